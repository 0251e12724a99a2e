"""Versions behind at consumption, against runs whose tokens are counted by version while they are made."""

from collections import defaultdict
from pathlib import Path

import pytest
from truth.asynchronous_runs import EPOCH, Plan, Simulation, events_of
from truth.synthetic import tables_of

from verl_profiler.analysis.staleness import staleness
from verl_profiler.reading.reader import load


def long_and_short(number):
    """Every fourth sample takes longer than a step."""
    return (2600, 90, 900) if number % 4 == 0 else (150 + number, 30, 120)


PLANS = {
    "separate": Plan(),
    "trainer bound": Plan(train_ms=2700, ahead=8),
    "long requests": Plan(stages=long_and_short, steps=6, ahead=8),
    "long requests, redone": Plan(
        stages=long_and_short, steps=6, redo=True, ahead=8, train_ms=2400
    ),
    "shared": Plan(separate=False, ahead=8),
}


def of(rows, part):
    return [row for row in rows if row["part"] == part]


def ends_of(name, unit):
    """The ends of a quartile's name, which are one number where they are equal."""
    ends = [int(text) for text in name.removesuffix(unit).split(" to ")]
    assert len(ends) == len(set(ends))
    return ends[0], ends[-1]


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_versions_behind_and_off_policy_tokens(plan):
    """By step: of samples the newest and oldest version, of tokens their own."""
    run = Simulation(plan)
    rows = staleness(tables_of(events_of(run)))

    by_step = run.taken_by_step()
    assert {row["step"] for row in of(rows, "all")} == set(by_step)
    for row in of(rows, "all"):
        taken = by_step[row["step"]]
        waited = [each.trainer_version - max(each.tokens) for each in taken]
        oldest = [each.trainer_version - min(each.tokens) for each in taken]
        tokens = [
            (each.trainer_version - version, count)
            for each in taken
            for version, count in each.tokens.items()
        ]
        assert row["samples"] == len(taken)
        assert row["waited"] == pytest.approx(sum(waited) / len(taken))
        assert row["behind"] == pytest.approx(sum(oldest) / len(taken))
        assert row["spanned"] == pytest.approx((sum(oldest) - sum(waited)) / len(taken))
        assert row["max_behind"] == max(oldest)
        assert row["tokens"] == sum(count for _, count in tokens)
        assert row["off_policy_tokens"] == sum(count for behind, count in tokens if behind > 0)
        assert row["unknown_tokens"] == 0
        mine = [each for each in of(rows, "versions") if each["step"] == row["step"]]
        assert {int(each["what"]): each["samples"] for each in mine if each["samples"]} == {
            behind: oldest.count(behind) for behind in oldest
        }
        for each in mine:
            own = sum(count for behind, count in tokens if behind == int(each["what"]))
            assert each["tokens"] == own
    assert any(row["off_policy_tokens"] for row in of(rows, "all"))


def test_each_grouping_has_every_sample():
    """Lengths are quartiles of the run's consumed samples, not of each step."""
    run = Simulation(PLANS["long requests"])
    rows = staleness(tables_of(events_of(run)))

    for part in ("all", "versions", "length", "prompt_length", "attempts"):
        assert sum(row["samples"] for row in of(rows, part)) == len(run.consumed)
    for part, unit, length_of in (
        ("length", " tokens", lambda sample: sum(sample.tokens.values())),
        ("prompt_length", " prompt tokens", lambda sample: sample.prompt_tokens),
    ):
        names = {row["what"] for row in of(rows, part)}
        assert len(names) == 4
        for name in names:
            low, high = ends_of(name, unit)
            own = [sample for sample in run.consumed if low <= length_of(sample) <= high]
            behind = [sample.trainer_version - min(sample.tokens) for sample in own]
            mine = [row for row in of(rows, part) if row["what"] == name]
            assert sum(row["samples"] for row in mine) == len(own)
            assert sum(row["behind"] * row["samples"] for row in mine) == pytest.approx(sum(behind))
            assert sum(row["tokens"] for row in mine) == sum(sum(s.tokens.values()) for s in own)


def test_prompts_of_unknown_length_are_in_no_group():
    """Older runs lack it; nothing else changes."""
    events = events_of(Simulation(PLANS["separate"]))
    before = staleness(tables_of(events))
    for event in events:
        (event["extra"] or {}).pop("prompt_tokens", None)
    after = staleness(tables_of(events))

    assert of(before, "prompt_length")
    assert after == [row for row in before if row["part"] != "prompt_length"]


def test_long_and_resumed_samples_are_the_stale_ones():
    """Their tokens span versions; short samples only wait."""
    run = Simulation(PLANS["long requests"])
    rows = staleness(tables_of(events_of(run)))

    spanned = defaultdict(float)
    for row in of(rows, "attempts"):
        spanned[row["what"]] += row["spanned"] * row["samples"]
    resumed = [each for each in run.consumed if any(call.attempt for call in each.calls)]
    assert resumed
    assert spanned["not aborted"] == 0
    assert spanned["aborted and resumed"] == pytest.approx(
        sum(max(each.tokens) - min(each.tokens) for each in resumed)
    )
    stalest = of(rows, "prompt")[0]
    assert stalest["behind"] == max(
        each.trainer_version - min(each.tokens) for each in run.consumed
    )


def test_verls_own_numbers_stand_beside():
    """Of the step whose metrics they are."""
    run = Simulation(Plan())
    events = events_of(run)
    events.append(
        {
            **events[-1], "name": "trainer_0", "role": "trainer", "rank": 0, "event": "metrics",
            "step": 2, "begin_us": EPOCH, "end_us": EPOCH, "duration_us": None,
            "extra": {"metrics": {
                "training/off_policy/trajectory_staleness/mean": 0.25,
                "training/off_policy/trajectory_staleness_worst/mean": 1.5,
            }},
        }
    )  # fmt: skip
    rows = of(staleness(tables_of(events)), "all")

    assert {row["step"]: row["logged_waited"] for row in rows}[2] == 0.25
    assert {row["step"]: row["logged_behind"] for row in rows}[2] == 1.5
    assert all(row["logged_behind"] is None for row in rows if row["step"] != 2)


def test_tokens_whose_version_was_not_recorded_are_not_counted_as_either():
    """A sample of several versions whose calls lack theirs; one of a single version has no doubt."""
    run = Simulation(PLANS["long requests"])
    events = [
        {**each, "extra": {k: v for k, v in (each["extra"] or {}).items() if k != "weight_version"}}
        for each in events_of(run)
    ]
    rows = of(staleness(tables_of(events)), "all")

    mixed = [sample for sample in run.consumed if len(sample.tokens) > 1]
    assert sum(row["unknown_tokens"] for row in rows) == sum(
        sum(sample.tokens.values()) for sample in mixed
    )
    assert mixed


@pytest.mark.parametrize("name", ["colocate_async_run", "separate_async_run"])
def test_recorded_runs_agree_with_verls_own_numbers(name):
    """verl computes them from its tensors."""
    with load([Path(__file__).parents[1] / f"data/{name}.tar.gz"]) as run:
        rows = of(staleness(run.tables), "all")

    assert len(rows) == 4
    for row in rows:
        assert row["waited"] == pytest.approx(row["logged_waited"])
        assert row["behind"] == pytest.approx(row["logged_behind"])
