"""A step with several `gen` has one length of it: their sum, wherever it is shown."""

import pytest

from verl_profiler.analysis.captures import gpu_idle
from verl_profiler.analysis.compare.step_metrics import step_metrics
from verl_profiler.analysis.steps import step_durations, step_phases, step_times
from verl_profiler.reading.tables.tables import Tables

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


def test_a_gpus_time_in_gen_is_that_of_all_gens(span, tables):
    """Not from the first one's begin to the last one's end: the update between them is no `gen`."""
    window = {"run": "r", "step": 1, "host": "h", "file": "f", "begin_ns": 0, "end_ns": 50 * 10**9}
    busy = [
        {"run": "r", "step": 1, "host": "h", "gpu": "0", "name": "a", "file": "f", "kind": "kernel",
         "begin_ns": begin * 10**9, "end_ns": end * 10**9}
        for begin, end in ((1, 2), (20, 45))
    ]  # fmt: skip
    made = Tables.of(
        {
            "events": events(span),
            "processes": [{"run": "r", "name": "trainer_0", "role": "trainer", "rank": 0}],
            "captures": [window],
            "capture_work": busy,
        }
    )
    row = one(gpu_idle(made))

    # Of the third only 10 s lie within the capture; 1 s, 10 s and 5 s of the three are busy.
    assert (5 + 20 + 10, 1 + 10 + 5) == (row["gen_s"], row["gen_busy_s"])
