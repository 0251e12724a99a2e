"""Event-loop lags: who caused them, and who only waited."""

from picked import picked

from verl_profiler.analysis.event_loop import loop_suspects


def test_a_lag_in_a_trainer_worker_with_a_known_call_is_by_design(span, tables):
    """They compute in their event loops; a lag without a known call is a suspect there too."""
    events = [
        span("event_loop_lag", 0, 5, name="actor_0", loop="main", during="update_actor"),
        span("event_loop_lag", 6, 7, name="actor_0", loop="main"),
        span("event_loop_lag", 0, 2, name="worker_0", loop="main", during="tool_call"),
    ]

    rows = loop_suspects(tables(events))

    assert [
        ("worker_0", "tool_call", False, 2.0),
        ("actor_0", None, False, 1.0),
        ("actor_0", "update_actor", True, 5.0),
    ] == [(row["name"], row["during"], row["by_design"], row["max_s"]) for row in rows]


def test_requests_that_were_under_way_are_counted(tables, conversation, span):
    """Only those of the same process; how long each was held up, at most, is added."""
    events = [
        *conversation("a"),
        *conversation("b", begin=9.0),
        *conversation("far", begin=100.0),
        *conversation("other", name="worker_1"),
        span("event_loop_lag", 8, 10, loop="main"),
        span("event_loop_lag", 12, 13, loop="main"),
        span("step", 0, 20, name="trainer_0"),
    ]

    (row,) = loop_suspects(tables(events))

    # a: 8 to 10 s; b: 9 to 10 s and 12 to 13 s.
    assert (2, 2, 4.0, 3.0, 0.15) == picked(row, "lags requests requests_s total_s step_share")
    assert 8_000_000 == row["worst_begin_us"]


def test_other_processes_have_no_requests(span, tables):
    """An engine's requests are the agent loops'."""
    (row,) = loop_suspects(tables([span("event_loop_lag", 0, 1, name="engine_0", loop="main")]))

    assert (None, None, None) == (row["requests"], row["requests_s"], row["step_share"])
