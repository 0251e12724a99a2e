"""What a trace of a large run holds, against the events that the test wrote."""

import json
import random

import pytest
from event_files import ended, write_lines
from views.perfetto_reading import read_trace

from verl_profiler.cli import main
from verl_profiler.exports import trace_selection

WORKERS = 20
REQUESTS = 400
STEP_S = 100.0


def line(event, begin_s, end_s, step, rank, **extra):
    return ended(event, end_s, end_s - begin_s, step=step, rank=rank, **extra)


def run_of(folder, steps, lengths_s):
    """Requests that all begin with their step; return (step, id, duration) of each."""
    dice = random.Random(1)
    truth = []
    for step in range(1, steps + 1):
        begin_s = (step - 1) * STEP_S
        files = {}
        for number in range(REQUESTS):
            name, rank = f"worker_{number % WORKERS}", number % WORKERS
            request = f"{dice.getrandbits(64):016x}"
            length_s = lengths_s(dice)
            end_s = begin_s + length_s
            about = {"request_id": request, "sample": number, "session": 0}
            failed = {"status": "error", "error": "ToolError"} if number == 7 else {}
            files.setdefault(name, []).extend(
                (
                    line("turn", begin_s, end_s, step, rank, turn=0, **about),
                    line("request", begin_s, end_s, step, rank, **about, **failed),
                )
            )
            truth.append((step, request, length_s, bool(failed)))
        files["trainer_0"] = [
            line("gen", begin_s, begin_s + 90, step, 0),
            line("step", begin_s, begin_s + 95, step, 0),
        ]
        write_lines(folder, **files)
    return truth


def exported(run, path, *options):
    assert main(["export", "perfetto", str(run), "-o", str(path), "--no-cache", *options]) == 0
    return read_trace(path)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large") / "run"
    return folder, run_of(folder, 3, lambda dice: dice.uniform(10, 80))


def requests_of(reading):
    return {
        span.fields["request_id"]: span for span in reading.spans if span.name[:8] == "request "
    }


