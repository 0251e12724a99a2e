"""Trainer, queue and pools of an asynchronous run over the same time, against sums by hand."""

import pytest
from picked import picked

from verl_profiler.analysis.pools import pools_over_time
from verl_profiler.reading.tables.tables import Tables


def summed(rows, lane, key):
    """Add up length times mean by phase or version."""
    found = {}
    for row in rows:
        if row["lane"] == lane and row["phase"] != "weight_sync":
            length = row["end_s"] - row["begin_s"]
            mean = 1 if row["mean"] is None else row["mean"]
            found[row[key]] = found.get(row[key], 0) + length * mean
    return found


@pytest.fixture
def rows(span, instant):
    trainer = {"name": "trainer_0"}

    def at(event, moment, **extra):
        return instant(event, moment, **trainer, **extra)

    def call(name, begin, end, version, number):
        return span(
            "engine_request", begin, end, name=name, weight_version=version,
            engine_request_id=str(number), response_tokens=1,
        )  # fmt: skip

    events = [
        at("replica_pool", 0, replicas=[0], pool="hybrid"),
        at("replica_pool", 0, replicas=[1], pool="standalone"),
        span("step", 10, 26, **trainer),
        span("gen", 10, 14, **trainer),
        span("update_actor", 14, 26, **trainer),
        at("queue_depth", 0, queue="replay_buffer", ready=1),
        at("queue_depth", 12, queue="replay_buffer", ready=3),
        at("queue_depth", 18, queue="replay_buffer", ready=0),
        # Begins before the first step, of which only the rest counts.
        call("engine_1", 8, 12, 0, 1),
        call("engine_1", 10, 14, 0, 2),
        call("engine_1", 20, 22, 1, 3),
        call("engine_0", 10, 26, 0, 4),
        span(
            "weight_sync", 15, 16, **trainer, replicas=[1], pool="standalone", weight_version=1
        ),
        *(
            at("sample_consumed", 14, uid=str(each), session=0, consumed_step=2)
            for each in range(3)
        ),
    ]  # fmt: skip
    processes = [
        {"run": "r", "name": "trainer_0", "role": "trainer", "rank": 0},
        *(
            {"run": "r", "name": f"engine_{each}", "role": "engine", "rank": each, "replica": each}
            for each in range(2)
        ),
    ]
    return pools_over_time(Tables.of({"events": events[::-1], "processes": processes}))


def test_parts_of_the_time_add_up_to_calls_and_phases(rows):
    """Whatever the parts: seconds of the trainer's phases, prompts times seconds, calls times seconds."""
    assert {"gen": 4, "update_actor": 12} == pytest.approx(summed(rows, "trainer", "phase"))
    assert {None: 1 * 2 + 3 * 6} == pytest.approx(summed(rows, "queue", "phase"))
    assert {0: 2 + 4, 1: 2} == pytest.approx(summed(rows, "standalone", "weight_version"))
    assert {0: 16} == pytest.approx(summed(rows, "hybrid", "weight_version"))


def test_syncs_are_where_they_were(rows):
    """In seconds after the first step's start, with their pool and version."""
    (sync,) = [row for row in rows if row["phase"] == "weight_sync"]

    assert ("standalone", 1, 5.0, 6.0) == picked(sync, "lane weight_version begin_s end_s")
