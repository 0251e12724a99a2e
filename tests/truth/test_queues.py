"""How long the queue was empty or full: against runs whose queue is looked at every millisecond."""

import pytest
from truth.asynchronous_runs import Plan, Simulation, events_of
from truth.synthetic import tables_of

from verl_profiler.analysis.explain.queues import queue_times

PLANS = {
    "separate": Plan(),
    "trainer bound": Plan(train_ms=2700, ahead=8),
    "some dropped": Plan(stale=frozenset({2, 5, 9})),
    "shared": Plan(separate=False, ahead=8),
    "message queue, full": Plan(train_ms=2700, ahead=8, queue=8),
    "message queue, not full": Plan(train_ms=2700, ahead=8, queue=40),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_empty_and_full_times(plan):
    """To a microsecond per step; a replay buffer is never full."""
    run = Simulation(plan)
    rows = queue_times(tables_of(events_of(run)))

    assert {row["step"]: row["empty_s"] for row in rows} == pytest.approx(run.empty_s, abs=1e-6)
    assert {row["step"]: row["full_s"] for row in rows} == pytest.approx(run.full_s, abs=1e-6)
    assert {row["capacity"] for row in rows} == {plan.queue}
    assert {row["queue"] for row in rows} == {
        "replay_buffer" if plan.queue is None else "message_queue"
    }
    assert (max(run.full_s.values()) > 0) == (plan.queue == 8)


def test_synchronous_runs_have_no_such_queue():
    """What a step dispatches, it takes."""
    run = Simulation(Plan(separate=False, ahead=0))

    assert [] == queue_times(tables_of(events_of(run)))
