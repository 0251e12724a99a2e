"""Steps that are over are compressed, and nothing of them is lost whatever fails."""

import errno
import gzip
import os
from pathlib import Path

import msgspec
import pytest
from recording.children import until

from verl_profiler.reading.reader import load
from verl_profiler.recording import recorder, step_costs
from verl_profiler.recording.clock import now
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings

STEPS = range(1, 9)
# The last three stay as they are.
OVER = [1, 2, 3, 4, 5]
EVENTS = 300
TEXT = "x" * 80


@pytest.fixture
def recording(worker_config):
    """A recorder that compresses, and flushes often."""
    events = EventSettings(max_gb=1)
    config = msgspec.structs.replace(worker_config, events=events)
    active = recorder.start(config, lambda: Identity("agent_loop", 0))
    yield active
    recorder.stop()


def record(step, events=EVENTS):
    for number in range(events):
        recorder.record("looked", now(), now(), {"number": number, "text": TEXT}, step)


@pytest.fixture(autouse=True)
def no_accounts(monkeypatch):
    """On a busy machine the account of a step's cost comes when its file is already compressed."""
    monkeypatch.setattr(step_costs, "INTERVAL_S", 600.0)


def written(active, step):
    """Wait until a step's lines are on the disk, so that each step is written in turn."""
    until(lambda: active.account()["waiting"] == 0 and folder(active, step).exists())


def folder(active, step):
    return Path(active.directory) / f"step_{step}"


def names(active, step):
    return sorted(file.name for file in folder(active, step).iterdir())


def numbers(directory):
    """Return the numbers of the events of each step, as the reader has them."""
    with load(Path(directory), cache=False) as opened:
        rows = opened.rows(
            "SELECT step, list(CAST(extra->>'$.number' AS INT) ORDER BY begin_us, "
            "CAST(extra->>'$.number' AS INT)) AS numbers "
            "FROM events WHERE event = 'looked' GROUP BY step ORDER BY step"
        )
        return {row["step"]: sorted(row["numbers"]) for row in rows}


ALL = {step: list(range(EVENTS)) for step in STEPS}


def test_steps_that_are_over_are_compressed(recording):
    """The last three are not; every line is there, for the reader and for gzip."""
    for step in STEPS:
        record(step)
        written(recording, step)
    until(lambda: all(names(recording, step) == ["worker_0.jsonl.gz"] for step in OVER))
    recorder.stop()

    assert all(names(recording, step) == ["worker_0.jsonl"] for step in STEPS if step not in OVER)
    assert ALL == numbers(recording.directory)
    lines = gzip.decompress((folder(recording, 1) / "worker_0.jsonl.gz").read_bytes())
    assert EVENTS == sum(b'"looked"' in line for line in lines.splitlines())


def test_late_lines_go_to_a_file_beside(recording):
    """And are read with the others."""
    for step in STEPS:
        record(step)
        written(recording, step)
    until(lambda: names(recording, 1) == ["worker_0.jsonl.gz"])
    record(1, 2)
    until(lambda: len(names(recording, 1)) == 2)
    recorder.stop()

    assert {**ALL, 1: sorted([*range(EVENTS), 0, 1])} == numbers(recording.directory)


@pytest.mark.parametrize("failing", ["fsync", "replace", "unlink"])
def test_where_a_disk_refuses_files_stay(recording, monkeypatch, capsys, failing):
    """It is reported once, and nothing is lost or there twice."""

    def refuse(path, *_more, **_named):
        if failing == "unlink" and Path(path).suffix != ".jsonl":
            return remove(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    remove = Path.unlink
    if failing == "fsync":
        monkeypatch.setattr(os, "fsync", refuse)
    else:
        monkeypatch.setattr(Path, failing, refuse)
    for step in STEPS:
        record(step)
        written(recording, step)
    until(lambda: "(not-compressed)" in capsys.readouterr().err)
    recorder.stop()
    monkeypatch.undo()

    assert ALL == numbers(recording.directory)
    assert "(not-compressed)" not in capsys.readouterr().err
    kept = {name for step in STEPS for name in names(recording, step)}
    assert kept <= {"worker_0.jsonl", "worker_0.jsonl.gz"}
    assert all("worker_0.jsonl" in names(recording, step) for step in STEPS)
