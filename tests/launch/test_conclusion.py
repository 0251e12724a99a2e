"""The summary at the end of a command: in a process of its own, and never in the way."""

import importlib.util
import stat
import sys

import pytest
from cached_runs import REHEARSED

from verl_profiler.cli import main
from verl_profiler.launch import conclusion
from verl_profiler.launch import prepare as launch
from verl_profiler.recording import recorder

omegaconf = pytest.importorskip("omegaconf")


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Replace the interpreter of the process by a shell script."""

    def replace(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


def test_the_process_is_not_recorded(python, tmp_path, monkeypatch, capsys):
    """It does not inherit the run's settings."""
    monkeypatch.setenv("VERL_PROFILER_SETTINGS", "x")
    python(f'echo "{tmp_path.name}: [$VERL_PROFILER_SETTINGS]"')

    conclusion.conclude(tmp_path)

    assert f"{tmp_path.name}: []" in capsys.readouterr().err


def test_the_end_of_a_training_shows_the_headline_and_the_first_finding(capsys):
    """As the command prints them, without the second finding; nothing is imported here."""
    before = set(sys.modules)
    conclusion.conclude(REHEARSED, patience_s=120)

    printed = capsys.readouterr().err
    modules = set(sys.modules) - before
    assert main(["summary", str(REHEARSED)]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = (
        next(index for index, line in enumerate(lines) if line.startswith(f"{number}. "))
        for number in (1, 2)
    )
    assert [f"[verl-profiler] {line}" for line in (lines[0], *lines[first:second])] == (
        printed.splitlines()
    )
    assert not modules & {"duckdb", "numpy", "scipy"}


@pytest.mark.parametrize(
    ("script", "missing", "printed"),
    [
        ("exec sleep 600", None, "the summary takes longer than 0.2 s"),
        ("echo x; exit 3", None, None),
        ("echo x >&2; exit 1", None, None),
        ("exit 0", None, None),
        (f"echo {REHEARSED.name}: no", "duckdb", None),
    ],
)
def test_a_summary_that_cannot_be_had_is_left_out(
    python, capsys, monkeypatch, script, missing, printed
):
    """It hangs, fails or is empty, or the reading half is not installed; nothing is raised."""
    python(script)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )

    conclusion.conclude(REHEARSED, patience_s=0.2)

    err = capsys.readouterr().err
    assert "" == err if printed is None else printed in err


def test_run_json_has_the_loggers_that_can_be_published_to(tmp_path):
    """For `verl-profiler export trackers` afterwards."""
    config = {
        "profiler": {"output_dir": str(tmp_path / "run")},
        "trainer": {"logger": ["console", "tensorboard", "swanlab"]},
    }
    launch.prepare(omegaconf.OmegaConf.create(config))
    directory = recorder.active().directory
    recorder.stop()

    import json

    content = json.loads((directory / "run.json").read_text())
    assert ["tensorboard"] == content["training"]["logger"]