def test_concurrent_requests_share_few_lanes(large, tmp_path, capsys):
    """400 requests at once, in 20 processes: the slowest of each step, failures, and a sample."""
    run, truth = large
    reading = exported(run, tmp_path / "a.pftrace")

    drawn = requests_of(reading)
    lanes = {span.track for span in drawn.values()}
    assert len(lanes) <= trace_selection._SAMPLED_LANES
    assert {reading.path(lane) for lane in lanes} == {("whole run", "requests (sampled)")}
    for step in (1, 2, 3):
        mine = sorted((row for row in truth if row[0] == step), key=lambda row: -row[2])
        assert {row[1] for row in mine[:16]} <= set(drawn)
        assert {row[1] for row in mine if row[3]} <= set(drawn)
    # The others are no tail: some are faster than half of all.
    half_s = sorted(row[2] for row in truth)[len(truth) // 2]
    lengths = {row[1]: row[2] for row in truth}
    assert sum(lengths[request] < half_s for request in drawn) >= 8
    error = capsys.readouterr().err
    assert f"{len(drawn)} of 1,200 requests are drawn" in error
    assert "--all draws everything" in error
    (whole,) = [track for track in reading.tracks.values() if track.name == "whole run"]
    assert "--all draws everything" in whole.description
    # Counters count what is not drawn, too.
    (values,) = [
        values
        for track, values in reading.counters.items()
        if reading.path(track) == ("whole run", "requests in flight")
    ]
    assert max(value for _, value in values) == REQUESTS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """8,192 requests at once in 64 workers, and 16 engines; rank 17 of 64 is slow, rank 40 fast."""
    folder = tmp_path_factory.mktemp("cluster") / "run"
    dice = random.Random(2)
    files = {
        "trainer_0": [line("gen", 0, 90, 1, 0), line("step", 0, 95, 1, 0)],
        "reward_0": [],
    }
    for number in range(8_192):
        worker, engine = number % 64, number % 16
        end_s = dice.uniform(10, 80)
        about = {"request_id": f"{dice.getrandbits(64):016x}", "sample": number, "session": 0}
        own = {**about, "uid": f"u{number}"}
        call = {"turn": 0, "engine_request_id": f"e{number}", **about}
        files.setdefault(f"worker_{worker}", []).extend(
            (
                line("engine_call", 1, end_s - 2, 1, worker, **call),
                line("turn", 0.5, end_s - 1, 1, worker, turn=0, **about),
                line("request", 0, end_s, 1, worker, **own),
            )
        )
        files.setdefault(f"engine_{engine}", []).append(
            line("engine_request", 1.5, end_s - 3, 1, engine, **call)
        )
        files["reward_0"].append(
            line("reward_score", end_s - 1, end_s - 0.5, 1, 0, uid=f"u{number}", session=0)
        )
    for rank in range(64):
        end_s = {17: 94.0, 40: 90.5}.get(rank, 92.0)
        files[f"actor_{rank}"] = [
            line(
                "memory", end_s, end_s, 1, rank, allocated_bytes=1, reserved_bytes=2, used_bytes=3
            ),
            line("update_actor", 90, end_s, 1, rank),
        ]
    return write_lines(folder, **files)


def test_a_cluster_takes_at_most_200_tracks(cluster, tmp_path, capsys):
    """Of each role the slowest and the fastest process are drawn."""
    reading = exported(cluster, tmp_path / "a.pftrace")

    assert reading.faults == []
    assert len(reading.tracks) <= 200
    assert (tmp_path / "a.pftrace").stat().st_size < 100e6
    names = {track.name for track in reading.tracks.values()}
    assert {"actor_17", "actor_40", "trainer_0"} <= names
    assert len([name for name in names if name.startswith("actor_")]) < 10
    assert len(requests_of(reading)) >= 24
    assert any(track.name == "reward scores (sampled)" for track in reading.tracks.values())
    error = capsys.readouterr().err
    assert "of 146 processes are drawn" in error
    assert "of 8,192 requests are drawn" in error


def test_all_draws_all(large, tmp_path, capsys):
    """Texts that come again are written once: in the first span that has it, and in the table of texts."""
    reading = exported(large[0], tmp_path / "a.pftrace", "--all")
    names = {track.name for track in reading.tracks.values()}
    assert len(requests_of(reading)) == 3 * REQUESTS
    assert {f"worker_{rank}" for rank in range(WORKERS)} <= names
    assert "drawn" not in capsys.readouterr().err
    assert (tmp_path / "a.pftrace").read_bytes().count(large[1][0][1].encode()) == 2


def test_few_at_a_time_share_lanes_however_many_there_are(tmp_path, capsys):
    """One after the other in each process: nothing needs to be left out."""
    run = tmp_path / "run"
    truth = run_of(run, 1, lambda dice: 60.0)
    for path in run.glob("step_1/worker_*.jsonl"):
        # Each pair of lines is a request of two seconds, after the one before.
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        for number, each in enumerate(lines):
            end_s = 2.0 * (number // 2 + 1)
            each["timestamp"] = ended("request", end_s)["timestamp"]
            each["duration_sec"] = 2.0
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    reading = exported(run, tmp_path / "a.pftrace")
    drawn = requests_of(reading)
    assert len(drawn) == len(truth)
    assert len({span.track for span in drawn.values()}) == WORKERS
    assert capsys.readouterr().err == ""


def test_more_than_a_trace_holds_leaves_steps_out(large, tmp_path, capsys, monkeypatch):
    """The longest steps stay; counters are of the steps that are drawn."""
    monkeypatch.setattr(trace_selection, "_SPANS", 20)
    reading = exported(large[0], tmp_path / "a.pftrace")
    steps = {span.name for span in reading.spans if span.name.startswith("step")}
    assert len(steps) == 1
    assert "1 of 3 steps are drawn" in capsys.readouterr().err
