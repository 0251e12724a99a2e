"""Requests in flight, and the tail of a rollout."""

from verl_profiler.analysis.rollout import requests_in_flight
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
