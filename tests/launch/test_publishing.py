"""`profiler.publish`: at the end of a command, in a process of its own, and never in the way."""

import importlib.util
import os
import stat
import sys
import time

import pytest
from cached_runs import REHEARSED

from verl_profiler.cli import main
from verl_profiler.errors import ConfigError
from verl_profiler.launch import conclusion, publishing
from verl_profiler.launch import prepare as launch
from verl_profiler.launch.settings import parse
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


def test_the_report_is_published_by_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    """The real one, to TensorBoard; the driver has imported no client for it."""
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    before = set(sys.modules)

    publishing.publish(REHEARSED, ("tensorboard",))

    shown = capsys.readouterr().err
    assert f"[verl-profiler] Published to tensorboard: {tmp_path / 'tb'}\n" == shown
    assert (tmp_path / "tb/profile/report.html").is_file()
    assert not {name for name in set(sys.modules) - before if "tensorboard" in name}


def test_a_process_that_hangs_is_ended_with_its_children(tmp_path, python, capsys):
    """Also one that holds the pipes open and ignores SIGTERM."""
    python(f"trap '' TERM; sleep 600 & echo $! > {tmp_path}/child; wait")

    publishing.publish(tmp_path, ("wandb",), patience_s=1)

    assert "not done after 1 s. Run: verl-profiler export trackers" in capsys.readouterr().err
    if (tmp_path / "child").exists():
        child = int((tmp_path / "child").read_text())
        end = time.monotonic() + 60
        while time.monotonic() < end and _runs(child):
            time.sleep(0.01)
        assert not _runs(child)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (
            "echo Not published to wandb: no key; exit 1",
            "WARNING Not published to wandb: no key. Run",
        ),
        ("echo this needs duckdb >&2; exit 2", "WARNING Not published: this needs duckdb. Run"),
        ("exit 7", "WARNING Not published: exit status 7. Run"),
        (
            "echo Published to wandb: there; echo noise",
            "[verl-profiler] Published to wandb: there\n",
        ),
    ],
)
def test_the_driver_prints_what_was_done_or_why_not(python, tmp_path, capsys, script, line):
    """One line per tracker; nothing is raised."""
    python(script)

    publishing.publish(tmp_path, ("wandb",))

    shown = capsys.readouterr().err
    assert line in shown
    assert 1 == shown.count("\n")


def test_the_process_is_not_recorded_and_may_not_start(python, tmp_path, monkeypatch, capsys):
    """It does not inherit the run's settings; nothing is raised, since training has succeeded."""
    monkeypatch.setenv("VERL_PROFILER_SETTINGS", "x")
    python('echo "Published to wandb: [$VERL_PROFILER_SETTINGS]"')
    publishing.publish(tmp_path, ("wandb",))
    assert "Published to wandb: []" in capsys.readouterr().err

    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    publishing.publish(tmp_path, ("wandb",))
    assert "WARNING not published: FileNotFoundError" in capsys.readouterr().err


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
        ("trap '' TERM; sleep 600", None, "the summary takes longer than 0.2 s"),
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


@pytest.mark.parametrize(
    ("setting", "logger", "expected"),
    [
        (True, ["console", "wandb", "tensorboard"], ("wandb", "tensorboard")),
        (True, "tracking", ("wandb",)),
        (True, ["console"], None),
        (["mlflow"], ["console"], ("mlflow",)),
        (False, ["wandb"], None),
    ],
)
def test_where_to_publish(tmp_path, monkeypatch, capsys, setting, logger, expected):
    """`true` takes it from verl's own logger; only a run whose Ray started has something to publish."""
    calls = []
    monkeypatch.setattr(publishing, "publish", lambda directory, to: calls.append((directory, to)))
    config = {
        "profiler": {"output_dir": str(tmp_path / "run"), "publish": setting},
        "trainer": {"logger": logger},
    }
    for started in (False, True):
        launch.prepare(omegaconf.OmegaConf.create(config))
        directory = recorder.active().directory
        monkeypatch.setattr(launch, "_ray_started", started)
        launch.end(failed=False)
        assert ([(directory, expected)] if started and expected else []) == calls
    assert (setting is True and expected is None) == (
        "trainer.logger has none of wandb, tensorboard, mlflow" in capsys.readouterr().err
    )


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


def test_other_trackers_are_refused():
    """Before training."""
    with pytest.raises(ConfigError, match=r"profiler\.publish"):
        parse({"output_dir": "x", "publish": ["swanlab"]})
    assert ("wandb",) == parse({"output_dir": "x", "publish": ["wandb"]}).publish
    assert "VERL_PROFILER_SETTINGS" not in os.environ
