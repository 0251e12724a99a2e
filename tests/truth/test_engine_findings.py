"""Faults planted inside the engines: the finding, its replica, and the seconds of a run without them."""

from dataclasses import replace

import pytest
from truth.engine_readings import reading
from truth.synthetic import events_of, tables_of
from truth.test_culprits import STEPS, each_request, each_turn, every, healthy, seconds_per_step

from verl_profiler.analysis.registry import explained

_EVERY_US = 100_000
_FITS = 10


def readings_of(events, *, limit, full_at):
    """Return what an engine would report of its requests ten times a second.

    The KV cache is as full as the running requests are many, and 97 % full with `full_at` of them.
    """
    served = {}
    for event in events:
        if event["event"] == "engine_request":
            begin = event["begin_us"]
            runs_us = begin + round(event["extra"]["queue_s"] * 1e6)
            served.setdefault(event["name"], []).append((begin, runs_us, event["end_us"]))
    first = min(event["begin_us"] for event in events)
    last = max(event["end_us"] for event in events)
    for name, calls in served.items():
        for at_us in range(first, last, _EVERY_US):
            running = sum(runs <= at_us < end for _, runs, end in calls)
            waiting = sum(begin <= at_us < runs for begin, runs, _ in calls)
            yield reading(
                name,
                at_us,
                running_requests=running,
                waiting_requests=waiting,
                running_limit=limit,
                kv_used_tokens=round(97_000 * running / full_at),
                kv_capacity_tokens=100_000,
            )


ROLLOUT = "actor_rollout_ref.rollout"
RECORDED = {
    "versions": {"verl": "0.9.1"},
    "training": {
        "rollout": "vllm",
        "use_v1": True,
        "trainer_mode": "sync",
        "settings": {
            f"{ROLLOUT}.gpu_memory_utilization": 0.5,
            f"{ROLLOUT}.max_num_seqs": _FITS,
            f"{ROLLOUT}.router_config_path": False,
        },
    },
}


def found_in(step_of, *, limit=256, full_at=100):
    events, _ = events_of(*(step_of(number) for number in range(1, STEPS + 1)))
    readings = list(readings_of(events, limit=limit, full_at=full_at))
    tables = tables_of([*events, *readings])
    tables.launches = {"made": RECORDED}
    # Without the one that accounts for work in which nothing was found.
    return [row for row in explained(tables)["findings"] if row["finding"] != "work"]


def queueing(step, _):
    """Ten requests fit into each replica."""
    return replace(step, slots=_FITS)


def on_replica_1(step, _):
    """Replica 1 has 30 of the 40 requests, and room for twelve."""
    moved = each_request(step, lambda place, request: replace(request, replica=int(place % 4 != 0)))
    return replace(moved, slots=12)


def last_request(change):
    """Change the last turn of one request of replica 1, in each step."""

    def changed(step, number):
        return each_turn(
            step,
            lambda place, request, turn: (
                replace(turn, **change(turn))
                if (place, turn is request.turns[-1]) == (4 + number % 4, True)
                else replace(turn, prompt=400, cached=390)
            ),
        )

    return changed


def few(step, _):
    """Four requests in each replica."""
    return replace(step, requests=step.requests[:8])


retracted = last_request(lambda _: {"lost_us": 900_000, "retractions": 1})
# Prefill at 2 ms per token.
cold = last_request(lambda _: {"prompt": 500, "cached": 0, "replica": 0, "prefill_us": 1_000_000})
warm = last_request(lambda _: {"prompt": 500, "cached": 460, "prefill_us": 80_000})
healthy_turn = last_request(lambda _: {})


def test_an_engine_with_readings_of_a_healthy_run_is_silent():
    """A batch of twenty in each replica, a cache that is a fifth full, nobody waits."""
    assert [] == found_in(healthy)
    assert [] == found_in(every(healthy_turn))


def test_a_full_kv_cache_is_told_from_a_limit():
    """The same queue, once for memory and once for a setting."""
    rows = found_in(every(queueing), full_at=_FITS)
    limited = found_in(every(queueing), limit=_FITS)
    true_s = seconds_per_step(every(queueing)) - seconds_per_step(healthy)

    assert "kv_bound" == rows[0]["finding"]
    assert "engine_queue" not in {row["finding"] for row in rows}
    # Up to a reading at each end of the queue.
    assert 0.85 * true_s < rows[0]["recoverable_s"] < 1.2 * true_s
    assert [f"{ROLLOUT}.gpu_memory_utilization=0.8"] == rows[0]["overrides"]
    pasted = {row["finding"]: row["overrides"] for row in limited}
    assert [f"{ROLLOUT}.max_num_seqs={2 * _FITS}"] == pasted["engine_queue"]
    assert "kv_bound" not in pasted


def test_a_queue_beside_room_names_its_replica():
    """One replica queues while the other one has room; the files of the fix come with it."""
    rows = found_in(every(on_replica_1), limit=12)
    row = next(row for row in rows if row["finding"] == "unbalanced_replicas")

    assert "engine_1" == row["culprit"]
    assert {"unbalanced_replicas"} >= {row["finding"] for row in rows} & {
        "unbalanced_replicas",
        "uneven_replicas",
        "engine_queue",
        "kv_bound",
    }
    assert {"spread_calls.yaml", "spread_calls.py"} == set(row["files"])
    assert row["evidence"]


@pytest.mark.parametrize(
    ("fault", "without", "finding", "replica"),
    [
        (retracted, healthy_turn, "retractions", "engine_1"),
        (cold, warm, "cold_prefix_cache", "engine_0"),
    ],
)
def test_recomputing_is_named_with_its_replica_and_seconds(fault, without, finding, replica):
    """Needs no readings of the engines."""
    rows = found_in(every(fault))
    true_s = seconds_per_step(every(fault)) - seconds_per_step(every(without))
    (row,) = rows

    assert (finding, replica) == (row["finding"], row["culprit"])
    assert 0.97 * true_s < row["recoverable_s"] < 1.2 * true_s
    assert row["evidence"][0]["what"].startswith("q00")


def test_small_batches_only_where_more_would_fit():
    """Four requests where 256 fit; not where the engine runs at most 16."""
    rows = found_in(every(few))
    names = [row["finding"] for row in rows]

    assert ["small_batches"] == names
    assert rows[0]["dominates"]
    # Decoding of the last request: twice 60 tokens, one more in a step in which it is the last.
    assert rows[0]["recoverable_s"] == pytest.approx(1.2, rel=0.02)
    assert "small_batches" not in {row["finding"] for row in found_in(every(few), limit=16)}
