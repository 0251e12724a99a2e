"""The event files of one process, and what it takes to open them."""

import shutil
from pathlib import Path

import msgspec
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
