"""What a change would save in an asynchronous run: against the changed run itself."""

from dataclasses import replace

import pytest
from truth.asynchronous_runs import Plan, Simulation, events_of
from truth.synthetic import tables_of

from verl_profiler.analysis.explain.asynchronous_what_if import (
    ASYNCHRONOUS_CHANGES,
    LARGEST_ERROR,
    asynchronous_what_if,
)

# So many that the replayed ones and the compared ones are an even number.
STEPS = 17
# Steps at the begin whose queue is not yet as it will be.
FIRST = 4


def short(_):
    return 90, 20, 60


def long(number):
    return 1200 + 150 * (number % 5), 90, 700 + 90 * (number % 3)


def even(number):
    return 400 + 30 * (number % 4), 60, 420


def tooled(number):
    return 150, 2400 + 200 * (number % 4), 120


BASES = {
    "trainer": Plan(stages=short, train_ms=1800, steps=STEPS),
    "rollout": Plan(stages=long, train_ms=180, sync_ms=20, steps=STEPS),
    "rollout, loaded": Plan(
        stages=long, train_ms=180, sync_ms=60, steps=STEPS, slowdown=0.2, batch=6, ahead=6
    ),
    "sync": Plan(stages=short, train_ms=270, sync_ms=900, steps=STEPS),
    "in turn": Plan(stages=even, ahead=1, train_ms=900, sync_ms=20, steps=STEPS),
    "tools": Plan(stages=tooled, train_ms=360, sync_ms=60, steps=STEPS),
    "redone": Plan(stages=long, train_ms=180, sync_ms=20, steps=STEPS, redo=True),
    "mini-batches": Plan(stages=even, gens=4, batch=8, ahead=8, train_ms=1800, steps=STEPS),
    "shared": Plan(stages=even, separate=False, train_ms=900, steps=STEPS),
    "some dropped": Plan(
        stages=long, train_ms=180, sync_ms=20, steps=STEPS, stale=frozenset(range(3, 200, 9))
    ),
    "seldom synced": Plan(stages=short, train_ms=270, sync_ms=900, steps=STEPS, sync_every=2),
}


def _halved(stages, calls=1, tools=1):
    """Return shorter stages: even places are calls, odd ones tools."""
    parts = calls, tools
    return lambda number: tuple(
        length // parts[place % 2] for place, length in enumerate(stages(number))
    )


CHANGED = {
    "training_twice_as_fast": lambda plan: replace(plan, train_ms=plan.train_ms // 2),
    "calls_twice_as_fast": lambda plan: replace(plan, stages=_halved(plan.stages, calls=2)),
    "tools_twice_as_fast": lambda plan: replace(plan, stages=_halved(plan.stages, tools=2)),
    "weights_twice_as_fast": lambda plan: replace(plan, sync_ms=plan.sync_ms // 2),
    "one_batch_more_in_flight": lambda plan: replace(plan, ahead=plan.ahead + plan.batch),
    "weight_sync_half_as_often": lambda plan: replace(plan, sync_every=2 * plan.sync_every),
    "weight_sync_twice_as_often": lambda plan: replace(plan, sync_every=plan.sync_every // 2),
}


def step_s_of(plan):
    """Return the mean length of the simulated steps, from begin to begin."""
    begins = [begin for event, _, begin, _ in Simulation(plan).timers if event == "step"]
    window = begins[FIRST:]
    return (window[-1] - window[0]) / 1000 / (len(window) - 1)


def answers_of(plan):
    rows = asynchronous_what_if(tables_of(events_of(Simulation(plan))))
    return {row["what"]: row for row in rows}


@pytest.fixture(scope="module")
def answers():
    return {name: answers_of(plan) for name, plan in BASES.items()}


@pytest.mark.parametrize("name", BASES)
def test_an_unchanged_replay_is_as_long_as_the_steps(answers, name):
    """Within 3 %; and no answer is refused."""
    unchanged = answers[name]["unchanged"]

    assert unchanged["refused"] is None
    assert unchanged["replayed_s"] == pytest.approx(step_s_of(BASES[name]), rel=0.03)
    assert abs(unchanged["replay_error"]) <= 0.03


CASES = [
    (name, what)
    for name in BASES
    for what in CHANGED
    if what != "weight_sync_twice_as_often" or BASES[name].sync_every > 1
    if what != "weight_sync_half_as_often" or BASES[name].separate
    if what != "one_batch_more_in_flight" or not BASES[name].stale
]


@pytest.mark.parametrize(("name", "what"), CASES)
def test_the_saving_is_that_of_the_changed_run(answers, name, what):
    """Within 5 % of the step, and inside the interval."""
    plan = BASES[name]
    step_s = step_s_of(plan)
    saved = step_s - step_s_of(CHANGED[what](plan))
    row = answers[name][what]

    assert row["expected_s"] == pytest.approx(saved, abs=0.05 * step_s)
    # Steps that begin at a whole number of polls and batches are not known better than this.
    assert row["low_s"] - 0.01 * step_s <= saved <= row["high_s"] + 0.01 * step_s
