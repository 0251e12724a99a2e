"""What Ray has on record of actors and calls, on a real cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_profiler.recording import ray_view

ACTORS = Path(__file__).parent / "ray_actors.py"


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(200)
def test_dead_actors_and_calls_that_hang_are_found():
    """With the reason that Ray gives; without a cluster there is nothing."""
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, str(ACTORS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    report = json.loads(lines[0].removeprefix("FOUND "))

    assert {} == report["before"]
    found = report["found"]
    assert {"ALIVE": 1, "DEAD": 1} == found["actors"]
    (dead,) = found["not_alive"]
    assert ("Dying", "DEAD", 0) == (dead["class"], dead["state"], dead["restarts"])
    assert dead["pid"] > 0
    assert dead["reason"].startswith("Worker exit type: ")
    if "calls_error" not in found:
        # Ray's state API is there with its dashboard only (ray[default]).
        waiting = [row for row in found["calls"] if row["function"].endswith("Busy.wait")]
        assert report["calls"] == sum(row["calls"] for row in waiting)
        # On a busy machine, Ray learns late that a call has begun.
        assert {"RUNNING", "SUBMITTED_TO_WORKER"} & {row["state"] for row in waiting}


def test_the_profilers_own_actors_are_left_out(monkeypatch):
    """They are ended once their node has nothing to send; of 128 nodes they would hide the run's."""
    rows = {
        number: {"JobID": "job", "State": state, "ActorClassName": name, "Pid": number}
        for number, (name, state) in enumerate(
            [
                ("node_actor.<locals>.VerlProfilerFiles", "DEAD"),
                ("_actor.<locals>.VerlProfilerClock", "ALIVE"),
                ("WorkerDict", "ALIVE"),
                ("AgentLoopWorker", "DEAD"),
            ]
        )
    }
    context = SimpleNamespace(get_job_id=lambda: "job")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    state = SimpleNamespace(actors=lambda: rows)
    monkeypatch.setattr(ray_view.importlib, "import_module", lambda _name: state)

    found = ray_view.ray_actors()

    assert {"ALIVE": 1, "DEAD": 1} == found["actors"]
    assert ["AgentLoopWorker"] == [each["class"] for each in found["not_alive"]]
