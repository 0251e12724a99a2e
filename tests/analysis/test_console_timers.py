"""Logged timers: where each lies is found from the numbers, and the parts make up the step."""

from pathlib import Path

import pytest
from console_logs import FOLDER, FORMS
from hypothesis import given, settings
from hypothesis import strategies as st
from picked import picked

from verl_profiler.analysis.console_timers import (
    COUNTS,
    generation_times,
    logged_phases,
    logged_steps,
    metric_summary,
    timer_places,
)
from verl_profiler.reading.formats.console_steps import LoggedRun, StepLine, logged_runs

SOURCE = Path("a.log")


def run_of(steps, *, rounded=False, begins=None):
    """Return a run with these timers by step."""
    lines = [
        StepLine(
            step,
            {f"timing_s/{name}": value for name, value in timers.items()},
            SOURCE,
            step,
            rounded=rounded,
            validated="testing" in timers,
        )
        for step, timers in steps.items()
    ]
    return LoggedRun("a", lines, begins or [lines[0].step], SOURCE)


def places(run):
    return {name: place.place for name, place in timer_places(run.lines).items()}


def fixture(name):
    (run,) = logged_runs([FOLDER / f"{name}.log"], [])
    return run


@pytest.mark.parametrize("name", FORMS)
def test_every_version_s_timers_are_placed_where_that_version_has_them(name):
    """From the numbers alone: no log names its version."""
    form = FORMS[name]
    outer = {"testing", "save_checkpoint", "start_profile", "stop_profile", "update_weights"}
    found = places(fixture(name))

    assert all("gen" == found[child] for child in form.children)
    assert not set(form.counts) & set(found)
    for timer in outer & set(found):
        assert ("step" if timer in form.inside else "outside") == found[timer], timer
    assert {"step"} == {place for timer, place in found.items() if timer in form.timers} - {
        "outside"
    }


def test_the_timers_of_a_real_run_are_placed():
    """verl 0.9.1 on a CPU; two ranks, and a first step in which much waits outside all timers."""
    run = fixture("verl-0.9.1-real")
    steps = logged_steps(run)

    assert {"step"} == set(places(run).values())
    assert [2, 2, 2] == [row["gpus"] for row in steps]
    assert [38.69389989232494 * 2, 402.7823507458932 * 2] == [
        pytest.approx(row["tokens_per_s"]) for row in steps[:2]
    ]
    rests = [row["duration_s"] for row in logged_phases(run) if row["phase"] == "unaccounted"]
    assert rests == pytest.approx([22.5467, 0.0513, 0.0264], abs=1e-3)


# A step with much time that no timer covers has room for testing, and that proves nothing.
ROOM = {step: {"gen": 5.0, "step": 20.0 + step % 3 * 0.1} for step in range(1, 9)}


@pytest.mark.parametrize(
    ("steps", "place"),
    [
        # verl 0.6 and later.
        (
            {1: {"gen": 5.0, "step": 6.0}, 2: {"gen": 5.0, "step": 6.0, "testing": 2.0}},
            ("outside", "step 2 is too short to hold it"),
        ),
        (
            {**ROOM, 4: {**ROOM[4], "testing": 3.0}},
            ("outside", "steps that have it are not longer"),
        ),
        # verl 0.5 and earlier.
        (
            {**ROOM, 4: {"gen": 5.0, "step": 23.0, "testing": 3.0}},
            ("step", "steps that have it are longer by it"),
        ),
        # Also where every step has a validation, so that none is without.
        (
            {1: {"gen": 5.0, "step": 8.01, "testing": 3.0}},
            ("step", "it fills the time that no other timer covers"),
        ),
    ],
)
def test_testing_is_placed_by_the_lengths_of_steps(steps, place):
    """With the reason."""
    assert place == timer_places(run_of(steps).lines)["testing"]


