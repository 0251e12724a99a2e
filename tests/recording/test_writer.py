"""The event files of one process, and what it takes to open them."""

import os

import pytest

from verl_profiler.recording.process_header import ProcessHeader
from verl_profiler.recording.writer import EventFiles


@pytest.fixture
def made(monkeypatch):
    """The folders that somebody tried to make."""
    folders = []
    mkdir = os.mkdir
    monkeypatch.setattr(
        os, "mkdir", lambda path, *mode: folders.append(os.fspath(path)) or mkdir(path, *mode)
    )
    return folders


def test_one_process_of_many_makes_the_folder_of_a_step(tmp_path, made):
    """At each step, all of them open a file there at the same moment."""
    path = tmp_path / "run" / "step_1"
    tmp_path.joinpath("run").mkdir()
    made.clear()
    for rank in range(8):
        files = EventFiles(1000, 1_000_000, lambda _kind, _text: None)
        files.append(path / f"worker_{rank}.jsonl", [b"{}\n"])
        files.close()

    assert [str(path)] == made
    assert 8 == len(list(path.iterdir()))


def test_one_process_of_many_makes_the_folder_of_headers(tmp_path, made):
    """When all of them start."""
    for rank in range(8):
        ProcessHeader().claim(tmp_path, f"worker_{rank}")

    assert [str(tmp_path / "processes")] == made
