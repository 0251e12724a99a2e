"""`verify`: a change that was made up gives what was predicted, half of it, or nothing."""

import random
from dataclasses import replace

import pytest
from truth.synthetic import SECOND, run_of
from truth.test_culprits import healthy

from verl_profiler.analysis.explain.verification import verified
from verl_profiler.analysis.registry import explained
from verl_profiler.analysis.steps import step_times


def run(poll_us, seed, steps=10):
    """A run that polls, whose steps vary by some per cent."""
    chance = random.Random(seed)
    made = [
        replace(healthy(n), poll_us=poll_us, gap_us=chance.randrange(1_000, 40_000))
        for n in range(1, steps + 1)
    ]
    tables, _ = run_of(*made)
    return {row["finding"]: row for row in explained(tables)["findings"]}, step_times(tables)


@pytest.fixture(scope="module")
def before():
    found, rows = run(2 * SECOND, 1)
    return found["polling"], rows


@pytest.mark.parametrize(
    ("poll_us", "verdict"),
    [
        (None, "kept"),
        pytest.param(200_000, "kept", marks=pytest.mark.nightly),
        (2 * SECOND, "not kept"),
    ],
)
def test_what_was_kept_is_told(before, poll_us, verdict):
    """Without polling, ten times as often, and with nothing changed."""
    predicted, rows = before
    remaining, after = run(poll_us, 2)
    left = remaining.get("polling", {"recoverable_s": None})["recoverable_s"]
    result = verified(predicted, rows, after, left)

    mean = [sum(row["duration_s"] for row in each) / len(each) for each in (rows, after)]
    assert verdict == result["verdict"]
    assert pytest.approx(mean[0] - mean[1]) == result["measured_s"]
    assert result["measured_low_s"] <= result["measured_s"] <= result["measured_high_s"]
    assert pytest.approx(result["measured_s"] - result["predicted_s"]) == result["miss_s"]
    assert (left is None) == (result["remaining_s"] is None)


def test_runs_that_do_other_work_prove_nothing(before):
    """Half of the requests are faster without any fix."""
    predicted, rows = before
    fewer = [{**row, "requests": row["requests"] // 2, "duration_s": 0.1} for row in rows]
    result = verified(predicted, rows, fewer, None)

    assert "undecided" == result["verdict"]
    assert {"requests": -0.5} == result["work_changes"]


def test_two_steps_prove_nothing(before):
    """There is no interval."""
    predicted, rows = before
    result = verified(predicted, rows, rows[:2], None)

    assert ("undecided", None) == (result["verdict"], result["measured_low_s"])
