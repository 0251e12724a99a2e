"""Findings come out of an account of all time, from the start of a step to the start of the next."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from truth.asynchronous_runs import Plan, Simulation
from truth.asynchronous_runs import events_of as made_of_run
from truth.synthetic import SECOND, Phase, events_of, run_of, tables_of
from truth.test_findings import CASES, QUIET, anomalies, longest_turn, requests_with, turns_with

from verl_profiler.analysis.explain.asynchronous_findings import with_the_rest
from verl_profiler.analysis.explain.findings import ranked
from verl_profiler.analysis.explain.ledger import ACCOUNTS
from verl_profiler.analysis.explain.rules import BETWEEN, CATEGORIES
from verl_profiler.analysis.registry import explained
from verl_profiler.views.findings import finding_list

PHASES = ("adv", "update_actor", "old_log_prob", "testing", "save_checkpoint", "{mine}", "gen")


@st.composite
def accounts(draw):
    """Make segments of one to six steps: any category, in steps and between them."""
    rows = []
    for step in range(1, draw(st.integers(1, 6)) + 1):
        for phase in ("gen", BETWEEN):
            names = st.sampled_from((*CATEGORIES, *PHASES, BETWEEN))
            for category in draw(st.lists(names, min_size=phase == "gen", max_size=6)):
                duration_s = draw(st.floats(1e-3, 1e4))
                rows.append(
                    {
                        "run": "any",
                        "step": step,
                        "phase": phase,
                        "category": category,
                        "name": draw(st.sampled_from(("trainer_0", "actor_1"))),
                        "event": category,
                        "duration_s": duration_s,
                        "what": None,
                        "turn": 0,
                    }
                )
    return rows


def per_step(own, rows):
    """Return the mean of `own`: over the steps, and over those gaps whose end is known."""
    steps = {row["step"] for row in rows}
    gaps = {row["step"] for row in rows if row["phase"] == BETWEEN}
    gaps |= {step for step in steps if step + 1 in steps}
    return sum(row["duration_s"] / len(gaps if row["phase"] == BETWEEN else steps) for row in own)


@given(accounts())
def test_findings_and_what_is_below_3_percent_are_the_whole(rows):
    """No category of 3 % is left out, and none is counted twice."""
    listed = ranked(rows, [], [], {})
    named = [category for each in listed for category in each.accounts]
    whole_s = per_step(rows, rows)
    means = {
        category: per_step([row for row in rows if row["category"] == category], rows)
        for category in {row["category"] for row in rows}
    }

    assert len(named) == len(set(named))
    small = {category: mean for category, mean in means.items() if category not in named}
    assert all(mean < 0.03 * whole_s * (1 + 1e-9) for mean in small.values())
    covered_s = sum(mean for each in listed for mean in each.accounts.values())
    assert covered_s + sum(small.values()) == pytest.approx(whole_s)
    for each in listed:
        assert each.step_s == pytest.approx(whole_s)
        assert each.lost_s >= 0.03 * whole_s * (1 - 1e-9)


ADV = replace(QUIET, phases=(*QUIET.phases, Phase("adv", (), before_us=2 * SECOND)))
BUILD = requests_with(lambda request: replace(request, build_us=3 * SECOND))
PREFILL = requests_with(turns_with(prefill_us=4 * SECOND))


@pytest.mark.parametrize(
    ("step", "finding", "lost_s", "said"),
    [
        (ADV, "adv", 2.003, "in the trainer's process, while no rank is active"),
        (BUILD, "prompt_build", 3.0, "of the last request to finish: tokenizing the first prompt"),
        # Two turns of the last request; the first call is as long as the other.
        (PREFILL, "prefill", 8.0, "Prefill takes 8.00 s per step"),
    ],
)
def test_what_no_rule_explains_is_named_with_its_seconds(step, finding, lost_s, said):
    """First, and what was not recorded inside it is not guessed."""
    rows = explained(run_of(step, step, step)[0])["findings"]

    assert finding == rows[0]["finding"]
    assert rows[0]["recoverable_s"] == pytest.approx(lost_s)
    assert said in rows[0]["message"]


def run_that_ends_steps_with(timer):
    """Each of three steps is followed by 5 s in this timer."""
    events, truths = events_of(*[replace(QUIET, testing_us=5 * SECOND, pause_us=100_000)] * 3)
    for event in events:
        if event["event"] == "testing":
            event["event"] = timer
    return explained(tables_of(events))["findings"][0], truths


def test_what_lies_between_steps_is_named_by_its_timer():
    """Also after the last step; shares are of the time from step to step."""
    row, truths = run_that_ends_steps_with("dump_rollout_generations")
    # The pause after the last step has no end.
    whole_s = truths[1].duration_us / 1e6 + 5 + 0.1 * 1 / 2

    assert "dump_rollout_generations" == row["finding"]
    assert row["between"]
    assert row["recoverable_s"] == pytest.approx(5)
    assert row["step_s"] == pytest.approx(whole_s)
    assert row["share"] == pytest.approx(5 / whole_s)
    assert "between steps" in row["message"]
    assert f"step_to_step > {whole_s - 2.5:.4g}s" in row["proof"]


def test_the_end_of_a_capture_is_named_as_such():
    """On an H100 it took 28 s of a step of 43 s to write the trace of one rank."""
    row, _ = run_that_ends_steps_with("stop_profile")

    assert "stop_profile" == row["finding"]
    assert "capture" in row["message"]
    assert "profile_steps" in row["advice"]
    assert "span" not in row["advice"]


def test_spans_of_the_user_in_the_trainer_are_named():
    """In a step, instead of what no timer covers, and between steps."""
    step = replace(QUIET, gap_us=SECOND, pause_us=2 * SECOND)
    events, truths = events_of(step, step, step)
    for whole in [event for event in events if event["event"] == "step"]:
        # The last gap of the step, and what follows it.
        for name, begin, end in (("mine", -SECOND, 0), ("log {samples}", 0, 1_500_000)):
            ends = {key: whole["end_us"] + at for key, at in (("begin_us", begin), ("end_us", end))}
            more = {"event": name, "family": "user", "duration_us": end - begin}
            events.append({**whole, **ends, **more})
    rows = {row["finding"]: row for row in explained(tables_of(events))["findings"]}

    assert rows["mine"]["recoverable_s"] == pytest.approx(1)
    assert rows["log {samples}"]["recoverable_s"] == pytest.approx(1.5)
    assert "log {samples} takes 1.50 s per step" in rows["log {samples}"]["message"]
    assert "in the trainer's process" in rows["mine"]["message"]
    assert truths[0].categories["unexplained"] - SECOND == pytest.approx(
        rows["unexplained"]["recoverable_s"] * SECOND
    )


def test_a_gap_after_every_third_step_is_described_so():
    """Of steps 2 to 8, the gaps after 3 and 6 have nearly all of the time."""
    steps = [replace(QUIET, pause_us=(9 if n % 3 == 0 else 0.01) * SECOND) for n in range(1, 9)]
    (row,) = anomalies(explained(run_of(*steps)[0])["findings"])
    once = explained(run_of(*steps[:5])[0])["findings"]

    assert row["finding"] == "between_steps"
    assert row["where"] == "mostly every 3 steps, in steps 3, 6"
    assert row["recoverable_s"] == pytest.approx((2 * 9 + 4 * 0.01) / 6)
    assert 3 == once[0]["mostly_step"]
    assert "mostly after step 3" in finding_list(once)


def test_loading_and_offloading_is_told_from_the_phase_around_it():
    """In each phase, of the rank that finishes last."""
    events, _ = events_of(QUIET, QUIET, QUIET)
    for event in [e for e in events if e["event"] in ("compute_log_prob", "update_actor")]:
        if event["name"].startswith("actor"):
            end = event["begin_us"] + 300_000
            events.append({**event, "event": "load", "end_us": end, "duration_us": 300_000})
    (row,) = anomalies(explained(tables_of(events))["findings"])

    assert "offload" == row["finding"]
    assert row["recoverable_s"] == pytest.approx(0.6)


def test_phases_without_a_backward_pass_are_compared_with_the_update():
    """As long as the update: all but a third of it is too much; a third is not."""
    phases = (Phase("old_log_prob", (900_000,) * 2), Phase("update_actor", (900_000,) * 2))
    rows = explained(run_of(*[replace(QUIET, phases=phases)] * 3)[0])["findings"]
    row = anomalies(rows)[0]

    assert ("forward_only", "old_log_prob") == (row["finding"], row["culprit"])
    assert row["recoverable_s"] == pytest.approx(0.9 * 2 / 3)
    assert "old_log_prob 900 ms, update_actor 900 ms" in row["message"]


def test_a_blocking_function_is_named_with_its_file_and_line():
    """As recorded; where it was not, nothing is named."""
    events, _ = events_of(*[CASES["event_loop"][0]] * 3)
    lags = [event for event in events if event["event"] == "event_loop_lag"]
    for lag in lags:
        lag["extra"] |= {"during": "tools:search", "function": "tools:search", "file": "tools.py"}
        lag["extra"] |= {"line": 41}

    def named():
        rows = explained(tables_of(events))["findings"]
        return next(row for row in rows if row["finding"] == "event_loop")

    row = named()
    assert ("tools.py:41", "tools:search") == (row["code"], row["culprit"])
    assert "tools:search (tools.py:41)" in row["culprit_text"]
    for lag in lags:
        del lag["extra"]["line"]
    assert named()["code"] is None


def test_host_memory_that_grows_in_each_step_is_named_with_its_process():
    """By 26 GiB a step; not where it falls once."""
    gib = 1 << 30
    events, _ = events_of(*[QUIET] * 6)

    def readings(of):
        steps = [event for event in events if event["event"] == "step"]
        for number, step in enumerate(steps):
            extra = {"rss_bytes": of(number), "at": "after update", "used_bytes": 1}
            yield {**step, "name": "actor_0", "role": "actor", "event": "memory", "family": "memory",
                   "extra": extra}  # fmt: skip

    growing = [*events, *readings(lambda number: (30 + 26 * number) * gib)]
    falling = [*events, *readings(lambda number: (30 + 26 * (number % 4)) * gib)]
    (row,) = anomalies(explained(tables_of(growing))["findings"])

    assert ("host_memory", "actor_0", 0) == (row["finding"], row["culprit"], row["recoverable_s"])
    assert "actor_0 by 26.0 GiB, from 56.0 GiB in step 2 to 160 GiB in step 6" in row["message"]
    assert [] == anomalies(explained(tables_of(falling))["findings"])


@st.composite
def ledgers(draw):
    """Make rows of device time of one to five steps, of a trainer that shares its devices or not."""
    pool, rows = draw(st.sampled_from(("shared", "trainer"))), []
    for step in range(1, draw(st.integers(1, 5)) + 1):
        for account in draw(st.lists(st.sampled_from([*ACCOUNTS]), min_size=1, unique=True)):
            own = {"run": "any", "step": step, "pool": pool, "devices": 2.0, "account": account}
            rows.append({**own, "device_s": draw(st.floats(1e-2, 1e4))})
    return rows


@given(ledgers())
def test_findings_of_an_asynchronous_run_and_what_is_below_3_percent_are_the_whole(rows):
    """Of the time of the trainer's devices, from step to step."""
    steps = len({row["step"] for row in rows})
    whole_s = sum(row["device_s"] / row["devices"] for row in rows) / steps
    listed = with_the_rest([], rows)
    named = {account: spent for each in listed for account, spent in each.accounts.items()}
    means = dict.fromkeys((row["account"] for row in rows), 0.0)
    for row in rows:
        means[row["account"]] += row["device_s"] / row["devices"] / steps

    assert len(named) == sum(len(each.accounts) for each in listed)
    assert named == pytest.approx({each: means[each] for each in named})
    small = {each: mean for each, mean in means.items() if each not in named}
    assert all(mean < 0.03 * whole_s * (1 + 1e-9) for mean in small.values())
    assert sum(named.values()) + sum(small.values()) == pytest.approx(whole_s)


