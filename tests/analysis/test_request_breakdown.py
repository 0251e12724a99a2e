"""The breakdown: really the slowest, in parts that are never made up."""

from verl_profiler.analysis.requests import request_breakdown, request_timeline


def served(span, request_id, turn, begin, *, name="engine_0", step=1, times=(0.5, 0.5, 1.0)):
    queue, prefill, decode = times
    return span(
        "engine_request",
        begin + 0.1,
        begin + 0.2 + queue + prefill + decode,
        name=name,
        step=step,
        request_id=request_id,
        engine_request_id=f"{request_id}-{turn}",
        queue_s=queue,
        prefill_s=prefill,
        decode_s=decode,
        response_tokens=9,
    )


def test_the_slowest_are_the_slowest_of_all_steps_and_workers(tables, conversation):
    """Not of the first step, not of the first worker, and not the fastest."""
    events = [
        event
        for number, scale in enumerate((1.0, 5.0, 0.5, 4.0, 3.0))
        for event in conversation(
            f"q{number}", scale=scale, step=number % 2, name=f"worker_{number}"
        )
    ]

    rows = request_breakdown(tables(events), count=3)

    assert [("q1", 50.0), ("q3", 40.0), ("q4", 30.0)] == [
        (row["request_id"], row["duration_s"]) for row in rows
    ]
    assert ["q3"] == [r["request_id"] for r in request_breakdown(tables(events), worker=3)]
    assert ["q1", "q3"] == [r["request_id"] for r in request_breakdown(tables(events), (1, 1))]


def test_the_engines_parts_are_shown_when_every_call_has_them(tables, conversation, span):
    """They add up to the engine's part; `outside` is what the engine does not account for."""
    events = conversation()
    both = [*events, served(span, "q", 0, 1.0), served(span, "q", 1, 6.0, times=(0.0, 0.5, 1.0))]

    (row,) = request_breakdown(tables(both))
    (half,) = request_breakdown(tables(both[:-1]))

    assert (5.0, 0.5, 1.0, 2.0, 1.5) == (
        row["engine_s"],
        row["queue_s"],
        row["prefill_s"],
        row["decode_s"],
        row["outside_s"],
    )
    assert (5.0, None, None, None, None) == (
        half["engine_s"],
        half["queue_s"],
        half["prefill_s"],
        half["decode_s"],
        half["outside_s"],
    )


def test_unfinished_requests_come_last(tables, conversation):
    """They have no duration; how long they were seen is said apart."""
    killed = [event for event in conversation("killed", scale=9) if event["event"] != "request"]

    rows = request_breakdown(tables(conversation("done") + killed))

    assert [("done", 10.0), ("killed", None)] == [(r["request_id"], r["duration_s"]) for r in rows]
    assert 85.5 == rows[1]["seen_s"]


def test_a_beginning_of_an_id_finds_the_request(tables, conversation):
    """In training and in validation, when both are asked for."""
    events = conversation("abc") + conversation("abd", validate=True) + conversation("xyz")

    found = request_breakdown(tables(events), request_id="ab", validate=None, count=None)

    assert {("abc", False), ("abd", True)} == {(r["request_id"], r["validate"]) for r in found}
    assert [] == request_breakdown(tables(events), request_id="%", validate=None)


def test_the_timeline_is_in_order_with_the_engines_side(tables, conversation, span):
    """From the request's begin, the longest first where two begin together."""
    events = [*conversation(begin=100.0), served(span, "q", 0, 101.0, step=2)]

    rows = request_timeline(tables(events), "q", 1)

    assert ["request", "agent_loop", "prompt_build", "turn", "engine_call", "engine_request"] == [
        row["event"] for row in rows[:6]
    ]
    assert ("engine_0", 1.1, 20, 0.5) == (
        rows[5]["name"],
        rows[5]["begin_s"],
        rows[5]["tokens"],
        rows[5]["queue_s"],
    )
    assert ["search", "calc"] == [r["what"] for r in rows if r["event"] == "tool_call"]
    assert 9.5 == rows[-2]["end_s"]


def test_ids_that_repeat_are_told_apart(tables, conversation):
    """verl's full_determinism gives the same ids in every step."""
    events = conversation("same", step=1) + conversation("same", step=2, begin=50.0)

    rows = request_timeline(tables(events), "same", 2)

    assert {2} == {row["step"] for row in rows}
    assert 0.0 == rows[0]["begin_s"]


def test_a_request_says_how_long_its_loop_stood_still(tables, conversation, span):
    """Of its own worker, and only while it ran; no part gets longer."""
    lags = [
        span("event_loop_lag", -1.0, 0.5, name="worker_0", loop="main"),
        span("event_loop_lag", 5.0, 5.25, name="worker_0", loop="main"),
        span("event_loop_lag", 2.0, 4.0, name="worker_1", loop="main"),
    ]
    (quiet,) = request_breakdown(tables(conversation()))
    (row,) = request_breakdown(tables([*conversation(), *lags]))

    assert 0.75 == row["stalled_s"]
    assert 0.0 == quiet["stalled_s"]
    assert quiet == {**row, "stalled_s": 0.0}
