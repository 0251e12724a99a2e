"""What a change would save in an asynchronous run: against the changed run itself."""

from dataclasses import replace
from functools import cache

import pytest
from truth.asynchronous_runs import Plan, Simulation, events_of, iterations_of
from truth.synthetic import tables_of

from verl_profiler.analysis.explain import what_if as module
from verl_profiler.analysis.explain.asynchronous_model import models
from verl_profiler.analysis.explain.changes import CHANGES
from verl_profiler.analysis.explain.model import Mark, Model, Run
from verl_profiler.analysis.explain.replay import lengths_us
from verl_profiler.analysis.explain.what_if import Cycle, asynchronous_what_if
from verl_profiler.views.cycle_text import cycle_replays_text

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
    "rollouter": Plan(stages=even, train_ms=450, sync_ms=90, steps=STEPS, rollouter=True),
    "rollouter, few at once": Plan(
        stages=even, train_ms=450, sync_ms=90, ahead=6, steps=STEPS, rollouter=True, at_once=3
    ),
    "rollouter, seldom synced": Plan(
        stages=even, train_ms=450, sync_ms=600, ahead=8, steps=STEPS, rollouter=True, sync_every=2
    ),
    "parked": Plan(
        stages=long, train_ms=180, sync_ms=20, steps=STEPS, pause_ms=240, trainer_devices=4
    ),
    "few for the trainer": Plan(
        stages=long, train_ms=1500, sync_ms=20, steps=STEPS, replicas=3, slowdown=0.1, ahead=8
    ),
    "seldom synced": Plan(stages=short, train_ms=270, sync_ms=900, steps=STEPS, sync_every=2),
    "one step off": Plan(stages=long, train_ms=900, ahead=0, steps=STEPS, one_step_off=True),
}


def seldom(plan):
    """Let a rollouter dispatch twice as much after each sync, and have twice as much in flight."""
    ahead = 2 * plan.ahead + plan.batch if plan.rollouter else plan.ahead
    return replace(plan, sync_every=2 * plan.sync_every, ahead=ahead)


def _halved(stages, calls=1, tools=1):
    """Return shorter stages: even places are calls, odd ones tools."""
    parts = calls, tools
    return lambda number: tuple(
        length // parts[place % 2] for place, length in enumerate(stages(number))
    )


def with_replicas(plan, more):
    """Move one device between the pools; the training takes inversely as long."""
    devices = plan.trainer_devices - more
    train_ms = plan.train_ms * plan.trainer_devices // devices
    return replace(plan, replicas=plan.replicas + more, trainer_devices=devices, train_ms=train_ms)


