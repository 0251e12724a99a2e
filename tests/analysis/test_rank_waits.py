"""Ranks wait for each other at every mini-batch and in every step, not for each other's sums."""

import pytest

from verl_profiler.analysis.workers import rank_balance, worker_balance, worker_phases
from verl_profiler.reading.tables.tables import Tables

STEPS = range(1, 11)


def spans(per_step=1, merged=False):
    """Two ranks that are in turn 5 s late, once per step or several times in each."""
    events = []
    for step in STEPS:
        for batch in range(per_step):
            begin = (step * 1000 + batch * 20) * 1_000_000
            for rank in (0, 1):
                late = 5_000_000 * (rank == (step + batch) % 2)
                events.append(
                    {
                        "run": "r",
                        "name": f"actor_{rank}",
                        "role": "actor",
                        "rank": rank,
                        "step": 0 if merged else step,
                        "event": "update_actor",
                        "family": "workers",
                        "begin_us": begin,
                        "end_us": begin + 1_000_000 + late,
                        "duration_us": 1_000_000 + late,
                        "validate": False,
                    }
                )
    processes = [{"run": "r", "name": f"actor_{rank}", "role": "actor"} for rank in (0, 1)]
    return Tables.of({"events": events, "processes": processes})


@pytest.mark.parametrize("analysis", [rank_balance, worker_balance])
@pytest.mark.parametrize(
    ("per_step", "merged", "waits"),
    [(1, False, 5.0), (2, False, 10.0), (1, True, 50.0)],
    ids=["a step", "mini-batches", "all steps as one"],
)
def test_waits_are_counted_where_ranks_wait(analysis, per_step, merged, waits):
    """Each sums up to the same time over steps, or over a step's mini-batches."""
    rows = analysis(spans(per_step, merged))
    column = "waste_s" if analysis is rank_balance else "waited_s"

    assert {waits} == {round(row[column], 6) for row in rows}
    assert {6.0 * per_step * (10 if merged else 1)} == {round(row["slowest_s"], 6) for row in rows}


def test_a_process_waited_as_often_as_the_other_was_late():
    """Twice per step, each once."""
    rows = worker_phases(spans(2))

    assert {5.0} == {row["waited_s"] for row in rows}
    assert 10 == sum(row["slowest"] for row in rows)
