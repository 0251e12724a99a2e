"""What goes wrong around a recorder: every event taken is written once or counted, nothing is raised."""

import asyncio
import contextlib
import errno
import json
import os
import stat
import threading
import time
import weakref
from pathlib import Path

import msgspec
import pytest
from picked import picked
from reading_back import headers_of, lines_of
from recording.children import PATIENCE_S, run_child, until

from verl_profiler import log_manager, span
from verl_profiler.recording import recorder
from verl_profiler.recording.identity import Identity


def start(worker_config):
    return recorder.start(worker_config, lambda: Identity("agent_loop", 0))


def header_of(directory):
    (header,) = headers_of(directory).values()
    return header


def numbers(directory):
    return [line["extra"]["n"] for line in lines_of(directory)]


class Disk:
    """Stands in for `os.write` of event lines: refuses, or hangs."""

    def __init__(self, monkeypatch):
        self.refuses = False
        self.hangs = threading.Event()
        self.hangs.set()
        self.refused = 0
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor, data):
        data = bytes(data)
        if data.startswith(b'{"timestamp"'):
            self.hangs.wait(PATIENCE_S)
            if self.refuses:
                self.refused += 1
                raise OSError(errno.ENOSPC, "No space left on device")
        return self._write(descriptor, data)


# A full disk


def files_of(worker_config):
    return list(Path(worker_config.directory).rglob("*.jsonl"))


def test_more_than_may_wait_for_a_disk_is_counted(worker_config, monkeypatch, capsys):
    """As many as may wait, the first ones, are kept."""
    disk = Disk(monkeypatch)
    disk.refuses = True
    start(msgspec.structs.replace(worker_config, max_pending=1000))
    for begin in range(0, 3000, 500):
        for n in range(begin, begin + 500):
            recorder.record("turn", 0, 1, {"n": n}, 1)
        refused = disk.refused
        until(lambda refused=refused: disk.refused > refused + 1)
    disk.refuses = False
    recorder.stop()

    kept = numbers(worker_config.directory)
    counters = header_of(worker_config.directory)["counters"]
    assert list(range(1000)) == kept[:1000]
    assert 3000 == len(kept) + counters["dropped"]
    assert counters["dropped"] >= 1500
    assert "dropped and counted" in capsys.readouterr().err


def test_a_disk_that_is_really_full_and_then_has_room(worker_config):
    """The kernel cuts writes where it likes; afterwards every line is there, once and whole."""
    finished = run_child(
        worker_config,
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        for n in range(1000):
            recorder.record("turn", 0, 1, {"n": n}, 1)
            time.sleep(0.0005)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        recorder.stop()
        """,
    )
    assert list(range(1000)) == numbers(worker_config.directory), finished.stderr
    counters = header_of(worker_config.directory)["counters"]
    assert counters["write_errors"] > 3
    assert 0 == counters["dropped"]


def tearing(monkeypatch, file, cuts):
    """Cut writes to a file so, each followed by one that fails; return a function that tells whether all were."""
    write = os.write
    left, failures = list(cuts), []

    def cut(descriptor, data):
        if failures and failures[-1] is None:
            failures[-1] = OSError(errno.EIO, "Input/output error")
            raise failures[-1]
        if not left or os.readlink(f"/proc/self/fd/{descriptor}") != str(file):
            return write(descriptor, data)
        failures.append(None)
        return write(descriptor, bytes(data)[: left.pop(0)])

    monkeypatch.setattr(os, "write", cut)
    return lambda: not left and None not in failures


def whole_lines_are(expected, file, active):
    whole = []
    for line in file.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            whole.append(json.loads(line)["extra"]["n"])
    assert expected == sorted(whole)
    assert len(expected) == active.account()["events"] - active.account()["own_events"]


@pytest.mark.parametrize("cuts", [(-90,), (-1,), (-90, -1), (1, -1), (-1, 0), (-90, -90, 1)])
def test_a_torn_line_in_a_file_of_the_callers_choice(worker_config, tmp_path, monkeypatch, cuts):
    """Somebody else may append meanwhile: it stays as a line of its own, before the whole one.

    What lacks its end alone is whole, and was written again.
    """
    file = tmp_path / "shared.jsonl"
    torn = tearing(monkeypatch, file, cuts)
    active = start(worker_config)
    log_manager.log(file, "mine", extra={"n": 1}, step=1)
    until(torn)
    log_manager.log(file, "mine", extra={"n": 2}, step=1)
    recorder.stop()

    whole_lines_are([1, 2], file, active)


def test_lines_of_another_step_do_not_continue_a_piece(worker_config, tmp_path, monkeypatch):
    """They go to the same file of the caller's, and came right after it: such a line could not be read."""
    file = tmp_path / "shared.jsonl"
    tearing(monkeypatch, file, (90,))
    active = start(msgspec.structs.replace(worker_config, flush_interval_s=60.0))
    for step in (1, 2):
        log_manager.log(file, "mine", extra={"n": step}, step=step)
    recorder.stop()

    whole_lines_are([1, 2], file, active)


def test_a_disk_that_hangs_at_the_end_is_reported(worker_config, monkeypatch, capsys):
    """In bounded time, with the number of events."""
    disk = Disk(monkeypatch)
    active = start(worker_config)
    active._writer.stall_s = 0.2
    disk.hangs.clear()
    for n in range(1000):
        recorder.record("turn", 0, 1, {"n": n}, 1)
    recorder.stop()
    said = capsys.readouterr().err
    writer = active._writer._thread
    disk.hangs.set()
    writer.join(PATIENCE_S)

    assert "1,000 events were not written" in said
    kept = numbers(worker_config.directory)
    assert 1000 == len(kept) + header_of(worker_config.directory)["counters"]["dropped"]


# Bad events


class Unprintable:
    """Its representation raises, ends the thread, or never comes."""

    def __init__(self, error=None):
        self.error = error
        self.called = False

    def __repr__(self):
        self.called = True
        if self.error is None:
            time.sleep(PATIENCE_S)
            return ""
        raise self.error

    __str__ = __repr__
    __getattr__ = __repr__


def test_code_of_the_callers_objects_is_not_run(worker_config):
    """So it can neither raise, nor end the writer, nor hold it up; None never comes back."""
    start(worker_config)
    errors = (ValueError("no"), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), None)
    objects = [Unprintable(error) for error in errors]
    for bad in objects:
        recorder.record("turn", 0, 1, {"bad": bad, "in": [bad]}, 1)
        with span("mine", bad=bad):
            pass
        log_manager.log(None, "turn", extra={"bad": bad, "in": {"x": bad}}, step=1)
    recorder.stop()

    shown = [line["extra"]["bad"] for line in lines_of(worker_config.directory)]
    assert 3 * len(errors) == len(shown)
    assert all("Unprintable" in text for text in shown)
    assert not any(bad.called for bad in objects)


