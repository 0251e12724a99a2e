"""Switches recording off and on between the steps of a rehearsal, in all its processes, and reads their CPU time.

Python imports it in each process that `bench_run.py` starts with this folder in PYTHONPATH, also in those
without verl.  Each process that records has a thread that waits for the trainer's word at a socket, and
answers with the profiler's account of this process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import socket
import threading
import time
from pathlib import Path

import wrapt

# A JSON object: `folder` gets sockets and rows, `recorded` are the steps that are recorded.
VARIABLE = "BENCH_RUN_SWITCH"
# After each step, before its CPU time is read: twice the interval of the writers, so that they have written it.
_SETTLE_S = 1.0
_ANSWER_S = 300.0


def _begin_following(recorder):
    """Follow the trainer in a process that begins to record."""
    start = recorder.start

    @functools.wraps(start)
    def started(*args, **kwargs):
        begins = recorder.active() is None
        active = start(*args, **kwargs)
        if begins:
            own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            own.bind(str(_folder() / f"{os.getpid()}.socket"))
            threading.Thread(target=_follow, args=(recorder, active, own), daemon=True).start()
        return active

    recorder.start = started


def _follow(recorder, active, own):
    """Record or do not, as the trainer has it, until the process ends.

    Without an active recorder, wrappers call the original at once, and the watchdog and the heartbeats of
    loops end until a probed coroutine begins in a recorded step.
    """
    from verl_profiler.recording.background_writer import BackgroundWriter

    recorded = threading.Event()
    recorded.set()
    stay_quiet = BackgroundWriter.stay_quiet

    def waiting_for_a_recorded_step(self):
        # The writer comes here before it looks for events.
        recorded.wait()
        return stay_quiet(self)

    BackgroundWriter.stay_quiet = waiting_for_a_recorded_step
    while True:
        word, trainer = own.recvfrom(16)
        # Else a full collection of what was there before takes half a second in some steps.
        gc.collect()
        gc.freeze()
        cpu_s = time.process_time()
        if word == b"record":
            recorder._active = active
            recorded.set()
        else:
            recorder._active = None
            recorded.clear()
        account = {name: ns / 1e9 for name, ns in active.spent().items()}
        role = "no events" if active.identity is None else active.identity.role
        account |= {"role": role, "cpu_s": cpu_s, "events": active.account()["events"]}
        account["collections"] = [each["collections"] for each in gc.get_stats()]
        own.sendto(json.dumps(account).encode(), trainer)


def _switch_at_steps(tracking):
    """Where the trainer logs a step, append a row, and have the next step recorded or not."""
    log = tracking.Tracking.log

    @functools.wraps(log)
    def logged(self, data, step, *args, **kwargs):
        time.sleep(_SETTLE_S)
        accounts = _switch(step + 1 in _settings()["recorded"])
        row = {"step": step, "time_s": time.monotonic(), "processes": _others() | accounts}
        with open(_folder() / "steps.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        return log(self, data, step, *args, **kwargs)

    tracking.Tracking.log = logged


def _switch(record):
    """Switch recording in all processes; return the account of each by PID."""
    word = b"record" if record else b"pause"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as trainer:
        trainer.bind(str(_folder() / "trainer"))
        trainer.settimeout(_ANSWER_S)
        asked = 0
        for path in _folder().glob("*.socket"):
            # A process that has ended leaves its socket.
            with contextlib.suppress(ConnectionRefusedError):
                trainer.sendto(word, str(path))
                asked += 1
        answers = [trainer.recvfrom(4096) for _ in range(asked)]
    os.unlink(_folder() / "trainer")
    return {Path(path).stem: json.loads(answer) for answer, path in answers}


def _others():
    """Return role and CPU seconds by PID of all processes of the run; those that record answer themselves."""
    found = {}
    for pid, name in _processes().items():
        with contextlib.suppress(OSError):
            # Linux: the clock of another process's CPU time, threads that have ended included.
            clock = (~int(pid) << 3) | 2
            found[pid] = {"role": name, "cpu_s": time.clock_gettime_ns(clock) / 1e9}
    return found


@functools.cache
def _processes():
    """Return PIDs of all processes of the run, and what they are called."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(_folder()).encode() in (process / "environ").read_bytes():
                words = (process / "cmdline").read_text().split("\0")
                scripts = [word for word in words if word.endswith(".py")]
                found[process.name] = Path([*scripts, *words][0]).name
    return found


@functools.cache
def _settings():
    return json.loads(os.environ[VARIABLE])


def _folder():
    return Path(_settings()["folder"])


if VARIABLE in os.environ:
    wrapt.register_post_import_hook(_begin_following, "verl_profiler.recording.recorder")
    wrapt.register_post_import_hook(_switch_at_steps, "verl.utils.tracking")
