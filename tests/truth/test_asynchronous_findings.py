"""Findings of asynchronous runs: pairs of simulated runs, with and without the cause."""

import pytest
from truth.asynchronous_runs import Plan, Simulation, events_of
from truth.synthetic import tables_of

from verl_profiler.analysis.explain.asynchronous_findings import asynchronous_findings
from verl_profiler.analysis.explain.findings import explanations
from verl_profiler.analysis.explain.ledger import bubble_ledger
from verl_profiler.analysis.explain.rules import RULES
from verl_profiler.views.findings import finding_list, findings


def fast(number):
    return 90 + number % 3, 20, 60


def slow(number):
    return 1200 + 70 * (number % 5), 90, 500


def even(_):
    return (400, 60, 420)


# The finding, a run that has it, and the same run without its cause.
PAIRS = {
    "waits_for_rollout": (
        Plan(stages=slow, train_ms=300, sync_ms=20),
        Plan(stages=fast, train_ms=300, sync_ms=20),
    ),
    "waits_for_trainer": (Plan(stages=fast, train_ms=2400), Plan(stages=fast, train_ms=99)),
    "waits_in_turn": (
        Plan(ahead=1, steps=6, train_ms=900, sync_ms=20),
        Plan(ahead=4, steps=6, train_ms=900, sync_ms=20),
    ),
    "sync_bound": (Plan(sync_ms=600, steps=5), Plan(sync_ms=20, steps=5)),
    "stale_samples": (
        Plan(ahead=2, steps=6, train_ms=360, stale=frozenset(range(3, 30, 3))),
        Plan(ahead=2, steps=6, train_ms=360),
    ),
    "wasted_aborts": (
        Plan(redo=True, stages=slow, train_ms=900, steps=6),
        Plan(redo=False, stages=slow, train_ms=900, steps=6),
    ),
}
# A sync stops the rollout as well, which then may be the one that is waited for.
ALSO = {
    "wasted_aborts": {"waits_for_rollout", "waits_in_turn"},
    "stale_samples": {"waits_for_rollout", "waits_in_turn"},
    "sync_bound": {"waits_for_rollout", "waits_for_trainer"},
}


def found_in(plan):
    """Return the findings without the first step, and the mean length of the other steps in s."""
    run = Simulation(plan)
    tables = tables_of(events_of(run))
    steps = (2, plan.steps)
    lengths = [
        (end - begin) / 1000
        for event, step, begin, end in run.timers
        if event == "step" and step > 1
    ]
    rows = asynchronous_findings(tables, bubble_ledger(tables), steps)
    return {row["finding"]: row for row in rows}, sum(lengths) / len(lengths), run


@pytest.mark.parametrize("name", PAIRS)
def test_a_finding_bounds_what_its_fix_gains(name):
    """The step of the run without the cause is shorter, by no more than is called recoverable."""
    plan, fixed = PAIRS[name]
    rows, before, run = found_in(plan)
    later, after, _ = found_in(fixed)

    assert name in rows
    assert set(rows) <= {name, *ALSO.get(name, ())}
    assert name not in later
    assert 0 < before - after <= rows[name]["recoverable_s"] + 1e-6
    account = rows[name]["culprit"].replace(" ", "_")
    pool = (
        "rollout" if name in ("waits_for_trainer", "stale_samples", "wasted_aborts") else "trainer"
    )
    true = sum(
        seconds
        for (own, step, what), seconds in run.seconds.items()
        if (own, what) == (pool, account) and step > 1
    )
    devices = plan.replicas if pool == "rollout" else plan.trainer_devices
    assert rows[name]["values"]["lost_s"] == pytest.approx(true / devices / (plan.steps - 1))


def test_a_balanced_run_has_no_findings():
    """Both pools are busy nearly all the time."""
    rows, _, _ = found_in(Plan(stages=even, train_ms=900, sync_ms=30, ahead=8, steps=6, batch=8))

    assert {} == rows


def test_synchronous_runs_have_none_of_these():
    """Their steps have a critical path."""
    rows, _, _ = found_in(Plan(separate=False, ahead=0))

    assert {} == rows


def test_a_finding_is_written_with_its_fix():
    """As those of synchronous runs; what is on the critical path of no step is left out."""
    tables = tables_of(events_of(Simulation(PAIRS["waits_in_turn"][0])))
    rows = findings(explanations(tables))
    text = finding_list(rows)

    assert all(RULES[row["finding"]].pooled for row in rows)
    assert "wait for each other in turn" in text
    assert "paste: trainer.v1.separate_async.num_warmup_batches=2" in text
    assert "{" not in text


def test_the_split_of_devices_is_named():
    """Two trainer devices that wait most of the time, one replica that never does."""
    rows, _, _ = found_in(Plan(stages=slow, train_ms=200, trainer_devices=4, replicas=2))

    assert "of the trainer's for the rollout" in rows["waits_for_rollout"]["values"]["who"]
