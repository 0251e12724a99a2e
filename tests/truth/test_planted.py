"""Planted faults of a simulation of whole trainings: each is named first, and nobody innocent is named."""

from dataclasses import replace

import pytest
from truth.planted import KINDS, findings_of, judge, pair
from truth.simulated_training import Plan, Training, write

from verl_profiler.analysis.explain.what_if import what_if
from verl_profiler.reading.reader import load

# On each push: kind, severity, one of each mechanism; the others each night.
QUICK = [
    *(
        ("long_prompts", 1),
        ("routing_55", 0),
        ("small_cache", 1),
        ("tail", 1),
        ("blocking_tool", 1),
    ),
    *(("slow_receiver", 0), ("tool_limit", 2), ("host_tools", 0), ("late_worker", 1)),
    *(("halted_replica", 0), ("halted_beside_tail", 0), ("long_inputs", 1), ("slow_optimizer", 0)),
    ("tool_grows", 0),
]


def judged(kind, severity, seed=0):
    """Return how a fault is named, recoverable / truth, and the findings; None if it costs less than 3 %."""
    planted, sound = pair(kind, severity, seed)
    cost_s = planted.step_s - sound.step_s
    if kind != "clean" and cost_s < 0.03 * planted.step_s:
        return None
    rows = findings_of(planted)
    named = [(row["finding"], row["culprit_text"], row["recoverable_s"]) for row in rows]
    return *judge(kind, rows, cost_s), named


@pytest.mark.parametrize(("kind", "severity"), QUICK)
def test_a_planted_fault_is_named_first(kind, severity):
    verdict, ratio, named = judged(kind, severity)

    assert "first" == verdict, named
    assert 0.8 <= ratio <= 1.25, named


def test_lengths_that_vary_as_usual_come_after_what_is_out_of_the_ordinary():
    rows = findings_of(Training(Plan(lognormal=(0.8, 4000), adv=6.0)))
    found = {row["finding"]: row["recoverable_s"] for row in rows}

    assert ["adv", "tail"] == list(found)[:2]
    assert found["tail"] > found["adv"]


def test_tools_whose_latencies_vary_as_usual_are_not_slow():
    rows = findings_of(Training(Plan(tool=2.5, tool_spread=1.0)))

    assert "slow_tools" not in {row["finding"] for row in rows}


def test_the_prompts_of_few_steps_establish_that_their_tokens_grow():
    rows = findings_of(Training(Plan(token_grows=0.05, spread=0.5, steps=7)))

    assert rows[0]["finding"] == "more_tokens"


@pytest.mark.parametrize("fault", [{"late_worker": 30.0}, {"prepare_since": (5, 8.0)}], ids=str)
def test_seconds_that_two_findings_could_have_are_in_one(fault):
    """A worker starts late, and so ends late; the trainer prepares a step for long, and longer than before."""
    planted = Training(Plan(**fault))
    cost_s = planted.step_s - Training(Plan()).step_s
    anomalies = [row for row in findings_of(planted) if not row["dominates"]]

    (row,) = (row for row in anomalies if row["finding"] != "tail")
    assert 0.8 <= row["recoverable_s"] / cost_s <= 1.25


def test_turns_alone_make_a_tail_where_tokens_were_not_recorded():
    training = Training(Plan(loops=(0.05, 16), steps=4))
    training.events = [
        (*event, {name: each for name, each in extra.items() if "tokens" not in name})
        for *event, extra in training.events
    ]
    (row,) = (row for row in findings_of(training) if row["finding"] == "tail")

    assert "turns, others" in row["cause"]
    assert "tokens" not in row["cause"]


@pytest.mark.parametrize(
    ("faults", "named"),
    [
        ({"one_at_a_time": True, "build": 4.0}, ("few_at_once", "prompt_build")),
        ({"one_at_a_time": True, "slow_tool": 20.0}, ("few_at_once", "slow_tools")),
        ({"busy_host": 4.0, "slots": 4}, ("slow_host", "engine_queue")),
    ],
    ids=str,
)
def test_each_of_two_faults_is_named_with_what_it_costs_alone(faults, named):
    """Requests that run one after the other wait for all of each other's prompts; a queue for slow calls."""
    both = Training(Plan(**faults))
    found = {row["finding"]: row["recoverable_s"] for row in findings_of(both)}
    costs = {
        finding: both.step_s - Training(replace(both.plan, **{fault: getattr(Plan, fault)})).step_s
        for finding, fault in zip(named, faults, strict=True)
    }

    assert list(found)[:2] == sorted(costs, key=lambda name: -costs[name])
    for finding, cost in costs.items():
        assert 0.8 <= found[finding] / cost <= 1.25, (finding, found, costs)


