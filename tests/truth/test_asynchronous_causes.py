"""Causes of asynchronous runs, each in a run with it and the same run without it; their difference is the truth."""

import math
from dataclasses import replace
from functools import partial

import pytest
from truth.asynchronous_runs import Plan, Simulation, events_of, with_syncs
from truth.planted import findings_of
from truth.simulated_training import Plan as FlowingPlan
from truth.simulated_training import Training
from truth.synthetic import tables_of

from verl_profiler.analysis.explain.findings import explained
from verl_profiler.analysis.explain.what_if import cycles

FLOWING = FlowingPlan(ahead=16, per_call=0.0002, prompts=8, steps=5)


class Routed(Simulation):
    """A load balancer sends new samples to the replica with the fewest calls; the first one takes three times as long."""

    slow = 3.0

    def _fill(self):
        known = len(self.samples)
        super()._fill()
        for sample in self.samples[known:]:
            open_ = [0] * self.plan.replicas
            for each in self.untaken:
                if each.calls_engine and each is not sample:
                    open_[each.replica] += 1
            sample.replica = open_.index(min(open_))

    def _find_speeds(self):
        super()._find_speeds()
        if 0 in self.speeds:
            self.speeds[0] /= self.slow


class Even(Routed):
    slow = 1.0


class Dumping(Simulation):
    """Writes samples after each step, in the trainer alone."""

    def _run_step(self):
        super()._run_step()
        begin = self.now
        self._serve(True)
        self._pass(300, "training")
        self._note("dump_rollout_generations", begin)


class Alternating(Simulation):
    """Every second step trains for longer."""

    def _run_step(self):
        self.plan = replace(self.plan, train_ms=900 if self.step % 2 else 1_440)
        super()._run_step()


def even(number):
    return 400 + 20 * (number % 5), 60, 420


def of_lengths(sigma, number):
    """Lognormal lengths: the quantiles of 40 samples, in no order of theirs."""
    quantile = (number * 17 % 40 + 0.5) / 40
    low, high = -4.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if math.erf(middle / 2**0.5) < 2 * quantile - 1 else (low, middle)
        )
    length = round(400 * math.exp(sigma * low))
    return length, 30, length


def hanging(number):
    """The tools of one in ten samples take 3 s."""
    first, tool, last = even(number)
    return first, 3_000 if number % 10 == 7 else tool, last


def gap(number):
    """What a tool call takes here is not recorded."""
    first, _, last = even(number)
    return first, 900, last


BUSY = Plan(stages=even, train_ms=300, sync_ms=60, ahead=8, steps=24, slowdown=0.1)
ROUTED = Plan(stages=even, train_ms=300, sync_ms=60, ahead=16, batch=8, steps=24, slowdown=0.2)
ROUTED = replace(ROUTED, replicas=4)
TRAINER = Plan(stages=even, train_ms=2_400, sync_ms=60, ahead=8, steps=9, slowdown=0.1)


def events(run):
    return with_syncs(events_of(run))


def with_tokens(made):
    """Let requests record the tokens that their calls generated."""
    tokens: dict[str, int] = {}
    for each in made:
        if each["event"] == "engine_call":
            extra = each["extra"]
            tokens[each["request_id"]] = (
                tokens.get(each["request_id"], 0) + extra["response_tokens"]
            )
    for each in made:
        if each["event"] == "request":
            own = tokens[each["request_id"]]
            each["extra"] = {**each["extra"], "generated_tokens": own, "response_tokens": own}
    return made


def with_optimizer(made, part=3):
    """Let each rank take the last part of its update for the optimizer."""
    updates = [e for e in made if e["event"] == "update_actor" and e["role"] == "actor"]
    return [
        *made,
        *(
            {
                **each,
                "event": "optimizer_step",
                "family": "workers",
                "begin_us": each["end_us"] - each["duration_us"] // part,
                "duration_us": each["duration_us"] // part,
            }
            for each in updates
        ),
    ]


def without_tools(made):
    return [each for each in made if each["event"] != "tool_call"]


def same(made):
    return made


