"""What holds up an event loop: one thread per process that samples the loop's stack while it is late.

The thread wakes shortly after each heartbeat of a loop was due.  If the beat has run, that is all;
if not, it takes the stack of the loop's thread: the function that runs there, the probed call and the
request it runs in, and the last time at which the loop is known to have been alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

from verl_profiler.recording import context, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now

__all__ = [
    "RUN_HANDLE",
    "Beat",
    "Stall",
    "ensure_watched",
    "is_installed",
    "is_users",
    "is_wrapper",
    "name_of",
]

# A stalled loop is sampled so often at first, and rarely after so many samples.
_EVERY_S = 0.05
_OFTEN = 20
_RARELY_S = 1.0
# With no loop at all.
_IDLE_S = 0.2
# The thread's time on a core is read at each so manyth wake.
_ACCOUNTED = 20
# Late by less than this is not looked into, whatever the threshold is.
_LEAST_NS, _MOST_NS = 10_000_000, 1_000_000_000
_MOST_FRAMES = 500
_MOST_FUNCTIONS = 50
_NAME_LIMIT = 200

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_REHEARSAL = os.path.join(_PACKAGE, "rehearsal", "")
_WRAPPER = os.path.join(_PACKAGE, "instrumentation", "wrapping.py")
_STDLIB = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
RUN_HANDLE: CodeType = asyncio.Handle._run.__code__
_RUN_ONCE: CodeType = asyncio.BaseEventLoop._run_once.__code__  # type: ignore[attr-defined]


@dataclass
class Function:
    """A function that held the loop's thread, and for which request."""

    during: str
    innermost: str
    file: str
    line: int
    tool: str | None
    request: context.Request | None
    identity: dict[str, Any]
    held_ns: int = 0


@dataclass
class Stall:
    """What was seen of a loop from when its beat was due."""

    # When the loop is known to have been alive last, as of the first sample; None: it never blocked.
    alive_ns: int | None = None
    functions: dict[str, Function] = field(default_factory=dict[str, Function])
    # The loop did not run at all: nobody waits for it.
    stopped: bool = False
    samples: int = 0
    sampled_ns: int = 0
    next_ns: int = 0

    def culprit(self) -> Function | None:
        """Return the function that held the loop longest."""
        return max(self.functions.values(), key=lambda each: each.held_ns, default=None)


class Beat(Protocol):
    """The heartbeat of one loop, as the watching thread needs it."""

    loop: Any
    due_ns: int
    threshold_ns: int
    thread: int
    base: int
    stall: Stall | None


_thread: threading.Thread | None = None
_beats: Any = ()


def ensure_watched(beats: Any) -> None:
    """Watch these heartbeats (a `WeakSet`) from now on; cheap when they are watched already."""
    global _thread, _beats
    thread = _thread
    if thread is not None and thread.is_alive():
        return
    _beats = beats
    thread = threading.Thread(target=_watch, name="verl-profiler watchdog", daemon=True)
    _thread = thread
    # Without a thread, stalls are recorded all the same, without a name.
    with contextlib.suppress(RuntimeError):
        thread.start()


def _forked() -> None:
    global _thread
    _thread = None


os.register_at_fork(after_in_child=_forked)


def _watch() -> None:
    spent_ns = time.thread_time_ns()
    for wakes in itertools.count():
        active = recorder.active()
        if active is None:
            return
        wait_s = _IDLE_S
        # Whatever the host's frames and loops are like, the next stall gets its chance.
        with contextlib.suppress(Exception):
            wait_s = _look_at_all(active)
        if not wakes % _ACCOUNTED:
            spent_ns, before_ns = time.thread_time_ns(), spent_ns
            active.wrapper_cpu_ns += spent_ns - before_ns
        del active
        time.sleep(wait_s)


def _look_at_all(active: recorder.Recorder) -> float:
    """Look at all loops; return for how many seconds nothing will be due."""
    beats = list(_beats)
    alive_ns = active.alive_ns if len(beats) == 1 else 0
    until_ns = now() + round(_IDLE_S * 1e9)
    for beat in beats:
        until_ns = min(until_ns, _look_at(beat, alive_ns))
    return max(until_ns - now(), 1_000_000) / 1e9


