"""Each input format is stated once, and what reads it is there."""

from pathlib import Path

import pytest

from verl_profiler.reading.formats.registry import FORMATS, format_of, is_run, label_of


@pytest.mark.parametrize(
    ("name", "form", "label"),
    [
        ("worker_0.jsonl", "events", "worker_0"),
        ("events.parquet", "parquet", "events"),
        ("my.run.tar.gz", "archive", "my.run"),
        ("my-run.tgz", "archive", "my-run"),
        ("my-run.tar.zst", "archive", "my-run"),
        ("w.pt.trace.json.gz", "torch_trace", "w.pt.trace"),
        ("actor_0.step3.sqlite", "nsys_export", "actor_0.step3"),
        ("training.log", "console", "training.log"),
        ("training.log.1.gz", "console", "training.log.1.gz"),
    ],
)
def test_a_name_has_one_format(name, form, label):
    """Also with several dots, and of archives without their compression."""
    path = Path(name)

    assert (form, label) == (format_of(path), label_of(path))
    assert (FORMATS[form].kind == "run") == is_run(path)
