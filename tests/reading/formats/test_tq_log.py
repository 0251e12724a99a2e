"""TransferQueue lines of console logs: what is read, paired, placed, and what is said of the rest."""

import gzip
import io
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from picked import picked
from tq_lines import WALL_S, Writer, log_of

from verl_profiler.analysis.tq import tq_functions, tq_throughput
from verl_profiler.reading.formats.console_tq import MIB
from verl_profiler.reading.formats.tq_log import read_logs
from verl_profiler.reading.reader import load

DATA = Path(__file__).parents[2] / "data" / "tq"
# The lines that the guide shows, to the letter.
GUIDE = """\
[TQ-TRACE] trace_id=a1b2c3d4 | func=rollout | stage=FUNCTION_END | total_duration=0.914024s | \
get_ratio=5.69% | compute_ratio=87.52% | put_ratio=6.78%
[TQ-DETAIL] trace_id=a1b2c3d4 | stage=TQ_CLIENT_PUT_END | duration=0.060000s | throughput_mbps=253.33
"""
PARTS = [("get", 0.05), ("compute", 0.8), ("put", 0.06)]
# verl 0.9.1's own lines, from a real run.
OWN = (
    "(WorkerDict pid=11227) INFO:2026-11-21 01:48:15,475:Task compute_log_prob (pid=11227) is getting "
    "len_samples=8, cost time: 0.11585474014282227\n"
    "(WorkerDict pid=11227) INFO:2026-11-21 01:48:15,971:Task compute_log_prob (pid=11227) is writing "
    "to TransferQueue, cost time: 0.0335235595703125s)\n"
    "(WorkerDict pid=11227) INFO:2026-11-21 01:48:16,210:Task update_actor (pid=11227) is getting "
    "len_samples=8, cost time: 0.048453569412231445\n"
)


