"""What a trace of a large run holds, against the events that the test wrote."""

import random

import pytest
from event_files import ended, write_lines
from views.perfetto_reading import read_trace

from verl_profiler.cli import main
from verl_profiler.exports import tracks

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


def test_a_step_that_is_too_large_has_its_slow_requests_failures_and_a_sample(
    large, tmp_path, capsys, monkeypatch
):
    """400 requests at once, in 20 processes; counters count what is not drawn, too."""
    monkeypatch.setattr(tracks, "SPAN_BUDGET", 66)
    run, truth = large
    reading = exported(run, tmp_path / "a.pftrace")

    drawn = requests_of(reading)
    (step,) = {row[0] for row in truth if row[1] in drawn}
    mine = sorted((row for row in truth if row[0] == step), key=lambda row: -row[2])
    assert {row[1] for row in mine[:16]} <= set(drawn) <= {row[1] for row in mine}
    assert {row[1] for row in mine if row[3]} <= set(drawn)
    assert 20 <= len(drawn) <= 33
    # The others are no tail: some are faster than half of all.
    half_s = mine[len(mine) // 2][2]
    lengths = {row[1]: row[2] for row in truth}
    assert sum(lengths[request] < half_s for request in drawn) >= 3
    error = capsys.readouterr().err
    assert f"{len(drawn)} of 400 requests are drawn, at most 32 per step" in error
    assert "1 of 3 steps are drawn" in error
    assert "--all draws everything" in error
    (whole,) = [track for track in reading.tracks.values() if track.name == "whole run"]
    assert "--all draws everything" in whole.description
    (values,) = [
        values
        for track, values in reading.counters.items()
        if reading.path(track) == ("whole run", "requests in flight")
    ]
    assert max(value for _, value in values) == REQUESTS


def test_all_draws_all(large, tmp_path, capsys):
    """Texts that come again are written once: in the first span that has it, and in the table of texts."""
    reading = exported(large[0], tmp_path / "a.pftrace", "--all")
    names = {track.name for track in reading.tracks.values()}
    assert len(requests_of(reading)) == 3 * REQUESTS
    assert {f"worker_{rank}" for rank in range(WORKERS)} <= names
    assert "drawn" not in capsys.readouterr().err
    assert (tmp_path / "a.pftrace").read_bytes().count(large[1][0][1].encode()) == 2
