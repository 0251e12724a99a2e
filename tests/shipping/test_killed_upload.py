"""An upload that is killed, with its driver and without: what a reader gets, and how the rest follows.

Real processes: a driver with the recorder and its upload process, and an S3 server (moto's).
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from held_server import HeldServer
from shipping.copies import contents, local

from verl_profiler.cli import main
from verl_profiler.events.remote import connect
from verl_profiler.reading.reader import load

pytest.importorskip("omegaconf")

pytestmark = pytest.mark.timeout(240)

HERE = Path(__file__).parent
EVENTS = {"ship_every_s": 1.0}
ACCOUNT = "upload.json"
LONG_AGO = "2026-01-01T10:00:00.000000+00:00"
QUERY = "SELECT * EXCLUDE (run) FROM event_fields ORDER BY ALL"


class Driver:
    """The driver, and its upload process."""

    def __init__(self, url, spool, **environment):
        self.url = url
        argv = [sys.executable, str(HERE / "uploading_driver.py"), url, str(spool)]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("VERL_PROFILER_SETTINGS")}
        self.log = spool.with_name(f"{spool.name}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*argv, json.dumps({**EVENTS, **environment.pop("events", {})})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**kept, **environment},
            )
        self.run = Path(self.answered()["run"])

    def answered(self, seconds=90):
        assert select.select([self.process.stdout], [], [], seconds)[0], self.log.read_text()
        return json.loads(self.process.stdout.readline())

    def does(self, command):
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.answered()

    @property
    def uploader(self):
        return self.does("uploader")["pid"]

    def kill_both(self):
        """At once, as a power cut or the OOM killer of the node does; they are stopped first."""
        pids = [self.uploader, self.process.pid]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
        self.process.wait()
        until(lambda: not alive(pids[0]))

    def close(self):
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


@pytest.fixture
def drive(s3, tmp_path, monkeypatch):
    """Start drivers; what is left of them is ended."""
    monkeypatch.delenv("VERL_PROFILER_SETTINGS", raising=False)
    started = []

    def start(name="my-run", **environment):
        started.append(Driver(f"{s3}/{name}", tmp_path / name, **environment))
        return started[-1]

    yield start
    for driver in started:
        driver.close()


@pytest.fixture
def held(s3_server):
    """A server between an upload and the S3 server."""
    server = HeldServer(int(s3_server.rpartition(":")[2]))
    yield server
    server.close()


def account(url):
    return json.loads(contents(url)[ACCOUNT])


def rewrite(url, **fields):
    """Change the account of an upload, such as to when it was an hour ago."""
    filesystem, target = connect(url)
    filesystem.pipe_file(f"{target}/{ACCOUNT}", json.dumps({**account(url), **fields}).encode())


def looked(where):
    with load(str(where), cache=False) as run:
        rows = run.rows("SELECT count(*) AS n FROM event_fields WHERE event = 'looked'")
        return rows[0]["n"], [each for each in run.problems if "upload" in each]


def printed(capsys, *argv):
    status = main(list(argv))
    return status, capsys.readouterr().out


def as_the_local_run(driver, capsys):
    """Whether the URL has every byte, and reads like the run on this disk."""
    there = contents(driver.url)
    assert json.loads(there.pop(ACCOUNT))["ended"]
    assert local(driver.run, ".cache", ".disk") == there
    with load(str(driver.run), cache=False) as here, load(driver.url, cache=False) as there:
        assert here.rows(QUERY) == there.rows(QUERY)
        assert here.problems == there.problems
    capsys.readouterr()
    expected = printed(capsys, "summary", str(driver.run))
    assert expected == printed(capsys, "summary", driver.url)


def test_both_are_killed_in_the_middle_of_a_file_and_collect_brings_the_rest(drive, held, capsys):
    """What was there is whole; the problems have how much is known to be missing, and the command."""
    driver = drive(AWS_ENDPOINT_URL=f"http://127.0.0.1:{held.port}")
    driver.does("write 1 500")
    until(lambda: looked(driver.url)[0] == 500)
    # Less than a quarter more: its header comes, its events do not.
    written = driver.does("write 1 50")["events"]
    (header,) = [name for name in contents(driver.url) if name.startswith("processes/")]
    until(lambda: json.loads(contents(driver.url)[header])["written_events"] >= written)
    held.hold(200_000)
    driver.does("write 1 5000")
    assert held.held.wait(150)
    driver.kill_both()

    count, (problem,) = looked(driver.url)
    assert 500 == count
    assert "still being uploaded" in problem
    rewrite(driver.url, uploaded=LONG_AGO, updated=LONG_AGO)
    count, (problem,) = looked(driver.url)
    with load(driver.url, cache=False) as run:
        read = run.rows("SELECT sum(events) AS n FROM event_counts")[0]["n"]
        # Nothing else is printed of these events, such as that they were left on a host.
        assert [problem] == run.problems
    missing = json.loads(contents(driver.url)[header])["written_events"] - read
    assert missing >= 50
    for text in (
        "did not end",
        "10:00:00 UTC",
        f"{missing:,} events that its processes had written by their last headers",
        f"verl-profiler collect {driver.run} --to {driver.url}",
        "if that directory is lost, so is the rest",
    ):
        assert text in problem
    with load(f"{driver.url}/step_1") as part:
        assert [each for each in part.problems if "did not end" in each]

    for _ in range(2):
        assert 0 == main(["collect", str(driver.run), "--to", driver.url])
        as_the_local_run(driver, capsys)
    assert (5550, []) == looked(driver.url)


def test_the_upload_alone_is_killed_during_the_run_and_in_its_last_file(drive, held, capsys):
    """It is announced and started again; at the end it is tried once more."""
    driver = drive(AWS_ENDPOINT_URL=f"http://127.0.0.1:{held.port}")
    driver.does("write 1 500")
    until(lambda: looked(driver.url)[0] == 500)
    killed = driver.uploader
    os.kill(killed, signal.SIGKILL)
    driver.does("write 2 500")
    until(lambda: "was killed (SIGKILL)" in driver.log.read_text())
    assert "(upload-restarted)" in driver.log.read_text()
    until(lambda: looked(driver.url)[0] == 1000)
    assert killed != driver.uploader

    held.hold(100_000)
    driver.does("write 3 5000")
    assert held.held.wait(150)
    uploader = driver.uploader
    driver.process.stdin.write("end\n")
    driver.process.stdin.flush()
    time.sleep(1)
    held.hold(None)
    os.kill(uploader, signal.SIGKILL)
    assert driver.answered()["ended"]

    as_the_local_run(driver, capsys)
    assert f"the run was uploaded to {driver.url}" in driver.log.read_text()
