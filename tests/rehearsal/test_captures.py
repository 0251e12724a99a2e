"""Captures of the rehearsals: SGLang's with a real nsys, the stand-in's with the torch profiler.

A machine without a GPU has no kernels; what is checked is that each process and task of the captured
step has its report, that nobody else has one, and that the ranges in it are those of the events.
"""

import gzip
import json
from collections import Counter

import pytest

from verl_profiler.analysis.captures import range_times
from verl_profiler.cli import main
from verl_profiler.reading.reader import load

from .conftest import STEPS, of_engine

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(900)]

ROLES = {"trainer", "actor", "agent_loop", "engine", "tq_controller", "tq_storage"}
# verl's tasks of the hybrid worker in one step of this configuration.
TASKS = 3


@of_engine("sglang")
def test_a_real_nsys_captures_each_process_and_task(nsys, rehearsed):
    """Controller, workers, and the roles that verl never wraps, each on the ranks asked for."""
    _, run, printed = rehearsed
    captures = json.loads((run / "nsight" / "captures.json").read_text())

    assert [] == [capture["problem"] for capture in captures if capture["problem"]], printed[-3000:]
    assert ROLES == {capture["role"] for capture in captures}
    assert {0} == {c["rank"] for c in captures if c["role"] in ("trainer", "actor", "agent_loop")}
    assert {0, 1} == {c["rank"] for c in captures if c["role"] == "engine"}
    assert {STEPS} == {capture["step"] for capture in captures}
    per_process = Counter((c["role"], c["host"], c["pid"]) for c in captures)
    assert {
        process: TASKS if process[0] == "actor" else 1 for process in per_process
    } == per_process
    assert TASKS == len({c["task"] for c in captures if c["role"] == "actor"})
    assert "(one-per-step)" in printed


@of_engine("sglang")
def test_the_ranges_of_a_capture_are_the_events(nsys, rehearsed, monkeypatch):
    """Exported and read back, they are the requests, turns and phases of the event files."""
    _, run, _ = rehearsed
    monkeypatch.setenv("PATH", nsys["PATH"])
    assert 0 == main(["collect", "--export", str(run)])
    with load(run) as opened:
        ranges = range_times(opened.tables)
        recorded = opened.rows(
            "SELECT event, count(*) AS events FROM events WHERE name = 'actor_0' "
            f"AND step = {STEPS} AND event IN ('train_mini_batch', 'optimizer_step') GROUP BY event"
        )
        schedulers = opened.rows(
            "SELECT event, count(*) AS ranges FROM capture_ranges WHERE category = 'scheduler' "
            "GROUP BY event"
        )

    of_actor = {
        row["event"]: row["ranges"]
        for row in ranges
        if (row["name"], row["domain"]) == ("actor_0", "verl_profiler")
    }
    assert recorded
    for row in recorded:
        assert row["events"] == of_actor[row["event"]]
    # The loop's captured requests and turns, as in the event files.
    assert {"request", "turn", "engine_call", "tool_call"} <= {row["event"] for row in ranges}
    assert {"engine_0", "actor_0"} <= {row["name"] for row in ranges}
    # SGLang's schedulers are processes below the captured servers; a batch has a pass and a result.
    batches = {row["event"]: row["ranges"] for row in schedulers}
    assert {"forward_extend", "forward_decode", "batch_result"} == set(batches)
    passes = sum(count for event, count in batches.items() if event.startswith("forward_"))
    # One per scheduler may be cut off at either end of the capture.
    assert abs(passes - batches["batch_result"]) <= 4


@of_engine("standin")
def test_the_torch_profiler_needs_no_nsys(rehearsed):
    """The same keys, Chrome traces instead, gathered the same way; without TransferQueue."""
    _, run, printed = rehearsed
    captures = json.loads((run / "nsight" / "captures.json").read_text())
    # Who only passes messages on may run no operation, and is said to.
    idle = {capture["role"] for capture in captures if capture["problem"]}
    assert idle <= {"engine"}, printed[-3000:]
    roles = ROLES - {"tq_controller", "tq_storage"}
    assert {(role, STEPS) for role in roles} == {(c["role"], c["step"]) for c in captures}
    trace = gzip.decompress((run / "nsight" / f"actor_0.step{STEPS}.json.gz").read_bytes())
    assert [event for event in json.loads(trace)["traceEvents"] if event.get("cat") == "cpu_op"]
