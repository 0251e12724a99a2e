"""Tables kept beside a run: used while nothing changed, never when something did."""

import json
import os
from datetime import datetime, timedelta

import pytest
from analyses import ANALYSES

from verl_profiler.analysis.registry import explained, summarized
from verl_profiler.reading.reader import load

# Between them, they read every table that is kept.
ASKED = (
    "step_times", "request_times", "engine_times", "tool_times", "turn_times",
    "critical_path", "stragglers", "reward_times",
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_chunk_per_step(monkeypatch):
    """Of the run's two steps and its start-up."""
    monkeypatch.setattr("verl_profiler.reading.tables.tables.CHUNK_EVENTS", 1)
    monkeypatch.setattr("verl_profiler.reading.convert.PART_BYTES", 1)
    monkeypatch.setattr("verl_profiler.reading.cache_folder.UNUSED_S", 0)


def answers(run, *, cache=True):
    with load(run, cache=cache) as opened:
        return asked(opened.tables)


def asked(tables):
    made = {name: ANALYSES[name](tables) for name in ASKED}
    return json.loads(json.dumps(made, default=str), parse_float=lambda text: round(float(text), 7))


def cached_files(run, table="*", kind="parquet"):
    return {
        path.name: path.stat().st_ino
        for path in (run / ".cache" / "events-1").glob(f"{table}-*.{kind}")
        if not path.name.startswith("part-")
    }


def test_the_second_reading_makes_nothing(run):
    """No file is written again."""
    first = answers(run)
    files = cached_files(run)

    assert first == answers(run)
    assert files == cached_files(run)
    assert {name.split("-")[0] for name in files} == {
        "asynchronous", "engine_call_times", "engine_calls", "engine_requests", "event_counts", "last_requests", "phases", "rank_spans", "request_caused_wait",
        "lags", "requests", "reward_scores", "samples", "steps", "tool_caused_wait",
        "tool_calls", "transfers", "turns",
    }  # fmt: skip


def test_a_run_that_grows_makes_only_its_last_step_again(run):
    """The turns of the steps before stay as they are."""
    answers(run)
    before = cached_files(run, "turns")
    path = run / "step_2" / "worker_0.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-4]) + "\n")

    assert answers(run) == answers(run, cache=False)
    after = cached_files(run, "turns")
    assert 2 == len(set(before.items()) & set(after.items()))
    assert 3 == len(after)


def test_steps_before_those_that_show_that_a_run_is_asynchronous_are_made_again(run):
    """Once requests outlast the `gen` of a later step, nothing waited for those of the first."""

    def rewritten(path, change):
        lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def moved(line, seconds=3600.0):
        at = datetime.fromisoformat(line["timestamp"]) + timedelta(seconds=seconds)
        return {**line, "timestamp": at.isoformat()}

    def of_no_length(line):
        if line["event"] != "gen":
            return line
        return moved(line, -line["duration_sec"]) | {"duration_sec": 0.0}

    # The steps of chunks are further apart than clocks.
    for path in (run / "step_2").iterdir():
        rewritten(path, moved)
    before = answers(run)["stragglers"]
    rewritten(run / "step_2" / "trainer_0.jsonl", of_no_length)

    after = answers(run)

    assert after == answers(run, cache=False)
    assert any(row["kind"] == "request" for row in before)
    assert not any(row["kind"] == "request" for row in after["stragglers"])


def test_other_content_of_the_same_size_is_seen(run):
    """A file that was written again is not taken for the old one."""
    before = answers(run)
    path = run / "step_1" / "worker_0.jsonl"
    status = path.stat()
    path.write_text(path.read_text().replace('"duration_sec":0', '"duration_sec":1'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    after = answers(run)

    assert path.stat().st_size == status.st_size
    assert after == answers(run, cache=False)
    assert before != after


def step_times(tables, steps=None):
    return summarized(tables, steps, ["step_times"])["step_times"]


@pytest.mark.parametrize("answer", [explained, step_times])
def test_an_answer_is_kept_and_made_again_when_the_run_grows(run, answer):
    """Read back as it was made; other steps, or another event, have another file."""
    with load(run) as opened:
        first = json.loads(json.dumps(answer(opened.tables)))
    kept = cached_files(run, answer.__name__, "json")
    (file,) = kept
    path = run / ".cache" / "events-1" / file
    assert first == json.loads(path.read_text())

    with load(run) as opened:
        assert first == answer(opened.tables)
        assert kept == cached_files(run, answer.__name__, "json")
        assert first != answer(opened.tables, (2, 2))
    assert 2 == len(cached_files(run, answer.__name__, "json"))
    trainer = next(run.glob("step_2/trainer_0.*"))
    lines = [json.loads(line) for line in trainer.read_text().splitlines()]
    (step,) = (line for line in lines if line.get("event") == "step")
    with trainer.open("a") as file:
        own = {**step, "event": "mine", "duration_sec": step["duration_sec"] / 3}
        file.write(json.dumps(own) + "\n")
    with load(run) as opened:
        assert first != json.loads(json.dumps(answer(opened.tables)))