@pytest.mark.parametrize(
    ("rounded", "timer", "place"),
    [(True, "testing", "step"), (False, "testing", "outside"), (False, "save_checkpoint", "step")],
)
def test_where_the_numbers_allow_both_the_habit_of_verl_counts(rounded, timer, place):
    """Up to 0.4 everything is inside, and its numbers have three decimals."""
    run = run_of({1: {"gen": 5.0, "step": 20.0, timer: 3.0}}, rounded=rounded)

    assert place == places(run)[timer]


def test_a_timer_without_room_is_outside_or_said_to_overlap():
    """Room for either alone is not room for both; a user's inside gen would make them too long."""
    run = run_of({1: {"gen": 5.0, "step": 9.0, "save_checkpoint": 3.0, "testing": 3.0}})
    own = run_of({1: {"gen": 5.0, "step": 8.0, "my_filter": 2.0, "my_tool": 4.0}})

    assert {"gen": "step", "save_checkpoint": "step", "testing": "outside"} == places(run)
    assert {"gen": "step", "my_filter": "step", "my_tool": "overlapping"} == places(own)


def test_counts_are_no_times():
    """verl puts numbers of tokens and requests, and a ratio, under timing_s/."""
    counts = {f"agent_loop/slowest/{count}": 4096 for count in COUNTS}
    run = run_of({1: {"gen": 5.0, "step": 6.0, **counts}})

    assert {"gen": "step"} == places(run)
    assert ["gen"] == [row["timer"] for row in generation_times(run)]
    assert not any(count in row["metric"] for row in metric_summary(run) for count in COUNTS)


@pytest.mark.parametrize("name", FORMS)
def test_the_number_of_gpus_follows_from_the_throughput(name):
    """Also where numbers have three decimals."""
    form, run = FORMS[name], fixture(name)

    assert {form.gpus} == {row["gpus"] for row in logged_steps(run)}
    for row in logged_steps(run):
        assert row["tokens_per_s"] == pytest.approx(row["total_tokens"] / row["step_s"], rel=1e-3)


TIMERS = st.dictionaries(
    st.sampled_from(["gen", "ref", "adv", "update_actor", "mine", "testing", "save_checkpoint"]),
    st.floats(0, 100),
    min_size=1,
)


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 40), TIMERS, min_size=1), st.floats(0, 50), st.randoms())
def test_whatever_the_timers_are_the_parts_are_positive_and_add_up(steps, rest, draw):
    """Every timer is in one place; what is in the stack is never longer than the step."""
    made = {
        step: {
            **timers,
            "step": rest + sum(value for value in timers.values() if draw.random() > 0.3),
        }
        for step, timers in sorted(steps.items())
    }
    run = run_of(made)
    rows = logged_phases(run)

    for step in logged_steps(run):
        inside = [row for row in rows if row["step"] == step["step"] and row["place"] == "step"]
        together = sum(row["duration_s"] for row in inside)
        assert all(row["duration_s"] >= 0 for row in inside)
        assert together == pytest.approx(step["step_s"] + step["overlap_s"], abs=1e-3)
    for number, timers in made.items():
        assert set(timers) - {"step"} == {
            row["phase"] for row in rows if row["step"] == number and row["phase"] != "unaccounted"
        }


def test_a_log_without_the_step_s_own_time_has_timers_and_no_rest():
    """Forks drop metrics."""
    (row,) = logged_phases(run_of({1: {"gen": 5.0}}))
    (step,) = logged_steps(run_of({1: {"gen": 5.0}}))

    assert ("gen", None) == (row["phase"], row["share"])
    assert (None, 5.0, None, None) == picked(step, "step_s accounted_s gpus tokens_per_s")


def test_gpus_that_make_no_whole_number_are_not_told():
    """Another definition of throughput than verl's."""
    values = {
        "perf/total_num_tokens": 1000.0,
        "perf/time_per_step": 10.0,
        "perf/throughput": 66.0,
        "timing_s/step": 10.0,
    }
    (row,) = logged_steps(LoggedRun("a", [StepLine(1, values, SOURCE, 1)], [1], SOURCE))

    assert (66.0, None, None) == (row["tokens_per_s_per_gpu"], row["gpus"], row["tokens_per_s"])
