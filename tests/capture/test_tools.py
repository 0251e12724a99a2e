"""Capture tools: which there are, and what is needed to read their reports."""

import shutil

import pytest

from verl_profiler.capture import tools
from verl_profiler.errors import ConfigError, ReadingError
from verl_profiler.launch.settings import parse


def test_a_tool_that_is_not_there_is_refused_before_training():
    """With the names of those that are."""
    with pytest.raises(ConfigError, match=r"profiler\.nsight.*'nsy'.*nsys, torch"):
        parse({"output_dir": "x", "nsight": {"tool": "nsy"}})


def test_without_nsys_the_command_that_exports_is_in_the_message(tmp_path, monkeypatch):
    """To be run on another machine."""
    report = tmp_path / "a.nsys-rep"
    report.touch()
    monkeypatch.setattr(shutil, "which", lambda _name: None)

    with pytest.raises(ReadingError) as caught:
        tools.get("nsys").export(report)
    assert "no-nsys" == caught.value.slug
    assert f"nsys export --type sqlite -o {tmp_path / 'a.sqlite'} {report}" in str(caught.value)