@pytest.mark.parametrize(
    ("fault", "named", "most"),
    [
        ({"first_prefill": 20.0}, "slow_prefill", 1.25),
        ({"reward_timeouts": (0.05, 60.0), "reward_workers": 64}, "reward", 1.25),
        # Without a replay it is an upper bound.
        ({"slots": 4}, "engine_queue", 1.5),
    ],
    ids=str,
)
def test_a_fault_costs_as_much_where_few_details_were_recorded(fault, named, most):
    """Of most requests of two workers only the line is known, of all calls the engines' times."""
    planted = Plan(workers=2, samples=8, **fault)
    without = {name: getattr(Plan, name) for name in list(fault)[:1]}
    training = Training(planted)
    cost_s = training.step_s - Training(replace(planted, **without)).step_s
    row = findings_of(training, detail_share=1 / 8)[0]

    assert named == row["finding"]
    assert 0.8 <= row["recoverable_s"] / cost_s <= most, (row["recoverable_s"], cost_s)


def test_retracted_calls_are_counted_among_the_recorded_ones():
    full_caches = Training(Plan(workers=2, samples=8, steps=4, capacity=(8000,) * 4))
    rows = findings_of(full_caches, detail_share=1 / 8)
    (cause,) = (row["cause"] for row in rows if row["finding"] == "engine_queue")

    assert "recorded calls of all replicas were retracted" in cause


@pytest.mark.parametrize(
    ("fault", "known"),
    [
        ({"cache_lost": 2, "prefill_token": 2e-3}, "prefix_caching"),
        ({"capacity": (5000,) * 4}, "retracted"),
    ],
    ids=str,
)
def test_what_is_known_of_calls_without_the_engines_times_is_stated(fault, known):
    (row,) = (
        row
        for row in findings_of(Training(Plan(timed=False, steps=4, **fault)))
        if row["finding"] == "engine_bound"
    )

    assert known in row["cause"]


def test_a_clean_run_blames_nobody():
    assert "clean" == judged("clean", 0)[0]


@pytest.mark.parametrize(
    "limit", [{"tools_at_once": 2}, {"reward": 3.0}, {"capacity": (5000,) * 4}], ids=str
)
def test_half_the_requests_wait_less_for_what_they_share(tmp_path, limit):
    """Tools, reward workers and KV caches; the truth is a simulation of half the prompts."""
    whole = Training(Plan(steps=6, **limit))
    half = Training(replace(whole.plan, prompts=8))
    run = load(write(whole, tmp_path / "run"), cache=False)
    answers = {row["what"]: row["expected_s"] for row in what_if(run.tables)}
    run.close()

    assert 0.75 <= answers["half_the_requests"] / (whole.step_s - half.step_s) <= 1.25


def test_each_timer_of_an_asynchronous_trainer_has_an_account_of_its_own():
    """Three phases whose ranks get 2 s long and begin 1 s late; nothing follows the last of the seven steps."""
    plan = Plan(steps=8, ahead=32, per_call=0.0002, adv=3.0, dump=4.0, between=2.0)
    found = {}
    for row in findings_of(Training(replace(plan, transfer=2.0, handover=1.0))):
        found |= row["accounts"]

    assert {
        "adv": 3.0,
        "dump_rollout_generations": 4.0,
        "between_steps": 2.0 * 6 / 7,
    } == pytest.approx(
        {name: found[name] for name in ("adv", "dump_rollout_generations", "between_steps")},
        rel=0.02,
    )
    assert found["rank_transfer"] == pytest.approx(3 * 2.0, rel=0.02)
    # Of the simulation are also 0.2 s in each phase.
    assert found["handover"] == pytest.approx(3 * (1.0 + 0.2), rel=0.05)


def test_a_slow_rank_costs_no_more_than_until_the_trainer_waits_for_samples():
    plan = Plan(steps=20, seed=70, ahead=32, per_call=0.0002, slow_tool=40.0, collective=False)
    slow = Training(replace(plan, slow_rank=2.0))
    row = findings_of(slow)[0]

    assert ("slow_ranks", "actor_5") == (row["finding"], row["culprit"])
    assert 0.8 <= row["recoverable_s"] / (slow.step_s - Training(plan).step_s) <= 1.25


def test_steps_that_alternate_are_replayed_where_an_odd_number_of_them_was_recorded():
    plan = Plan(steps=8, ahead=16, per_call=0.0002, reward=60.0, reward_workers=256)
    slow = Training(plan)
    row = findings_of(slow)[0]

    assert row["finding"] == "reward"
    assert (
        0.8
        <= row["recoverable_s"] / (slow.step_s - Training(replace(plan, reward=0.0)).step_s)
        <= 1.25
    )


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_every_severity_of_a_planted_fault_is_named_first(kind):
    answers = [judged(kind, place) for place in range(len(KINDS[kind].severities))]
    verdicts = {each[0] for each in answers if each is not None}

    assert verdicts <= {"first", "clean"}, answers
