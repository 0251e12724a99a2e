"""What began in this process and has not ended: probed calls, requests, phases, and where they stand.

Nothing is kept for it while calls run.  Running calls are found in the frames of threads, suspended ones
in the coroutines of the tasks of watched event loops; requests are held until they end anyway.  Only a
trainer's phases are noted when they begin, a dozen per step, because the frame of a suspended context
manager is in no stack.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from statistics import median
from types import FrameType
from typing import Any

import msgspec

from verl_profiler.recording import event_loop_lag, loop_watchdog, requests
from verl_profiler.recording.call import Call
from verl_profiler.recording.context import EngineCall, Request
from verl_profiler.recording.values import text

__all__ = [
    "OpenCall",
    "OpenPhase",
    "begin_phase",
    "end_phase",
    "forget",
    "open_calls",
    "open_phases",
    "open_requests",
    "place_of",
    "places_of",
    "stack_of",
]

_MOST_FRAMES = 500
# Of one task: coroutines that await each other.
_MOST_COROUTINES = 100
_STACK = 14
_NAME_LIMIT = 200
# The lengths of a phase that its usual one is taken from, and how many it takes.
_LENGTHS, _USUAL = 31, 3


class OpenCall(msgspec.Struct, omit_defaults=True):
    """A call that has not ended.

    Args:
        event: The event that it will be.
        begin_ns: When it began, on the clock of `clock.now()`.
        step: verl's global step, if it has one of its own.
        identity: Of its request, and the fields that it has so far.
        thread: The name of the thread that runs it; None for a suspended coroutine.
        at: Where it stands: the innermost function of the user's code, else of a package, with line.
        stack: Functions from the outermost to the innermost, the last ones.
    """

    event: str
    begin_ns: int
    step: int | None = None
    identity: dict[str, Any] = {}
    thread: str | None = None
    at: str | None = None
    stack: tuple[str, ...] = ()


class OpenPhase(msgspec.Struct, omit_defaults=True):
    """A phase of the trainer that has not ended.

    Args:
        event: verl's name of it.
        begin_ns: When it began, on the clock of `clock.now()`.
        step: verl's global step.
        usual_ns: The median of its last lengths; None for fewer than three.
    """

    event: str
    begin_ns: int
    step: int | None = None
    usual_ns: int | None = None


_phases: dict[int, OpenPhase] = {}
_lengths: dict[str, list[int]] = {}
# The phase that an exception or interrupt ended last, until another one begins.
interrupted: OpenPhase | None = None


def begin_phase(call: Call) -> None:
    """Note that a phase of the trainer begins."""
    global interrupted
    if call.event is not None and call.begin_ns is not None:
        interrupted = None
        lengths = _lengths.get(call.event, ())
        usual_ns = round(median(lengths)) if len(lengths) >= _USUAL else None
        _phases[id(call)] = OpenPhase(call.event, call.begin_ns, call.step, usual_ns)


def end_phase(call: Call) -> None:
    """Note that it ended, in whatever way."""
    global interrupted
    phase = _phases.pop(id(call), None)
    if phase is None:
        return
    if call.error is not None:
        interrupted = phase
    else:
        lengths = _lengths.setdefault(phase.event, [])
        lengths.append(call.end_ns - phase.begin_ns)
        del lengths[:-_LENGTHS]


def forget() -> None:
    """Forget the phases; in a forked child and at the end of a recording."""
    global interrupted
    _phases.clear()
    _lengths.clear()
    interrupted = None


def open_phases() -> list[OpenPhase]:
    """Return the open phases, the outermost first."""
    return sorted(_phases.copy().values(), key=lambda phase: phase.begin_ns)


def open_calls() -> list[OpenCall]:
    """Return all running and suspended calls that can be found, the oldest first."""
    found: dict[int, OpenCall] = {}
    loops = event_loop_lag.watched_loops()
    for call, opened in (*_running(), *_suspended(loops)):
        found.setdefault(id(call), opened)
    return sorted(found.values(), key=lambda call: call.begin_ns)


def open_requests() -> list[OpenCall]:
    """Return the requests that are running, the oldest first; `doing` is what each is in."""
    return sorted(map(_open_request, requests.open_requests()), key=lambda call: call.begin_ns)


def _open_request(request: Request) -> OpenCall:
    identity = request.full_identity()
    for name, value in (("uid", request.uid), ("agent", request.agent)):
        if value is not None:
            identity[name] = value
    if request.tool_begin_ns is not None:
        doing = "tool_execution"
    elif request.calls_open:
        doing = "engine_call"
    else:
        doing = "turn" if request.turn is not None else "agent_loop"
    return OpenCall("request", request.begin_ns, request.step, {**identity, "doing": doing})


def _running() -> Iterator[tuple[Call, OpenCall]]:
    """Find the calls that a thread is in."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    for ident, innermost in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        name = names.get(ident, "")
        if ident != own and not name.startswith("verl-profiler "):
            yield from _calls_in(_frames_of(innermost), name)


