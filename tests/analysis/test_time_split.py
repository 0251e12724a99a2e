"""The self times of events."""

import sys

import pytest

from verl_profiler.analysis.time_split import exclusive_times
from verl_profiler.render.colors import color


def own(rows, scope):
    return {row["event"]: row["self_s"] for row in rows if row["scope"] == scope and row["self_s"]}


def test_a_request_in_own_times(tables, conversation):
    """Two tools at the same time take 2 s, not 3; what nothing covers is the request's own."""
    rows = exclusive_times(tables(conversation()))

    assert {
        "request": 0.5,
        "prompt_build": 1.0,
        "engine_call": 5.0,
        "tool_call": 2.0,
        "postprocess": 1.0,
        "reward": 0.5,
    } == own(rows, "requests")
    totals = {row["event"]: (row["events"], row["total_s"]) for row in rows}
    assert (2, 3.0) == totals["tool_call"]
    assert (1, 2.0) == totals["tool_execution"]
    assert 0.2 == next(row["share"] for row in rows if row["event"] == "tool_call")


def test_a_transfer_is_inside_whatever_makes_it(tables, conversation, span):
    """In post-processing, or in a turn; one that names no request is in none."""
    events = [
        *conversation(),
        span("tq_put", 9.0, 9.25, request_id="q", size_bytes=1),
        span("tq_put", 3.0, 4.0),
    ]

    times = own(exclusive_times(tables(events)), "requests")

    assert (0.25, 0.75, 5.0) == (times["tq_put"], times["postprocess"], times["engine_call"])


def test_what_sticks_out_of_the_request_is_cut_off(tables, conversation, span):
    """Own times are of the request, and add up to it."""
    events = [*conversation(), span("tq_put", 9.5, 30.0, request_id="q")]

    times = own(exclusive_times(tables(events)), "requests")

    assert 0.5 == times["tq_put"]
    assert sum(times.values()) == pytest.approx(10.0)


def test_events_of_the_users_own_are_innermost(tables, conversation, span):
    """Whatever they are called, and also with a quote in the name."""
    made = span("turn", 2.0, 3.0, request_id="q", family="user")
    events = [*conversation(), {**made, "event": "it's mine"}]

    times = own(exclusive_times(tables(events)), "requests")

    assert (1.0, 4.0) == (times["it's mine"], times["engine_call"])
    assert color("it's mine").startswith("#")


def test_a_step_in_own_times(tables, span):
    """Waiting is inside `gen`; testing is outside the step."""
    events = [
        span("step", 0, 10, name="trainer_0"),
        span("gen", 0, 6, name="trainer_0"),
        span("sample_wait", 1, 6, name="trainer_0"),
        span("update_actor", 6, 9, name="trainer_0"),
        span("testing", 10, 20, name="trainer_0"),
    ]

    rows = exclusive_times(tables(events))

    assert {"step": 1.0, "gen": 1.0, "sample_wait": 5.0, "update_actor": 3.0} == own(rows, "step")


def test_ranks_in_own_times(tables, span):
    """All ranks together; moving the optimizer is inside the update."""
    events = [
        each
        for name in ("actor_0", "actor_1")
        for each in (
            span("update_actor", 0, 5, name=name),
            span("load", 0, 1, name=name, model=True),
            span("train_mini_batch", 1, 4, name=name),
            span("forward_backward", 2, 4, name=name),
        )
    ]

    rows = exclusive_times(tables(events))

    assert {
        "update_actor": 2.0,
        "load": 2.0,
        "train_mini_batch": 2.0,
        "forward_backward": 4.0,
    } == own(rows, "actor")


def test_steps_in_batches_are_the_same(small, monkeypatch):
    """How many events are swept at a time changes nothing."""
    whole = exclusive_times(small.tables)
    # In the package, this name is the function's.
    module = sys.modules["verl_profiler.analysis.time_split"]
    monkeypatch.setattr(module, "_EVENTS_AT_ONCE", 1)

    single = exclusive_times(small.tables)
    assert len(whole) == len(single)
    for one, other in zip(whole, single, strict=True):
        assert other == pytest.approx(one)