def test_the_time_of_an_asynchronous_trainer_has_findings_and_a_last_line():
    """2 s of advantages in each step, with no rank active: an account of its own."""
    run = Simulation(Plan(steps=5, stages=lambda _: (90, 20, 60), train_ms=900))
    events = made_of_run(run)
    for event in [each for each in events if each["event"] == "old_log_prob"]:
        event["event"] = "adv"
    rows = {row["finding"]: row for row in explained(tables_of(events))["findings"]}
    advantages_s = 0.9 * 3 / 9

    assert rows["adv"]["recoverable_s"] == pytest.approx(advantages_s)
    assert "no rank is active" in rows["adv"]["message"]
    assert {"training", "weight_sync"} >= rows["pool_work"]["accounts"].keys() >= {"training"}
    assert rows["pool_work"]["accounts"]["training"] == pytest.approx(0.9 * 6 / 9)


@pytest.mark.parametrize("many", [8, 4])
def test_a_stalled_step_is_not_what_bounds_the_others(many):
    """What it stood still is taken out of its phase, which has the time of the other steps; the first one is left out."""
    usual, stalled = (Phase("update_actor", (each * SECOND,) * 2) for each in (2, 602))
    steps = [replace(QUIET, phases=(*QUIET.phases[:1], usual)) for _ in range(many)]
    place = many // 2
    steps[place] = replace(steps[place], phases=(*QUIET.phases[:1], stalled))
    rows = explained(run_of(*steps)[0])["findings"]
    named = {category: spent for row in rows for category, spent in row["accounts"].items()}

    assert ("stalled_step", place + 1) == (rows[0]["finding"], rows[0]["mostly_step"])
    assert rows[0]["recoverable_s"] == pytest.approx(600 / (many - 1))
    assert "trainer_bound" not in {row["finding"] for row in rows}
    assert named["stalled_step"] == pytest.approx(600 / (many - 1))
    assert named.get("update_actor", 2.0) == pytest.approx(2.0)