def _frames_of(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of a thread, the outermost first."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _suspended(loops: Iterable[Any]) -> Iterator[tuple[Call, OpenCall]]:
    """Find the calls that a task of one of these event loops is in."""
    for loop in loops:
        tasks: Iterable[Any] = ()
        # Tasks come and go meanwhile.
        with contextlib.suppress(Exception):
            tasks = asyncio.all_tasks(loop)
        for task in tasks:
            with contextlib.suppress(Exception):
                yield from _calls_in(_coroutines_of(task.get_coro()), None)


def _coroutines_of(awaited: Any) -> list[FrameType]:
    """Return the frames of a coroutine and of those that it awaits, the outermost first."""
    frames: list[FrameType] = []
    for _ in range(_MOST_COROUTINES):
        frame = None
        for kind, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                frames.append(frame)
                awaited = getattr(awaited, inner, None)
                break
        if frame is None:
            break
    return frames


def _calls_in(frames: list[FrameType], thread: str | None) -> Iterator[tuple[Call, OpenCall]]:
    """Find the wrappers among the frames; the frames inside of each show where its call stands."""
    calls = [(place, _call_of(frame)) for place, frame in enumerate(frames)]
    for place, call in calls:
        if call is None or call.event is None or call.begin_ns is None:
            continue
        inside = [each for each in frames[place + 1 :] if not loop_watchdog.is_wrapper(each)]
        opened = OpenCall(
            text(call.event, _NAME_LIMIT), call.begin_ns, call.step, _identity(call), thread
        )
        if inside:
            opened.at = place_of(inside)
            opened.stack = places_of(inside)
        yield call, opened


def _call_of(frame: FrameType) -> Call | None:
    if not loop_watchdog.is_wrapper(frame):
        return None
    call = frame.f_locals.get("call")
    return call if type(call) is Call else None


def _identity(call: Call) -> dict[str, Any]:
    """Return who a call is for: short values only."""
    request = call.request
    fields: dict[str, Any] = {}
    if isinstance(request, Request):
        fields = request.full_identity()
    for name, value in (call.extra or {}).items():
        if type(value) in (int, float, bool):
            fields[name] = value
        elif type(value) is str:
            fields[name] = text(value, _NAME_LIMIT)
    state = call.state
    if isinstance(state, EngineCall) and state.server is not None:
        fields["server"] = state.server
    return fields


def stack_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the outermost first; none if it has ended."""
    return _frames_of(sys._current_frames().get(thread))  # pyright: ignore[reportPrivateUsage]


def place_of(frames: list[FrameType]) -> str | None:
    """Return the innermost function of the user's code, else of a package, else any, with its line."""
    for matches in (loop_watchdog.is_users, loop_watchdog.is_installed):
        for frame in frames[::-1]:
            if matches(frame):
                return _place(frame)
    return _place(frames[-1]) if frames else None


def places_of(frames: list[FrameType]) -> tuple[str, ...]:
    """Return the innermost functions with their lines, the innermost last."""
    return tuple(map(_place, frames[-_STACK:]))


def _place(frame: FrameType) -> str:
    """Return a function and its line; no path, no argument."""
    return f"{loop_watchdog.name_of(frame)}:{frame.f_lineno or 0}"
