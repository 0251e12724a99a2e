"""Processes of nsys that outlived a run: found by what they say of it, named, ended when asked.

`nsys` is a stand-in here: `tail` under that name, which stays until it is ended.
"""

import json
import os
import shutil
import subprocess
import time

import pytest

from verl_profiler import leftovers
from verl_profiler.capture_plan import UNDER_NSYS
from verl_profiler.cli import main
from verl_profiler.settings import ENVIRONMENT_VARIABLE

TAIL = shutil.which("tail")

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


@pytest.fixture
def start(tmp_path):
    """Starts a stand-in: `start("nsys", "profile", run=…)`; ended with the test."""
    started = []

    def start(*words, run=None, under_nsys=False):
        environment = {"PATH": os.environ["PATH"]}
        if run is not None:
            environment[ENVIRONMENT_VARIABLE] = json.dumps({"directory": str(run)})
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
    return {tool.pid: tool.in_use for tool in leftovers.tools_of(run, run / "nsight" / "raw")}


def test_a_tool_belongs_to_a_run_by_its_words_or_its_environment(run, start, tmp_path):
    """And to no other run, nor is any other program that looks at the reports one."""
    by_words = start("nsys", f"{run}/nsight/raw/actor_h_1")
    by_environment = start("/opt/nsys", "--session-name=profile-python-1", run=run)
    start("nsys", f"{tmp_path}/run-2/nsight/raw/actor_h_1")
    start("nsys", f"{run}/nsight/raw/x", run=tmp_path / "other")
    start("nsys-ui", f"{run}/nsight/raw/actor_h_1")
    start("less", f"{run}/nsight/raw/actor_h_1", run=run)

    assert {by_words.pid: False, by_environment.pid: False} == found(run)


def test_a_tool_that_watches_a_living_process_is_in_use(run, start):
    """By its child, or by the session that the child's launcher started."""
    words = ["nsys", "-c", f"{TAIL} -f /dev/null & wait"]
    environment = {ENVIRONMENT_VARIABLE: json.dumps({"directory": str(run)}), UNDER_NSYS: "1"}
    launcher = subprocess.Popen(
        words, executable=shutil.which("bash"), env=environment, start_new_session=True
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
    """Then no agent without a launcher is taken for left over."""
    agent = start("nsys", "--session-name=profile-python-1", run=run)
    start("python", run=run, under_nsys=True)

    assert {agent.pid: True} == found(run)


def test_collect_names_what_is_left_and_ends_it_when_asked(run, start, tmp_path, capsys):
    """Without the option it only says so."""
    left = start("nsys", f"{run}/nsight/raw/actor_h_1")
    other = start("nsys", f"{tmp_path}/other/nsight/raw/actor_h_1")

    assert 0 == main(["collect", str(run)])
    assert f"process {left.pid} (nsys" in capsys.readouterr().out
    assert left.poll() is None

    assert 0 == main(["collect", "--end-left-over", str(run)])
    assert f"ended process {left.pid} (nsys" in capsys.readouterr().out
    assert left.wait(10) is not None
    assert other.poll() is None


def test_who_does_not_heed_is_killed(run, start):
    """A process that is stopped never sees SIGTERM."""
    left = start("nsys", f"{run}/nsight/raw/actor_h_1")
    left.send_signal(19)
    (tool,) = leftovers.end(run, run / "nsight" / "raw", grace_s=0.2)

    assert left.pid == tool.pid
    assert -9 == left.wait(10)
