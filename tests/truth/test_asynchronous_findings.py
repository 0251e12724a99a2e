"""Findings of asynchronous runs: pairs of simulated runs, with and without the cause."""

from dataclasses import replace

import pytest
from truth.asynchronous_runs import Plan, Simulation, events_of, with_syncs
from truth.engine_readings import reading
from truth.synthetic import tables_of

from verl_profiler.analysis.explain.asynchronous_findings import asynchronous_findings
from verl_profiler.analysis.explain.findings import explained
from verl_profiler.analysis.explain.fixes import Facts
from verl_profiler.analysis.explain.ledger import bubble_ledger
from verl_profiler.analysis.explain.what_if import cycles
from verl_profiler.views.findings import finding_list


def fast(number):
    return 90 + number % 3, 20, 60


def slow(number):
    return 1200 + 70 * (number % 5), 90, 500


def even(_):
    return (400, 60, 420)


def long_tools(number):
    """Every fourth sample waits for a tool during several steps."""
    return (420, 5580, 90) if number % 4 == 0 else (150 + number, 30, 120)


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
    "waits_for_rollout": {"split_off"},
    "waits_for_trainer": {"split_off"},
    "wasted_aborts": {"waits_for_rollout", "waits_in_turn", "split_off"},
    "stale_samples": {"waits_for_rollout", "waits_in_turn", "split_off"},
    "sync_bound": {"waits_for_rollout", "waits_for_trainer"},
}


def rows_of(tables, steps):
    """Return the findings by name, each with what its sentence is filled in with."""
    return {
        each.name: {**each.row(Facts(tables, each.run)), "values": vars(each)}
        for each in asynchronous_findings(
            tables, bubble_ledger(tables), steps, known=cycles(tables, steps)
        )
    }


def spent(run, pool, what):
    """Return the mean seconds that a pool's devices spent on an account, in each step but the first."""
    return sum(
        seconds
        for (own, step, account), seconds in run.seconds.items()
        if own == pool and step > 1 and account.startswith(what)
    ) / (run.plan.steps - 1)


def later_step_s(run):
    """Return the mean length of the steps after the first."""
    return sum(
        end - begin for event, step, begin, end in run.timers if event == "step" and step > 1
    ) / (1000 * (run.plan.steps - 1))


def found_in(plan):
    """Return the findings without the first step, and the mean length of the other steps in s."""
    run = Simulation(plan)
    tables = tables_of(with_syncs(events_of(run)))
    return rows_of(tables, (2, plan.steps)), later_step_s(run), run


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
    devices = plan.replicas if pool == "rollout" else plan.trainer_devices
    assert rows[name]["values"]["lost_s"] == pytest.approx(spent(run, pool, account) / devices)


