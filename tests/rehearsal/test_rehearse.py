"""`verl-profiler rehearse`, from the command line: two whole runs, a failing one, an interrupted one."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from reading_back import lines_of
from shipping.copies import contents, local

from verl_profiler.analysis.steps import phase_efficiency
from verl_profiler.cli import main
from verl_profiler.reading.reader import load

from .conftest import URL, of_engine

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("verl", "ray", "transfer_queue")),
        reason="needs verl",
    ),
]


def _command(*arguments):
    return [str(Path(sys.executable).parent / "verl-profiler"), "rehearse", *arguments]


def _events(output, name):
    return [line for line in lines_of(output) if line["event"] == name]


@of_engine("sglang")
def test_the_run_is_uploaded_to_its_url(rehearsed, s3):
    """Each file, as far as it was written when the driver ended; `collect` brings the rest."""
    pytest.importorskip("moto")
    _, output, printed = rehearsed
    assert f"the run was uploaded to {URL}" in printed
    there = contents(URL)
    assert json.loads(there.pop("upload.json"))["ended"]
    here = local(output, ".cache", ".disk")
    assert {name for name in here if name.startswith(("step_", "processes/"))} <= {*there}
    assert [] == [name for name, content in there.items() if not here[name].startswith(content)]

    assert 0 == main(["collect", str(output), "--to", URL])
    there = contents(URL)
    assert json.loads(there.pop("upload.json"))["ended"]
    assert there == {name: here[name] for name in there}


def test_requests_have_several_turns(rehearsed):
    """The taught model calls tools, in training and in validation."""
    _, output, _ = rehearsed
    turns = {False: 0, True: 0}
    requests = {False: 0, True: 0}
    for name, counts in (("turn", turns), ("request", requests)):
        for event in _events(output, name):
            counts[bool(event.get("extra", {}).get("validate"))] += 1

    assert 64 == requests[False]
    for validation in (False, True):
        assert turns[validation] > 1.3 * requests[validation]


def test_the_tools_of_the_recipe_are_called(rehearsed):
    """The model is taught the tools that the recipe names, and no others."""
    engine, output, _ = rehearsed
    expected = {"look_up"} if engine == "standin" else {"calculate", "check_answer"}
    named = [event["extra"].get("tool") for event in _events(output, "tool_call")]

    assert expected <= set(named)
    assert sum(name in expected for name in named) > 0.8 * len(named)


def test_tokens_and_mfu_of_updates_are_those_that_verl_logs(rehearsed):
    """Its MFU is that of one rank; ours lies between those of all ranks."""
    _, output, _ = rehearsed
    logged = {event["step"]: event["extra"]["metrics"] for event in _events(output, "metrics")}
    batches = list(_events(output, "batch_flops"))
    with load(output, cache=False) as run:
        rows = [row for row in phase_efficiency(run.tables) if row["step"] in (1, 2)]

    assert {"update_actor", "old_log_prob", "ref"} == {row["phase"] for row in rows}
    for row in rows:
        metrics = logged[row["step"]]
        assert metrics["perf/total_num_tokens"] == row["tokens"]
        if row["phase"] == "update_actor":
            mfus = [
                each["extra"]["tflops"] / each["extra"]["promised_tflops"] / each["extra"]["ranks"]
                for each in batches
                if each["step"] == row["step"]
            ]
            assert min(mfus) - 1e-9 <= metrics["perf/mfu/actor"] <= max(mfus) + 1e-9
            assert min(mfus) - 1e-9 <= row["mfu"] <= max(mfus) + 1e-9


@pytest.mark.nightly
def test_a_trainer_that_fails_is_reported_with_the_reason(tmp_path, command_environment):
    """The status is 1, and the end of the console and its path are printed."""
    output = tmp_path / "run"
    done = subprocess.run(
        _command("--engine", "standin", "--output", str(output), "trainer.no_such_key=1"),
        env=command_environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert 1 == done.returncode
    assert "no_such_key" in done.stderr
    assert str(output / "console.log") in done.stderr


@pytest.mark.nightly
def test_an_interrupted_rehearsal_leaves_no_process(tmp_path, command_environment):
    """Ctrl-C ends the trainer, Ray's daemons and its workers."""
    psutil = pytest.importorskip("psutil")
    rehearse = subprocess.Popen(
        _command("--engine", "standin", "--output", str(tmp_path / "run")),
        env=command_environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in rehearse.stdout:
        if "Ray runs" in line:
            break
    started = psutil.Process(rehearse.pid).children(recursive=True)
    rehearse.send_signal(signal.SIGINT)
    rest = rehearse.stdout.read()
    status = rehearse.wait()

    assert 130 == status
    assert "interrupted" in rest
    assert "console log and events so far: " in rest
    assert len(started) > 3
    assert [] == [each for each in started if each.is_running()]
