"""Captures of a rehearsal, with a real nsys and with the torch profiler: made, gathered and read.

A machine without a GPU has no kernels; what is checked is that each process and step has its report,
that nobody else has one, and that the ranges in it are those of the events.
"""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiler.analysis import range_times, span_kernels
from verl_profiler.cli import main
from verl_profiler.reader import load

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(900)]

STEPS = (2, 3)
ROLES = ["agent_loop=[0]", "engine=true", "transfer_queue=true"]


def rehearse(output, environment, *overrides):
    """Run the stand-in's rehearsal with two ranks and captures; return what it printed."""
    missing = [n for n in ("verl", "ray", "transfer_queue") if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "verl-profiler"),
            *("rehearse", "--engine", "standin", "--steps", "3", "--output", str(output)),
            f"trainer.profile_steps={list(STEPS)}".replace(" ", ""),
            "actor_rollout_ref.actor.profile_ranks=[0]",
            *(f"profiler.nsight.roles.{role}" for role in ROLES),
            *overrides,
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )
    printed = done.stdout + done.stderr
    assert 0 == done.returncode, printed[-6000:]
    return printed


def test_a_real_nsys_captures_each_process_and_step(nsys, tmp_path):
    """Controller, workers, and the roles that verl never wraps, each on the ranks asked for."""
    run = tmp_path / "run"
    printed = rehearse(run, nsys)

    captures = json.loads((run / "nsight" / "captures.json").read_text())
    assert [] == [capture["problem"] for capture in captures if capture["problem"]], printed[-3000:]
    by_role = {}
    for capture in captures:
        by_role.setdefault(capture["role"], set()).add((capture["rank"], capture["step"]))
    for role, rank in (("trainer", 0), ("actor", 0), ("agent_loop", 0)):
        assert {(rank, step) for step in STEPS} == by_role[role], role
    assert {step for _, step in by_role["engine"]} == set(STEPS)
    assert {"tq_controller", "tq_storage"} <= set(by_role)
    assert {"trainer", "actor", "agent_loop", "engine", "tq_controller", "tq_storage"} == set(
        by_role
    )

    os.environ["PATH"] = nsys["PATH"]
    assert 0 == main(["collect", "--export", str(run)])
    with load(run) as opened:
        ranges = range_times(opened.tables)
        spans = span_kernels(opened.tables)
        recorded = opened.rows(
            "SELECT event, count(*) AS events FROM events WHERE name = 'actor_0' "
            "AND step = 3 AND event IN ('update_actor', 'optimizer_step') GROUP BY event"
        )
    of_actor = {
        row["event"]: row["ranges"]
        for row in ranges
        if (row["name"], row["step"], row["domain"]) == ("actor_0", 3, "verl_profiler")
    }
    assert recorded
    for row in recorded:
        assert row["events"] == of_actor[row["event"]]
    # The loop's captured requests and turns, as in the event files.
    assert {"request", "turn", "engine_call", "tool_call"} <= {row["event"] for row in spans}
    assert {"engine_0", "agent_loop_0", "actor_0"} <= {row["name"] for row in spans} | {
        "agent_loop_0"
    }


def test_the_torch_profiler_needs_no_nsys(tmp_path):
    """The same keys, Chrome traces instead, gathered the same way."""
    run = tmp_path / "run"
    printed = rehearse(run, {}, "profiler.nsight.tool=torch")

    captures = json.loads((run / "nsight" / "captures.json").read_text())
    found = {(capture["role"], capture["step"]) for capture in captures}
    # Who only passes messages on may run no operation, and is said to.
    idle = {capture["role"] for capture in captures if capture["problem"]}
    assert idle <= {"engine", "tq_controller", "tq_storage"}, printed[-3000:]
    for role in ("trainer", "actor", "agent_loop", "engine", "tq_controller", "tq_storage"):
        assert {(role, step) for step in STEPS} <= found, role
    trace = gzip.decompress((run / "nsight" / "actor_0.step2.json.gz").read_bytes())
    assert [event for event in json.loads(trace)["traceEvents"] if event.get("cat") == "cpu_op"]
