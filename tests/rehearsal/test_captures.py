"""Captures of a rehearsal, with a real nsys and with the torch profiler: made, gathered and read.

A machine without a GPU has no kernels; what is checked is that each process, step and task has its
report, that nobody else has one, and that the ranges in it are those of the events.
"""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from verl_profiler.analysis import range_times, span_kernels
from verl_profiler.cli import main
from verl_profiler.reader import load

from .conftest import CAPTURED, COMMANDS

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(900)]

STEPS = (1, 2)
ROLES = {"trainer", "actor", "agent_loop", "engine", "tq_controller", "tq_storage"}
# verl's tasks of the hybrid worker in one step of this configuration.
TASKS = 3
# As little as makes requests with turns and tools on both replicas.
SMALL = [
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "rehearsal.poll_interval_s=0.2",
    "rehearsal.tool_latency=0.2",
]


@pytest.fixture(scope="module")
def captured(nsys, tmp_path_factory):
    """A run whose steps a real nsys captured, per task in the workers, and what it printed."""
    missing = [n for n in ("verl", "ray", "transfer_queue") if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    run = tmp_path_factory.mktemp("captured") / "run"
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "verl-profiler"),
            *("rehearse", "--engine", "standin", "--steps", "2", "--output", str(run)),
            f"trainer.profile_steps={list(STEPS)}".replace(" ", ""),
            "actor_rollout_ref.actor.profile_discrete=true",
            *CAPTURED,
            *SMALL,
        ],
        env={**os.environ, **nsys},
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )
    assert 0 == done.returncode, (done.stdout + done.stderr)[-6000:]
    return run, done.stdout + done.stderr


def test_a_real_nsys_captures_each_process_and_step(captured):
    """Controller, workers, and the roles that verl never wraps, each on the ranks asked for."""
    run, printed = captured
    captures = json.loads((run / "nsight" / "captures.json").read_text())

    assert [] == [capture["problem"] for capture in captures if capture["problem"]], printed[-3000:]
    assert ROLES == {capture["role"] for capture in captures}
    assert {0} == {c["rank"] for c in captures if c["role"] in ("trainer", "actor", "agent_loop")}
    per_process = Counter((c["role"], c["host"], c["pid"], c["step"]) for c in captures)
    assert set(STEPS) == {step for *_, step in per_process}
    for (role, *_), count in per_process.items():
        assert (TASKS if role == "actor" else 1) == count, role
    of_actor = [c["task"] for c in captures if (c["role"], c["step"]) == ("actor", STEPS[0])]
    assert TASKS == len(set(of_actor))
    assert "(one-per-step)" in printed


def test_the_ranges_of_a_capture_are_the_events(captured, nsys, monkeypatch):
    """Exported and read back, they join the requests, turns and phases of the event files."""
    run, _ = captured
    monkeypatch.setenv("PATH", nsys["PATH"])
    assert 0 == main(["collect", "--export", str(run)])
    with load(run) as opened:
        ranges = range_times(opened.tables)
        spans = span_kernels(opened.tables)
        recorded = opened.rows(
            "SELECT event, count(*) AS events FROM events WHERE name = 'actor_0' "
            "AND step = 2 AND event IN ('update_actor', 'optimizer_step') GROUP BY event"
        )

    of_actor = {
        row["event"]: row["ranges"]
        for row in ranges
        if (row["name"], row["step"], row["domain"]) == ("actor_0", 2, "verl_profiler")
    }
    assert recorded
    for row in recorded:
        assert row["events"] == of_actor[row["event"]]
    # The loop's captured requests and turns, as in the event files.
    assert {"request", "turn", "engine_call", "tool_call"} <= {row["event"] for row in spans}
    assert {"engine_0", "actor_0"} <= {row["name"] for row in spans}


@pytest.mark.parametrize(
    "rehearsed", [name for name in COMMANDS if name == "standin"], indirect=True
)
def test_the_torch_profiler_needs_no_nsys(rehearsed):
    """The same keys, Chrome traces instead, gathered the same way."""
    _, run, printed = rehearsed
    captures = json.loads((run / "nsight" / "captures.json").read_text())
    # Who only passes messages on may run no operation, and is said to.
    idle = {capture["role"] for capture in captures if capture["problem"]}
    assert idle <= {"engine", "tq_controller", "tq_storage"}, printed[-3000:]
    assert {(role, 2) for role in ROLES} == {(c["role"], c["step"]) for c in captures}
    trace = gzip.decompress((run / "nsight" / "actor_0.step2.json.gz").read_bytes())
    assert [event for event in json.loads(trace)["traceEvents"] if event.get("cat") == "cpu_op"]
