"""The load of engines, against readings written by hand."""

from picked import picked

from verl_profiler.analysis.engine import engine_load

# Seconds, then running and waiting requests and tokens in use.
READINGS = [(0.0, 0, 0, 0), (1.0, 8, 2, 900), (3.0, 4, 0, 300), (4.0, 0, 0, 0), (60.0, 1, 0, 10)]


def test_means_are_by_time(instant, tables):
    """Four seconds are covered: 1 s idle, 2 s with 8 requests, 1 s with 4; then nothing is known."""
    readings = [
        instant(
            *("engine_state", at),
            name="engine_0",
            running_requests=running,
            waiting_requests=waiting,
            running_limit=8,
            kv_used_tokens=used,
            kv_capacity_tokens=1000,
        )
        for at, running, waiting, used in READINGS
    ]
    (row,) = engine_load(tables(readings))

    assert (5, 4.0, 5.0, 8, 1.0, 2, 8) == picked(
        row, "readings covered_s running max_running waiting max_waiting running_limit"
    )
    assert (0.525, 0.9, 0.25, 0.5) == picked(row, "kv_share max_kv_share idle_share waiting_share")


def test_counts_that_an_engine_does_not_report_are_unknown(instant, tables):
    """Not 0 % idle and never waiting; a mean is over the readings that have the value."""
    partly = [
        instant("engine_state", at, name="engine_0", **counts)
        for at, counts in ((0.0, {"kv_used_tokens": 5}), (3.0, {"running_requests": 4}), (4.0, {}))
    ]
    (row,) = engine_load(tables(partly))

    assert (4.0, 4.0, 0.0, None, None) == picked(
        row, "covered_s running idle_share waiting waiting_share"
    )
