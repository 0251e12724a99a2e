"""Each input format is stated once, and what reads it is there."""

from pathlib import Path

import pytest

from verl_profiler.reading.formats.registry import is_log_name, label_of


@pytest.mark.parametrize(
    ("name", "kind", "label"),
    [
        ("worker_0.jsonl", "run", "worker_0"),
        ("events.parquet", "run", "events"),
        ("my.run.tar.gz", "run", "my.run"),
        ("my-run.tgz", "run", "my-run"),
        ("my-run.tar.zst", "run", "my-run"),
        ("w.pt.trace.json.gz", "trace", None),
        ("actor_0.step3.sqlite", "trace", None),
        ("training.log", "log", None),
        ("training.log.1.gz", "log", None),
    ],
)
def test_a_name_has_one_format(name, kind, label):
    """Also with several dots, and of archives without their compression."""
    path = Path(name)
    assert (kind == "log") == is_log_name(path)
    assert label in (None, label_of(path))
