"""Stale processes of nsys: found by command line and environment, listed, ended on request.

`nsys` is a stand-in here, `tail` under that name, which stays until it is ended; the last test has a
real one.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_profiler.capture import nsys_processes
from verl_profiler.capture.open_files import being_written
from verl_profiler.cli import main
from verl_profiler.environ import SETTINGS, UNDER_NSYS

TAIL = shutil.which("tail")

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


@pytest.fixture
def start(tmp_path):
    """Starts a stand-in: `start("nsys", "profile", run=…)`; ended with the test."""
    started = []

    def start(*words, run=None, under_nsys=False):
        environment = {"PATH": os.environ["PATH"]}
        if run is not None:
            environment[SETTINGS] = json.dumps({"directory": str(run)})
        if under_nsys:
            environment[UNDER_NSYS] = "1"
        process = subprocess.Popen(
            [words[0], "-f", "/dev/null", "--", *words[1:]],
            executable=TAIL,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def run(tmp_path):
    """A run directory with captures."""
    run = tmp_path / "run"
    (run / "nsight" / "raw").mkdir(parents=True)
    (run / "nsight" / "journal").mkdir()
    return run


def found(run):
    processes = nsys_processes.processes_of(run, run / "nsight" / "raw")
    return {process.pid: process.in_use for process in processes}


def test_a_process_belongs_to_a_run_by_command_line_or_environment(run, start, tmp_path):
    """And to no other run; other programs that open the reports are not nsys."""
    by_argv = start("nsys", f"{run}/nsight/raw/actor_h_1")
    by_environment = start("/opt/nsys", "--session-name=profile-python-1", run=run)
    start("nsys", f"{tmp_path}/run-2/nsight/raw/actor_h_1")
    start("nsys", f"{run}/nsight/raw/x", run=tmp_path / "other")
    start("nsys-ui", f"{run}/nsight/raw/actor_h_1")
    start("less", f"{run}/nsight/raw/actor_h_1", run=run)

    assert {by_argv.pid: False, by_environment.pid: False} == found(run)


def test_a_run_is_identified_by_its_whole_path(run, start, tmp_path, monkeypatch):
    """It may be given by a relative one or by a link; another folder may have the same name."""
    ours = start("nsys", "-o", f"{run}/nsight/raw/actor_h_1")
    written = start("nsys", f"-o={run}/nsight/raw/actor_h_2")
    start("nsys", f"/elsewhere{run}/nsight/raw/actor_h_1")
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(tmp_path)

    for given in ("run", "link"):
        assert {ours.pid: False, written.pid: False} == found(Path(given))


def test_nsys_is_in_use_while_the_process_it_watches_lives(run, start, tmp_path):
    """By its child, or by the session that the child's launcher started."""
    # bash under the name nsys, which runs this script.
    (tmp_path / "profile").write_text(f"{TAIL} -f /dev/null & wait")
    environment = {SETTINGS: json.dumps({"directory": str(run)}), UNDER_NSYS: "1"}
    launcher = subprocess.Popen(
        ["nsys", "profile"],
        executable=shutil.which("bash"),
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        agent = start("nsys", f"--session-name=profile-python-{launcher.pid}", run=run)
        stale = start("nsys", "--session-name=profile-python-1", run=run)
        while len(found(run)) < 3 or not found(run)[launcher.pid]:
            assert launcher.poll() is None
            time.sleep(0.02)

        assert {launcher.pid: True, agent.pid: True, stale.pid: False} == found(run)
    finally:
        os.killpg(launcher.pid, 9)
        launcher.wait()


def test_the_launcher_of_a_living_process_may_be_gone(run, start):
    """Then no agent without a launcher counts as stale."""
    agent = start("nsys", "--session-name=profile-python-1", run=run)
    start("python", run=run, under_nsys=True)

    assert {agent.pid: True} == found(run)


def test_collect_lists_stale_processes_and_ends_them_on_request(run, start, tmp_path, capsys):
    """Without the option they are only listed."""
    left = start("nsys", f"{run}/nsight/raw/actor_h_1")
    other = start("nsys", f"{tmp_path}/other/nsight/raw/actor_h_1")

    assert 0 == main(["collect", str(run)])
    assert f"process {left.pid} (nsys" in capsys.readouterr().out
    assert left.poll() is None

    assert 0 == main(["collect", "--end-left-over", str(run)])
    assert f"ended process {left.pid} (nsys" in capsys.readouterr().out
    assert left.wait(10) is not None
    assert other.poll() is None


def test_a_machine_without_proc_has_no_processes(run, monkeypatch):
    """A Mac gathers and reads too."""
    monkeypatch.setattr(os, "listdir", lambda _path: os.stat("/nowhere"))

    assert [] == nsys_processes.processes_of(run, run)
    assert set() == being_written(run)


def test_a_process_that_ignores_sigterm_is_killed(run, start):
    """A process that is stopped never sees SIGTERM."""
    left = start("nsys", f"{run}/nsight/raw/actor_h_1")
    left.send_signal(19)
    (process,) = nsys_processes.end_stale(run, run / "nsight" / "raw", grace_s=0.2)

    assert left.pid == process.pid
    assert -9 == left.wait(10)


def test_the_agent_of_a_real_nsys_that_stays_is_found_and_ended(nsys, run):
    """Its command line does not name the run, and it has no parent any more."""
    settings = json.dumps({"directory": str(run)})
    options = ["--trace=nvtx", "--sample=none", "--cpuctxsw=none"]
    program = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(300)"]
    launcher = subprocess.Popen(
        ["nsys", "profile", *options, "-o", f"{run}/nsight/raw/actor_h_1", *program],
        env={**os.environ, **nsys, SETTINGS: settings, UNDER_NSYS: "1"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert b"1\n" == launcher.stdout.readline()
    processes = nsys_processes.processes_of(run, run / "nsight" / "raw")
    (agent,) = [
        process
        for process in processes
        if b"--start-agent" in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    ]
    try:
        assert {True} == {process.in_use for process in processes}
        assert launcher.pid in {process.pid for process in processes}
        # It stops, so that it stays; everything else of the session dies.
        os.kill(agent.pid, signal.SIGSTOP)
        processes = {process.pid: process for process in nsys_processes._processes()}
        under = [
            p for p in processes.values() if launcher.pid in nsys_processes._above(p, processes)
        ]
        for process in under:
            os.kill(process.pid, signal.SIGKILL)
        launcher.kill()
        launcher.wait()
        while len(found(run)) > 1:
            time.sleep(0.02)

        assert {agent.pid: False} == found(run)
        assert [agent.pid] == [
            process.pid
            for process in nsys_processes.end_stale(run, run / "nsight" / "raw", grace_s=0.5)
        ]
        assert {} == found(run)
    finally:
        subprocess.run(["kill", "-9", str(agent.pid)], check=False, capture_output=True)
