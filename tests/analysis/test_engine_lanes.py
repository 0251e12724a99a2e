"""Calls of engines in lanes, against calls whose times are known."""

import itertools
import random
from dataclasses import replace

import pytest
from truth.engine_readings import reading
from truth.synthetic import EPOCH, Request, Step, Turn, events_of, run_of, tables_of

from verl_profiler.analysis.engine_lanes import LANE_PARTS, engine_lanes, longest_step
from verl_profiler.analysis.engine_state import engine_load_over_time


def drawn_step(seed):
    source = random.Random(seed)
    return Step(
        tuple(
            Request(
                begin_us=10_000 + source.randrange(900_000),
                turns=tuple(
                    Turn(
                        tokens=source.randrange(2, 60),
                        held_us=source.choice((0, 200_000)),
                        parked_us=source.choice((0, 0, 90_000)),
                    )
                    for _ in range(source.randrange(1, 4))
                ),
                replica=place % 2,
            )
            for place in range(14)
        )
    )


def spans_of(row):
    return row["begin_s"], row["begin_s"] + sum(row[f"{part}_s"] for part in LANE_PARTS)


@pytest.mark.parametrize("seed", range(3))
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

    assert (0.07, 0.02, 0, 0.03, 0, 0.4) == tuple(
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
