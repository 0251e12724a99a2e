"""Steps that are too large to be replayed: left out, and the output states it."""

import shutil
from pathlib import Path

import pytest

from verl_profiler.analysis.explain.what_if import step_replays
from verl_profiler.reading import losses
from verl_profiler.reading.reader import load

SMALL = Path(__file__).parents[1] / "data" / "small_run"


@pytest.fixture
def run(tmp_path):
    place = shutil.copytree(SMALL, tmp_path / "run", ignore=shutil.ignore_patterns(".cache"))
    with load(place) as opened:
        yield opened


def calls_of(run):
    return {
        row["step"]: row["calls"]
        for row in run.rows(
            "SELECT step, count(*) AS calls FROM event_fields "
            "WHERE event = 'engine_call' AND family = 'rollout' GROUP BY step ORDER BY step"
        )
    }


def test_a_step_with_too_many_calls_is_left_out_with_a_note(run, monkeypatch):
    calls = calls_of(run)
    largest = max(calls, key=calls.get)
    replayed = {row["step"] for row in step_replays(run.tables)}
    assert largest in replayed
    assert run.notes == []

    monkeypatch.setattr(losses, "REPLAYED_CALLS", calls[largest] - 1)
    left = {row["step"] for row in step_replays(run.tables)}

    assert largest not in left
    assert left == {step for step in replayed if calls[step] < calls[largest]}
    (note,) = run.notes
    assert note.startswith(
        f"What-if leaves out step {largest} with {calls[largest]:,} generate calls"
    )
