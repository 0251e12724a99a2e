"""Signs of life of the trainer's process."""

import os

from verl_profiler.recording.trainer_signs import TrainerSigns

SECOND = 10**9


def test_no_process_lists_the_headers_of_all_others(tmp_path, monkeypatch):
    """Looks of many processes at a folder with a file of each grow with their square."""
    listed = []
    for name in ("scandir", "listdir"):
        original = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *path, original=original: listed.append(path) or original(*path)
        )
    signs = TrainerSigns(tmp_path, 10 * SECOND, SECOND)
    before = signs.silent_since(0), signs.name
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes" / "trainer_0.json").write_text("{}")
    after = signs.silent_since(SECOND), signs.name

    assert [(None, ""), (None, "trainer_0")] == [before, after]
    assert [] == listed