def _look_at(beat: Beat, alive_ns: int) -> int:
    """Sample a loop that is late; return when to sample again."""
    due_ns = beat.due_ns
    grace_ns = min(max(beat.threshold_ns, _LEAST_NS), _MOST_NS)
    at_ns = now()
    if at_ns < due_ns + grace_ns:
        return due_ns + grace_ns
    stall = beat.stall
    if stall is None:
        stall = Stall()
    elif at_ns < stall.next_ns:
        return stall.next_ns
    if not beat.loop.is_running():
        stall.stopped = True
        found = None
    else:
        found = _seen(beat.loop, sys._current_frames().get(beat.thread), beat.base)  # pyright: ignore[reportPrivateUsage]
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


def _credit(stall: Stall, seen: _Seen, ns: int) -> None:
    during = name_of(seen.frame)
    function = stall.functions.get(during)
    request = seen.request
    if function is None:
        if len(stall.functions) >= _MOST_FUNCTIONS:
            return
        stall.functions[during] = function = Function(
            during,
            name_of(seen.inner),
            os.path.basename(seen.frame.f_code.co_filename)[:_NAME_LIMIT],
            seen.frame.f_lineno or 0,
            seen.tool,
            request,
            {} if request is None else request.identity(),
        )
    elif function.request is not request:
        # One function, called for several requests.
        function.request, function.identity = None, {}
    function.held_ns += ns


def name_of(frame: FrameType) -> str:
    """Return `module:function` of a frame."""
    module = frame.f_globals.get("__name__")
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
    return f"{module if isinstance(module, str) else '?'}:{name}"[:_NAME_LIMIT]


class _Seen(NamedTuple):
    """The innermost frame of the user's code (else of a package, else any), and what it is part of."""

    frame: FrameType
    inner: FrameType
    tool: str | None
    request: context.Request | None


def _seen(loop: Any, frame: FrameType | None, base: int) -> _Seen | None:
    """Find the function that runs in a loop's callback; None where the loop runs no callback."""
    inner = users = packages = None
    calls: list[Call] = []
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code is _RUN_ONCE:
            # Not this loop, or it is between two callbacks.
            return None
        if frame.f_code is RUN_HANDLE or id(frame) == base:
            break
        filename = frame.f_code.co_filename
        if is_wrapper(frame):
            call = frame.f_locals.get("call")
            if isinstance(call, Call):
                calls.append(call)
        else:
            inner = inner or frame
            if is_users(frame):
                users = users or frame
            elif not _is_python(filename):
                packages = packages or frame
        frame = frame.f_back
    if inner is None:
        return None
    tools = (call.extra.get("tool") for call in calls if call.extra)
    tool = next((each for each in tools if isinstance(each, str)), None)
    requests = (call.request for call in calls if call.request is not None)
    request = next(requests, None) or _request_of(loop)
    return _Seen(users or packages or inner, inner, tool, request)


def _is_package(filename: str) -> bool:
    return any(part in filename for part in _PACKAGES)


def _is_python(filename: str) -> bool:
    return filename.startswith(_STDLIB) and not _is_package(filename)


def is_wrapper(frame: FrameType) -> bool:
    """Whether this is a wrapper of ours; its local variable `call` is the probed call."""
    return frame.f_code.co_filename == _WRAPPER


def is_installed(frame: FrameType) -> bool:
    """Whether this is of an installed package: neither Python's own, nor ours."""
    filename = frame.f_code.co_filename
    return not (filename.startswith(_PACKAGE) or _is_python(filename))


def is_users(frame: FrameType) -> bool:
    """Whether this is the user's code: neither ours, nor Python's, nor of an installed package."""
    filename = frame.f_code.co_filename
    own = filename.startswith(_PACKAGE) and not filename.startswith(_REHEARSAL)
    return not (own or _is_python(filename) or _is_package(filename))


def _request_of(loop: Any) -> context.Request | None:
    """Return the request of the running task, where Python shows a task's context (from 3.12)."""
    get_context = getattr(asyncio.current_task(loop), "get_context", None)
    return None if get_context is None else get_context().get(context.current_request)
