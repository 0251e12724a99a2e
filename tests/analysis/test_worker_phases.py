"""Worker phases: who was last, and how long the others waited."""

from verl_profiler.analysis.workers import worker_balance, worker_phases


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


def test_the_balance_names_the_slowest(span, tables):
    """Nine seconds of thirty were waited."""
    (row,) = worker_balance(tables(rollout(span, 4, 10, 7)))

    assert (3, "worker_1", 10.0, 7.0, 4.0, 9.0) == (
        row["processes"],
        row["slowest"],
        row["slowest_s"],
        row["median_s"],
        row["fastest_s"],
        row["waited_s"],
    )
    assert 0.3 == round(row["waited_share"], 9)


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


def test_validation_keeps_nobody_waiting(span, tables):
    """It is apart from training."""
    events = [
        *rollout(span, 4, 10),
        span("request", 20, 90, name="worker_0", request_id="v", validate=True),
        span("request", -9, -1, name="worker_1", request_id="w", validate=True),
    ]

    rows = worker_phases(tables(events))

    assert [4.0, 10.0] == [row["duration_s"] for row in rows]


def test_the_original_loggers_phases_are_per_worker(span, tables):
    """There, waiting at the barrier is recorded as a phase."""
    events = []
    for number, generated in enumerate((9.0, 3.0)):
        name = f"worker_{number}"
        events += [
            span("gen", 0, 10, name=name, family="trainer"),
            span("step", 0, 10, name=name, family="trainer"),
        ][:1]
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
