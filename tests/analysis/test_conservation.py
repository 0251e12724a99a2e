"""Parts add up to their wholes, on a run of the real trainer and on a generated one.

Tolerance: 1 microsecond per part, for the rounding of files; sums of floats add 1e-9 of the whole.
"""

import itertools

import pytest

from verl_profiler.analysis.engine import replica_token_rates, token_rates
from verl_profiler.analysis.requests import request_breakdown, turn_times
from verl_profiler.analysis.rollout import requests_in_flight, rollout_tail
from verl_profiler.analysis.steps import step_durations
from verl_profiler.analysis.tools import reward_times, tool_latencies
from verl_profiler.reading.tables.tables import REQUEST_PARTS

MICROSECOND = 1e-6


@pytest.fixture(params=["rehearsed", "small"])
def run(request):
    return request.getfixturevalue(request.param)


def near(whole, parts=1):
    return pytest.approx(whole, rel=1e-9, abs=parts * MICROSECOND)


def test_parts_of_a_request_add_up(run):
    """Its parts, minus what it did at the same time, are its duration; so are the engine's."""
    rows = list(request_breakdown(run.tables, validate=None, count=None))

    for row in rows:
        parts = sum(row[f"{part}_s"] or 0 for part in (*REQUEST_PARTS, "other"))
        assert parts - row["overlap_s"] == near(row["duration_s"])
        engine = sum(row[f"{part}_s"] for part in ("queue", "prefill", "decode", "outside"))
        assert engine == near(row["engine_s"], 8)
    assert rows


def test_the_time_between_steps_adds_up(run):
    """The step and what follows it reach to the next one."""
    for row in step_durations(run.tables):
        if row["finished"] and row["to_next_s"] is not None:
            assert row["step_s"] + row["between_s"] == near(row["to_next_s"])
            between = (row["testing_s"] or 0) + row["between_other_s"]
            assert between == near(row["between_s"])


def test_parts_of_turns_add_up(run):
    """Means of parts, minus what overlaps, are the mean turn; shares add up to 1."""
    rows = turn_times(run.tables)

    for row in rows:
        names = ("engine", "tool", "tool_parsing", "token_merge", "other")
        parts = sum(row[f"{name}_s"] for name in names)
        assert parts - row["overlap_s"] == near(row["mean_s"])
        assert row["total_s"] == near(row["mean_s"] * row["turns"])
    assert sum(row["share"] for row in rows) == pytest.approx(1)


def test_requests_in_flight_add_up_to_their_durations(run):
    """The area below the curve is the time of all requests; the bubble is what it leaves empty."""
    flights = requests_in_flight(run.tables)
    tails = {row["step"]: row for row in rollout_tail(run.tables)}
    wholes = run.rows(
        "SELECT step, sum(duration_us) / 1e6 AS whole_s FROM requests "
        "WHERE finished AND NOT validate GROUP BY step"
    )

    for whole in wholes:
        curve = [row for row in flights if row["step"] == whole["step"]]
        area = sum(
            row["in_flight"] * (after["at_s"] - row["at_s"])
            for row, after in itertools.pairwise(curve)
        )
        assert area == near(whole["whole_s"], len(curve))
        assert curve[-1]["in_flight"] == 0
        tail = tails[whole["step"]]
        used = tail["peak"] * tail["rollout_s"] * (1 - tail["bubble_share"])
        assert used == near(whole["whole_s"])


def test_tools_and_replicas_add_up(run):
    """Tools to all tool calls, replicas to all tokens of the steps."""
    tools = tool_latencies(run.tables)
    calls = run.rows(
        "SELECT count(*) AS calls, sum(duration_us) / 1e6 AS total_s FROM tool_calls "
        "WHERE NOT validate"
    )[0]
    replicas, steps = replica_token_rates(run.tables), token_rates(run.tables)

    assert calls["calls"] == sum(row["calls"] for row in tools)
    assert sum(row["total_s"] for row in tools) == near(calls["total_s"])
    assert sum(row["share"] for row in tools) == pytest.approx(1)
    for key in ("calls", "prompt_tokens", "generated_tokens"):
        assert sum(row[key] for row in replicas) == sum(row[key] for row in steps)


def test_scores_are_of_the_requests_that_asked(rehearsed):
    """Every training request was scored once, and no score of validation counts."""
    rows = [row for row in reward_times(rehearsed.tables) if row["part"] == "score"]
    requests = rehearsed.rows(
        "SELECT step, count(*) AS requests FROM requests WHERE NOT validate GROUP BY step ORDER BY step"
    )

    assert [(row["step"], row["requests"]) for row in requests] == [
        (row["step"], row["count"]) for row in rows
    ]
