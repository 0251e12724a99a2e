"""Write what is open for long, so that a run that hangs, or was killed while it hung, can be explained.

One thread per process checks a few times per `profiler.stuck.after`.  While something is open for longer
than that, `open/<name>.json` in the run directory has all of it, where it stands and since when; the
file is replaced at each look, and removed when nothing is open for long any more.  In the trainer, a
phase far beyond its usual length is also announced on the console, once, and its end.

The thread writes itself: the writer thread may hang with its disk.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.events.open_files import (
    EVIDENCE_FOLDER,
    FOLDER,
    FORMAT_VERSION,
    NO_PROGRESS,
    stuck_after_s,
)
from verl_profiler.events.whole_files import replace_file
from verl_profiler.recording import (
    context,
    event_loop_lag,
    evidence,
    open_calls,
    recorder,
)
from verl_profiler.recording.clock import Timestamps, now
from verl_profiler.recording.complaints import announce
from verl_profiler.recording.open_calls import FailedPhase, OpenCall, OpenPhase
from verl_profiler.recording.stacks import Stack

# Looks per `after`, and the seconds between two of them.
_LOOKS = 4
_LEAST_S, _MOST_S = 0.25, 15.0
# Time on a core per look, as a share of the time until the next one.
_SHARE = 1 / 1000
# Listed in one file, the oldest ones.
_CALLS = _REQUESTS = 100
_THREADS = 10
# So many of the calls with their stacks.
_STACKS = 20
# The file is replaced when this share of the oldest age has passed: long requests are usual in some runs.
_REFRESH = 1 / 8
# Hangs of a run of which evidence is gathered.
_EVIDENCE_HANGS = 3
# A watching thread that hangs with a disk must not hold up the end of the process.
_PATIENCE_S = 1.0

_watcher: _Watcher | None = None


class _Watcher(threading.Thread):
    def __init__(self, active: recorder.Recorder, after_s: float) -> None:
        super().__init__(name="verl-profiler open", daemon=True)
        self.active = active
        self.after_ns = round(after_s * 1e9)
        self.period_s = min(max(after_s / _LOOKS, _LEAST_S), _MOST_S)
        self.ended = False
        self.woken = threading.Event()
        self.timestamps = Timestamps(active.anchor)
        self.written: Path | None = None
        self.written_ns = 0
        self.last: dict[str, Any] | None = None
        self.announced: OpenPhase | None = None
        self.kept: FailedPhase | None = None
        # Hangs of the run that this process has written evidence of, or that were before its time.
        self.hangs = 0

    def run(self) -> None:
        wait_s = self.period_s
        with contextlib.suppress(OSError):
            while self.hangs < _EVIDENCE_HANGS and self.hang().is_dir():
                self.hangs += 1
        while True:
            self.woken.wait(wait_s)
            if self.ended:
                return
            self.woken.clear()
            begin_ns = time.thread_time_ns()
            # Whatever the host's frames and the disk are like, the next look gets its chance.
            with contextlib.suppress(Exception):
                self.look()
            with contextlib.suppress(Exception):
                self.add_evidence()
            spent_ns = time.thread_time_ns() - begin_ns
            self.active.wrapper_cpu_ns += spent_ns
            wait_s = max(self.period_s, spent_ns / 1e9 / _SHARE)

    def look(self) -> None:
        """Write what is open for long, or remove what was written."""
        at_ns = now()
        until_ns = at_ns - self.after_ns
        if open_calls.failed is not None:
            self.keep_failure(open_calls.failed)
            return
        phases = open_calls.open_phases()
        requests = open_calls.open_requests()
        loops = event_loop_lag.blocked_loops(until_ns)
        self.announce(phases, at_ns)
        known = [*(each.begin_ns for each in (*phases, *requests)), *loops.values()]
        if open_calls.paused_ns is not None:
            known.append(open_calls.paused_ns)
        oldest_ns = min(known, default=at_ns)
        calls: list[OpenCall] | None = None
        # Coroutines are looked through only where a request is old, or none shows how old they are.
        if not requests:
            calls = open_calls.open_calls()
            oldest_ns = min((oldest_ns, *(call.begin_ns for call in calls)))
        if oldest_ns > until_ns:
            self.remove()
        elif self.written is None or at_ns - self.written_ns >= (at_ns - oldest_ns) * _REFRESH:
            calls = open_calls.open_calls() if calls is None else calls
            self.last = self.content(at_ns, phases, requests, calls, loops)
            self.write(self.last)
            self.written_ns = at_ns

    def is_stuck(self, phase: OpenPhase, at_ns: int) -> bool:
        """Whether a phase is open for far longer than usual; matters for the innermost one alone."""
        limit_s = stuck_after_s(
            _seconds(phase.usual_ns), self.after_ns / 1e9, _seconds(phase.longest_ns)
        )
        return (at_ns - phase.begin_ns) / 1e9 > limit_s

    def content(
        self,
        at_ns: int,
        phases: list[OpenPhase],
        requests: list[OpenCall],
        calls: list[OpenCall],
        loops: dict[int, int],
    ) -> dict[str, Any]:
        """Return what the file holds; see docs/stuck.md."""
        requests_of_old = [each for each in requests if each.begin_ns <= at_ns - self.after_ns]
        calls = [call for call in calls if call.row["event"] != "request"]
        return {
            "format": FORMAT_VERSION,
            "name": self.active.name,
            "at": self.time(at_ns),
            "after_s": self.after_ns / 1e9,
            "step": context.process.step,
            "weight_version": context.process.weight_version,
            "paused": None
            if open_calls.paused_ns is None
            else self.since(open_calls.paused_ns, at_ns),
            "phases": [
                {
                    "event": phase.event,
                    "step": phase.step,
                    **self.since(phase.begin_ns, at_ns),
                    "usual_s": _seconds(phase.usual_ns),
                    "longest_s": _seconds(phase.longest_ns),
                    "in_flight": phase.in_flight,
                    "stuck": self.is_stuck(phase, at_ns),
                    **Stack.of_thread(phase.thread).row(),
                }
                for phase in phases
            ],
            "open_requests": len(requests),
            "requests": [self.row(each, at_ns) for each in requests_of_old[:_REQUESTS]],
            "open_calls": len(calls),
            "calls": [
                self.row(each, at_ns, stack=place < _STACKS)
                for place, each in enumerate(calls[:_CALLS])
            ],
            "blocked_loops": [
                {**self.since(due_ns, at_ns), **Stack.of_thread(thread).row()}
                for thread, due_ns in loops.items()
            ],
            "threads": [
                {"thread": name, **stack.row()}
                for name, stack in open_calls.user_threads(loops)[:_THREADS]
            ],
        }

    def row(self, call: OpenCall, at_ns: int, *, stack: bool = True) -> dict[str, Any]:
        row = {"event": call.row["event"], **self.since(call.begin_ns, at_ns), **call.row}
        if not stack:
            row.pop("stack", None)
        return row

    def since(self, begin_ns: int, at_ns: int) -> dict[str, Any]:
        return {"since": self.time(begin_ns), "open_s": round((at_ns - begin_ns) / 1e9, 3)}

    def time(self, at_ns: int) -> str:
        return self.timestamps.text(self.timestamps.microseconds(at_ns))

    def write(self, content: dict[str, Any]) -> None:
        """Replace the file."""
        if self.active.name is None:
            return
        path = self.active.directory / FOLDER / f"{self.active.name}.json"
        path.parent.mkdir(exist_ok=True)
        _replace(path, content)
        self.written = path

    def hang(self) -> Path:
        """Return the folder for the evidence of the next hang."""
        return self.active.directory / EVIDENCE_FOLDER / str(self.hangs + 1)

    def add_evidence(self) -> None:
        """Write what this process shows of itself, if the trainer's has found that the run is stuck."""
        folder, name = self.hang(), self.active.name
        if name is None or self.hangs >= _EVIDENCE_HANGS or not folder.is_dir():
            return
        self.hangs += 1
        at_ns = now()
        found = evidence.gather()
        head = {"format": FORMAT_VERSION, "name": name, "at": self.time(at_ns)}
        _replace(folder / f"{name}.json", {**head, **found})

    def keep_failure(self, failed: FailedPhase) -> None:
        """Add a failed phase to what was open before it, once."""
        if failed is self.kept:
            return
        self.kept = failed
        content = self.last or {"format": FORMAT_VERSION, "name": self.active.name}
        phase = failed.phase
        self.write(
            {
                **content,
                "at": self.time(failed.end_ns),
                "failed": {
                    "event": phase.event,
                    "step": phase.step,
                    **self.since(phase.begin_ns, failed.end_ns),
                    **failed.failure,
                },
            }
        )

    def remove(self) -> None:
        """Nothing is open for long: remove the file."""
        self.last = None
        path, self.written = self.written, None
        if path is not None:
            path.unlink(missing_ok=True)

    def announce(self, phases: list[OpenPhase], at_ns: int) -> None:
        """Print a line when the innermost phase of the trainer gets stuck, and one when it ends."""
        if self.announced is not None:
            began = self.announced.begin_ns
            if not any(phase.begin_ns == began for phase in phases):
                announced, self.announced = self.announced, None
                length = f"{(at_ns - began) / 1e9:.0f} s"
                announce(f"{self.active.name}: {_named(announced)} is over after {length}")
        elif phases and self.is_stuck(phases[-1], at_ns):
            self.announced = phase = phases[-1]
            usual = ""
            if phase.usual_ns is not None and phase.event != NO_PROGRESS:
                usual = f", usually {phase.usual_ns / 1e9:.1f} s"
            announce(
                f"WARNING {self.active.name}: {_named(phase)} has taken "
                f"{(at_ns - phase.begin_ns) / 1e9:.0f} s so far{usual}. What it waits for: "
                f"verl-profiler stuck {self.active.directory} (phase-stuck)",
            )
            if self.hangs < _EVIDENCE_HANGS:
                with contextlib.suppress(OSError):
                    self.hang().mkdir(parents=True, exist_ok=True)


