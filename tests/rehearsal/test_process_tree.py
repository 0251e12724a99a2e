"""A program is ended with everything that it started, wherever that has gone."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs subreapers")

# Runs in a process of its own: becoming a subreaper is for the whole process.
TEST = """
import os, subprocess, sys
from verl_profiler.rehearsal.process_tree import Children

PROGRAM = '''
import os, signal, subprocess, sys, time
{ignores}
grandchild = subprocess.Popen(
    [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
    start_new_session=True, stdout=subprocess.PIPE)
grandchild.stdout.readline()
print(grandchild.pid, flush=True)
{then}
'''
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
children = Children([sys.executable, "-c", PROGRAM], dict(os.environ), subprocess.PIPE)
grandchild = int(children.program.stdout.readline())
{wait}
assert grandchild in [each.pid for each in children.living()]
children.end(grace_s={grace})
assert [] == children.living(), children.living()
assert not os.path.exists(f"/proc/{{grandchild}}")
assert other.poll() is None
other.kill()
print("ended")
"""


@pytest.mark.parametrize(
    ("ignores", "then", "wait", "grace"),
    [
        # Ray starts its daemons in sessions of their own.
        ("", "time.sleep(600)", "", 20),
        # The program is gone, and what it started is adopted and found.
        ("", "pass", "children.program.wait()", 20),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "time.sleep(600)", "", 0.5),
    ],
)
def test_a_grandchild_in_its_own_session_is_ended(ignores, then, wait, grace):
    """And nothing that was not started there."""
    code = TEST.format(ignores=ignores, then=then, wait=wait, grace=grace)
    code = code.replace("{ignores}", ignores).replace("{then}", then)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.stdout + done.stderr == "ended\n"