def half(number):
    return tuple(length // 2 for length in slow(number))


def third(_):
    return 270, 60, 210


def late(_):
    return 1500, 60, 900


def long_and_short(number):
    """Every fourth sample takes several steps."""
    return (4200, 90, 1800) if number % 4 == 0 else (150 + number, 30, 120)


# One replica and one device of the trainer.
ONE_EACH = Plan(ahead=4, steps=12, sync_ms=20, replicas=1, trainer_devices=1)

# The finding, a run that has it, the same run without its cause, and what the culprit is called.
PLANTED = {
    "split_off, rollout": (
        Plan(stages=slow, train_ms=300, sync_ms=20, trainer_devices=4, steps=12, slowdown=1.0),
        Plan(stages=half, train_ms=600, sync_ms=20, replicas=4, steps=12, slowdown=0.2),
        "trainer's devices",
    ),
    "split_off, trainer": (
        Plan(stages=fast, train_ms=2700, replicas=6, steps=12),
        Plan(stages=third, train_ms=900, replicas=2, trainer_devices=6, batch=8, ahead=8, steps=12),
        "rollout's devices",
    ),
    "too_stale, queue": (
        Plan(sync_ms=20, ahead=14, steps=8, replicas=1, trainer_devices=1),
        Plan(sync_ms=20, ahead=4, steps=8, replicas=1, trainer_devices=1),
        "the wait in the queue",
    ),
    "too_stale, long requests": (
        replace(ONE_EACH, stages=long_and_short, ahead=8, train_ms=1800),
        ONE_EACH,
        "long requests (320 to 6000 tokens)",
    ),
    "too_stale, tools": (
        replace(ONE_EACH, stages=long_tools, ahead=8, train_ms=1800),
        ONE_EACH,
        "the time between generate calls (tools, rewards)",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_named_first_and_its_absence_is_silent(planted):
    """With the culprit."""
    plan, fixed, culprit = PLANTED[planted]
    name = planted.partition(",")[0]
    rows, _, _ = found_in(plan)
    later, _, _ = found_in(fixed)

    assert name == next(iter(rows))
    assert culprit == rows[name]["culprit"]
    assert name not in later


@pytest.mark.parametrize("devices", [4, 12])
def test_the_split_gains_what_a_run_with_a_device_moved_gains(devices):
    """Counted millisecond by millisecond; however many are idle, one more replica is no more than that."""
    plan = Plan(
        stages=slow, train_ms=300, sync_ms=20, trainer_devices=devices, steps=12, slowdown=1.0
    )
    rows, step_s, run = found_in(plan)
    less = {"trainer_devices": devices - 1, "train_ms": 300 * devices // (devices - 1)}
    _, moved_s, _ = found_in(replace(plan, **less, replicas=plan.replicas + 1))
    idle = spent(run, "trainer", "waiting_for_samples") / step_s
    values = rows["split_off"]["values"]

    assert f"{idle:.1f} of the trainer's {devices} devices are idle" in values["who"]
    assert values["reason"] == "Move 1 of the trainer's devices to the rollout."
    assert rows["split_off"]["recoverable_s"] == pytest.approx(step_s - moved_s, rel=0.5)


def test_what_requests_wait_for_comes_before_the_bare_wait():
    """Also if it is less than half of it."""
    plan = Plan(stages=lambda number: (900 + 70 * (number % 5), 500, 600), train_ms=300, steps=12)
    rows = explained(tables_of(with_syncs(events_of(Simulation(plan)))))["findings"]

    assert ["tool_time", "waits_for_rollout"] == [row["finding"] for row in rows][:2]


def test_stale_tokens_are_counted():
    """The share of the consumed tokens that are more than two versions behind."""
    rows, _, run = found_in(PLANTED["too_stale, queue"][0])
    tokens = [
        (sample.trainer_version - version, count)
        for sample in run.consumed
        if sample.consumed_step > 1
        for version, count in sample.tokens.items()
    ]
    stale = sum(count for behind, count in tokens if behind > 2) / sum(count for _, count in tokens)

    assert rows["too_stale"]["values"]["lost_share"] == pytest.approx(stale)
    assert rows["too_stale"]["recoverable_s"] == 0


@pytest.mark.parametrize(
    ("mode", "switch", "lends"),
    [
        ("separate_async", False, True),
        ("separate_async", True, False),
        ("separate_async", None, True),
        ("colocate_async", False, False),
        (None, False, False),
    ],
)
def test_replicas_that_lend_are_advised_where_the_run_could_have_them(mode, switch, lends):
    """In words and to paste, or not at all: what was not recorded is not advised."""
    key = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    settings = {
        "actor_rollout_ref.hybrid_engine": True,
        "actor_rollout_ref.rollout.disaggregation.enabled": False,
        "trainer.v1.sampler.custom_sampler": False,
        key: switch,
    }
    training = {"use_v1": True, "trainer_mode": mode, "settings": settings}
    plan = PAIRS["waits_for_rollout"][0]
    tables = tables_of(events_of(Simulation(plan)))
    tables.launches = {"made": {"versions": {"verl": "0.9.1"}, "training": training}}
    row = rows_of(tables, None)["waits_for_rollout"]

    assert row["overrides"] == [f"{key}=true"] * lends
    assert lends == ("replicas generate while it waits" in row["advice"])


def test_a_balanced_run_has_no_findings():
    """Both pools are busy nearly all the time."""
    rows, _, _ = found_in(Plan(stages=even, train_ms=900, sync_ms=30, ahead=8, steps=6, batch=8))

    assert {} == rows


def quick(number):
    """Generate calls of half of the length of `slow`'s."""
    return tuple(
        length // 2 if place % 2 == 0 else length for place, length in enumerate(slow(number))
    )


def with_engines(plan, extra_of, *, full=False):
    """Return the findings of a run whose engines report these fields of each request."""
    run = Simulation(plan)
    events = events_of(run)
    for event in events:
        if event["event"] == "engine_request" and event["duration_us"]:
            event["extra"] = {**(event["extra"] or {}), **extra_of(event["duration_us"] / 1e6)}
    first, last = (pick(event["end_us"] for event in events) for pick in (min, max))
    if full:
        events += [
            reading(
                name,
                at_us,
                step=1,
                running_requests=4,
                waiting_requests=2,
                running_limit=64,
                kv_used_tokens=990,
                kv_capacity_tokens=1_000,
            )
            for name in sorted({e["name"] for e in events if e["event"] == "engine_request"})
            for at_us in range(first, last, 500_000)
        ]
    tables = tables_of(events)
    return rows_of(tables, (2, plan.steps)), later_step_s(run), run


@pytest.mark.parametrize(
    ("name", "extra_of", "full"),
    [
        ("kv_bound", lambda length_s: {"queue_s": length_s / 2}, True),
        (
            "cold_prefix_cache",
            lambda length_s: {
                "queue_s": 0.0,
                "prefill_s": length_s / 2,
                "cached_tokens": 0,
                "prompt_tokens": 1_000,
            },
            False,
        ),
    ],
)
def test_what_engines_lose_is_found_where_the_trainer_waits_for_them(name, extra_of, full):
    """Half of each call, or of each second one, is lost; without it the steps are shorter."""
    plan = Plan(stages=slow, train_ms=300, sync_ms=20)
    rows, before, run = with_engines(plan, extra_of, full=full)
    healthy, _, _ = with_engines(plan, lambda _: {"queue_s": 0.0}, full=full)
    _, after, _ = with_engines(Plan(stages=quick, train_ms=300, sync_ms=20), lambda _: {})

    assert name in rows
    assert name not in healthy
    assert 0 < before - after <= rows[name]["recoverable_s"] + 1e-6
    whole = spent(run, "rollout", "generating") / plan.replicas
    share = {"kv_bound": (0.4, 0.5), "cold_prefix_cache": (0.1, 0.4)}[name]
    assert share[0] * whole <= rows[name]["values"]["lost_s"] <= share[1] * whole + 1e-6
    assert "rollout's time" in finding_list([*rows.values()])
    # A trainer that never waits gains nothing from quicker engines.
    busy_trainer, _, _ = with_engines(Plan(stages=fast, train_ms=2400), extra_of, full=full)
    assert name not in busy_trainer


def test_a_slow_rank_and_a_tool_that_fails_are_named():
    """Three ranks of four end each update 100 ms before the other one; every third tool call fails."""
    plan = Plan(stages=even, train_ms=900, sync_ms=30, ahead=8, steps=8, batch=8, trainer_devices=4)
    run = Simulation(plan)
    events = events_of(run)
    sound = rows_of(tables_of(events), (2, plan.steps))
    tools = [each for each in events if each["event"] == "tool_call"]
    for each in tools[::3]:
        each |= {"status": "error", "error": "TimeoutError"}
    for each in events:
        if each["event"] == "update_actor" and each["role"] == "actor" and each["rank"] != 2:
            each["end_us"] -= 100_000
            each["duration_us"] -= 100_000
    rows = rows_of(tables_of(events), (2, plan.steps))

    assert {"slow_ranks", "failing_tools"} == rows.keys() - sound.keys()
    assert ("actor_2", "rank") == (
        rows["slow_ranks"]["culprit"],
        rows["slow_ranks"]["culprit_kind"],
    )
    # With a quicker trainer, some steps wait for samples.
    saved_s = later_step_s(run) - later_step_s(Simulation(replace(plan, train_ms=800)))
    assert rows["slow_ranks"]["recoverable_s"] == pytest.approx(saved_s, rel=0.1)
    assert saved_s < 0.07
    assert "TimeoutError" in rows["failing_tools"]["message"]