def _replace(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, msgspec.json.encode(content))


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e9


def _named(phase: OpenPhase) -> str:
    if phase.event == NO_PROGRESS:
        return "the wait for the next sample to be dispatched or finished"
    return phase.event if phase.step is None else f"{phase.event} of step {phase.step}"


def begin() -> None:
    """Watch from now on, if the settings ask for it."""
    global _watcher
    active = recorder.active()
    if active is None or _watcher is not None or active.config.stuck.after is None:
        return
    _watcher = _Watcher(active, active.config.stuck.after)
    open_calls.when_failed = _watcher.woken.set
    recorder.before_stop(_end)
    recorder.after_fork(_forget)
    # Without a thread nothing is written, and training goes on.
    with contextlib.suppress(RuntimeError):
        _watcher.start()


def _end() -> None:
    watcher = _watcher
    if watcher is not None:
        watcher.ended = True
        watcher.woken.set()
        if watcher.is_alive():
            watcher.join(_PATIENCE_S)
        # A process that is ended while it hangs leaves its file; but a disk that hangs is left alone.
        if not watcher.is_alive():
            with contextlib.suppress(Exception):
                watcher.look()
    _forget()


def _forget() -> None:
    global _watcher
    _watcher = None
    open_calls.when_failed = None
    open_calls.forget()
