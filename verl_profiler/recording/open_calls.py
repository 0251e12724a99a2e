"""What began in this process and has not ended: probed calls, requests, phases, and where they stand.

Nothing is kept for it while calls run.  Running calls are found in the frames of threads, suspended ones
in the coroutines of the tasks of watched event loops; requests are held until they end anyway.  Only a
trainer's phases are noted when they begin, a dozen per step, because the frame of a suspended context
manager is in no stack.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from statistics import median
from types import FrameType
from typing import Any

import msgspec

from verl_profiler.recording import event_loop_lag, loop_watchdog, requests
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now
from verl_profiler.recording.context import EngineCall, Request
from verl_profiler.recording.failures import failure_of
from verl_profiler.recording.values import text

__all__ = [
    "FailedPhase",
    "OpenCall",
    "OpenPhase",
    "Stack",
    "begin_phase",
    "end_phase",
    "forget",
    "open_calls",
    "open_phases",
    "open_requests",
    "user_threads",
]

_MOST_FRAMES = 500
# Of one task: coroutines that await each other.
_MOST_COROUTINES = 100
_STACK = 14
_STEPS = ("async_generator_asend", "async_generator_athrow", "coroutine_wrapper")
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
        at: Where it stands: the innermost function that is not Python's own, with line.
        user: The innermost function of the user's code, if there is one and it is not `at`.
        stack: Functions from the outermost to the innermost, the last ones.
    """

    event: str
    begin_ns: int
    step: int | None = None
    identity: dict[str, Any] = {}
    thread: str | None = None
    at: str | None = None
    user: str | None = None
    stack: tuple[str, ...] = ()


class OpenPhase(msgspec.Struct, omit_defaults=True):
    """A phase of the trainer that has not ended.

    Args:
        event: verl's name of it.
        begin_ns: When it began, on the clock of `clock.now()`.
        step: verl's global step.
        usual_ns: The median of its last lengths; None for fewer than three.
        thread: `threading.get_ident` of the thread that began it.
    """

    event: str
    begin_ns: int
    step: int | None = None
    usual_ns: int | None = None
    thread: int = 0


class FailedPhase(msgspec.Struct):
    """A phase of the trainer that an exception ended.

    Args:
        phase: It.
        end_ns: When it ended, on the clock of `clock.now()`.
        failure: What the exception tells; see `failures.failure_of`.
    """

    phase: OpenPhase
    end_ns: int
    failure: dict[str, Any]


_phases: dict[int, OpenPhase] = {}
_lengths: dict[str, list[int]] = {}
_HARMLESS = (asyncio.CancelledError, GeneratorExit, StopIteration, StopAsyncIteration)
# The innermost phase that an exception or interrupt ended, until another one begins.
failed: FailedPhase | None = None
# Called in the trainer's thread when a phase has failed.
when_failed: Callable[[], None] | None = None
# Since when the engine server of the process is paused, on the clock of `clock.now()`.
paused_ns: int | None = None


def begin_phase(call: Call) -> None:
    """Note that a phase of the trainer begins."""
    global failed
    if call.event is not None and call.begin_ns is not None:
        failed = None
        lengths = _lengths.get(call.event, ())
        usual_ns = round(median(lengths)) if len(lengths) >= _USUAL else None
        _phases[id(call)] = OpenPhase(
            call.event, call.begin_ns, call.step, usual_ns, threading.get_ident()
        )


def end_phase(call: Call) -> None:
    """Note that it ended, in whatever way."""
    global failed
    phase = _phases.pop(id(call), None)
    if phase is None:
        return
    if call.error is not None:
        # The same exception ends the phases around it; some only end a wait.
        if failed is None and call.event is not None and not isinstance(call.error, _HARMLESS):
            failed = FailedPhase(phase, call.end_ns or now(), failure_of(call.error))
            if when_failed is not None:
                when_failed()
    else:
        lengths = _lengths.setdefault(phase.event, [])
        lengths.append(call.end_ns - phase.begin_ns)
        del lengths[:-_LENGTHS]


def forget() -> None:
    """Forget the phases; in a forked child and at the end of a recording."""
    global failed, paused_ns
    _phases.clear()
    _lengths.clear()
    failed = paused_ns = None


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
        if type(awaited).__name__ in _STEPS:
            # What `__anext__` and `__await__` return does not show what it drives.
            held = gc.get_referents(awaited)
            awaited = next(filter(_is_driven, held), None)
        for kind, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            if hasattr(awaited, inner):
                frame = getattr(awaited, f"{kind}_frame", None)
                # Coroutines of Cython (Ray's) have no frame.
                if isinstance(frame, FrameType):
                    frames.append(frame)
                awaited = getattr(awaited, inner)
                break
        else:
            break
    return frames


def _is_driven(awaited: Any) -> bool:
    return inspect.isasyncgen(awaited) or inspect.iscoroutine(awaited)


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
            stack = Stack.of(inside)
            opened.at, opened.user, opened.stack = stack.at, stack.user, stack.places
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


class Stack(msgspec.Struct):
    """Where a thread or coroutine stands.

    Args:
        at: The innermost function that is not Python's own, with its line.
        user: The innermost function of the user's code, if there is one and it is not `at`.
        places: The innermost functions, the innermost last.
    """

    at: str | None = None
    user: str | None = None
    places: tuple[str, ...] = ()

    @classmethod
    def of(cls, frames: list[FrameType]) -> Stack:
        """Read it from frames, the outermost first."""
        if not frames:
            return cls()
        frames = [each for each in frames if not loop_watchdog.is_wrapper(each)] or frames
        user = _last(frames, loop_watchdog.is_users)
        at = _last(frames, loop_watchdog.is_installed)
        at = at if frames.index(at) >= frames.index(user) else user
        if not loop_watchdog.is_users(user) and not loop_watchdog.is_installed(at):
            at = frames[-1]
        places = tuple(map(_place, frames[-_STACK:]))
        named = loop_watchdog.is_users(user) and user is not at
        return cls(_place(at), _place(user) if named else None, places)

    @classmethod
    def of_thread(cls, thread: int) -> Stack:
        """Read that of a thread; empty if it has ended."""
        return cls.of(_frames_of(sys._current_frames().get(thread)))  # pyright: ignore[reportPrivateUsage]


def _last(frames: list[FrameType], matches: Callable[[FrameType], bool]) -> FrameType:
    """Return the innermost frame that matches; the outermost of all if none does."""
    return next((each for each in frames[::-1] if matches(each)), frames[0])


def user_threads(loops: Collection[int]) -> list[tuple[str, Stack]]:
    """Return name and stack of threads that run the user's code, event loops and probed calls aside."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: list[tuple[str, Stack]] = []
    for ident, innermost in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        name = names.get(ident, "")
        if ident in loops or ident == threading.get_ident() or name.startswith("verl-profiler "):
            continue
        frames = _frames_of(innermost)
        if any(map(loop_watchdog.is_users, frames)) and not any(map(_call_of, frames)):
            found.append((name, Stack.of(frames)))
    return found


def _place(frame: FrameType) -> str:
    """Return a function and its line; no path, no argument."""
    return f"{loop_watchdog.name_of(frame)}:{frame.f_lineno or 0}"