@pytest.mark.parametrize(("later_s", "gaps"), [(8.9, 3), (90.0, 2)])
def test_the_gap_after_the_last_step_ends_with_the_process_if_it_is_like_others(later_s, gaps):
    """Steps 3 and 6 of six are followed by 8 s; a process that lives on for long is not waiting for a step."""
    steps = [replace(QUIET, pause_us=(8 if n % 3 == 0 else 0.01) * SECOND) for n in range(1, 7)]
    events, _ = events_of(*steps)
    tables = tables_of(events)
    last_us = max(event["end_us"] for event in events if event["event"] == "step")
    ended = datetime.fromtimestamp(last_us / 1e6 + later_s, UTC).isoformat()
    tables.connection.execute("UPDATE processes SET ended = ? WHERE role = 'trainer'", [ended])
    row = next(r for r in explained(tables)["findings"] if r["finding"] == "between_steps")
    known_s = 8 + 3 * 0.01 + (later_s if gaps == 3 else 0)

    assert row["recoverable_s"] == pytest.approx(known_s / (5 if gaps == 3 else 4))


def test_a_slow_reward_costs_only_what_the_next_request_does_not():
    """The last request waits 3 s for its reward, while a long one without any ends before it."""
    sound = requests_with(longest_turn, (7,))
    slow = requests_with(lambda each: replace(each, reward_us=3 * SECOND), (3,), sound)
    tables, truths = run_of(slow, slow, slow)
    _, others = run_of(sound, sound, sound)
    cost_s = (truths[0].duration_us - others[0].duration_us) / SECOND
    row = next(r for r in explained(tables)["findings"] if r["finding"] == "reward")

    assert 0.5 < cost_s < 2.9
    assert row["recoverable_s"] == pytest.approx(cost_s, rel=0.05)


def test_the_trainers_own_reward_waits_for_no_reward_worker():
    row = {"run": "any", "step": 1, "phase": "reward", "category": "reward", "event": "reward"}
    row |= {"name": "trainer_0", "duration_s": 5.0, "what": None, "turn": None}
    (reward,) = ranked([row], [], [], {})

    assert ("reward", False) == (reward.name, reward.culprit.fixable)


def test_validation_and_checkpoints_of_an_asynchronous_run_are_told_apart():
    """0.3 and 0.6 s in each step: overhead as an account, two findings with the advice of each."""
    run = Simulation(Plan(steps=5, stages=lambda _: (90, 20, 60), train_ms=900))
    events = made_of_run(run)
    timers = {"old_log_prob": "save_checkpoint", "update_actor": "testing"}
    for event in events:
        event["event"] = timers.get(event["event"], event["event"])
    rows = {row["finding"]: row for row in explained(tables_of(events))["findings"]}

    for name, timer, spent_s in (
        ("checkpoint", "save_checkpoint", 0.3),
        ("validation", "testing", 0.6),
    ):
        assert rows[name]["recoverable_s"] == pytest.approx(spent_s)
        assert timer == rows[name]["culprit"]
    assert "overhead" not in rows
