"""What `diff` compares of asynchronous runs: against runs that are counted while they are made."""

from collections import defaultdict
from functools import cache

import pytest
from truth.asynchronous_runs import Plan, Simulation, events_of
from truth.synthetic import tables_of

from verl_profiler.analysis.compare.step_metrics import device_metrics, sample_metrics, step_metrics
from verl_profiler.analysis.explain.ledger import bubble_ledger

PLANS = {
    "separate": Plan(ahead=6, steps=5),
    "trainer bound": Plan(train_ms=2700, ahead=8),
    "some dropped": Plan(stale=frozenset({2, 5, 9})),
    "shared": Plan(separate=False, ahead=8),
}
SYNCHRONOUS = Plan(separate=False, ahead=0)


@cache
def made(plan):
    """Return a run and its tables."""
    run = Simulation(plan)
    return run, tables_of(events_of(run))


def values(rows):
    """Return step → value by name, or step → count of what occurs often."""
    found = defaultdict(dict)
    for row in rows:
        found[row["name"]][row["step"]] = row["count"] if row["value"] is None else row["value"]
    return found


@pytest.mark.parametrize("plan", [*PLANS.values(), SYNCHRONOUS], ids=[*PLANS, "synchronous"])
def test_requests_and_calls_count_in_the_step_that_consumed_them(plan):
    """Warm-up batches do not make the first step larger, and no step has requests of others."""
    run, tables = made(plan)
    found = values(step_metrics(tables))
    taken = run.taken_by_step()

    assert found["requests"] == {step: len(samples) for step, samples in taken.items()}
    assert found["request"] == found["requests"]
    assert found["tool_call"] == {
        step: sum(len(sample.tools) for sample in samples) for step, samples in taken.items()
    }
    assert found["engine_call"] == {
        step: sum(len(sample.lengths) // 2 + 1 for sample in samples)
        for step, samples in taken.items()
    }


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_asynchronous_steps_have_no_rollout_of_their_own(plan):
    """Requests of several steps overlap."""
    found = values(step_metrics(made(plan)[1]))

    assert not {"rollout", "tail_p80", "tail_p95"} & set(found)


@pytest.mark.parametrize("plan", [*PLANS.values(), SYNCHRONOUS], ids=[*PLANS, "synchronous"])
def test_samples_per_second_and_staleness(plan):
    """Samples by the step's own length; a synchronous run is no version behind."""
    run, tables = made(plan)
    found = values(sample_metrics(tables, None))
    taken = run.taken_by_step()
    lengths = {
        step: (end - begin) / 1000 for event, step, begin, end in run.timers if event == "step"
    }

    assert found["samples_per_s"] == pytest.approx(
        {step: len(samples) / lengths[step] for step, samples in taken.items()}
    )
    behind = {
        step: [sample.trainer_version - min(sample.tokens) for sample in samples]
        for step, samples in taken.items()
    }
    assert found["versions_behind"] == pytest.approx(
        {step: sum(each) / len(each) for step, each in behind.items()}
    )
    if plan.ahead:
        assert max(found["off_policy_share"].values()) > 0
    else:
        assert set(found["off_policy_share"].values()) == {0}


def test_device_seconds_by_pool_where_both_runs_have_the_same():
    """What only one of them has is zero in the other."""
    runs, tables = zip(*map(made, (PLANS["trainer bound"], PLANS["some dropped"])), strict=True)
    both = device_metrics([*map(bubble_ledger, tables)])
    names = {
        f"device:{pool}:{account}"
        for run in runs
        for (pool, _, account), seconds in run.seconds.items()
        if seconds
    }

    for run, rows in zip(runs, both, strict=True):
        found = values(rows)
        assert set(found) == names
        for name, by_step in found.items():
            _, pool, account = name.split(":")
            assert by_step == pytest.approx(
                {
                    step: run.seconds.get((pool, step, account), 0.0)
                    for step in range(1, run.plan.steps + 1)
                },
                abs=1e-6,
            )


def test_device_seconds_of_other_pools_are_added_up():
    """A synchronous run has one pool, the other one two."""
    runs, tables = zip(*map(made, (SYNCHRONOUS, PLANS["separate"])), strict=True)
    both = device_metrics([*map(bubble_ledger, tables)])

    for run, rows in zip(runs, both, strict=True):
        expected = defaultdict(float)
        for (_, step, account), seconds in run.seconds.items():
            expected[f"device:{account}", step] += seconds
        found = {(row["name"], row["step"]): row["value"] for row in rows if row["value"]}
        assert found == pytest.approx({key: each for key, each in expected.items() if each})
    assert {row["name"] for row in both[0]} == {row["name"] for row in both[1]}
