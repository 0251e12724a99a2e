"""Notice when an event loop does not run: a timer that is late by more than the threshold.

A rollout is thousands of coroutines in one thread.  When one of them blocks, every request seems
slow wherever it happens to wait; the recorded interval is when the loop itself was stalled, and
`recording.event_loop_lag` in which function.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sys
import threading
import weakref
from types import FrameType
from typing import Any

from verl_profiler.events.vocabulary import LAG_THRESHOLD_S
from verl_profiler.recording import loop_watchdog, recorder
from verl_profiler.recording.clock import now
from verl_profiler.recording.loop_watchdog import Stall

__all__ = [
    "WORTH_NAMING_NS",
    "blocked_loops",
    "note_blocking_call",
    "watch_running_loop",
    "watched_loops",
]

# Between two beats of a loop in which a probed coroutine began lately, and of any other.
_PERIOD_S, _QUIET_PERIOD_S = 0.1, 0.2
_LATELY_NS = 2_000_000_000
# Synchronous calls that are shorter are not worth a `note_blocking_call`.
WORTH_NAMING_NS = 5_000_000
# Event, begin, end and thread of the last probed synchronous call of some length.
last_blocking_call: tuple[str, int, int, int] = ("", 0, 0, 0)
_watched: weakref.WeakSet[Any] = weakref.WeakSet()
# A loop's timer holds its heartbeat, which holds the loop: both go together.
_beats: weakref.WeakSet[_Heartbeat] = weakref.WeakSet()
# `id` of the loop that was looked at last, so that callers can skip it; 0 when that one is gone.
last_loop: int = 0
_last_reference: weakref.ref[Any] | None = None


def watch_running_loop() -> None:
    """Watch the running event loop from now on; cheap when it is watched already."""
    global last_loop, _last_reference
    loop = asyncio._get_running_loop()
    active = recorder.active()
    if loop is None or active is None or "event_loop" in active.config.events.exclude:
        return
    last_loop = id(loop)
    # A loop of another kind may refuse a weak reference or the timer; the call goes on without.
    with contextlib.suppress(Exception):
        _last_reference = weakref.ref(loop, _forget_last)
        if loop not in _watched:
            _watched.add(loop)
            heartbeat = _Heartbeat(loop, LAG_THRESHOLD_S)
            heartbeat.arm(_PERIOD_S)
            _beats.add(heartbeat)
            loop_watchdog.ensure_watched(_beats)


def watched_loops() -> list[Any]:
    """Return the event loops of this process in which probed coroutines ran."""
    return [beat.loop for beat in list(_beats)]


def blocked_loops(since_ns: int) -> dict[int, int]:
    """Return when each running loop that has been blocked since before `since_ns` was due, by its thread."""
    return {
        beat.thread: beat.due_ns
        for beat in list(_beats)
        if 0 < beat.due_ns < since_ns and beat.loop.is_running()
    }


def _forget_last(reference: weakref.ref[Any] | None) -> None:
    """Look at the next loop again, which may have the address of the one that is gone."""
    global last_loop
    if reference is _last_reference:
        last_loop = 0


def _forked() -> None:
    """Forget the parent's loops, which never run here."""
    global last_loop
    last_loop = 0
    _watched.clear()
    _beats.clear()


os.register_at_fork(after_in_child=_forked)


class _Heartbeat:
    def __init__(self, loop: Any, threshold_s: float) -> None:
        self.loop = loop
        self.threshold_ns = int(threshold_s * 1e9)
        self.beat_ns = now()
        self.due_ns = 0
        self.thread = threading.get_ident()
        # `id` of the frame that runs the loop; 0 before the first beat.
        self.base = 0
        self.stall: Stall | None = None
        # A timer keeps the context it is set in; the caller's is that of one request.
        self._context = contextvars.Context()

    def arm(self, period_s: float) -> None:
        self.due_ns = now() + int(period_s * 1e9)
        self.loop.call_later(period_s, self._beat, context=self._context)

    def _beat(self) -> None:
        active = recorder.active()
        if active is None:
            _watched.discard(self.loop)
            _beats.discard(self)
            _forget_last(_last_reference)
            return
        ran_ns, cpu_ns = active.begin_section()
        stall, self.stall = self.stall, None
        late_ns = ran_ns - self.due_ns
        # A loop that did not run between two calls of `run_until_complete` kept nobody waiting.
        if late_ns >= self.threshold_ns and not (stall is not None and stall.stopped):
            self._record(ran_ns, late_ns, stall)
        self.beat_ns = ran_ns
        self.thread = threading.get_ident()
        self.base = _running_frame(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        self.arm(_PERIOD_S if ran_ns - active.alive_ns < _LATELY_NS else _QUIET_PERIOD_S)
        loop_watchdog.ensure_watched(_beats)
        active.end_section(ran_ns, cpu_ns)

    def _record(self, ran_ns: int, late_ns: int, stall: Stall | None) -> None:
        extra: dict[str, Any] = {}
        begin_ns = self.due_ns
        culprit = None if stall is None else stall.culprit()
        if stall is not None and culprit is not None:
            # It began between the last sign of life and when the beat was due.
            if stall.alive_ns is not None and self.beat_ns < stall.alive_ns < self.due_ns:
                begin_ns = stall.alive_ns
                error_ns = self.due_ns - begin_ns
            else:
                error_ns = (self.due_ns - self.beat_ns) // 2
                begin_ns = self.due_ns - error_ns
            extra = {
                **culprit.identity,
                "during": culprit.during,
                "function": culprit.during,
                "innermost": culprit.innermost,
                "file": culprit.file,
                "line": culprit.line,
                "begin_error_s": round(error_ns / 1e9, 6),
            }
            if culprit.tool is not None:
                extra["tool"] = culprit.tool
        event, call_ns, end_ns, thread = last_blocking_call
        shared_ns = min(end_ns, ran_ns) - max(call_ns, self.due_ns)
        if thread == self.thread and shared_ns * 2 > late_ns:
            extra["during"] = event
            if self.beat_ns < call_ns < self.due_ns:
                begin_ns, extra["begin_error_s"] = call_ns, 0.0
        if extra.get("function") == extra.get("during"):
            # Said once: names are long, and lines many.
            extra.pop("function", None)
        extra["loop"] = threading.current_thread().name
        recorder.record("event_loop_lag", begin_ns, ran_ns, extra)


def _running_frame(frame: FrameType | None) -> int:
    """Return the `id` of the frame that runs the loop, which called a beat."""
    if frame is not None and frame.f_code is loop_watchdog.RUN_HANDLE:
        # Below it is `_run_once`, which is called by it each time.
        frame = frame.f_back and frame.f_back.f_back
    return id(frame)


def note_blocking_call(event: str, begin_ns: int, end_ns: int) -> None:
    """Remember a probed synchronous call, so that a stall of its thread's loop can name it."""
    global last_blocking_call
    last_blocking_call = (event, begin_ns, end_ns, threading.get_ident())