def read(tmp_path, text, name="training.log"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_logs([path])


def times(row):
    return [row[key] for key in ("duration_us", "get_us", "compute_us", "put_us")]


def test_the_guides_own_lines_are_read(tmp_path):
    """A last line alone gives the whole call; a put's size follows from its speed."""
    log = read(tmp_path, GUIDE)

    (call,), (put,) = log.calls, log.transfers
    assert [914_024, 52_008, 799_954, 61_971] == times(call)
    assert ("rollout", "a1b2c3d4", True, True) == picked(call, "func trace_id finished estimated")
    expected = ("tq_put", 60_000, round(253.33 * 0.06 * MIB))
    assert expected == picked(put, "event duration_us size_bytes")
    (note,) = log.notes
    assert "lack stage lines" in note


@pytest.mark.parametrize("fork", [True, False])
def test_every_stage_is_exact_and_on_the_wall_clock(tmp_path, fork):
    """The process's clock gives microseconds, the logger's prefix where they are."""
    writer = Writer(fork=fork)
    writer.call(1.0, PARTS, trace_id="a", mb=15.2)

    # A newer tracing may write more.
    log = read(tmp_path, writer.text().replace("status=ok", "status=ok | node=n 1 | what="))

    (call,) = log.calls
    get, put = log.transfers
    begin_us = (WALL_S + 1) * 1_000_000
    assert [910_000, 50_000, 800_000, 60_000] == times(call)
    assert [begin_us, begin_us + 910_000] == [call["begin_us"], call["end_us"]]
    assert ["get", "compute", "put"] == [row["stage"] for row in log.stages]
    assert [50_000, 850_000] == [row["begin_us"] - begin_us for row in log.stages[1:]]
    assert [(32, 50_000), (32, 60_000)] == [(row["rows"], row["duration_us"]) for row in (get, put)]
    assert [15.2, 15.2] == [round(row["size_bytes"] / MIB, 3) for row in (get, put)]
    assert ["generate", "generate"] == [get["func"], put["func"]]
    assert call["more"] == (None if fork else {"node": "n 1", "what": ""})
    # A logger's prefix has no time zone; who knows it can give it.
    ahead = read_logs([tmp_path / "training.log"], utc_offset_s=8 * 3600)
    assert begin_us - 8 * 3600 * 1_000_000 == ahead.calls[0]["begin_us"]
    assert [] == log.notes


def test_stages_that_come_again_add_up(tmp_path):
    """A function that reads and writes the queue in its own code does so as often as it likes."""
    writer = Writer()
    writer.call(
        0, [("compute", 0.1), ("get", 0.02), ("compute", 0.2), ("get", 0.03), ("put", 0.01)]
    )

    log = read(tmp_path, writer.text())

    assert [360_000, 50_000, 300_000, 10_000] == times(log.calls[0])
    assert 5 == len(log.stages)


def test_a_failed_call_says_so(tmp_path):
    """Other endings than an error are none."""
    writer = Writer()
    writer.call(0, PARTS, status="error")
    writer.call(2, PARTS, status="not_collected")

    log = read(tmp_path, writer.text())

    assert ["error", None] == [row["status"] for row in log.calls]


def test_a_call_that_never_ended_is_counted_with_its_last_line(tmp_path):
    """In the fork, functions that put nothing end so."""
    writer = Writer(fork=True)
    writer.call(0, PARTS[:2], ends=False)
    writer.call(2, PARTS)

    log = read(tmp_path, writer.text())

    assert [(False, "COMPUTE_END"), (True, "FUNCTION_END")] == [
        (row["finished"], row["stage"]) for row in log.calls
    ]
    (note,) = log.notes
    assert "1 calls of generate did not end" in note


def test_concurrent_calls_of_one_process_are_told_apart(tmp_path):
    """Also without ids: a stage's end says when it began."""
    writer = Writer(fork=True)
    lengths = [0.9, 0.3, 0.6, 0.1]
    for number, length in enumerate(lengths):
        writer.call(number * 0.01, [("get", 0.001), ("compute", length), ("put", 0.002)])

    log = read(tmp_path, writer.text())

    assert sorted(round(length * 1e6) for length in lengths) == sorted(
        row["compute_us"] for row in log.calls
    )
    assert all(row["duration_us"] == row["compute_us"] + 3_000 for row in log.calls)


@settings(deadline=None, max_examples=15)
@given(st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_the_lines_does_not_matter(tmp_path_factory, chance, fork):
    """Ray holds lines back that look like another process's, some seconds at a time."""
    writers = [Writer(f"Worker pid={pid}", fork=fork, zero_s=pid) for pid in (7, 8)]
    for writer in writers:
        for number in range(4):
            parts = [("get", 0.03 + 0.01 * number), ("compute", 0.5), ("put", 0.02)]
            writer.call(number * 0.2, parts, mb=1.5)
    straight = log_of(*writers).splitlines(keepends=True)
    shuffled = list(straight)
    chance.shuffle(shuffled)
    folder = tmp_path_factory.mktemp("order")

    first, second = (read(folder, "".join(lines)) for lines in (straight, shuffled))

    def facts(rows, *keys):
        return sorted(tuple(row[key] for key in ("name", "begin_us", *keys)) for row in rows)

    assert facts(first.calls, "duration_us", "get_us", "compute_us", "put_us") == facts(
        second.calls, "duration_us", "get_us", "compute_us", "put_us"
    )
    assert facts(first.transfers, "event", "duration_us", "size_bytes") == facts(
        second.transfers, "event", "duration_us", "size_bytes"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("duration=0.050000s", "duration=0.0500"),
        ("duration=0.050000s", "duration=-1.0s"),
        ("stage=GET_END", "stage=GET_LEAVE"),
        ("func=generate | stage=GET_END | duration", "func=generate | duration"),
        ("step=3", "step=three"),
    ],
)
def test_a_line_that_cannot_be_read_is_counted_and_shown(tmp_path, old, new):
    """The lines around it are read."""
    writer = Writer()
    writer.call(0, PARTS, step=3)

    log = read(tmp_path, writer.text().replace(old, new))

    assert log.counts["unreadable"] >= 1
    assert any("unreadable lines were left out" in note for note in log.notes)
    assert any(note.startswith("  ") and "training.log:" in note for note in log.notes)


def test_ray_shows_several_lines_as_one(tmp_path):
    """It says how many; so many are missing, and which."""
    writer = Writer()
    writer.call(0, PARTS)
    lines = writer.text().splitlines()
    lines[-1] += (
        "\x1b[32m [repeated 4x across cluster]\x1b[0m (Ray deduplicates logs by default. Set \
RAY_DEDUP_LOGS=0 to disable log deduplication)"
    )

    log = read(tmp_path, "\n".join(lines) + "\n")

    assert [910_000, 50_000, 800_000, 60_000] == times(log.calls[0])
    assert 3 == log.missing["generate", "FUNCTION_END"]
    (note,) = log.notes
    assert "3 lines are missing" in note


def test_processes_are_told_apart_by_rays_prefix(tmp_path):
    """With the same trace id, function and time, on the same or another host."""
    names = ["Worker pid=7", "Worker pid=8", "Worker pid=7, ip=10.0.0.2"]
    writers = [Writer(name, fork=True, zero_s=100 + n) for n, name in enumerate(names)]
    for writer in writers:
        writer.call(0, PARTS)

    log = read(tmp_path, log_of(*writers))

    assert {"Worker pid=7", "Worker pid=8", "Worker pid=7 ip=10.0.0.2"} == {
        row["name"] for row in log.calls
    }
    assert 3 == len(log.calls)
    assert 1 == len({row["begin_us"] for row in log.calls})


def test_steps_come_from_the_lines_or_from_the_log(tmp_path):
    """Where a call names none, it is in the step that ends after it."""
    writer = Writer(fork=True)
    for step in (1, 2, 3):
        writer.call(step * 10, PARTS)
        if step < 3:
            writer.say(step * 10 + 5, f"step:{step} - actor/loss:0.1 - timing_s/step:9")
    named = Writer()
    named.call(0, PARTS, step=7)

    inferred, given_ones = read(tmp_path, writer.text()), read(tmp_path, named.text())

    assert [1, 2, 3] == [row["step"] for row in inferred.calls]
    (note,) = inferred.notes
    assert "assigned to the step during which" in note
    assert ([7], []) == ([row["step"] for row in given_ones.calls], given_ones.notes)


def test_a_line_that_ray_shows_late_is_in_its_step(tmp_path):
    """By its time, not by its place in the log."""
    writer = Writer(fork=True)
    writer.call(10, PARTS)
    writer.call(30, PARTS)
    writer.say(11, "step:1 - actor/loss:0.1")
    lines = writer.text().splitlines(keepends=True)
    late = [line for line in lines if "15:10" not in line and "COMPUTE" in line][:2]
    others = [line for line in lines if line not in late]
    place = next(number for number, line in enumerate(others) if "step:1" in line)

    log = read(tmp_path, "".join([*others[: place + 1], *late, *others[place + 1 :]]))

    assert [1, 2] == [row["step"] for row in log.calls]
    assert [910_000, 50_000, 800_000, 60_000] == times(log.calls[0])


def test_a_last_line_without_its_end_is_left_out(tmp_path):
    """A number in it may have been cut: 12 is not 123."""
    writer = Writer()
    writer.call(0, PARTS)

    log = read(tmp_path, writer.text().rstrip("\n"))

    assert not log.calls[0]["finished"]
    assert any(note.startswith("  ") and "the line has no end" in note for note in log.notes)


def test_verls_own_lines_are_calls_too(tmp_path):
    """Get and put exactly, the rest by the log's clock; update_actor puts nothing."""
    log = read(tmp_path, OWN)

    first, second = log.calls
    assert [611_855, 115_855, 462_476, 33_524] == times(first)
    assert (None, 48_454, None, None) == tuple(times(second))
    assert (True, None) == (first["finished"], second["finished"])
    (note,) = log.notes
    assert "known only from verl's own cost time lines" in note


def test_lines_of_the_forks_other_log_are_transfers(tmp_path):
    """[TQ-LOG] tells of the trainer's own gets and puts, without sizes."""
    text = (
        "[TQ-LOG] op=TQ_GET | func=fit:advantages | stage=START\n"
        "[TQ-LOG] op=TQ_GET | func=fit:advantages | stage=END | duration=0.250000s\n"
        "[TQ-LOG] op=TQ_CLEAR | func=fit | stage=END | duration=0.100000s\n"
    )
    log = read(tmp_path, text)

    assert [("tq_get", "fit:advantages", 250_000), ("tq_clear", "fit", 100_000)] == [
        (row["event"], row["func"], row["duration_us"]) for row in log.transfers
    ]


def test_two_lines_in_one_are_two_lines(tmp_path):
    """The line end between two processes' lines may be lost, with or without Ray's prefix."""
    for process in ("Worker pid=7", ""):
        writer = Writer(process)
        writer.call(0, PARTS)
        log = read(tmp_path, writer.text().replace("\n", "") + "\n")

        assert [910_000, 50_000, 800_000, 60_000] == times(log.calls[0])
        assert [] == log.notes


def test_logs_are_read_compressed_in_parts_and_from_a_pipe(tmp_path, monkeypatch):
    """A call may begin in one file and end in the next."""
    writer = Writer(fork=True)
    writer.call(0, PARTS)
    writer.call(2, PARTS)
    data = writer.text().encode()
    middle = data.index(b"\n", len(data) // 4) + 1
    paths = [tmp_path / "training.log.1.gz", tmp_path / "training.log"]
    paths[0].write_bytes(gzip.compress(data[:middle]))
    paths[1].write_bytes(data[middle:])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))

    parts, piped = read_logs(paths), read_logs([Path("-")])

    assert [910_000, 910_000] == [row["duration_us"] for row in parts.calls]
    assert [times(row) for row in parts.calls] == [times(row) for row in piped.calls]
    assert "training.log.1.gz and 1 more" == parts.label