NOT_RECORDED = {
    "NaN": {"duration": float("nan")},
    "infinite": {"duration": float("inf")},
    "negative": {"duration": -1},
    "text duration": {"duration": "0.25"},
    "list extra": {"extra": ["a"]},
    "text extra": {"extra": "a"},
    "path of int": {"log_path": 5},
    "path with NUL": {"log_path": "step_1/a\0b.jsonl"},
    "unhashable step": {"step": [1]},
    "text step": {"step": "first"},
    "huge step": {"step": 1 << 31},
    "event of int": {"event": 5},
    "workid of list": {"workid": [0]},
    "key of ours": {"timestamp": "yesterday"},
}
# A begin, an extra and an event of a wrong type, and a step that cannot be hashed.
BY_PROBES = [
    ("e", "a", 1, None, 1),
    ("e", 0, 1, ["a"], 1),
    (5, 0, 1, None, 1),
    ("e", 0, 1, None, [1]),
]


def test_a_bad_event_is_counted_and_costs_no_other(worker_config, capsys):
    """The first of its kind is printed; the host sees nothing."""
    events = msgspec.structs.replace(worker_config.events, steps=(1,))
    active = start(msgspec.structs.replace(worker_config, events=events))
    count = 0
    for case, changes in NOT_RECORDED.items():
        recorder.record("turn", 0, 1, {"n": count}, 1)
        log_manager.log(**{"log_path": None, "event": "e", "step": 1, **changes})
        count += 1
        until(lambda count=count: sum(active.account()["dropped_by"].values()) == count)
        assert {"bad_event": count} == active.account()["dropped_by"], case
    for bad in BY_PROBES:
        recorder.record(*bad)
    recorder.record("turn", 0, 1, {"n": count}, 1)
    recorder.stop()

    dropped = header_of(worker_config.directory)["counters"]["dropped_by"]
    assert list(range(count + 1)) == numbers(worker_config.directory)
    assert {"bad_event": count + len(BY_PROBES)} == dropped
    printed = capsys.readouterr().err.splitlines()
    assert 1 < len(printed) == len({*printed}) < count


def test_a_path_reaches_the_console_as_bounded_text(worker_config, capsys):
    """Neither an escape sequence nor a line of its own, nor the password of a URL, nor 5,000 characters."""
    start(worker_config)
    path = "/proc/x\x1b[2J\n[verl-profiler] forged\u202e/https://me:hunter2@h/"
    log_manager.log(f"{path}{'d' * 5_000}/a.jsonl", "e")
    recorder.stop()

    (printed,) = capsys.readouterr().err.splitlines()
    assert r"/proc/x\x1b[2J\n[verl-profiler] forged\u202e/" in printed
    assert "hunter2" not in printed
    assert "events are dropped (events-lost)" in printed
    assert len(printed) < 1_200


