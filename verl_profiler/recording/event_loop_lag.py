"""Notice when an event loop does not run: a timer that is late by more than the threshold.

A rollout is thousands of coroutines in one thread.  When one of them blocks, every request seems
slow wherever it happens to wait; the recorded interval is when the loop itself was stalled.

One thread per process names the function.  It wakes shortly after each heartbeat of a loop was
due.  If the beat has run, that is all; if not, it samples the stack of the loop's thread: the function that
runs there, the probed call and the request it runs in, and the last time at which the loop is known to have
been alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import os
import sys
import threading
import time
import weakref
from types import CodeType, FrameType
from typing import Any

import msgspec

from verl_profiler.events.vocabulary import COMPUTING_ROLES, LAG_THRESHOLD_S
from verl_profiler.recording import context, recorder
from verl_profiler.recording.clock import now
from verl_profiler.recording.stacks import (
    call_of,
    is_python,
    is_users,
    is_wrapper,
    name_of,
    running_frames,
)

# Between two beats of a loop in which a probed coroutine began lately, and of any other.
_PERIOD_S, _QUIET_PERIOD_S = 0.1, 1.0
_LATELY_NS = 2_000_000_000
# Synchronous calls that are shorter are not worth a `note_blocking_call`.
WORTH_NAMING_NS = 5_000_000
# A stalled loop is sampled so often at first, and rarely after so many samples.
_EVERY_S = 0.05
_OFTEN = 20
_RARELY_S = 1.0
# With no loop at all.
_IDLE_S = 1.0
_IDLE_NS = 1_000_000_000
# The thread's time on a core is read at each so manyth wake.
_ACCOUNTED = 20
_MOST_FRAMES = 500
_MOST_FUNCTIONS = 50
_NAME_LIMIT = 200
_RUN_HANDLE: CodeType = asyncio.Handle._run.__code__
_RUN_ONCE: CodeType = asyncio.BaseEventLoop._run_once.__code__  # type: ignore[attr-defined]
_thread: threading.Thread | None = None
# Held while the thread sleeps, as waiting for a lock costs a third of waiting for an event.
_asleep = threading.Lock()
_asleep.acquire()
# Event, begin, end and thread of the last probed synchronous call of some length.
_last_blocking_call: tuple[str, int, int, int] = ("", 0, 0, 0)
# By `id`, the loops that are watched.
watched: dict[int, weakref.ref[Any]] = {}
# A loop's timer holds its heartbeat, which holds the loop: both go together.
_beats: list[weakref.ref[_Heartbeat]] = []


class _Function(msgspec.Struct, eq=False):
    """A function that held the loop's thread, and for which request."""

    during: str
    innermost: str
    file: str
    line: int
    tool: str | None
    request: context.Request | None
    identity: dict[str, Any]
    held_ns: int = 0


class _Stall(msgspec.Struct, eq=False):
    """What was seen of a loop from when its beat was due."""

    # When the loop is known to have been alive last, as of the first sample; None: it never blocked.
    alive_ns: int | None = None
    functions: dict[str, _Function] = {}
    # The loop did not run at all: nobody waits for it.
    stopped: bool = False
    samples: int = 0
    sampled_ns: int = 0
    next_ns: int = 0

    def culprit(self) -> _Function | None:
        """Return the function that held the loop longest."""
        return max(self.functions.values(), key=lambda each: each.held_ns, default=None)


def watch_running_loop() -> None:
    """Watch the running event loop, which must not be watched so far, from now on."""
    loop = asyncio._get_running_loop()
    active = recorder.active()
    if loop is None or active is None or "event_loop" in active.config.events.exclude:
        return
    key = id(loop)
    # A loop of another kind may refuse a weak reference or the timer; the call goes on without.
    with contextlib.suppress(Exception):
        watched[key] = weakref.ref(loop, lambda _: watched.pop(key, None))
        heartbeat = _Heartbeat(loop, LAG_THRESHOLD_S)
        heartbeat.arm(_PERIOD_S)
        _beats.append(weakref.ref(heartbeat, _beats.remove))
        _wake()
        _ensure_watched()