# The run with the cause, the one without it, what is recorded of both, and the finding with its culprit.
CAUSES = {
    "a replica": (Routed(ROUTED), Even(ROUTED), same, "slow_replica", "engine_0"),
    "a pause after aborts": (
        Simulation(replace(BUSY, pause_ms=900, slowdown=0.0)),
        Simulation(replace(BUSY, slowdown=0.0)),
        same,
        "late_resend",
        "pause",
    ),
    "hanging tools": (
        Simulation(replace(BUSY, stages=hanging, slowdown=0.0)),
        Simulation(replace(BUSY, slowdown=0.0)),
        same,
        "slow_tools",
        "t",
    ),
    "lengths that vary much": (
        Simulation(replace(BUSY, stages=partial(of_lengths, 1.0))),
        Simulation(replace(BUSY, stages=partial(of_lengths, 0.2))),
        with_tokens,
        "tail",
        None,
    ),
    "a wait between calls": (
        Simulation(replace(BUSY, stages=gap)),
        Simulation(replace(BUSY, stages=lambda number: (even(number)[0], 3, even(number)[2]))),
        without_tools,
        "unexplained",
        None,
    ),
    "a slow optimizer": (
        Simulation(TRAINER),
        Simulation(replace(TRAINER, train_ms=2_400 * 7 // 9)),
        with_optimizer,
        "optimizer_step",
        "optimizer_step",
    ),
    "steps that alternate": (
        Alternating(replace(TRAINER, train_ms=900, steps=10)),
        Simulation(replace(TRAINER, train_ms=900, steps=10)),
        same,
        "uneven_times",
        "update_actor",
    ),
    "what the driver writes after a step": (
        Dumping(replace(TRAINER, train_ms=900, ahead=4, rollouter=True)),
        Simulation(replace(TRAINER, train_ms=900, ahead=4, rollouter=True)),
        same,
        "dump_rollout_generations",
        "dump_rollout_generations",
    ),
}


def step_s(run):
    begins = [begin for event, _, begin, _ in run.timers if event == "step"]
    return (begins[-1] - begins[1]) / (len(begins) - 2) / 1000


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_comes_first_with_what_it_costs(cause):
    planted, sound, recorded, finding, culprit = CAUSES[cause]
    found = explained(tables_of(recorded(events(planted))))["findings"]
    rows = [row for row in found if row["recoverable_s"]]
    cost_s = step_s(planted) - step_s(sound)

    assert cost_s >= 0.03 * step_s(planted)
    assert (finding, culprit) == (rows[0]["finding"], rows[0]["culprit"])
    assert 0.8 <= rows[0]["recoverable_s"] / cost_s <= 1.25


@pytest.mark.parametrize("cause", CAUSES)
def test_no_cause_is_named_in_the_run_without_it(cause):
    _, sound, recorded, finding, _ = CAUSES[cause]
    if cause == "a slow optimizer":
        recorded = same
    rows = explained(tables_of(recorded(events(sound))))["findings"]

    assert finding not in [row["finding"] for row in rows]


def test_requests_that_start_as_others_end_are_few_at_once():
    """One at a time, of all workers."""
    planted, sound = Training(replace(FLOWING, one_at_a_time=True)), Training(FLOWING)
    row = findings_of(planted)[0]

    assert ("few_at_once", "1 request at a time, of 4") == (row["finding"], row["culprit_text"])
    assert 0.8 <= row["recoverable_s"] / (planted.step_s - sound.step_s) <= 1.25


def growing(number):
    length = 300 + 8 * number
    return length, 30, length


def test_what_the_end_of_a_run_cuts_off_hides_no_growth():
    """Of the last samples only the shorter ones end."""
    plan = replace(BUSY, stages=growing, ahead=16, steps=12)
    rows = explained(tables_of(with_tokens(events(Simulation(plan)))))["findings"]

    assert "more_tokens" == rows[0]["finding"]


def test_a_rollouter_that_nothing_but_its_samples_at_once_holds_is_replayed():
    """Its limit is recorded, though its dispatch was never paused."""
    plan = replace(BUSY, rollouter=True, at_once=3, ahead=200)
    made = [each for each in events(Simulation(plan)) if each["event"] != "dispatch_pause"]
    (cycle,) = cycles(tables_of(made)).values()

    assert cycle.refused is None
    assert sum(cycle.unchanged.us) == pytest.approx(sum(cycle.model.step_us), rel=0.03)


def test_what_is_waited_for_precedes_a_small_gain_of_other_devices():
    """One more of six saves the trainer a seventh; what its time is for is stated."""
    plan = replace(TRAINER, trainer_devices=6, replicas=4)
    rows = explained(tables_of(events(Simulation(plan))))["findings"]
    waits, split = (row for row in rows if row["finding"] in ("waits_for_trainer", "split_off"))

    assert ("waits_for_trainer", "split_off") == (waits["finding"], split["finding"])
    # Two thirds and a third of 2.4 s, of steps of 2.46 s.
    assert waits["cause"] == "Of the trainer's time: update_actor 65 %, old_log_prob 32 %."
    # Without training, a step is as long as the rollout takes.
    busy_s = step_s(Simulation(replace(plan, train_ms=0)))
    assert waits["recoverable_s"] == pytest.approx(step_s(Simulation(plan)) - busy_s, rel=0.05)


def test_an_optimizer_that_takes_what_it_usually_does_is_part_of_the_training():
    """A tenth of the update, 6 % of the step."""
    made = with_optimizer(events(Simulation(TRAINER)), part=10)
    rows = explained(tables_of(made))["findings"]

    assert "optimizer_step" not in [row["finding"] for row in rows]
