"""Each rule speaks on a run made to show it, names what it costs, and is silent on the others."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from truth.event_loops import blocked
from truth.synthetic import Phase, Request, Step, Turn, events_of, run_of, tables_of

from verl_profiler.analysis.explain.rules import RULES
from verl_profiler.analysis.explain.what_if import chosen_steps
from verl_profiler.analysis.registry import explained, explanations
from verl_profiler.reading.reader import load
from verl_profiler.units import seconds
from verl_profiler.views.findings import finding_list

DATA = Path(__file__).parent.parent / "data"

# Forty requests that take nearly the same time, in two workers and two replicas; even ranks.
QUIET = Step(
    requests=tuple(
        Request(
            turns=tuple(
                Turn(tokens=60 + place // 20, tools=(("search", 50_000),)) for _ in range(2)
            ),
            worker=place % 2,
            replica=place % 2,
        )
        for place in range(40)
    ),
    phases=(
        Phase("old_log_prob", (400_000, 399_000)),
        Phase("update_actor", (900_000, 898_000)),
        Phase("update_weights", (90_000, 89_000)),
    ),
)


def requests_with(change, chosen=range(40), step=QUIET):
    """Change some requests of a step."""
    return replace(
        step,
        requests=tuple(
            change(request) if place in chosen else request
            for place, request in enumerate(step.requests)
        ),
    )


def turns_with(**more):
    return lambda request: replace(
        request, turns=tuple(replace(turn, **more) for turn in request.turns)
    )


def longest_turn(request, tokens=300):
    return replace(request, turns=(*request.turns[:-1], replace(request.turns[-1], tokens=tokens)))


STALLED = requests_with(turns_with(back_us=150_000), (0,))
# What else a run shows that is made for a rule, and rightly so.
CASES = {
    "polling": (replace(QUIET, poll_us=2_000_000), set()),
    "tail": (requests_with(longest_turn, (7, 8)), set()),
    "slow_tools": (
        requests_with(turns_with(tools=(("search", 900_000),)), (3,)),
        # One request of forty is among the slowest 5 %.
        {"tail"},
    ),
    "uneven_replicas": (
        replace(
            requests_with(lambda request: replace(request, replica=0), range(6, 40)),
            slots=10,
        ),
        {"engine_queue", "tail"},
    ),
    "uneven_workers": (
        blocked(QUIET, (100_000, 300)),
        set(),
    ),
    "slow_ranks": (
        replace(QUIET, phases=(Phase("update_actor", (1_500_000, 900_000)),)),
        set(),
    ),
    "engine_queue": (replace(QUIET, slots=8), {"tail"}),
    "way_to_engine": (requests_with(turns_with(acquire_us=90_000)), set()),
    "event_loop": (replace(STALLED, stall=(0, 680_000, 828_000)), {"tail", "way_to_engine"}),
    "host_stall": (
        replace(
            requests_with(turns_with(back_us=900_000), (0,)),
            stall=(0, 680_000, 1_500_000),
            stalled_too=("engine_0", "trainer_0", "actor_0"),
        ),
        {"tail", "way_to_engine"},
    ),
    "late_start": (requests_with(lambda request: replace(request, begin_us=300_000)), set()),
    "reward": (requests_with(lambda request: replace(request, reward_us=300_000)), set()),
    "transfer": (requests_with(lambda request: replace(request, put_us=300_000)), set()),
    "weight_sync": (
        replace(QUIET, phases=(*QUIET.phases[:2], Phase("update_weights", (700_000, 690_000)))),
        set(),
    ),
    "checkpoint": (replace(QUIET, save_us=400_000), set()),
    "engine_sleep": (replace(QUIET, sleep_us=400_000), set()),
    "handover": (
        replace(QUIET, phases=tuple(replace(phase, before_us=100_000) for phase in QUIET.phases)),
        {"weight_sync"},
    ),
    "unexplained": (replace(QUIET, gap_us=100_000), set()),
}


def found_in(*steps):
    tables, truths = run_of(*steps)
    return explained(tables)["findings"], truths


def anomalies(rows):
    """Return the findings but the one that accounts for work in which nothing was found."""
    return [row for row in rows if row["finding"] != "work"]


def in_a_table(found):
    """Assert that each time in a sentence is one of the critical path, the replays or the culprits."""
    totals = {}
    for row in found["steady_path"]:
        totals[row["category"]] = totals.get(row["category"], 0.0) + row["duration_s"]
    groups = [
        sum(totals.get(category, 0.0) for category in rule.categories) for rule in RULES.values()
    ]
    printed = {seconds(total) for total in (*totals.values(), *groups)}
    printed |= {seconds(row["expected_s"]) for row in found["what_if"] if row["expected_s"]}
    printed |= {seconds(row["lost_s"]) for row in found["culprits"] if row["lost_s"]}

    for row in anomalies(found["findings"]):
        said = re.findall(r"[\d.]+ (?:s|ms|us)\b", row["message"])
        assert set(said) <= printed, row["message"]
        assert seconds(row["recoverable_s"]) in printed


@pytest.mark.parametrize("name", CASES)
def test_a_rule_speaks_where_it_should_and_no_other_does(name):
    """With a cost, a cause, something to try, and somewhere to look."""
    step, others = CASES[name]
    tables, (truth,) = run_of(step)
    found = explanations(tables)
    rows = found["findings"]
    names = {row["finding"] for row in rows}
    row = next((row for row in rows if row["finding"] == name), None)

    assert row is not None, names
    assert names <= {name, *others, "work"}
    assert 0 < row["recoverable_s"] < truth.duration_us / 1e6
    assert row["share"] == pytest.approx(row["recoverable_s"] * 1e6 / truth.duration_us)
    assert all(row[key] for key in ("message", "advice", "shows"))
    assert "{" not in row["message"] + row["cause"] + row["advice"]
    in_a_table(found)


def test_a_quiet_run_has_no_anomaly():
    """Its time is accounted for as work, and nobody is accused."""
    rows, _ = found_in(QUIET, QUIET)

    assert [("work", None, True)] == [
        (row["finding"], row["culprit"], row["dominates"]) for row in rows
    ]
    assert "not an anomaly" in finding_list(rows)


def with_a_tail(tokens):
    """Two of forty requests generate more in their last turn."""
    return requests_with(lambda request: longest_turn(request, tokens), (7, 8))


def test_what_may_be_chance_is_no_finding():
    """A gain of less than a tenth of a step needs an interval above 0; a larger one does not."""
    chance = [with_a_tail(tokens) for tokens in (60, 60, 160, 60, 60, 60)]
    rows, _ = found_in(*chance)
    each, _ = found_in(*[with_a_tail(tokens) for tokens in (80, 84, 88, 80, 84, 88)])
    large, _ = found_in(*[with_a_tail(tokens) for tokens in (60, 60, 900, 60, 60, 60)])

    assert [] == anomalies(rows)
    for found in (each, large):
        assert ["tail"] == [row["finding"] for row in anomalies(found)]
    assert each[0]["share"] < 0.1 < large[0]["share"]
    assert large[0]["low_s"] < 0 < each[0]["low_s"]


def test_one_bad_step_of_many_is_weighed_by_all():
    """The cost is per step; what one step of ten loses is not worth a line."""
    once = CASES["checkpoint"][0]
    rows, _ = found_in(QUIET, once, *([QUIET] * 3))
    rare, _ = found_in(QUIET, once, *([QUIET] * 9))
    first, _ = found_in(once, *([QUIET] * 3))

    assert [0.1] == [pytest.approx(row["recoverable_s"]) for row in anomalies(rows)]
    assert [2] == [row["mostly_step"] for row in anomalies(rows)]
    assert "mostly in step 2" in finding_list(rows)
    assert [] == anomalies(rare)
    # The warm-up is left out.
    assert [] == anomalies(first)


def test_the_costs_are_the_true_ones():
    """What a rule calls recoverable is what the step would save."""
    step = CASES["polling"][0]
    rows, (truth,) = found_in(step)
    (row,) = anomalies(rows)
    told = run_of(QUIET)[1][0]

    assert row["recoverable_s"] * 1e6 == pytest.approx(truth.duration_us - told.duration_us, abs=1)


def test_a_finding_states_how_many_steps_its_replay_used(monkeypatch):
    """The gain of some of the steps and the time of all of them differ; the text says of how many."""
    monkeypatch.setattr(sys.modules[chosen_steps.__module__], "MOST_STEPS", 2)
    steps = [replace(QUIET, poll_us=poll_us) for poll_us in (9, 500_000, 900_000, 1_300_000, 2_000)]
    rows, _ = found_in(*steps)
    (row,) = (row for row in rows if row["finding"] == "polling")

    assert (4, 2) == (row["steps"], row["replayed"])
    assert "from replays of 2 of 4 steps" in finding_list(rows)
    monkeypatch.undo()
    rows, _ = found_in(*steps)
    assert "from replays of" not in finding_list(rows)


def test_start_up_is_not_blamed_on_a_run_of_one_step():
    """Where the run's start was recorded: the time is accounted for, with nobody blamed and nothing to paste."""
    step, _ = CASES["late_start"]
    events, _ = events_of(step)
    start = {**next(each for each in events if each["event"] == "step"), "event": "init", "step": 0}
    found = {
        recorded: explained(tables_of([*([start] if recorded else []), *events]))["findings"]
        for recorded in (False, True)
    }
    blamed = [row for row in found[False] if row["finding"] == "late_start"]
    (told,) = [
        row for row in found[True] if row["finding"] in ("dispatch", "prepare_step", "late_start")
    ]

    assert 1 == len(blamed)
    assert "dispatch" == told["finding"]
    assert "in the first step, in which workers and agent loops start" in told["message"]
    assert ("dispatch", []) == (told["culprit"], told["overrides"])
    assert "agent-loop workers" not in told["advice"]
    assert blamed[0]["accounts"]["dispatch"] == told["accounts"]["dispatch"]


def test_start_up_is_not_blamed_on_two_steps_of_a_gpu():
    """The first prepare_step took 19.0 s there, the second less than a hundredth of that."""
    with load(DATA / "h100.tar.gz") as run:
        rows = explained(run.tables)["findings"]
    (told,) = [row for row in rows if "prepare_step" in (row["accounts"] or {})]

    assert "prepare_step" == told["finding"]
    assert "in the first step, in which workers and agent loops start" in told["message"]
    assert not told["overrides"]
