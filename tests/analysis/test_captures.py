"""GPU work inside ranges, kernels, and idle GPUs, on tables small enough to check by hand."""

import pytest

from verl_profiler.analysis.captures import gpu_idle, range_times, top_kernels
from verl_profiler.reading.tables.tables import Tables

MS = 1_000_000
OF = {"run": "r", "step": 2, "name": "actor_0", "file": "f", "host": "h1", "pid": 5}


def a_range(begin, end, event="update_actor", *, kind="push", tid=1):
    about = {**OF, "domain": "verl_profiler", "event": event, "kind": kind, "tid": tid}
    return {**about, "begin_ns": begin * MS, "end_ns": end * MS}


def work(launch, begin, end, kernel="gemm", *, tid=1, **changes):
    times = {"launch_ns": launch * MS, "begin_ns": begin * MS, "end_ns": end * MS}
    return {**OF, "kind": "kernel", "kernel": kernel, "gpu": "0", "tid": tid, **times, **changes}


def tables(**given):
    return Tables.of(given)


def test_work_belongs_to_the_range_that_launched_it():
    """Wherever it runs on the time axis; of another thread's only where the range crosses threads."""
    made = tables(
        capture_ranges=[a_range(0, 10), a_range(0, 100, "turn", kind="start")],
        capture_work=[work(5, 20, 50), work(6, 50, 60, tid=2), work(200, 200, 300)],
    )

    assert [("turn", 0.1, 2, 0.04), ("update_actor", 0.01, 1, 0.03)] == [
        (row["event"], row["total_s"], row["launches"], pytest.approx(row["gpu_s"]))
        for row in range_times(made)
    ]


def test_kernels_are_listed_longest_first_and_their_shares_add_up():
    """Of all work of a process in a step."""
    made = tables(
        capture_work=[work(0, 0, 30), work(0, 30, 60), work(0, 60, 100, "softmax")],
    )
    rows = top_kernels(made)

    assert [("gemm", 2, 0.06), ("softmax", 1, 0.04)] == [
        (row["kernel"], row["launches"], row["total_s"]) for row in rows
    ]
    assert 1 == pytest.approx(sum(row["share"] for row in rows))


def test_a_gpu_is_idle_where_no_process_uses_it():
    """Overlapping work counts once, also of two processes; the window is the step's captures."""
    window = {**OF, "begin_ns": 0, "end_ns": 100 * MS}
    gen = {"run": "r", "step": 2, "phase": "gen", "validate": False, "begin_us": 20_000}
    launched = [
        work(0, 10, 30),
        work(0, 20, 40, name="engine_0"),
        work(0, 60, 70),
        work(0, 62, 65),
    ]
    made = tables(
        captures=[window],
        capture_work=launched,
        phases=[{**gen, "end_us": 60_000, "duration_us": 40_000}],
    )
    (row,) = gpu_idle(made)

    assert {
        "processes": "actor_0, engine_0",
        "captured_s": 0.1,
        "busy_s": 0.04,
        "idle_share": 0.6,
        "gen_s": 0.04,
        "gen_busy_s": 0.02,
        "gen_idle_share": 0.5,
    } == {key: value for key, value in row.items() if key not in ("run", "step", "host", "gpu")}
