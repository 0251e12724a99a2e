"""Durations of requests and turns: percentiles, breakdown, and everything in one request."""

import itertools

import numpy as np
import pytest
from picked import picked
from truth.planted import findings_of, pair

from verl_profiler.analysis.compare.step_metrics import step_metrics
from verl_profiler.analysis.requests import (
    request_breakdown,
    request_duration_cdf,
    request_percentiles,
    request_timeline,
    request_times,
    slowest_requests,
    turn_times,
)
from verl_profiler.analysis.steps import rollout_tail
from verl_profiler.reading.tables.tables import Tables

SECOND = 1_000_000


WHO = {"run": "r", "step": 1, "name": "worker_0", "validate": False}


def request(number, duration_s, **more):
    end_us = None if duration_s is None else round(duration_s * SECOND)
    times = {"begin_us": 0, "end_us": end_us, "duration_us": end_us, "finished": end_us is not None}
    status = None if times["finished"] else "unfinished"
    return {**WHO, "request_id": f"q{number}", "turns": 1, "status": status, **times, **more}


def call(number, event, duration_s, turn, *, begin_s=0.0, tool=None):
    begin, length = round(begin_s * SECOND), round(duration_s * SECOND)
    times = {"begin_us": begin, "end_us": begin + length, "duration_us": length}
    about = {"event": event, "family": "rollout", "role": "agent_loop", "turn": turn}
    extra = None if tool is None else {"tool": tool}
    return {**WHO, "request_id": f"q{number}", **about, **times, "extra": extra}


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
        picked(row, "request_id duration_s longest longest_turn longest_s") for row in rows
    ]


def test_the_longest_call_may_be_of_all_tools_together_or_unknown():
    """The original logger has no events of single calls; a request without calls is slow all the same."""
    events = [call(0, "tool_execution", 0.5, 1)]
    (together,) = slowest_requests(Tables.of({"requests": [request(0, 1.0)], "events": events}))
    (unknown,) = slowest_requests(Tables.of({"requests": [request(0, 1.0)]}))

    assert ("tool", 1, 0.5) == picked(together, "longest longest_turn longest_s")
    assert ("q0", None, None) == picked(unknown, "request_id longest longest_s")


def test_parallel_calls_show_as_overlap_and_a_reward_inside_postprocess_is_counted_once():
    """An agent loop that calls twice at once; verl scores inside its post-processing, or did it before."""
    ended = call(0, "request", 1.0, None)
    parallel = [ended, call(0, "engine_call", 0.9, 0), call(0, "engine_call", 0.8, 0)]
    scored = [
        ended,
        call(0, "postprocess", 0.4, None, begin_s=0.5),
        call(0, "reward", 0.3, None, begin_s=0.55),
    ]

    one, two = (
        Tables.of({"events": events}).rows("SELECT * FROM requests")[0]
        for events in (parallel, scored)
    )

    assert (1_000_000, 1_700_000, 0, 700_000) == picked(
        one, "duration_us engine_us other_us overlap_us"
    )
    assert (100_000, 300_000, 600_000) == picked(two, "postprocess_us reward_us other_us")


def requests(durations_s, **more):
    return [request(number, duration_s, **more) for number, duration_s in enumerate(durations_s)]


def test_a_long_curve_keeps_its_tail():
    """Beyond 1,000 requests, the 100 slowest are all there, and no kept point is moved."""
    tables = Tables.of({"requests": requests([number / 100 for number in range(5000)])})

    rows = [row for row in request_duration_cdf(tables) if row["step"] == 1]

    assert 1000 < len(rows) < 1110
    assert [number / 100 for number in range(4900, 5000)] == [r["duration_s"] for r in rows[-100:]]
    for row in rows:
        assert row["share"] == pytest.approx((row["duration_s"] * 100 + 1) / 5000)
    gaps = [b["share"] - a["share"] for a, b in itertools.pairwise(rows)]
    assert max(gaps) < 0.0021


def test_a_worker_is_chosen_by_its_rank():
    """Worker 1 is neither worker 10 nor worker 11; a restarted one is the same worker."""
    rows = [
        each
        for number, name in enumerate(("worker_1", "worker_10", "worker_1-2", "worker_11"))
        for each in requests([number + 1], name=name)
    ]

    found = request_duration_cdf(Tables.of({"requests": rows}), worker=1)

    assert [1.0, 3.0] == [row["duration_s"] for row in found if row["step"] == 1]


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


