"""Run code in a process of its own that records, and wait for what other threads do."""

import subprocess
import sys
import textwrap
import time

PATIENCE_S = 30
_BEGIN = """
import multiprocessing, os, signal, sys, threading, time
from verl_profiler import log_manager, span
from verl_profiler.recording import context, recorder
from verl_profiler.recording.clock import now
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import WorkerConfig

worker_config = WorkerConfig.decode(sys.argv[1])
active = recorder.start(worker_config, lambda: Identity("agent_loop", 0))

def until(condition):
    while not condition():
        time.sleep(0.005)
"""


def run_child(worker_config, body):
    """Run `body` in a process of its own that records as `worker_0`; return it finished."""
    return subprocess.run(
        [sys.executable, "-c", _BEGIN + textwrap.dedent(body), worker_config.encode()],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def until(condition):
    """Wait for what another thread does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
