"""The event files of one process, and what it takes to open them."""

import contextlib
import errno
import os
import shutil
import threading
import time
from pathlib import Path

import msgspec
import pytest
from reading_back import headers_of, lines_of

from verl_profiler.recording.identity import Identity
from verl_profiler.recording.recorder import Recorder


class Files:
    """What one process writes, flush by flush, and a directory with which others do as they like."""

    def __init__(self, worker_config):
        config = msgspec.structs.replace(worker_config, flush_interval_s=60)
        self.directory = Path(config.directory)
        self.recorder = Recorder(config, lambda: Identity("worker", 0))
        self.offered = 0

    def flush(self, count=10, step=1):
        for _ in range(count):
            self.recorder.append(("turn", 0, 1, {"n": self.offered}, step))
            self.offered += 1
        self.recorder._writer._write_out()

    def account(self, *, also=()):
        """Check that what counts as written can be read, and that all else is counted as lost."""
        account = self.recorder.account()
        lines = [line for folder in (self.directory, *also) for line in lines_of(folder, own=True)]
        assert account["events"] == len(lines)
        assert self.offered + account["own_events"] == account["events"] + account["dropped"]
        return account

    def close(self, *, also=()):
        self.recorder.close("exit")
        account = self.account(also=also)
        (header,) = headers_of(self.directory).values()
        assert account["events"] == header["written_events"] == header["counters"]["events"]
        assert account["dropped"] == header["dropped_events"] == header["counters"]["dropped"]
        return account


def test_what_was_in_a_removed_run_directory_counts_as_lost(worker_config, capsys):
    """Also in files of earlier steps, which are closed; later events are in new files with a header."""
    files = Files(worker_config)
    for step in range(8):
        files.flush(step=step)
    files.account()
    shutil.rmtree(files.directory)
    files.flush(7, step=7)
    files.flush(5, step=8)

    account = files.close()

    assert {"removed": 80} == account["dropped_by"]
    assert list(range(80, 92)) == [line["extra"]["n"] for line in lines_of(files.directory)]
    assert 1 == capsys.readouterr().err.count("was removed by another program")


def test_a_moved_run_directory_loses_nothing(worker_config, tmp_path):
    """Its lines are where somebody put them; the next ones are in a new directory."""
    files = Files(worker_config)
    for step in range(8):
        files.flush(step=step)
    files.directory.rename(tmp_path / "elsewhere")
    files.flush(4, step=7)

    files.recorder.close("exit")

    assert 0 == files.recorder.dropped
    assert 80 == len(lines_of(tmp_path / "elsewhere"))
    assert 4 == len(lines_of(files.directory))
    assert 1 == len(headers_of(files.directory))


def test_without_events_only_the_time_of_the_files_moves_on(worker_config):
    """Of a process that is killed later, the header shows that nothing is missing."""
    files = Files(worker_config)
    writer = files.recorder._writer
    assert not writer.stay_quiet()
    files.flush()
    (first,) = headers_of(files.directory).values()
    assert writer.stay_quiet()
    (then,) = headers_of(files.directory).values()
    assert first.pop("complete_until") < then.pop("complete_until")
    assert first == then
    files.recorder.append(("turn", 0, 1, None, 1))
    files.offered += 1

    assert not writer.stay_quiet()
    assert 11 == files.close()["events"] - files.recorder.account()["own_events"]


def test_where_no_new_file_can_be_made_events_are_counted(worker_config):
    files = Files(worker_config)
    files.flush()
    shutil.rmtree(files.directory)
    files.directory.write_text("a file")
    files.flush(3)
    files.recorder.close("exit")

    account = files.recorder.account()
    assert 0 == account["events"]
    assert files.offered + account["own_events"] == account["dropped"]
    assert 10 == account["dropped_by"]["removed"]


def test_other_threads_run_after_some_hundred_events(worker_config, monkeypatch):
    """With 25,000 in the queue, all of them were encoded in eight turns of 14 ms; more that waits has larger ones."""
    files = Files(worker_config)
    written = files.recorder._writer.files
    sizes, append = [], written.append

    def counting(path, lines, **options):
        sizes.append(len(lines))
        append(path, lines, **options)

    monkeypatch.setattr(written, "append", counting)
    files.flush(25_000)
    assert 256 == max(sizes)
    sizes.clear()
    files.flush(80_000)
    assert 4096 < max(sizes)
    files.close()


def test_a_writer_that_starts_as_recording_ends_is_the_only_one(worker_config, monkeypatch):
    """The thread that ends the recording wrote too, as the other one was not known so far: each event twice."""
    files = Files(worker_config)
    start, write = threading.Thread.start, os.write

    def slow_start(thread):
        start(thread)
        if "writer" in thread.name:
            time.sleep(0.5)

    def slow_write(descriptor, data):
        time.sleep(0.05)
        return write(descriptor, data)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    monkeypatch.setattr(os, "write", slow_write)
    host = threading.Thread(target=lambda: files.recorder.append(("turn", 0, 1, {"n": 0}, 1)))
    host.start()
    time.sleep(0.2)
    files.offered = 1

    files.close()
    host.join()
    assert [0] == [line["extra"]["n"] for line in lines_of(files.directory)]


def broken_truncate(descriptor, size):
    raise OSError(errno.EIO, "I/O error")


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("error", [MemoryError(), SystemExit(), OSError(errno.EIO, "I/O error")])
def test_a_write_that_ends_in_an_unknown_way_loses_nothing(worker_config, monkeypatch, error, kept):
    """After a part of a line, with lines that waited for a full disk or others; nothing is there twice.

    What a broken disk has taken cannot be taken back.
    """
    files = Files(worker_config)
    write = os.write
    failures = [OSError(errno.ENOSPC, "full")] * kept + ["short", error]
    if isinstance(error, OSError):
        monkeypatch.setattr(os, "ftruncate", broken_truncate)

    def broken(descriptor, data):
        if not failures or b'"turn"' not in bytes(data):
            return write(descriptor, data)
        failure = failures.pop(0)
        if failure == "short":
            # The rest of the second line has its name no more.
            data = bytes(data)
            return write(descriptor, data[: data.index(b'"turn"', data.index(b"\n")) - 3])
        raise failure

    monkeypatch.setattr(os, "write", broken)
    for _ in range(2 + kept):
        with contextlib.suppress(MemoryError, SystemExit):
            files.flush()
    assert not failures
    files.flush()

    files.close()
    assert list(range(files.offered)) == [line["extra"]["n"] for line in lines_of(files.directory)]