def test_the_engines_parts_are_shown_when_every_call_has_them(tables, conversation, span):
    """They add up to the engine's part; `outside` is what the engine does not account for."""
    events = conversation()
    both = [*events, served(span, "q", 0, 1.0), served(span, "q", 1, 6.0, times=(0.0, 0.5, 1.0))]

    (row,) = request_breakdown(tables(both))
    (half,) = request_breakdown(tables(both[:-1]))

    assert (5.0, 0.5, 1.0, 2.0, 1.5) == picked(row, "engine_s queue_s prefill_s decode_s outside_s")
    assert (5.0, None, None, None, None) == picked(
        half, "engine_s queue_s prefill_s decode_s outside_s"
    )


def test_unfinished_requests_come_last(tables, conversation):
    """They have no duration; how long they were seen is said apart."""
    killed = [event for event in conversation("killed", scale=9) if event["event"] != "request"]

    rows = request_breakdown(tables(conversation("done") + killed))

    assert [("done", 10.0), ("killed", None)] == [(r["request_id"], r["duration_s"]) for r in rows]
    assert 85.5 == rows[1]["seen_s"]


def test_the_timeline_is_in_order_with_the_engines_side(tables, conversation, span):
    """From the request's begin, the longest first where two begin together."""
    events = [*conversation(begin=100.0), served(span, "q", 0, 101.0, step=2)]

    rows = request_timeline(tables(events), "q", 1)

    assert ["request", "agent_loop", "prompt_build", "turn", "engine_call", "engine_request"] == [
        row["event"] for row in rows[:6]
    ]
    assert ("engine_0", 1.1, 20, 0.5) == picked(rows[5], "name begin_s tokens queue_s")
    assert ["search", "calc"] == [r["what"] for r in rows if r["event"] == "tool_call"]
    assert 9.5 == rows[-2]["end_s"]


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


def test_an_unfinished_turn_is_counted_and_not_measured(tables, conversation, span):
    """A turn that was cut off by the end of the run would look short."""
    events = [*conversation(), span("engine_call", 0, 1, request_id="cut", turn=0)]

    first, _ = turn_times(tables(events))

    assert (1, 1, 5.0) == (first["turns"], first["unfinished"], first["mean_s"])


@pytest.mark.parametrize("number", [4, 12, 120])
def test_a_quantile_is_numpys_and_none_of_too_few(number):
    """In every table that has it; so many values lie, one of them, beyond the quantile."""
    lengths = np.random.default_rng(7).lognormal(1.0, 0.7, number).round(6).tolist()
    step = {"run": "r", "step": 1, "finished": True, "begin_us": 0, "end_us": 90 * SECOND}
    tables = Tables.of({"requests": requests(lengths), "steps": [step]})
    (times,) = request_times(tables)
    (metric,) = (row for row in step_metrics(tables) if row["name"] == "request")
    marks = {
        row["percentile"]: row["duration_s"]
        for row in request_percentiles(tables)
        if row["step"] == 1
    }
    tail = rollout_tail(tables)[0]

    for level, least in ((50, 1), (80, 5), (90, 10), (95, 20), (99, 100)):
        truth = np.quantile(lengths, level / 100) if number >= least else None
        shown = [times[f"p{level}_s"], marks[level]]
        shown += [metric[f"p{level}"]] if level != 80 else []
        assert shown == [truth and pytest.approx(truth, abs=2e-6)] * len(shown), level
        assert level in (50, 90) or (tail[f"tail{level}_s"] is None) == (truth is None)


def test_ids_that_repeat_are_told_apart(tables, conversation):
    """verl's full_determinism gives the same ids in every step."""
    events = conversation("same", step=1) + conversation("same", step=2, begin=50.0)

    rows = request_timeline(tables(events), "same", 2)

    assert {2} == {row["step"] for row in rows}
    assert 0.0 == rows[0]["begin_s"]


def test_a_wide_distribution_of_lengths_has_a_tail():
    """Lognormal response lengths; the truth is the same simulation with lengths that are nearly alike.

    `truth/test_planted` has the narrower distribution, behind another fault, and each night both.
    """
    wide, narrow = pair("lognormal", 1, 0)
    row = findings_of(wide)[0]

    assert "tail" == row["finding"]
    assert 0.8 <= row["recoverable_s"] / (wide.step_s - narrow.step_s) <= 1.25
    assert "times the tokens" in row["cause"]