CHANGED = {
    "no_pause_after_aborts": lambda plan: replace(plan, pause_ms=0),
    "one_batch_fewer_in_flight": lambda plan: replace(plan, ahead=plan.ahead - plan.batch),
    "one_replica_more": lambda plan: with_replicas(plan, 1),
    "one_replica_fewer": lambda plan: with_replicas(plan, -1),
    "training_twice_as_fast": lambda plan: replace(plan, train_ms=plan.train_ms // 2),
    "calls_twice_as_fast": lambda plan: replace(plan, stages=_halved(plan.stages, calls=2)),
    "tools_twice_as_fast": lambda plan: replace(plan, stages=_halved(plan.stages, tools=2)),
    "weights_twice_as_fast": lambda plan: replace(plan, sync_ms=plan.sync_ms // 2),
    "one_batch_more_in_flight": lambda plan: replace(plan, ahead=plan.ahead + plan.batch),
    "weight_sync_half_as_often": seldom,
    "weight_sync_twice_as_often": lambda plan: replace(plan, sync_every=plan.sync_every // 2),
}


@cache
def step_s_of(plan):
    """Return the mean length of the simulated steps, from begin to begin."""
    begins = [begin for event, _, begin, _ in Simulation(plan).timers if event == "step"]
    window = begins[FIRST:]
    return (window[-1] - window[0]) / 1000 / (len(window) - 1)


@cache
def answers_of(plan):
    rows = asynchronous_what_if(tables_of(events_of(Simulation(plan))))
    return {row["what"]: row for row in rows}


# On each push: every change in one of them at least; the others each night.
QUICK = (
    "rollout, loaded",
    "in turn",
    "redone",
    "rollouter",
    "parked",
    "seldom synced",
    "one step off",
)


def each_night(name, *more):
    return pytest.param(name, *more, marks=() if name in QUICK else pytest.mark.nightly)


@pytest.mark.parametrize("name", map(each_night, BASES))
def test_an_unchanged_replay_is_as_long_as_the_steps(name):
    """Within 3 % of those that the run settles to; the error is against all that were replayed."""
    unchanged = answers_of(BASES[name])["unchanged"]

    assert unchanged["refused"] is None
    assert unchanged["replayed_s"] == pytest.approx(step_s_of(BASES[name]), rel=0.03)
    error = unchanged["replayed_s"] / unchanged["step_s"] - 1
    assert unchanged["residual_share"] == pytest.approx(error)
    assert abs(error) <= 0.05


CASES = [
    each_night(name, what)
    for name in BASES
    for what in CHANGED
    if what != "weight_sync_twice_as_often"
    or (BASES[name].sync_every > 1 and not BASES[name].rollouter)
    if what != "weight_sync_half_as_often" or BASES[name].separate
    if "in_flight" not in what or not BASES[name].stale
    if what != "one_batch_fewer_in_flight" or BASES[name].ahead >= BASES[name].batch
    if what != "no_pause_after_aborts" or BASES[name].pause_ms
    if "replica" not in what or BASES[name].separate
]


def assert_saves(plan, what, row, part):
    """Assert that an answer differs from the changed run by no more than a part of the step."""
    step_s = step_s_of(plan)
    saved = step_s - step_s_of(CHANGED[what](plan))

    assert row["expected_s"] == pytest.approx(saved, abs=part * step_s)
    # Steps that begin at a whole number of polls and batches are not known better than this.
    assert row["low_s"] - 0.01 * step_s <= saved <= row["high_s"] + 0.01 * step_s


@pytest.mark.parametrize(("name", "what"), CASES)
def test_the_saving_is_that_of_the_changed_run(name, what):
    """Within 5 % of the step, and inside the interval; which request gets a moved replica is not known."""
    plan = BASES[name]
    assert_saves(plan, what, answers_of(plan)[what], 0.07 if "replica" in what else 0.05)


def test_a_stalled_step_is_not_trained_faster():
    """10 s of training in each step, and two hours in one of them: half of 10 s is saved in each."""
    trained_s = (10, 10, 7_200, 10)
    operations = [each for n, s in enumerate(trained_s) for each in (Mark(n), Run(s * 1e6))]
    model = Model("made", (1, 2, 3, 4), trained_s, tuple(operations), asynchronous=True)
    (faster,) = CHANGES["training_twice_as_fast"].changed(model, [model]).models

    assert [(s - 5) * 1e6 for s in trained_s] == pytest.approx(lengths_us(faster, steps=4))


# Replicas that are slower by more than a line: above 4 calls, or while another call is in prefill.
READ = {
    "prefill": replace(BASES["rollout, loaded"], slowdown=0.1, prefill_ms=80),
    "bend": replace(BASES["rollout, loaded"], slowdown=0.05, bend=4, steeper=0.4),
}


@pytest.fixture(scope="module")
def read():
    """Answers to the plans of `READ`, from the replicas' iterations and from calls."""
    runs = {name: Simulation(plan) for name, plan in READ.items()}

    def answers(run, more=()):
        rows = asynchronous_what_if(tables_of([*events_of(run), *more]))
        return {row["what"]: row for row in rows}

    return {name: (answers(run, iterations_of(run)), answers(run)) for name, run in runs.items()}


@pytest.mark.parametrize("name", READ)
def test_iterations_that_were_read_replace_the_line(read, name):
    """And reproduce the steps."""
    rows, others = read[name]

    assert {"iterations"} == {row["engine"] for row in rows.values()}
    assert {"calls"} == {row["engine"] for row in others.values()}
    assert rows["unchanged"]["replayed_s"] == pytest.approx(step_s_of(READ[name]), rel=0.03)


@pytest.mark.parametrize(
    ("name", "what", "part"),
    [
        ("prefill", "one_batch_more_in_flight", 0.05),
        ("prefill", "one_batch_fewer_in_flight", 0.05),
        ("prefill", "one_replica_more", 0.05),
        ("prefill", "one_replica_fewer", 0.05),
        ("bend", "one_batch_fewer_in_flight", 0.05),
        ("bend", "one_replica_more", 0.05),
        # More than were ever read.
        ("bend", "one_batch_more_in_flight", 0.12),
        ("bend", "one_replica_fewer", 0.15),
    ],
)
def test_intervals_from_iterations_hold_the_truth(read, name, what, part):
    """At loads that the run had, and at higher ones."""
    assert_saves(READ[name], what, read[name][0][what], part)


def test_a_line_through_a_bend_is_worse(read):
    """Fewer calls gain less speed than a line through all of them has."""
    plan = READ["bend"]
    saved = step_s_of(plan) - step_s_of(CHANGED["one_batch_fewer_in_flight"](plan))
    rows, line = (each["one_batch_fewer_in_flight"] for each in read["bend"])

    assert abs(rows["expected_s"] - saved) < 0.5 * abs(line["expected_s"] - saved)
    assert not line["low_s"] <= saved <= line["high_s"]


def refusal_of(tables):
    """Return the reason; the only row has no saving."""
    (row,) = asynchronous_what_if(tables)
    assert row["what"] == "unchanged"
    assert row["expected_s"] is None
    return row["refused"]


def test_a_replay_that_misses_the_steps_is_refused(monkeypatch):
    """The limit below the error of a run whose replay is not exact."""
    tables = tables_of(events_of(Simulation(BASES["rollout, loaded"])))
    error = asynchronous_what_if(tables)[0]["residual_share"]
    monkeypatch.setattr(module, "LARGEST_ERROR", abs(error) / 2)

    assert "the replay without a change is 1.9 % longer" in refusal_of(tables)
    monkeypatch.setattr(module, "LARGEST_ERROR", abs(error) * 2)
    assert len(asynchronous_what_if(tables)) > 1


def test_a_replay_with_too_many_calls_is_refused(monkeypatch):
    """After fewer repetitions of the cycle, whose answers are about the same."""
    tables = tables_of(events_of(Simulation(BASES["rollout"])))
    rows = asynchronous_what_if(tables)
    monkeypatch.setattr(module, "REPEATED_CALLS", 0)
    fewer = asynchronous_what_if(tables)

    assert [row["what"] for row in rows] == [row["what"] for row in fewer]
    assert rows[0]["step_s"] == fewer[0]["step_s"]
    for row, other in zip(rows[1:], fewer[1:], strict=True):
        assert row["expected_s"] == pytest.approx(other["expected_s"], abs=0.05 * row["step_s"])
    monkeypatch.setattr(module, "MOST_CALLS", 10)
    assert "more than 10 generate calls" in refusal_of(tables)


def with_a_hybrid_replica(event):
    """One of two replicas on the trainer's devices."""
    return {**event, "extra": {**event["extra"], "replicas": [0], "devices": 1}}


@pytest.mark.parametrize(
    ("plan", "event", "change", "reason"),
    [
        # Three steps are two without the warm-up.
        (replace(BASES["rollout"], steps=3), "step", dict, "fewer than 3"),
        (BASES["rollout"], "replica_pool", with_a_hybrid_replica, "beside standalone ones"),
        # What limits a rollouter without pauses is not recorded.
        (BASES["rollouter"], "dispatch_pause", lambda e: {**e, "event": "init"}, "never paused"),
    ],
)
def test_what_cannot_be_replayed_is_refused(plan, event, change, reason):
    events = [
        change(each) if each["event"] == event else each for each in events_of(Simulation(plan))
    ]

    assert reason in refusal_of(tables_of(events))


def test_calls_without_queue_times_are_named():
    """Their time in the engine is replayed as decoding."""
    plan = replace(next(iter(BASES.values())), prefill_ms=10)
    events = events_of(Simulation(plan))
    times = ("queue_s", "prefill_s", "decode_s")
    without = [
        {**each, "extra": {k: v for k, v in (each["extra"] or {}).items() if k not in times}}
        for each in events
    ]
    known, unknown = (asynchronous_what_if(tables_of(each)) for each in (events, without))

    assert (0.0, 1.0) == (known[0]["undivided_share"], unknown[0]["undivided_share"])
    assert "engine_timing" not in cycle_replays_text(known)
    assert "100 % of the calls, the time in the engines is replayed as" in cycle_replays_text(
        unknown
    )


def test_dropped_samples_leave_the_limit_unanswered():
    """More in flight would make more of them stale."""
    assert "one_batch_more_in_flight" not in answers_of(BASES["some dropped"])


def test_changes_are_described():
    """Each has a short text."""
    replayed = {name: change.about for name, change in CHANGES.items() if change.asynchronous}

    assert CHANGED.keys() == replayed.keys()
    assert len(CHANGED) == len({*replayed.values()})


def test_what_only_some_steps_do_is_saved_as_well():
    """Of 3 s in every third step of a trainer that bounds them, each step saves 1 s: it is no stalled step."""
    (model,) = models(tables_of(events_of(Simulation(BASES["trainer"])))).values()
    operations, step_us = [], list(model.step_us)
    for each in model.operations:
        operations.append(each)
        if isinstance(each, Mark):
            more_us = 20 if each.place % 3 else 3_000_000
            operations.append(Run(more_us, "overhead"))
            step_us[each.place] += more_us
    cycle = Cycle(replace(model, operations=tuple(operations), step_us=tuple(step_us)))
    spent_s = 3 * len(step_us[::3]) / len(step_us)

    assert cycle.refused is None
    assert cycle.trained_s(spent_s, "overhead") == pytest.approx(spent_s, rel=0.05)
