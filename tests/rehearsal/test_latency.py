"""The latencies of the rehearsal's tools: seeded, mostly short, with a tail."""

import statistics

from verl_profiler.rehearsal.latency import latency_s


def test_the_same_call_takes_the_same_time():
    """Latencies are decided by what the call is."""
    assert latency_s("12+30 1") == latency_s("12+30 1")
    assert latency_s("12+30 1") != latency_s("12+30 2")


def test_the_median_is_as_asked():
    """Half of the calls are quicker than the median, within what 2000 samples show."""
    values = [latency_s(str(key), median_s=0.1, tail_share=0.0) for key in range(2000)]

    assert 0.09 < statistics.median(values) < 0.11


def test_the_tail_has_its_share_and_size():
    """A few calls take a multiple of all others."""
    values = [
        latency_s(str(key), median_s=0.001, tail_share=0.02, tail_s=1.0) for key in range(5000)
    ]
    tail = [value for value in values if value >= 0.5]

    assert 0.012 < len(tail) / len(values) < 0.028
    assert max(values) < 1.6


def test_without_a_tail_there_is_none():
    """A share of zero leaves the lognormal alone."""
    assert max(latency_s(str(key), tail_share=0.0) for key in range(2000)) < 0.7