def test_numbers_of_other_libraries_are_numbers(worker_config):
    """`step=np.int64(7)` is step 7."""
    numpy = pytest.importorskip("numpy")
    start(worker_config)
    log_manager.log(
        None,
        "turn",
        duration=numpy.float32(0.5),
        extra={"n": numpy.int64(3), "x": numpy.float32(1.5), "one": numpy.ones(1)},
        workid=numpy.int32(4),
        step=numpy.int64(7),
    )
    recorder.record("turn", 0, 1, {"n": numpy.int64(4)}, numpy.int64(7))
    recorder.stop()

    logged, recorded = lines_of(worker_config.directory)
    assert ["timestamp", "event", "duration_sec", "extra", "workid", "step"] == list(logged)
    assert {"step_7"} == {file.parent.name for file in files_of(worker_config)}
    assert {"n": 3, "x": 1.5, "one": 1.0} == logged["extra"]
    assert (0.5, 4, 7) == (logged["duration_sec"], logged["workid"], logged["step"])
    assert (7, {"n": 4}) == (recorded["step"], recorded["extra"])


def deep():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    return nested


LARGE = {
    "text": lambda: "x" * 15_000_000,
    "texts": lambda: ["\u0001" * 9000] * 100,
    "many keys": lambda: {f"key {n}": n for n in range(100_000)},
    "long keys": lambda: {"k" * 100_000: 1},
    "wide": lambda: [[["x" * 100] * 100] * 100] * 100,
    "deep": deep,
    "integer": lambda: 10**5000,
    "bytes": lambda: b"x" * 1_000_000,
}


def test_no_line_is_longer_than_64_kib(worker_config):
    """What is cut is there in part; everything else is whole."""
    start(worker_config)
    for make in LARGE.values():
        value = make()
        recorder.record("turn", 0, 1, {"large": value, "after": "x"}, 1)
        log_manager.log(None, "turn", extra={"large": value, "after": "x"}, step=1)
        log_manager.log(
            None, "turn", extra={"large": "x" * 50_000, "after": "x"}, step=1, large=value
        )
    recorder.stop()

    (file,) = files_of(worker_config)
    with file.open("rb") as lines:
        assert max(map(len, lines)) <= 64 * 1024
    found = lines_of(worker_config.directory)
    assert 3 * len(LARGE) == len(found)
    for cut in (*(line["extra"]["large"] for line in found[:2]), found[2]["large"]):
        assert cut.startswith("xx")
        assert cut.endswith("(15,000,000 characters)")


def test_a_lone_surrogate_costs_no_field(worker_config):
    """Nor does one in the event's name."""
    start(worker_config)
    recorder.record("turn", 0, 1, {"n": 0, "text": "a\ud800b", "k\udfff": 1}, 1)
    log_manager.log(None, "e\ud800", extra={"n": 1, "text": "ü\ud800"}, step=1, more="\ud800")
    recorder.stop()

    first, second = lines_of(worker_config.directory)
    assert {"n": 0, "text": "a\\ud800b", "k\\udfff": 1} == first["extra"]
    assert ("e\\ud800", {"n": 1, "text": "ü\\ud800"}) == (second["event"], second["extra"])


@pytest.mark.parametrize("way", ["span", "log"])
def test_nothing_of_the_callers_outlives_its_event(worker_config, way):
    """An event that waits to be written holds no exception, batch or result."""

    class Batch(dict):
        pass

    start(msgspec.structs.replace(worker_config, flush_interval_s=60))
    kept = Batch(tokens=[1, 2])
    gone = weakref.ref(kept)
    if way == "span":
        with span("tool", batch=kept) as running:
            running.add(again=kept)
        del running
    else:
        log_manager.log(None, "tool", extra={"batch": kept}, step=1, again=kept)
    del kept

    assert None is gone()
    recorder.stop()
    (line,) = lines_of(worker_config.directory)
    assert {"tokens": [1, 2]} == line["extra"]["batch"]


# The writer


