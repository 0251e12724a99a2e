"""Step durations: gaps are named for what they are, and a trend is not made of one outlier."""

import pytest

from verl_profiler.analysis.steps import step_durations, step_trend


def step(span, number, begin, *, gen=4.0, training=3.0, weights=1.0, rest=0.5):
    end = begin
    events = []
    for phase, length in (("gen", gen), ("update_actor", training), ("update_weights", weights)):
        events.append(span(phase, end, end + length, name="trainer_0", step=number))
        end += length
    end += rest
    return [*events, span("step", begin, end, name="trainer_0", step=number)], end


def run(span, lengths, gap=0.25, **more):
    events, now = [], 0.0
    for number, gen in enumerate(lengths, start=1):
        made, now = step(span, number, now, gen=gen, **more)
        events += made
        now += gap
    return events


def test_a_step_and_what_follows_it(span, tables):
    """Testing lies between steps; what else lies there is called other."""
    events, end = step(span, 1, 0.0)
    events.append(span("testing", end, end + 2, name="trainer_0", step=1))
    more, _ = step(span, 2, end + 2.75)

    first, second = step_durations(tables(events + more))

    expected = {
        "step_s": 8.5,
        "gen_s": 4.0,
        "training_s": 3.0,
        "weights_s": 1.0,
        "checkpoint_s": 0.0,
        "unaccounted_s": 0.5,
        "between_s": 2.75,
        "testing_s": 2.0,
        "between_other_s": 0.75,
        "to_next_s": 11.25,
        "outside_gen_s": None,
    }
    assert expected == {key: first[key] for key in expected}
    assert (None, None) == (second["between_s"], second["to_next_s"])


def test_a_missing_step_is_no_gap(span, tables):
    """From step 1 to step 3 lies more than the time between two steps."""
    events = [each for each in run(span, [4, 4, 4]) if each["step"] != 2]

    first, _ = step_durations(tables(events))

    assert (1, None, None) == (first["step"], first["between_s"], first["to_next_s"])


def test_without_the_trainer_the_gap_is_everything_else(span, tables):
    """Then only the rollout is known, by its requests."""
    events = [
        span("request", 0, 6, request_id="a", step=1),
        span("request", 10, 13, request_id="b", step=2),
    ]

    first, second = step_durations(tables(events))

    assert (False, 6.0, 4.0) == (first["finished"], first["gen_s"], first["outside_gen_s"])
    assert (None, None, None) == (first["step_s"], first["training_s"], first["between_s"])
    assert (3.0, None) == (second["gen_s"], second["outside_gen_s"])


def test_unusual_steps_are_marked(span, tables):
    """One of twenty took twice as long; the usual spread is not unusual."""
    lengths = [4 + number % 3 / 10 for number in range(20)]
    lengths[11] = 14

    rows = step_durations(tables(run(span, lengths)))

    assert [12] == [row["step"] for row in rows if row["unusual"]]


def test_the_trend_is_the_median_slope(span, tables):
    """Rollouts grow by 0.1 s a step; an outlier of a minute does not change that."""
    lengths = [4 + number / 10 for number in range(10)]
    lengths[5] = 64

    trends = {row["measure"]: row for row in step_trend(tables(run(span, lengths)))}

    assert trends["gen"]["slope_s_per_step"] == pytest.approx(0.1)
    assert trends["gen"]["change_s"] == pytest.approx(0.9)
    assert trends["gen"]["rising"] > 0.9
    assert trends["training"]["slope_s_per_step"] == 0
    assert trends["training"]["rising"] == 0.5


def test_two_steps_are_no_trend(span, tables):
    """A line goes through any two points."""
    assert [] == step_trend(tables(run(span, [4, 5])))