def test_lines_that_are_told_twice_count_once(tmp_path):
    """A log and a copy of it, or a driver's log and a worker's."""
    for fork in (True, False):
        writer = Writer(fork=fork)
        writer.call(0, PARTS, mb=2)
        writer.call(2, PARTS, mb=2)

        log = read(tmp_path, writer.text() + writer.text())

        assert [910_000, 910_000] == [row["duration_us"] for row in log.calls]
        assert [50_000, 50_000] == [row["get_us"] for row in log.calls]
        assert 4 == len(log.transfers)
        (note,) = log.notes
        assert "occur more than once" in note
    assert 3 == len(read(tmp_path, OWN).calls) + 1 == len(read(tmp_path, OWN + OWN).calls) + 1


def test_gets_outside_of_functions_are_of_none(tmp_path):
    """A line with an id names its function, if it is in one."""
    writer = Writer("TaskRunner pid=9")
    writer.call(0, PARTS, func="fit")
    outside = (
        "[TQ-DETAIL] trace_id=N/A | stage=TQ_CLIENT_GET_END | duration=0.010000s | data_size_mb=1.00 | "
        "timestamp=109.000000 | pid=9 | call=x9 | status=ok"
    )
    writer.say(9, outside)

    log = read(tmp_path, writer.text())

    assert [(None, "x9")] == [(row["func"], row["call"]) for row in log.transfers]


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_damaged_logs_never_fail_and_lose_only_what_is_damaged(tmp_path_factory, data):
    """Any bytes changed, cut, doubled or put in: whole calls elsewhere stay as they are."""
    writer = Writer()
    for number in range(6):
        writer.call(number, PARTS, mb=2.0, step=number)
    text = writer.text().encode()
    lines = text.splitlines(keepends=True)
    broken = data.draw(st.integers(0, len(lines) - 1))
    line = lines[broken]
    place = data.draw(st.integers(0, len(line)))
    junk = data.draw(st.binary(max_size=12)).replace(b"\n", b"")
    cut = data.draw(st.integers(0, 8))
    lines[broken] = line[:place] + junk + line[place + cut :].rstrip(b"\n") + b"\n"
    # What begins like a compressed file is one.
    assume(not lines[0].startswith(b"\x1f\x8b"))
    path = tmp_path_factory.mktemp("damaged") / "training.log"
    path.write_bytes(b"".join(lines))

    log = read_logs([path])

    per_call = len(lines) // 6
    untouched = {f"c{n + 1}" for n in range(6)} - {f"c{broken // per_call + 1}"}
    whole = {row["call"] for row in log.calls if [910_000, 50_000, 800_000, 60_000] == times(row)}
    assert untouched <= whole


def test_a_real_runs_log_and_its_events_say_the_same():
    """A rehearsal with all switches: 161 calls of 9 functions, told twice."""
    with load(DATA / "run.tar.gz", cache=False) as run:
        log = read_logs([DATA / "console.log.gz"])
        told = {row["func"]: row for row in tq_functions(log.tables())}
        recorded = {row["func"]: row for row in tq_functions(run.tables)}
        rates = [tq_throughput(tables) for tables in (log.tables(), run.tables)]

    assert 161 == sum(row["calls"] for row in recorded.values())
    assert recorded.keys() == told.keys()
    for func, row in recorded.items():
        for key, value in row.items():
            if isinstance(value, float):
                assert value == pytest.approx(told[func][key], abs=2e-4, rel=2e-3), (func, key)
            elif key not in ("run", "rows"):
                assert value == told[func][key], (func, key)
    (note,) = log.notes
    assert "were also traced" in note
    # Lines count what is no tensor too, events do not.
    for line, event in zip(
        *([r for r in each if r["caller"] is None] for each in rates), strict=True
    ):
        assert line["size_bytes"] >= event["size_bytes"]
