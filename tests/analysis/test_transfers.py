"""TransferQueue calls: bytes, time, and time in which any was under way."""

from verl_profiler.analysis.transfers import transfer_rates


def test_calls_at_the_same_time_are_busy_once(span, tables):
    """Two processes; the rate is of the calls that say how much they moved."""
    events = [
        span("step", 0, 10, name="trainer_0"),
        span("tq_put", 0, 2, size_bytes=100),
        span("tq_put", 1, 3, size_bytes=50, status="error"),
        span("tq_put", 5, 6, name="worker_1"),
        span("tq_meta", 0, 1, name="trainer_0", family="transfer_queue", op="kv_list"),
    ]

    meta, put = sorted(transfer_rates(tables(events)), key=lambda row: row["event"])

    assert ("agent_loop", 3, 1, 2, 5.0, 4.0, 150) == tuple(
        put[key]
        for key in ("role", "calls", "failed", "processes", "total_s", "busy_s", "size_bytes")
    )
    assert (37.5, 0.2) == (put["bytes_per_s"], put["busy_share"])
    assert ("trainer", None, None) == (meta["role"], meta["size_bytes"], meta["bytes_per_s"])
