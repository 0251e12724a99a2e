"""Tools, rewards, and the time that scoring took."""

import pytest
from picked import picked

from verl_profiler.analysis.tools import reward_times, tool_latencies


def test_tools_by_time(tables, conversation, span):
    """Over all steps; failures by their kind."""
    events = [
        *conversation("a"),
        *conversation("b", step=2, scale=2.0),
        span(
            "tool_call", 0, 1, request_id="a", turn=0, tool="calc", status="error", error="KeyError"
        ),
        span("tool_call", 0, 1, request_id="a", turn=0, tool="calc", status="cancelled"),
    ]

    search, calc = tool_latencies(tables(events))

    assert ("search", 2, 0, None, 6.0) == picked(search, "tool calls failed errors total_s")
    assert ("calc", 4, 2, 0.5, "KeyError 1, cancelled 1", 5.0) == picked(
        calc, "tool calls failed failed_share errors total_s"
    )
    assert [6 / 11, 5 / 11] == pytest.approx([search["share"], calc["share"]])
    assert 6 / 30 == pytest.approx(search["requests_share"])
    assert (2, "b", 4.0, 3.0) == picked(search, "slowest_step slowest_request_id max_s p50_s")


def test_a_tool_that_returned_waits_for_all_stalls_that_follow_each_other(tables, span):
    """Each of them is of another request's reward; one that had ended before is none of the wait."""
    events = [
        span("tool_call", 0, 12, request_id="a", turn=0, tool="calc"),
        span("event_loop_lag", 1, 2, request_id="b"),
        span("event_loop_lag", 4, 8, request_id="b"),
        span("event_loop_lag", 8.01, 12, request_id="c"),
    ]
    (call,) = tables(events).rows("SELECT stalled_us FROM tool_calls")

    assert 7_990_000 == call["stalled_us"]


def test_the_score_is_of_the_request_with_its_uid(tables, conversation, span):
    """A reward worker knows neither the step nor that it scores validation."""
    events = [
        *conversation("a", uid="one"),
        *conversation("v", uid="two", validate=True),
        span("reward_score", 8.6, 8.8, name="reward_0", step=2, uid="one", score=0.5),
        span("reward_score", 8.6, 8.9, name="reward_0", uid="two", score=0.5),
        span("reward_score", 8.6, 8.9, name="reward_0", uid="unknown", score=0.5),
    ]

    times = {row["part"]: row for row in reward_times(tables(events))}

    assert {"postprocess": 1.0, "reward": 0.5, "score": 0.2} == {
        part: row["total_s"] for part, row in times.items()
    }
    assert {1} == {row["count"] for row in times.values()}
    assert 0.05 == times["reward"]["requests_share"]


def test_a_score_is_the_functions_own_time_where_that_is_recorded(tables, conversation, span):
    """A function of a constant 0.1 s, for which the reward worker had no thread for 0.3 s."""
    events = [
        *conversation("a", uid="one"),
        span(*("reward_score", 8.5, 8.9), name="reward_0", uid="one", wait_s=0.3, compute_s=0.1),
    ]
    made = tables(events)

    times = {row["part"]: row["total_s"] for row in reward_times(made)}
    (score,) = made.rows("SELECT wait_us, compute_us FROM reward_scores")

    assert {"wait_us": 300_000, "compute_us": 100_000} == score
    assert (0.5, 0.1) == (times["reward"], times["score"])
