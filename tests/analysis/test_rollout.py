"""Requests in flight, and the tail of a rollout."""

import numpy as np
import pytest

from verl_profiler.analysis.rollout import requests_in_flight, rollout_tail
from verl_profiler.reading.tables.tables import Tables


def requests(intervals, **more):
    return Tables.of(
        {
            "requests": [
                {
                    "run": "r",
                    "step": 1,
                    "name": f"worker_{number % 2}",
                    "validate": False,
                    "request_id": f"q{number}",
                    "finished": True,
                    "begin_us": round(begin * 1e6),
                    "end_us": round(end * 1e6),
                    "duration_us": round((end - begin) * 1e6),
                    **more,
                }
                for number, (begin, end) in enumerate(intervals)
            ]
        }
    )


def test_a_long_curve_keeps_its_peaks():
    """Ten thousand requests, and for a moment a hundred at once."""
    calm = [(number, number + 0.5) for number in range(5000)]
    busy = [(2500.1, 2500.2)] * 100

    rows = requests_in_flight(requests(calm + busy))

    assert len(rows) == 2000
    assert max(row["most"] for row in rows) == 101
    assert min(row["fewest"] for row in rows) == 0
    assert rows[-1]["in_flight"] == 0
    # Every begin and every end.
    assert sum(row["merged"] for row in rows) == 2 * (5000 + 100)
    at = [row["at_s"] for row in rows]
    assert at == sorted(at)
    assert (at[0], at[-1]) == (0.0, 4999.5)


def test_the_tail_is_what_follows_most_requests():
    """Four end at 1 to 4 s and one at 10 s: half of the rollout follows the 80 % quantile."""
    tail = 10 - np.quantile([1, 2, 3, 4, 10], 0.8)
    (row,) = rollout_tail(requests([(0, 1), (0, 2), (0, 3), (0, 4), (0, 10)]))

    assert (5, 10.0) == (row["requests"], row["rollout_s"])
    assert [tail, tail / 10] == pytest.approx([row["tail80_s"], row["tail80_share"]])
    # A fifth request cannot lie beyond 95 %.
    assert row["tail95_s"] is row["tail99_s"] is None
    assert (5, 0.6, "q4", "worker_0") == (
        row["peak"],
        round(row["bubble_share"], 9),
        row["last_request_id"],
        row["last_name"],
    )
    # worker_1 had nothing to do after 4 s.
    assert row["idle_share"] == pytest.approx(6 / 20)