def watched_loops() -> list[Any]:
    """Return the event loops of this process in which probed coroutines ran."""
    return [beat.loop for beat in _living_beats()]


def blocked_loops(since_ns: int) -> dict[int, int]:
    """Return when each running loop that has been blocked since before `since_ns` was due, by its thread."""
    return {
        beat.thread: beat.due_ns
        for beat in _living_beats()
        if 0 < beat.due_ns < since_ns and beat.loop.is_running()
    }


def _living_beats() -> list[_Heartbeat]:
    return [beat for reference in _beats.copy() if (beat := reference()) is not None]


def _forked() -> None:
    """Forget the parent's loops, which never run here, and its thread."""
    global _thread, _asleep
    _thread = None
    _asleep = threading.Lock()
    _asleep.acquire()
    watched.clear()
    _beats.clear()


os.register_at_fork(after_in_child=_forked)


class _Heartbeat:
    def __init__(self, loop: Any, threshold_s: float) -> None:
        self.loop = loop
        self.threshold_ns = int(threshold_s * 1e9)
        self.beat_ns = now()
        self.due_ns = 0
        self.thread = threading.get_ident()
        # `id` of the frame that runs a loop other than asyncio's own; 0 before the first beat.
        self.base = 0
        self.stall: _Stall | None = None
        # A timer keeps the context it is set in; the caller's is that of one request.
        self._context = contextvars.Context()

    def arm(self, period_s: float) -> None:
        """Beat again after so long."""
        self.due_ns = now() + int(period_s * 1e9)
        self.loop.call_later(period_s, self._beat, context=self._context)

    def _beat(self) -> None:
        active = recorder.active()
        if active is None:
            watched.pop(id(self.loop), None)
            return
        ran_ns, cpu_ns = active.begin_section()
        stall, self.stall = self.stall, None
        late_ns = ran_ns - self.due_ns
        # A loop that did not run between two calls of `run_until_complete` kept nobody waiting.
        if late_ns >= self.threshold_ns and not (stall is not None and stall.stopped):
            self._record(ran_ns, late_ns, stall)
        self.beat_ns = ran_ns
        self.thread = threading.get_ident()
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if caller.f_code is not _RUN_HANDLE:
            self.base = id(caller)
        lately = ran_ns - active.alive_ns < _LATELY_NS and not _computes(active)
        self.arm(_PERIOD_S if lately else _QUIET_PERIOD_S)
        if _thread is None:
            _ensure_watched()
        active.end_section(ran_ns, cpu_ns)

    def _record(self, ran_ns: int, late_ns: int, stall: _Stall | None) -> None:
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
        event, call_ns, end_ns, thread = _last_blocking_call
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


def note_blocking_call(event: str, begin_ns: int, end_ns: int) -> None:
    """Remember a probed synchronous call, so that a stall of its thread's loop can name it."""
    global _last_blocking_call
    _last_blocking_call = (event, begin_ns, end_ns, threading.get_ident())


def _ensure_watched() -> None:
    """Start the watching thread; cheap when it runs already."""
    global _thread
    thread = _thread
    if thread is not None and thread.is_alive():
        return
    thread = threading.Thread(target=_watch, name="verl-profiler watchdog", daemon=True)
    _thread = thread
    recorder.before_stop(_end)
    # Without a thread, stalls are recorded all the same, without a name.
    with contextlib.suppress(RuntimeError):
        thread.start()


def _wake() -> None:
    """End the thread's sleep."""
    with contextlib.suppress(RuntimeError):
        _asleep.release()


def _end() -> None:
    """Have the thread end with the recorder."""
    global _thread
    _thread = None
    _wake()


def _watch() -> None:
    thread, asleep, spent_ns = threading.current_thread(), _asleep, time.thread_time_ns()
    for wakes in itertools.count():
        active = recorder.active()
        if active is None or _thread is not thread:
            return
        wait_s = _IDLE_S
        # Whatever the host's frames and loops are like, the next stall gets its chance.
        with contextlib.suppress(Exception):
            wait_s = _look_at_all(active)
        if not wakes % _ACCOUNTED:
            spent_ns, before_ns = time.thread_time_ns(), spent_ns
            active.wrapper_cpu_ns += spent_ns - before_ns
        del active
        asleep.acquire(timeout=wait_s)


