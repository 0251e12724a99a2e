"""Who waits for whom: processes by phase, and ranks piece by piece."""

import pytest

from verl_profiler.analysis.workers import rank_balance, worker_balance, worker_phases


def rollout(span, *ends):
    return [
        span("request", number, end, name=f"worker_{number}", request_id=f"q{number}")
        for number, end in enumerate(ends)
    ]


def test_a_worker_is_busy_from_the_first_request_of_the_step(span, tables):
    """Also when its own first request came later; the others waited for the last."""
    rows = worker_phases(tables(rollout(span, 4, 10, 7)))

    assert [
        ("worker_0", "rollout", 4.0, 6.0, False),
        ("worker_1", "rollout", 10.0, 0.0, True),
        ("worker_2", "rollout", 7.0, 3.0, False),
    ] == [(r["name"], r["phase"], r["duration_s"], r["waited_s"], r["slowest"]) for r in rows]


def test_only_the_outermost_work_of_a_rank_counts(span, tables):
    """A mini-batch is part of the update, and a second update adds to the first."""
    events = [
        span("update_actor", 0, 4, name="actor_0"),
        span("train_mini_batch", 1, 3, name="actor_0"),
        span("optimizer_step", 2, 3, name="actor_0"),
        span("update_actor", 5, 6, name="actor_0"),
        span("update_actor", 0, 7, name="actor_1"),
    ]

    rows = worker_phases(tables(events))

    assert [("actor_0", "update_actor", 5.0, 2.0), ("actor_1", "update_actor", 7.0, 0.0)] == [
        (r["name"], r["phase"], r["duration_s"], r["waited_s"]) for r in rows
    ]


def test_the_original_loggers_phases_are_per_worker(span, tables):
    """There, waiting at the barrier is recorded as a phase."""
    events = []
    for number, generated in enumerate((9.0, 3.0)):
        name = f"worker_{number}"
        events.append(span("gen", 0, 10, name=name, family="trainer"))
        made = span("gen", 0, generated, name=name, family="trainer")
        events.append({**made, "event": "async_generate"})
        waited = span("gen", generated, 10 - number, name=name, family="trainer")
        events.append({**waited, "event": "barrier_wait"})

    rows = worker_phases(tables(events))

    assert {
        ("worker_0", "async_generate", 9.0, True),
        ("worker_0", "barrier_wait", 1.0, False),
        ("worker_1", "async_generate", 3.0, False),
        ("worker_1", "barrier_wait", 6.0, True),
    } == {(r["name"], r["phase"], r["duration_s"], r["slowest"]) for r in rows}


def late(span, tables, per_step=1, merged=False):
    """Tables of two ranks that are in turn 5 s late, once per step or several times in each."""
    return tables(
        span("update_actor", begin, begin + 1 + 5 * (rank == (step + batch) % 2),
             name=f"actor_{rank}", step=0 if merged else step)
        for step in range(1, 11)
        for batch in range(per_step)
        for begin in [step * 1000 + batch * 20]
        for rank in (0, 1)
    )  # fmt: skip


@pytest.mark.parametrize("analysis", [rank_balance, worker_balance])
@pytest.mark.parametrize(
    ("per_step", "merged", "waits"),
    [(1, False, 5.0), (2, False, 10.0), (1, True, 50.0)],
    ids=["a step", "mini-batches", "all steps as one"],
)
def test_waits_are_counted_where_ranks_wait(span, tables, analysis, per_step, merged, waits):
    """Each sums up to the same time over steps, or over a step's mini-batches."""
    rows = analysis(late(span, tables, per_step, merged))
    column = "waste_s" if analysis is rank_balance else "waited_s"

    assert {waits} == {round(row[column], 6) for row in rows}
    assert {6.0 * per_step * (10 if merged else 1)} == {round(row["slowest_s"], 6) for row in rows}