def test_threads_that_record_to_the_end(worker_config):
    """What they recorded while a recorder was active is written or counted."""
    finished = run_child(
        msgspec.structs.replace(worker_config, max_pending=20_000),
        """
        import atexit
        counts = {}

        def work(name):
            n = 0
            while recorder.active() is not None:
                recorder.record("turn", 0, 1, {"n": n}, 1)
                n += 1
                counts[name] = n
            while True:
                counts[name] == n

        # The first to be registered runs last.
        atexit.unregister(recorder.stop)
        atexit.register(lambda: print(sum(counts.values())))
        atexit.register(recorder.stop, "exit")
        for name in range(2):
            threading.Thread(target=work, args=(name,), daemon=True).start()
        time.sleep(0.3)
        sys.exit()
        """,
    )
    offered = int(finished.stdout)
    written = len(lines_of(worker_config.directory))
    dropped = header_of(worker_config.directory)["counters"]["dropped"]

    # Each thread may have been in the middle of one.
    assert 0 <= offered - written - dropped <= 2, finished.stderr
    assert written > 0


def test_the_account_is_whole_at_every_quiet_moment(worker_config):
    """Offered and own events are written, dropped or waiting; each step's costs say how many were dropped."""
    active = start(msgspec.structs.replace(worker_config, flush_interval_s=60, max_pending=1000))
    for n in range(1500):
        log_manager.log(None, "turn", extra={"n": n}, step=1)
    log_manager.log(None, "turn", duration="x")
    waiting = active.account()
    recorder.stop()
    ended = active.account()

    assert (1000, 0, {"bad_event": 1, "queue_full": 500}) == picked(
        waiting, "waiting events dropped_by"
    )
    assert 1501 + ended["own_events"] == ended["events"] + ended["dropped"]
    assert 0 == ended["waiting"]
    lines = lines_of(worker_config.directory, own=True)
    counters = header_of(worker_config.directory)["counters"]
    assert len(lines) == counters["events"] == ended["events"]
    assert 501 == counters["dropped"]
    costs = [line["extra"]["dropped"] for line in lines if line["event"] == "profiler_cost"]
    assert 501 == sum(costs)


# How far the files go


def test_while_a_disk_refuses_the_files_are_not_complete(worker_config, monkeypatch):
    """What waits is in the header."""
    disk = Disk(monkeypatch)
    active = start(worker_config)
    recorder.record("turn", 0, 1, {"n": 0}, 1)
    until(lambda: active.account()["events"])
    until(lambda: header_of(worker_config.directory)["written_events"])
    disk.refuses = True
    recorder.record("turn", 0, 1, {"n": 1}, 1)
    until(lambda: header_of(worker_config.directory)["waiting_events"])
    first = header_of(worker_config.directory)
    refused = disk.refused
    until(lambda: disk.refused > refused + 5)
    then = header_of(worker_config.directory)
    disk.refuses = False
    until(lambda: not active.account()["waiting"])
    until(lambda: not header_of(worker_config.directory)["waiting_events"])
    later = header_of(worker_config.directory)
    recorder.stop()

    assert 1 == then["waiting_events"]
    assert first["complete_until"] == then["complete_until"] < later["complete_until"]
    assert 2 == later["written_events"]


# Forks


def test_a_child_of_multiprocessing_writes_what_it_has(worker_config):
    """It ends without `atexit`; one that records nothing leaves no header."""
    run_child(
        worker_config,
        """
        def work(count):
            for n in range(count):
                recorder.record("turn", 0, 1, {"n": n}, 1)

        for count in (3, 0):
            child = multiprocessing.get_context("fork").Process(target=work, args=(count,))
            child.start()
            child.join()
        recorder.stop()
        """,
    )

    assert [0, 1, 2] == numbers(worker_config.directory)
    children = [h for h in headers_of(worker_config.directory).values() if "child" in h["role"]]
    assert ["exit"] == [header["end_reason"] for header in children]


# Where files go


def record_one(worker_config, n):
    active = start(worker_config)
    recorder.record("turn", 0, 1, {"n": n}, 1)
    recorder.stop()
    return active.directory


def test_where_the_run_directory_cannot_be_made_events_go_to_a_folder_of_the_user_s(
    worker_config, tmp_path, monkeypatch, capsys
):
    """Its header and the console have where they were meant to go."""
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    wanted = str(tmp_path / "file" / "run")
    folder = record_one(msgspec.structs.replace(worker_config, directory=wanted), 0)

    assert [0] == numbers(folder)
    assert tmp_path / "tmp" == folder.parent
    assert 0o700 == stat.S_IMODE(folder.stat().st_mode)
    assert f"{wanted} cannot be written" in header_of(folder)["fallback"]
    assert f"go to {folder}" in capsys.readouterr().err


def test_file_modes_follow_the_umask(worker_config):
    """As those of every other program."""
    mask = 0o027
    before = os.umask(mask)
    try:
        record_one(worker_config, 0)
    finally:
        os.umask(before)
    modes = {
        (path.is_dir(), stat.S_IMODE(path.stat().st_mode))
        for path in Path(worker_config.directory).rglob("*")
    }

    assert {(False, 0o666 & ~mask), (True, 0o777 & ~mask)} == modes
