"""The bubble ledger: against runs whose device time is counted while they are made, and conservation."""

from dataclasses import replace

import numpy as np
import pytest
from truth.asynchronous_runs import Plan, Simulation, events_of
from truth.synthetic import events_of as synchronous_events
from truth.synthetic import tables_of
from truth.test_culprits import healthy

from verl_profiler.analysis.explain.device_time import Group, integrate
from verl_profiler.analysis.explain.ledger import bubble_ledger
from verl_profiler.views.ledger_text import bound_text, ledger_lines

PLANS = {
    "synchronous": Plan(separate=False, ahead=0),
    "shared": Plan(separate=False),
    "shared, redone": Plan(separate=False, redo=True, train_ms=450),
    "separate": Plan(),
    "separate, trainer bound": Plan(train_ms=2700),
    "separate, four mini-batches": Plan(gens=4, batch=8),
    "separate, some dropped": Plan(stale=frozenset({2, 5, 9})),
    "separate, redone": Plan(redo=True, train_ms=450, replicas=3, batch=5),
    "synchronous, three replicas": Plan(separate=False, ahead=0, replicas=3, batch=7),
}


def counted(rows):
    """Sum up the rows by pool, step and account."""
    return {(row["pool"], row["step"], row["account"]): row["device_s"] for row in rows}


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_the_ledger_is_what_the_devices_did(plan):
    """To a microsecond per account."""
    run = Simulation(plan)

    assert counted(bubble_ledger(tables_of(events_of(run)))) == pytest.approx(
        {key: seconds for key, seconds in run.seconds.items() if seconds}, abs=1e-6
    )


@pytest.mark.parametrize(
    ("plan", "bound"),
    [
        (Plan(ahead=0, train_ms=180), "bounded by the rollout"),
        (Plan(train_ms=2700), "bounded by the trainer"),
        (Plan(ahead=0), "alternately wait for each other"),
        (Plan(ahead=2, train_ms=360, sync_ms=20, replicas=1), "bounded by the rollout"),
        (Plan(separate=False), ""),
    ],
)
def test_what_bounds_a_run_with_two_pools(plan, bound):
    """The pool that the other one waits for."""
    line = "; ".join(ledger_lines(bubble_ledger(tables_of(events_of(Simulation(plan))))))

    assert bound in line
    assert ("bounded" in line or "each other" in line) == bool(bound)


def test_the_first_step_does_not_decide_what_bounds_a_run():
    """A trainer that waited once, for the first samples, was called bounded by the rollout."""

    def row(step, pool, account, seconds):
        return {
            "run": "run",
            "step": step,
            "pool": pool,
            "devices": 1.0,
            "account": account,
            "device_s": seconds,
        }

    rows = [
        row(step, *account)
        for step in range(1, 7)
        for account in (
            ("trainer", "waiting_for_samples", 90.0 if step == 1 else 0.1),
            ("trainer", "training", 2.0),
            ("rollout", "generating", 1.0),
            ("rollout", "staleness_limit", 0.0 if step == 1 else 1.1),
        )
    ]

    (_, _, bound) = ledger_lines(rows, {"run": [1]})
    assert (
        "bounded by the trainer: the trainer waits 4.8 % of its time, the rollout is ahead 52 %"
        == bound
    )
    assert "bounded by the rollout" in bound_text([row for row in rows if row["step"] < 3])


def test_validation_and_checkpoints_are_overhead():
    """Whatever their timers contain; the accounts of a step add up to the devices' time."""
    steps = [replace(healthy(number), testing_us=700_000, save_us=90_000) for number in (1, 2, 3)]
    events, truths = synchronous_events(*steps)
    tested = [each for each in events if each["event"] == "testing"]
    events += [{**each, "event": "gen", "begin_us": each["begin_us"] + 10} for each in tested]
    rows = bubble_ledger(tables_of(events))

    for number, (step, truth) in enumerate(zip(steps, truths, strict=True), 1):
        mine = {row["account"]: row["device_s"] for row in rows if row["step"] == number}
        pause_us = step.pause_us * (number < 3)
        whole_us = truth.duration_us + step.testing_us + pause_us
        ranks = len(step.phases[0].ranks_us)
        assert sum(mine.values()) == pytest.approx(ranks * whole_us / 1e6)
        assert mine["overhead"] == pytest.approx(ranks * (700_000 + 90_000) / 1e6)
        assert mine["weight_sync"] == pytest.approx(
            ranks * truth.categories["update_weights"] / 1e6
        )
    assert sum(row["share"] for row in rows) == pytest.approx(3)


def test_the_wait_before_hybrid_replicas_are_taken_back_is_no_training():
    """A fully asynchronous trainer's timer, which has no name of V1's."""
    events = events_of(Simulation(Plan()))
    named = bubble_ledger(tables_of(events))
    renamed = [
        each | {"event": "wait_for_enough_samples"} if each["event"] == "gen" else each
        for each in events
    ]

    assert any(each["event"] == "gen" for each in events)
    assert bubble_ledger(tables_of(renamed)) == named


def test_a_replica_with_few_calls_is_not_generating_like_a_full_one():
    """A tail of 90 s after 10 s with nine calls, on two devices: by hand."""
    calls = (np.zeros(9, np.int64), np.array([*[10_000_000] * 8, 100_000_000], np.int64))
    group = Group(2.0, calls={"generating": calls}, few={"generating": "few_requests"})

    assert integrate([(0, 101_000_000)], [group]) == [
        {"generating": 20.0, "few_requests": 180.0, "unattributed": 2.0}
    ]
    assert integrate([(0, 101_000_000)], [replace(group, few={})]) == [
        {"generating": 200.0, "unattributed": 2.0}
    ]


@pytest.mark.parametrize("ahead", [0, 12])
def test_only_synchronous_steps_wait_for_few_requests(ahead):
    """An asynchronous rollout fills the slots with the next samples."""
    run = Simulation(Plan(separate=False, ahead=ahead, replicas=1, batch=12))
    found, truth = counted(bubble_ledger(tables_of(events_of(run)))), run.seconds

    assert any(account == "few_requests" for _, _, account in found) == (ahead == 0)
    for (pool, step, account), seconds in truth.items():
        if account == "generating":
            few = found.get((pool, step, "few_requests"), 0.0)
            assert found[pool, step, account] + few == pytest.approx(seconds)
