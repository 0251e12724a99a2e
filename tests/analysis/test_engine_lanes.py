"""Calls of engines in lanes, against calls whose times are known."""

import copy
import itertools
import random
from dataclasses import replace

import pytest
from chart_reading import channels, data_in, inner, panels_of, words
from truth.engine_readings import reading
from truth.synthetic import EPOCH, Request, Step, Turn, events_of, run_of, tables_of
from truth.test_engine_time import drawn_requests

from verl_profiler.analysis.engine import (
    LANE_PARTS,
    engine_lanes,
    engine_load_over_time,
    longest_step,
    request_engine_time,
)
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import Choice


def drawn_step(seed):
    return Step(drawn_requests(random.Random(seed)))


def spans_of(row):
    return row["begin_s"], row["begin_s"] + sum(row[f"{part}_s"] for part in LANE_PARTS)


def test_a_pause_that_an_engine_counts_as_its_queue_counts_once():
    """The stand-in of recorded rehearsals had it in its queue time, and decoding was less than nothing."""
    events, _ = events_of(drawn_step(0))
    expected = request_engine_time(tables_of(copy.deepcopy(events)))
    waits = {
        event["extra"]["engine_request_id"]: event["duration_us"] / 1e6
        for event in events
        if event["event"] == "engine_parked"
    }
    for event in events:
        if event["event"] == "engine_request":
            event["extra"]["queue_s"] += waits.get(event["extra"]["engine_request_id"], 0)

    assert waits
    assert expected == request_engine_time(tables_of(events))


@pytest.mark.parametrize("seed", range(2))
def test_calls_of_a_lane_do_not_overlap_and_lanes_are_as_few_as_calls_at_once(seed):
    """As many lanes as calls were there at the fullest moment, counted at each arrival."""
    rows = engine_lanes(run_of(drawn_step(seed))[0])
    for name in ("engine_0", "engine_1"):
        own = [row for row in rows if row["name"] == name]
        spans = [spans_of(row) for row in own]
        at_once = max(sum(first <= begin < last for first, last in spans) for begin, _ in spans)

        assert at_once == max(row["lane"] for row in own) + 1
        for lane in range(at_once):
            lasting = sorted(spans_of(row) for row in own if row["lane"] == lane)
            for (_, end), (begin, _) in itertools.pairwise(lasting):
                assert end <= begin


def test_a_call_is_drawn_from_its_arrival_with_its_parts():
    """On the way for 2 ms; then paused, queued, in prefill, decoding."""
    turn = Turn(tokens=40, token_us=10_000, prefill_us=30_000, held_us=20_000, parked_us=70_000)
    events, _ = events_of(Step((Request(turns=(turn,)),)))
    arrived_us = 1_000 + 10_000 + 3_000 + 500 + 1_500
    first = reading("engine_0", EPOCH + 4_000, step=1, running_requests=1, waiting_requests=0)
    tables = tables_of([*events, first])
    (row,) = engine_lanes(tables)

    assert (0.07, 0.02, 0, 0.03, 0, 0.4, 0) == tuple(
        pytest.approx(row[f"{part}_s"]) for part in LANE_PARTS
    )
    # Both tables count from the reading, which came before the call.
    assert (arrived_us - 4_000) / 1e6 == pytest.approx(row["begin_s"])
    assert 0 == engine_load_over_time(tables)[0]["at_s"]
    assert 0 == engine_lanes(tables_of(events))[0]["begin_s"]


def test_the_longest_step_is_shown_unless_another_is_named():
    """The first step warms up: the longest of the others."""
    short = drawn_step(1)
    steps = [replace(short, save_us=save) for save in (9_000_000, 0, 2_000_000, 0)]
    tables, _ = run_of(*steps)

    assert (3, 3) == longest_step(tables)
    assert {2} == {row["step"] for row in engine_lanes(tables, (2, 2))}
    assert longest_step(tables_of([])) is None


def test_the_longest_step_is_drawn_from_its_first_call():
    """Readings before it are left out, but for the one that holds then, which is cut; ten engines are eight."""
    short = Step(tuple(Request(replica=place) for place in range(10)))
    long = Step(
        tuple(
            Request(replica=place, turns=(Turn(tokens=200),) * (1 + place)) for place in range(10)
        )
    )
    events, truths = events_of(long, short)
    first = min(event["begin_us"] for event in events if event["event"] == "engine_request")
    read = [
        reading("engine_4", first + after_us, step=1, dp_rank=0, running_requests=running)
        for after_us, running in ((-900_000, 9), (-300_000, 1), (400_000, 2))
    ]
    tables = tables_of([*events, *read])
    spec = chart_of(tables)
    calls, loads = data_in(spec, "part"), data_in(spec, "requests")
    panels = [each["title"] for each in panels_of(spec) if "title" in each]

    assert truths[0].duration_us > truths[1].duration_us
    assert "the longest step (1)" in words(spec)
    assert 8 == len(panels)
    assert "10 engines, 8 of them shown" in words(spec)
    begin_s = min(row["at_s"] for row in calls)
    if "engine_4" in panels:
        assert [(-0.3, 1), (0.4, 2)] == [
            (pytest.approx(row["at_s"] - begin_s, abs=1e-4), row["requests"])
            for row in loads
            if row.get("what") == "running"
        ]
        lines = [each for each in inner(spec) if each.get("mark", {}).get("type") == "line"]
        assert lines
        for each in lines:
            assert each["mark"]["clip"]
            assert pytest.approx(begin_s) == channels(each)["x"]["scale"]["domainMin"]


def chart_of(tables):
    view, choice = VIEWS["engine_lanes"], Choice(run="r")
    return view.spec(view.analysis(tables, choice), choice)
