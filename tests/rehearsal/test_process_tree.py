"""A program is ended with everything that it started, wherever that has gone."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and subreapers")

# Runs in a process of its own: becoming a subreaper is for the whole process.
TEST = """
import os, sys, time
from verl_profiler.rehearsal.process_tree import Children

PROGRAM = '''
import os, signal, subprocess, sys, time
{ignore}
grandchild = subprocess.Popen(
    [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
    start_new_session=True, stdout=subprocess.PIPE)
grandchild.stdout.readline()
print(os.getpid(), grandchild.pid, flush=True)
{then}
'''
children = Children([sys.executable, "-c", PROGRAM], dict(os.environ))
pids = [int(word) for word in children.program.stdout.readline().split()]
{wait}
assert pids[1] in children.living(), children.living()
children.end(grace_s={grace})
assert [] == children.living(), children.living()
assert not any(os.path.exists(f"/proc/{{pid}}") and
               open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0] != "Z"
               for pid in pids)
print("ended")
"""


def _run(ignore="", then="time.sleep(600)", wait="", grace="5.0"):
    code = TEST.format(ignore=ignore, then=then, wait=wait, grace=grace)
    code = code.replace("{ignore}", ignore).replace("{then}", then)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.stdout + done.stderr


def test_a_grandchild_in_its_own_session_is_ended():
    """Ray starts its daemons that way."""
    assert _run() == "ended\n"


def test_an_orphan_is_ended():
    """The program is gone, and what it started is adopted and found."""
    assert _run(then="pass", wait="children.program.wait()") == "ended\n"


def test_a_process_that_ignores_the_request_is_killed():
    """Asking has a limit."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"

    assert _run(ignore=ignore, grace="0.5") == "ended\n"


def test_other_children_are_left_alone():
    """Only what was started here is ended."""
    code = """
import os, subprocess, sys
from verl_profiler.rehearsal.process_tree import Children
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
children = Children([sys.executable, "-c", "pass"], dict(os.environ))
children.program.wait()
children.end()
assert other.poll() is None
other.kill()
print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.stdout + done.stderr == "ended\n"
