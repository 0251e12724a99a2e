"""Notice when an event loop does not run: a timer that is late by more than the threshold.

A rollout is thousands of coroutines in one thread.  When one of them blocks, every request seems
slow wherever it happens to wait; the recorded interval says when the loop itself stood still.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import weakref
from typing import Any

from verl_profiler import recorder
from verl_profiler.clock import now

__all__ = ["WORTH_NAMING_NS", "note_blocking_call", "watch_running_loop"]

_PERIOD_S = 0.2
# Synchronous calls that are shorter are not worth a `note_blocking_call`.
WORTH_NAMING_NS = 5_000_000
# Event, begin, end and thread of the last probed synchronous call of some length.
last_blocking_call: tuple[str, int, int, int] = ("", 0, 0, 0)
_watched: weakref.WeakSet[Any] = weakref.WeakSet()
# `id` of the loop that was looked at last, so that callers can skip it; 0 when that one is gone.
last_loop: int = 0
_last_reference: weakref.ref[Any] | None = None


def watch_running_loop() -> None:
    """Watch the running event loop from now on; cheap when it is watched already."""
    global last_loop, _last_reference
    loop = asyncio._get_running_loop()
    active = recorder.active()
    if loop is None or active is None or not active.carried.events.families.event_loop:
        return
    last_loop = id(loop)
    # A loop of another kind may refuse a weak reference or the timer; the call goes on without.
    with contextlib.suppress(Exception):
        _last_reference = weakref.ref(loop, _forget_last)
        if loop not in _watched:
            _watched.add(loop)
            _Heartbeat(loop, active.carried.events.lag_threshold_s).arm()


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


os.register_at_fork(after_in_child=_forked)


class _Heartbeat:
    def __init__(self, loop: Any, threshold_s: float) -> None:
        self._loop = loop
        self._threshold_ns = int(threshold_s * 1e9)
        self._due_ns = 0
        # A timer keeps the context it is set in; the caller's is that of one request.
        self._context = contextvars.Context()

    def arm(self) -> None:
        self._due_ns = now() + int(_PERIOD_S * 1e9)
        self._loop.call_later(_PERIOD_S, self._beat, context=self._context)

    def _beat(self) -> None:
        active = recorder.active()
        if active is None:
            _watched.discard(self._loop)
            _forget_last(_last_reference)
            return
        ran_ns, cpu_ns = active.begin_section()
        late_ns = ran_ns - self._due_ns
        if late_ns >= self._threshold_ns:
            extra = {"loop": threading.current_thread().name}
            event, begin_ns, end_ns, thread = last_blocking_call
            shared_ns = min(end_ns, ran_ns) - max(begin_ns, self._due_ns)
            if thread == threading.get_ident() and shared_ns * 2 > late_ns:
                extra["during"] = event
            recorder.record("event_loop_lag", self._due_ns, ran_ns, extra)
        self.arm()
        active.end_section(ran_ns, cpu_ns)


def note_blocking_call(event: str, begin_ns: int, end_ns: int) -> None:
    """Remember a probed synchronous call, so that a stall of its thread's loop can name it."""
    global last_blocking_call
    last_blocking_call = (event, begin_ns, end_ns, threading.get_ident())
