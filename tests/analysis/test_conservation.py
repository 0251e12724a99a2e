"""Parts add up to their wholes, on a run of the real trainer and on a generated one.

Tolerance: 1 microsecond per part, for the rounding of files; sums of floats add 1e-9 of the whole.
"""

import itertools

import pytest

from verl_profiler.analysis.requests import request_breakdown
from verl_profiler.analysis.rollout import requests_in_flight, rollout_tail
from verl_profiler.analysis.tools import reward_times
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


def test_scores_are_of_the_requests_that_asked(rehearsed):
    """Every training request was scored once, and no score of validation counts."""
    rows = [row for row in reward_times(rehearsed.tables) if row["part"] == "score"]
    requests = rehearsed.rows(
        "SELECT step, count(*) AS requests FROM requests WHERE NOT validate GROUP BY step ORDER BY step"
    )

    assert [(row["step"], row["requests"]) for row in requests] == [
        (row["step"], row["count"]) for row in rows
    ]