def _computes(active: recorder.Recorder) -> bool:
    """Return whether loops of this process stall by design."""
    identity = active.identity
    return identity is not None and identity.role in COMPUTING_ROLES


def _look_at_all(active: recorder.Recorder) -> float:
    """Look at the loops that should not stall; return for how many seconds nothing will be due."""
    if _computes(active):
        return _IDLE_S
    alive_ns = active.alive_ns if len(_beats) == 1 else 0
    at_ns = now()
    until_ns = at_ns + _IDLE_NS
    for reference in _beats.copy():
        beat = reference()
        if beat is not None:
            until_ns = min(until_ns, _look_at(beat, alive_ns, at_ns))
    return max(until_ns - at_ns, 1_000_000) / 1e9


def _look_at(beat: _Heartbeat, alive_ns: int, at_ns: int) -> int:
    """Sample a loop that is late; return when to sample again."""
    due_ns = beat.due_ns
    if at_ns < due_ns + beat.threshold_ns:
        return due_ns + beat.threshold_ns
    stall = beat.stall
    if stall is None:
        stall = _Stall()
    elif at_ns < stall.next_ns:
        return stall.next_ns
    if not beat.loop.is_running():
        stall.stopped = True
        found = None
    else:
        found = _running(beat)
    if found is not None:
        if stall.alive_ns is None:
            stall.alive_ns = alive_ns
        stall.sampled_ns = stall.sampled_ns or due_ns
        _credit(stall, found, at_ns - stall.sampled_ns)
    stall.sampled_ns = at_ns
    stall.samples += 1
    every_s = _EVERY_S if stall.samples < _OFTEN else _RARELY_S
    stall.next_ns = at_ns + round(every_s * 1e9)
    # The beat may have run meanwhile.
    if beat.due_ns == due_ns:
        beat.stall = stall
    return stall.next_ns


def _credit(stall: _Stall, found: _Function, ns: int) -> None:
    known = stall.functions.get(found.during)
    if known is None:
        if len(stall.functions) >= _MOST_FUNCTIONS:
            return
        known = stall.functions[found.during] = found
    elif known.request is not found.request:
        # One function, called for several requests.
        known.request, known.identity = None, {}
    known.held_ns += ns


def _running(beat: _Heartbeat) -> _Function | None:
    """Find the function that runs in a loop's callback; None where the loop runs no callback.

    The innermost one of the user's code, else of a package, else any.
    """
    frame = running_frames().get(beat.thread)
    frames: list[FrameType] = []
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code is _RUN_ONCE:
            # Not this loop, or it is between two callbacks.
            return None
        if frame.f_code is _RUN_HANDLE or id(frame) == beat.base:
            break
        frames.append(frame)
        frame = frame.f_back
    hosts = [each for each in frames if not is_wrapper(each)]
    if not hosts:
        return None
    of_packages = (each for each in hosts if not is_python(each.f_code.co_filename))
    at = next(filter(is_users, hosts), None) or next(of_packages, hosts[0])
    calls = [call for call in map(call_of, frames) if call is not None]
    tools = (call.extra.get("tool") for call in calls if call.extra)
    requests = (call.request for call in calls if call.request is not None)
    request = next(requests, None) or _request_of(beat.loop)
    return _Function(
        name_of(at),
        name_of(hosts[0]),
        os.path.basename(at.f_code.co_filename)[:_NAME_LIMIT],
        at.f_lineno or 0,
        next((each for each in tools if isinstance(each, str)), None),
        request,
        {} if request is None else request.identity(),
    )


def _request_of(loop: Any) -> context.Request | None:
    """Return the request of the running task, where Python shows a task's context (from 3.12)."""
    get_context = getattr(asyncio.current_task(loop), "get_context", None)
    return None if get_context is None else get_context().get(context.current_request)
