"""A step with several `gen` has one length of it: their sum, wherever it is shown."""

import pytest

from verl_profiler.analysis.compare.step_metrics import step_metrics
from verl_profiler.analysis.steps import step_durations, step_phases, step_times

GENS = ((0, 5), (10, 30), (40, 52))
TOTAL_S = 5 + 20 + 12


def events(span, *, ended=True, name="trainer_0"):
    """Three times `gen` and an update; the longest lasts 20 s, from first to last are 52 s."""
    parts = [span("gen", begin, end, name=name, family="trainer") for begin, end in GENS]
    updates = [span("update_actor", 30, 40, name="trainer_0")] if ended else []
    return [*parts, *updates, *([span("step", 0, 60, name="trainer_0")] if ended else [])]


def one(rows, **equal):
    (row,) = (row for row in rows if all(row[key] == value for key, value in equal.items()))
    return row


@pytest.mark.parametrize("ended", [True, False])
def test_the_sum_everywhere(span, tables, ended):
    """With the step's end and, as after a crash, without it."""
    made = tables(events(span, ended=ended))
    shown = {
        "step_times": one(step_times(made))["gen_s"],
        "step_phases": one(step_phases(made), phase="gen")["duration_s"],
        "step_durations": one(step_durations(made))["gen_s"],
        "gens": one(made.rows("SELECT * FROM gens"))["duration_us"] / 1e6,
    }
    if ended:
        shown["step_metrics"] = one(step_metrics(made), name="gen")["value"]

    assert dict.fromkeys(shown, TOTAL_S) == shown


def test_of_several_workers_it_is_the_one_that_takes_longest(span, tables):
    """Where the trainer was not recorded: no sum over workers, no longest single one."""
    other = [span("gen", 0, 25, name="worker_1", family="trainer")]
    made = tables([*events(span, ended=False, name="worker_0"), *other])

    assert TOTAL_S == one(step_times(made))["gen_s"]
    assert TOTAL_S == one(step_durations(made))["gen_s"]
    assert TOTAL_S == one(step_phases(made), phase="gen")["duration_s"]
