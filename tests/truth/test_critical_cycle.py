"""The critical cycle: against runs that a known resource bounds."""

import pytest
from truth.asynchronous_runs import Plan, Simulation, events_of
from truth.synthetic import tables_of

from verl_profiler.analysis.explain.critical_cycle import EDGES, critical_cycle, cycle_bound


def short(_):
    return 90, 20, 60


def long(_):
    return 1500, 90, 900


def even(_):
    return 400, 60, 420


# What bounds the run, and how.
PLANS = {
    "trainer": Plan(stages=short, train_ms=1800, steps=12),
    "rollout": Plan(stages=long, train_ms=180, sync_ms=20, steps=12),
    "weight_sync": Plan(stages=short, train_ms=270, sync_ms=900, steps=12),
    "in_turn": Plan(stages=even, ahead=1, train_ms=900, sync_ms=20, steps=12),
    "trainer, four mini-batches": Plan(
        stages=short, gens=4, batch=8, ahead=8, train_ms=1800, steps=12
    ),
    "rollout, redone": Plan(stages=long, train_ms=180, sync_ms=20, steps=12, redo=True),
}


def found_in(plan):
    run = Simulation(plan)
    return run, critical_cycle(tables_of(events_of(run)))


def steps_of(run):
    """Return when each step took its last samples, in ms."""
    taken = run.taken_by_step()
    return {step: max(sample.taken for sample in taken[step]) for step in taken}


@pytest.mark.parametrize("what", PLANS)
def test_the_cycle_takes_as_long_as_a_step_and_names_what_bounds_it(what):
    """Within 1 % of the simulated steps that it passes."""
    run, rows = found_in(PLANS[what])
    times = steps_of(run)
    last = max(times)
    first = last - rows[0]["steps"]
    simulated = (times[last] - times[first]) / 1000 / (last - first)

    assert rows[0]["steps"] >= 8
    assert rows[0]["cycle_s"] == pytest.approx(simulated, rel=0.01)
    assert sum(row["edge_s"] for row in rows) == pytest.approx(rows[0]["cycle_s"])
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert cycle_bound(rows) == what.partition(",")[0]
    assert [row["edge"] for row in rows] == [
        edge for edge in EDGES if edge in {row["edge"] for row in rows}
    ]


def test_the_edges_of_a_trainer_bound_run_are_the_trainers():
    """Training and sync take what the plan gives them; no sample is on the cycle."""
    plan = PLANS["trainer"]
    _, rows = found_in(plan)
    edges = {row["edge"]: row["edge_s"] for row in rows}

    assert edges["training"] == pytest.approx(plan.train_ms / 1000)
    assert edges["weight_sync"] == pytest.approx(plan.sync_ms / 1000)
    assert not {"generating", "tools"} & set(edges)


def test_the_edges_of_a_rollout_bound_run_are_those_of_its_samples():
    """Calls and tools in the proportion of the plan; a faster trainer would change little."""
    _, rows = found_in(PLANS["rollout"])
    edges = {row["edge"]: row["edge_s"] for row in rows}

    assert edges["generating"] / edges["tools"] == pytest.approx(2400 / 90, rel=0.01)
    assert edges["generating"] > 5 * edges["training"]


def test_one_step_is_followed_into_the_one_before():
    """As long as it took from the consumption before to its own."""
    run = Simulation(PLANS["trainer"])
    rows = critical_cycle(tables_of(events_of(run)), (5, 5))
    times = steps_of(run)

    assert {row["steps"] for row in rows} == {1}
    assert rows[0]["cycle_s"] == pytest.approx((times[5] - times[4]) / 1000)
