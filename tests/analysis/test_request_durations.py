"""Request durations: every point of the curve is a request, and percentiles are numpy's."""

import itertools

import pytest

from verl_profiler.analysis.requests import request_duration_cdf, request_percentiles
from verl_profiler.reading.tables.tables import Tables


def requests(durations_s, *, step=1, name="worker_0", validate=False):
    return [
        {
            "run": "r",
            "step": step,
            "name": name,
            "validate": validate,
            "request_id": f"{step}-{name}-{validate}-{number}",
            "finished": duration_s is not None,
            "begin_us": 0,
            "duration_us": None if duration_s is None else round(duration_s * 1e6),
        }
        for number, duration_s in enumerate(durations_s)
    ]


def test_the_curve_has_a_point_for_each_request():
    """Of a step, and of all steps together."""
    tables = Tables.of({"requests": requests([3, 1, None]) + requests([2], step=2)})

    rows = request_duration_cdf(tables)

    assert [(None, 1.0), (None, 2.0), (None, 3.0), (1, 1.0), (1, 3.0), (2, 2.0)] == [
        (row["step"], row["duration_s"]) for row in rows
    ]
    assert [1 / 3, 2 / 3, 1, 1 / 2, 1, 1] == pytest.approx([row["share"] for row in rows])
    assert [3, 3, 3, 2, 2, 1] == [row["requests"] for row in rows]


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


def test_percentiles_interpolate_and_leave_unfinished_ones_out():
    """The P90 of 0 to 10 s is 9 s; unfinished requests are counted."""
    tables = Tables.of({"requests": requests([*range(11), None])})

    rows = [row for row in request_percentiles(tables, percentiles=(50, 90)) if row["step"] == 1]

    assert [(50.0, 5.0), (90.0, 9.0)] == [(row["percentile"], row["duration_s"]) for row in rows]
    assert {(11, 1, 5.0)} == {(r["requests"], r["unfinished"], r["mean_s"]) for r in rows}


def test_a_worker_is_chosen_by_its_rank():
    """Worker 1 is neither worker 10 nor worker 11; a restarted one is the same worker."""
    rows = [
        each
        for number, name in enumerate(("worker_1", "worker_10", "worker_1-2", "worker_11"))
        for each in requests([number + 1], name=name)
    ]

    found = request_duration_cdf(Tables.of({"requests": rows}), worker=1)

    assert [1.0, 3.0] == [row["duration_s"] for row in found if row["step"] == 1]


def test_no_percentiles_are_no_rows():
    """Nothing asked, nothing answered."""
    assert [] == request_percentiles(Tables.of({"requests": requests([1])}), percentiles=())
