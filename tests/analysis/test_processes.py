"""Tools, engines, ranks, transfers, memory, lags and the profiler's cost: by hand, few rows."""

import pytest
from picked import picked

from verl_profiler.analysis.engine import engine_times
from verl_profiler.analysis.memory import memory_peaks
from verl_profiler.analysis.profiler import profiler_cost
from verl_profiler.analysis.transfers import weight_sync
from verl_profiler.reading.tables.tables import Tables

SECOND = 1_000_000


def row(duration_s=None, **more):
    length = None if duration_s is None else round(duration_s * SECOND)
    times = {"begin_us": 0, "end_us": length or 0, "duration_us": length}
    return {"run": "r", "step": 1, "name": "worker_0", **times, **more}


CALLS = [
    row(2.0, engine_name="engine_0", engine_duration_us=1_500_000, outside_us=500_000),
    row(4.0, engine_name="engine_1", engine_duration_us=4_000_000, outside_us=0),
]
CALLS = [{**call, "validate": False, "response_tokens": 10} for call in CALLS]


def test_what_the_engine_does_not_report_is_not_zero():
    """Queue time of an engine that does not say it is unknown, as retractions and drafts are."""
    (times,) = engine_times(Tables.of({"engine_calls": CALLS}))
    own = [
        {**CALLS[0], "retractions": 2, "draft_tokens": 30, "accepted_draft_tokens": 12},
        {**CALLS[1], "retractions": None, "draft_tokens": 10, "accepted_draft_tokens": 8},
    ]
    (some,) = engine_times(Tables.of({"engine_calls": own}))

    assert (2, 2, 6.0, 0.5, None, None, None, None) == picked(
        times, "calls served total_s outside_s queue_s decode_s retractions draft_acceptance"
    )
    assert 5.0 == times["engine_tokens_per_s"]
    assert (2, 0.5) == (some["retractions"], some["draft_acceptance"])


def test_a_weight_sync_without_the_trainer_is_still_one():
    """What was not recorded is None."""
    spans = [
        row(2.0, name="actor_0", role="actor", event="update_weights", family="weights"),
        row(0.5, name="engine_0", role="engine", event="memory_release", family="weights"),
    ]
    (sync,) = weight_sync(Tables.of({"rank_spans": spans}))

    assert (None, 2.0, "actor_0", None, 0.5, None) == picked(
        sync, "trainer_s slowest_rank_s slowest_rank transfer_s release_s resume_s"
    )


def test_memory_peaks_name_where_and_leave_cpus_out():
    """On a CPU verl reports 1 byte of 1 on a CPU: that is no memory."""
    readings = [
        {"run": "r", "step": 1, "name": name, "role": "actor", "at": at, "end_us": 1}
        | {"used_bytes": used, "total_bytes": total}
        for name, at, used, total in (
            ("actor_0", "before", 10, 80),
            ("actor_1", "after", 30, 80),
            ("actor_2", "after", 1, 1),
        )
    ]

    rows = memory_peaks(Tables.of({"memory": readings}))

    assert [("actor_1", "after", 30, 2)] == [
        picked(row, "name at used_bytes readings") for row in rows
    ]


def test_the_cost_is_that_of_the_costliest_process():
    """Processes run beside each other: the slowest one's share is what a step can lose."""
    own = {"run": "r", "step": 1, "events": 10, "size_bytes": 100, "dropped": 0, "writer_s": 0.1}
    costs = [
        {**own, "name": name, "wrapper_s": cost, "wrapper_cpu_s": cost / 2}
        for name, cost in (("worker_0", 0.001), ("worker_0", 0.001), ("worker_1", 0.0015))
    ]

    step = row(10.0, finished=True)
    del step["name"]

    (cost,) = profiler_cost(Tables.of({"steps": [step], "costs": costs}))

    assert (2, 30, "worker_0", 0.002) == picked(cost, "processes events costliest costliest_s")
    assert 0.0002 == pytest.approx(cost["share"])
    assert 0.001 == pytest.approx(cost["costliest_cpu_s"])
    assert (0.00175, None) == (pytest.approx(cost["wrapper_cpu_s"]), cost["writer_cpu_s"])
