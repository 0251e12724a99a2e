"""The log beside the spans: equal where they are of one run, and each difference has its reason."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from verl_profiler.analysis.timer_differences import logged_and_recorded, timer_differences
from verl_profiler.reading.formats.console_steps import LoggedRun, StepLine
from verl_profiler.reading.reader import load

SOURCE = Path("a.log")
RUN = Path(__file__).parent.parent / "data/rehearsal_run.tar.gz"


@pytest.fixture(scope="module")
def recorded():
    """A run of the rehearsal, and what verl handed to its console there."""
    with load(RUN, cache=False) as opened:
        rows = opened.rows("SELECT step, extra FROM events WHERE event = 'metrics' ORDER BY step")
        lines = [
            StepLine(row["step"], metrics, SOURCE, number)
            for number, row in enumerate(rows)
            if "timing_s/step" in (metrics := json.loads(row["extra"])["metrics"])
        ]
        yield opened.tables, LoggedRun("a", lines, [1], SOURCE)


def changed(run, number, **values):
    """Return the run with other timers in a step; None takes one out."""
    lines = [
        replace(line, values={
            name: value
            for name, value in {**line.values, **{f"timing_s/{key}": new for key, new in values.items()}}.items()
            if value is not None
        }) if line.step == number else line
        for line in run.lines
    ]  # fmt: skip
    return replace(run, lines=lines)


def of(rows, step, timer):
    (row,) = [row for row in rows if (row["step"], row["timer"]) == (step, timer)]
    return row


def test_the_log_of_the_recorded_run_agrees_with_its_spans(recorded):
    """Every timer of every step, to less than a millisecond, testing outside the step too."""
    problems = []
    rows = logged_and_recorded(*recorded, None, problems)

    assert [] == problems
    assert {"step", "gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights",
            "testing", "unaccounted"} == {row["timer"] for row in rows}  # fmt: skip
    assert all(row["explained"] and abs(row["difference_s"]) < 0.001 for row in rows)
    assert all(row["difference_s"] >= 0 for row in rows if row["timer"] != "unaccounted")
    assert "unaccounted" == timer_differences(rows)[-1]["timer"]


def test_the_places_that_the_log_gives_are_those_of_the_spans(recorded):
    """What lies outside the step was found from the numbers; the spans know it."""
    tables, run = recorded
    from verl_profiler.analysis.console_timers import logged_phases

    inside = {
        (row["step"], row["phase"])
        for row in tables.rows("SELECT step, phase FROM phases WHERE parent = 'step'")
    }

    for row in logged_phases(run):
        if row["phase"] != "unaccounted":
            assert (row["place"] == "step") == ((row["step"], row["phase"]) in inside)


def test_a_log_of_another_run_is_noticed(recorded):
    """All steps differ."""
    tables, run = recorded
    other = changed(changed(run, 1, step=50.0), 2, step=60.0)
    problems = []
    rows = logged_and_recorded(tables, other, None, problems)

    assert ["a seems to be the log of another run: 2 of 2 steps differ."] == problems
    assert of(rows, 1, "step")["reason"].startswith("not known; is this the log")


def test_steps_that_only_one_of_them_has_are_no_contradiction(recorded):
    """Recording some steps only is usual; so is a log that begins later."""
    tables, run = recorded
    shifted = replace(run, lines=[replace(line, step=line.step + 1) for line in run.lines])
    problems = []
    rows = logged_and_recorded(tables, shifted, None, problems)

    assert "this step is not in the log" == of(rows, 1, "gen")["reason"]
    assert "this step was not recorded" == of(rows, 3, "gen")["reason"]
    assert of(rows, 1, "gen")["logged_s"] is None
    assert problems


def test_no_step_in_common_is_said(recorded):
    """The comparison would be empty."""
    tables, run = recorded
    problems = []
    logged_and_recorded(
        tables,
        replace(run, lines=[replace(line, step=line.step + 90) for line in run.lines]),
        None,
        problems,
    )

    assert ["a and the recorded run have no step in common."] == problems


def test_a_timer_that_one_of_them_lacks_is_named(recorded):
    """A user's own timer in the log, a span that the log lacks."""
    tables, run = recorded
    rows = logged_and_recorded(tables, changed(run, 1, mine=0.01, ref=None), None, [])

    assert (False, "no span of this name was recorded in this step") == (
        of(rows, 1, "mine")["explained"],
        of(rows, 1, "mine")["reason"],
    )
    assert (None, "verl does not print this timer") == (
        of(rows, 1, "ref")["logged_s"],
        of(rows, 1, "ref")["reason"],
    )


def test_a_span_that_verl_does_not_print_explains_what_it_leaves_uncovered(recorded):
    """Such as prepare_step: what no timer covers is shorter by it in the recording."""
    tables, run = recorded
    ref_s = run.lines[0].values["timing_s/ref"]
    rows = logged_and_recorded(tables, changed(run, 1, ref=None), None, [])

    assert of(rows, 1, "unaccounted")["difference_s"] == pytest.approx(-ref_s, abs=2e-3)
    assert (True, "the spans have ref, which verl does not print") == (
        of(rows, 1, "unaccounted")["explained"],
        of(rows, 1, "unaccounted")["reason"],
    )


def test_a_rounded_log_differs_by_its_rounding(recorded):
    """verl up to 0.4 prints three decimals."""
    tables, run = recorded
    lines = [
        replace(
            line,
            rounded=True,
            values={name: round(value, 3) for name, value in line.values.items()},
        )
        for line in run.lines
    ]
    rows = logged_and_recorded(tables, replace(run, lines=lines), None, [])

    assert all(row["explained"] for row in rows)
    assert "three decimals" in of(rows, 1, "gen")["reason"]


def test_a_difference_is_not_explained_away(recorded):
    """A tenth of a second in one timer shows in its row, and by timer with its step."""
    tables, run = recorded
    longer = run.lines[0].values["timing_s/ref"] + 0.1
    rows = logged_and_recorded(tables, changed(run, 1, ref=longer), None, [])
    by_timer = {row["timer"]: row for row in timer_differences(rows)}

    assert of(rows, 1, "ref")["difference_s"] == pytest.approx(-0.1, abs=1e-3)
    assert (False, 1, 1) == tuple(
        by_timer["ref"][key] for key in ("explained", "unexplained_steps", "largest_step")
    )
    assert by_timer["gen"]["explained"]


def test_only_the_chosen_steps_are_compared(recorded):
    """As elsewhere: both ends included."""
    assert {2} == {row["step"] for row in logged_and_recorded(*recorded, (2, 2), [])}
