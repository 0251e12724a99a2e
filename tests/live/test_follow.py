"""Following the files of a run: each byte once, whole lines only."""

import json
import random
from pathlib import Path

import pytest
from recorded import grow, lines_in_order, unpacked

from verl_profiler.live import follow
from verl_profiler.live.follow import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return unpacked(tmp_path_factory.mktemp("recorded"))


def polled(followed):
    return [(name, step, line.event) for name, step, line in followed.poll()]


def test_a_growing_run_is_read_as_a_whole_one(run, tmp_path):
    """Whatever pieces its files grow by, torn lines included; nothing is read twice."""
    source = random.Random(3)
    ordered = lines_in_order(run)
    expected = [
        (path.rpartition("/")[2][:-6], json.loads(line)["step"], json.loads(line)["event"])
        for path, line in ordered
    ]
    followed, found = Run(tmp_path), []
    for path, line in ordered:
        cut = source.randrange(len(line))
        grow(tmp_path, [(path, line[:cut])])
        if source.random() < 0.02:
            found += polled(followed)
        grow(tmp_path, [(path, line[cut:])])
    found += polled(followed)

    assert sorted(expected) == sorted(found)
    assert [] == polled(followed)
    assert (0, 0) == (followed.unreadable, followed.behind_bytes)


def test_of_a_long_run_the_beginning_is_not_read(run, tmp_path):
    """Of steps before the latest three, the trainer's files; later all of it."""
    for step in range(1, 6):
        for name in ("trainer_0", "worker_0"):
            line = {"timestamp": "2026-11-21T02:00:00+00:00", "event": "x", "step": step}
            grow(tmp_path, [(f"step_{step}/{name}.jsonl", json.dumps(line).encode() + b"\n")])
    followed = Run(tmp_path)
    first = polled(followed)
    line = b'{"timestamp":"2026-11-21T02:00:00+00:00","event":"late","step":4}\n'
    grow(tmp_path, [("step_6/worker_0.jsonl", line), ("step_4/worker_0.jsonl", line)])

    assert {("trainer_0", step) for step in range(1, 6)} | {
        ("worker_0", step) for step in (3, 4, 5)
    } == {(name, step) for name, step, _ in first}
    assert [("worker_0", 4, "late")] * 2 == polled(followed)
    grow(tmp_path, [("step_4/worker_0.jsonl", line)])
    grow(tmp_path, [("step_7/worker_0.jsonl", line)])
    assert [("worker_0", 4, "late")] * 2 == polled(followed)


def test_the_queue_of_a_long_run_is_followed_in_earlier_steps(tmp_path):
    """It counts its steps by the samples in it, which may be older than the latest three."""
    line = b'{"timestamp":"2026-11-21T02:00:00+00:00","event":"queue_depth","step":2}\n'
    for step in range(1, 7):
        grow(tmp_path, [(f"step_{step}/trainer_0.jsonl", line)])
    grow(tmp_path, [("step_2/message_queue_host_7.jsonl", line)])
    followed = Run(tmp_path)

    assert 7 == len(polled(followed))
    grow(tmp_path, [("step_2/message_queue_host_7.jsonl", line)])
    assert [("message_queue_host_7", 2, "queue_depth")] == polled(followed)


def test_broken_lines_are_counted_and_passed_over(tmp_path, monkeypatch):
    """Also one that is longer than what is read at once."""
    monkeypatch.setattr(follow, "_BLOCK_BYTES", 256)
    good = b'{"timestamp":"2026-11-21T02:00:00+00:00","event":"turn","step":1}\n'
    pieces = [good, b"{\n", b"\xff\xfe\n", b"x" * 1000 + b"\n", b'{"event":3}\n', good]
    grow(tmp_path, [("step_1/worker_0.jsonl", piece) for piece in pieces])
    followed = Run(tmp_path)

    assert ["turn", "turn"] == [event for _, _, event in polled(followed)]
    assert followed.unreadable >= 4


def test_much_is_read_in_portions(tmp_path, monkeypatch):
    """The screen says how much is left."""
    monkeypatch.setattr(follow, "_AT_ONCE_BYTES", 200)
    line = b'{"timestamp":"2026-11-21T02:00:00+00:00","event":"turn","step":1}\n'
    monkeypatch.setattr(follow, "_BLOCK_BYTES", 2 * len(line))
    grow(tmp_path, [(f"step_1/worker_{rank}.jsonl", line * 6) for rank in range(2)])
    followed = Run(tmp_path)
    counts = []
    while not counts or followed.behind_bytes:
        counts.append(len(polled(followed)))

    assert 12 == sum(counts)
    assert len(counts) > 1


def test_earlier_steps_are_read_in_portions_too(tmp_path, monkeypatch):
    """The trainer's lines of steps before the latest ones, whatever their size."""
    line = b'{"timestamp":"2026-11-21T02:00:00+00:00","event":"step","step":1}\n'
    monkeypatch.setattr(follow, "_AT_ONCE_BYTES", 2 * len(line))
    monkeypatch.setattr(follow, "_BLOCK_BYTES", len(line))
    for step in range(1, 31):
        grow(tmp_path, [(f"step_{step}/trainer_0.jsonl", line * 2)])
    followed = Run(tmp_path)
    found = polled(followed)
    while followed.behind_bytes:
        found += polled(followed)

    assert 60 == len(found)


def test_a_folder_that_is_away_is_no_error(tmp_path):
    """A network file system comes back."""
    followed = Run(tmp_path / "gone")

    assert ([], {}, {}) == (polled(followed), followed.launch(), followed.headers())


def test_a_refresh_of_a_long_run_looks_at_a_limited_number_of_files(tmp_path, monkeypatch):
    """Not at all that were ever followed: that grew with the steps, and more slowly than they did."""
    line = b'{"timestamp":"2026-11-21T02:00:00+00:00","event":"x","step":1}\n'
    followed = Run(tmp_path)
    looked = []
    stat = Path.stat
    for step in range(1, 61):
        for rank in range(3):
            grow(tmp_path, [(f"step_{step}/worker_{rank}.jsonl", line)])
        polled(followed)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", lambda path, **kw: looked.append(path) or stat(path, **kw))
        polled(followed)

    files = [path for path in looked if path.suffix == ".jsonl"]
    assert 0 < len(files) <= 3 * (follow._LATEST + follow._RECENT + follow._IN_TURN)


def test_a_late_line_of_a_step_long_ago_is_read_after_some_refreshes(tmp_path):
    """Older steps are looked at in turn."""
    line = b'{"timestamp":"2026-11-21T02:00:00+00:00","event":"x","step":2}\n'
    followed = Run(tmp_path)
    for step in range(1, 61):
        grow(tmp_path, [(f"step_{step}/worker_0.jsonl", line)])
        polled(followed)
    grow(tmp_path, [("step_2/worker_0.jsonl", line)])
    found = [each for _ in range(60) for each in polled(followed)]

    assert [("worker_0", 2, "x")] == found
