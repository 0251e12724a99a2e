"""Requests: percentiles of the finished ones, parts that add up, and really the slowest."""

import pytest

from verl_profiler.analysis import (
    request_parts,
    request_times,
    slowest_requests,
    turns_per_request,
)
from verl_profiler.reading.tables.tables import Tables

SECOND = 1_000_000


def request(number, duration_s, **more):
    finished = duration_s is not None
    return {
        "run": "r",
        "step": 1,
        "name": "worker_0",
        "validate": False,
        "request_id": f"q{number}",
        "finished": finished,
        "begin_us": 0,
        "turns": 1,
        "end_us": round(duration_s * SECOND) if finished else None,
        "duration_us": round(duration_s * SECOND) if finished else None,
        "status": None if finished else "unfinished",
        **more,
    }


def call(number, event, duration_s, turn, *, begin_s=0.0, tool=None):
    begin, length = round(begin_s * SECOND), round(duration_s * SECOND)
    return {
        "run": "r",
        "step": 1,
        "name": "worker_0",
        "validate": False,
        "request_id": f"q{number}",
        "event": event,
        "family": "rollout",
        "role": "agent_loop",
        "turn": turn,
        "begin_us": begin,
        "end_us": begin + length,
        "duration_us": length,
        "extra": None if tool is None else {"tool": tool},
    }


def test_percentiles_are_of_finished_requests():
    """Unfinished requests are counted and not measured; validation is apart."""
    tables = Tables.of(
        {
            "requests": [
                request(0, 1.0),
                request(1, 3.0, turns=4, status="error"),
                request(2, None),
                request(3, 50.0, validate=True),
            ]
        }
    )

    train, validation = request_times(tables)

    assert (3, 1, 1, 2.0, 2.0, 3.0, 4) == tuple(
        train[key]
        for key in ("requests", "unfinished", "failed", "mean_s", "p50_s", "max_s", "max_turns")
    )
    assert (1, 50.0, None) == tuple(validation[key] for key in ("requests", "p50_s", "p999_s"))


def test_parts_add_up_to_the_whole_and_what_was_not_recorded_is_left_out():
    """Shares sum to 1 over the parts that are there."""
    tables = Tables.of(
        {
            "requests": [
                request(0, 2.0, engine_us=1_500_000, other_us=500_000),
                request(1, 1.0, engine_us=1_000_000, other_us=0),
            ]
        }
    )

    rows = request_parts(tables)

    assert [("engine", 2.5), ("other", 0.5)] == [(row["part"], row["total_s"]) for row in rows]
    assert 1.0 == pytest.approx(sum(row["share"] for row in rows))


def test_the_slowest_are_the_slowest_and_say_what_took_longest():
    """Order is by duration; the longest single call is named with its turn."""
    tables = Tables.of(
        {
            "requests": [request(0, 1.0), request(1, 5.0), request(2, 3.0), request(3, None)],
            "events": [
                call(1, "engine_call", 1.0, 0),
                call(1, "tool_call", 3.5, 2, tool="calc"),
                # All calls of the turn together, and a little more.
                call(1, "tool_execution", 3.500001, 2),
                call(2, "engine_call", 2.0, 1),
            ],
        }
    )

    rows = slowest_requests(tables, count=2)

    assert [("q1", 5.0, "calc", 2, 3.5), ("q2", 3.0, "engine", 1, 2.0)] == [
        tuple(
            row[key] for key in ("request_id", "duration_s", "longest", "longest_turn", "longest_s")
        )
        for row in rows
    ]


def test_tools_that_were_only_recorded_together_are_named_tool():
    """The original logger has no events of single calls."""
    events = [call(0, "tool_execution", 0.5, 1)]
    (row,) = slowest_requests(Tables.of({"requests": [request(0, 1.0)], "events": events}))

    assert ("tool", 1, 0.5) == (row["longest"], row["longest_turn"], row["longest_s"])


def test_a_request_without_calls_is_slow_all_the_same():
    """Its longest call is not known."""
    (row,) = slowest_requests(Tables.of({"requests": [request(0, 1.0)]}))

    assert ("q0", None, None) == (row["request_id"], row["longest"], row["longest_s"])


def test_turns_are_counted_by_request():
    """Shares of a step sum to 1."""
    rows = turns_per_request(
        Tables.of({"requests": [request(0, 1.0), request(1, 2.0), request(2, 4.0, turns=3)]})
    )

    assert [(1, 2, 1.5), (3, 1, 4.0)] == [
        (row["turns"], row["requests"], row["mean_s"]) for row in rows
    ]
    assert 1.0 == pytest.approx(sum(row["share"] for row in rows))


def test_parallel_calls_show_as_overlap():
    """An agent loop that calls twice at once has parts longer than the whole, and that is said."""
    ended = call(0, "request", 1.0, None)
    tables = Tables.of(
        {"events": [ended, call(0, "engine_call", 0.9, 0), call(0, "engine_call", 0.8, 0)]}
    )

    (row,) = tables.rows("SELECT duration_us, engine_us, other_us, overlap_us FROM requests")

    assert (1_000_000, 1_700_000, 0, 700_000) == tuple(row.values())


def test_reward_inside_postprocess_is_counted_once():
    """Today verl scores inside its post-processing; the original logger did it before."""
    tables = Tables.of(
        {
            "events": [
                call(0, "request", 1.0, None),
                call(0, "postprocess", 0.4, None, begin_s=0.5),
                call(0, "reward", 0.3, None, begin_s=0.55),
            ]
        }
    )

    (row,) = tables.rows("SELECT postprocess_us, reward_us, other_us FROM requests")

    assert (100_000, 300_000, 600_000) == tuple(row.values())
