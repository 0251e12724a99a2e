"""What began in this process and has not ended: probed calls, requests, phases, and where they stand.

Nothing is kept for it while calls run.  Running calls are found in the frames of threads, suspended ones
in the coroutines of the tasks of watched event loops; requests are held until they end anyway.  Only a
trainer's phases are noted when they begin, a dozen per step, because the frame of a suspended context
manager is in no stack.

Of an exception that ends a phase, the type, the process it comes from and the cause are kept.  Its message may
hold prompts, so nothing is taken from it but what Ray, torch and the operating system write themselves, in forms
that are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import msgspec

from verl_profiler.events.open_files import NO_PROGRESS
from verl_profiler.recording import context, event_loop_lag, requests
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now
from verl_profiler.recording.context import EngineCall, Request
from verl_profiler.recording.stacks import (
    Stack,
    awaited_by,
    call_of,
    is_users,
    is_wrapper,
    other_threads,
    tasks_of,
)
from verl_profiler.recording.values import text

_NAME_LIMIT = 200
# The lengths of a phase that its usual one is taken from, and how many it takes.
_LENGTHS, _USUAL = 31, 3
# An asynchronous trainer waits for samples in this phase. They are usually there, if it takes less than
# this share of the step.
_WAIT, _SHARE = "gen", 1 / 10
# Tracebacks of several processes, one in the other.
_MESSAGE_LIMIT = 200_000
# ray/exceptions.py, ray 2.40 to 2.55: `ray::Class.method() (pid=1, ip=10.0.0.1, actor_id=...)`.
_TASK = r"\(pid=([0-9]{1,10}), ip=([0-9A-Za-z.:-]{1,100})"
# The same file, of an actor that died.
_ACTOR = r"\tpid: ([0-9]{1,10})\n(?:\t[^\n]{0,300}\n){0,5}?\tip: ([0-9A-Za-z.:-]{1,100})"


class OpenCall(NamedTuple):
    """A call or request that has not ended.

    Args:
        begin_ns: When it began, on the clock of `clock.now()`.
        row: What the file of open calls has of it besides: docs/stuck.md.
    """

    begin_ns: int
    row: dict[str, Any]


class OpenPhase(msgspec.Struct, omit_defaults=True):
    """A phase of the trainer that has not ended.

    Args:
        event: verl's name of it.
        begin_ns: When it began, on the clock of `clock.now()`.
        step: verl's global step.
        usual_ns: The median of its last lengths; None for fewer than three.
        longest_ns: Of a wait for samples that others make in advance, the longest but one of its last
            lengths: one may be of a first step. None for other phases.
        in_flight: Of a rollouter, how many samples it has dispatched and not finished.
        thread: `threading.get_ident` of the thread that began it.
    """

    event: str
    begin_ns: int
    step: int | None = None
    usual_ns: int | None = None
    longest_ns: int | None = None
    in_flight: int | None = None
    thread: int = 0


class FailedPhase(msgspec.Struct):
    """A phase of the trainer that an exception ended.

    Args:
        phase: It.
        end_ns: When it ended, on the clock of `clock.now()`.
        failure: What is known from the exception; see `failure_of`.
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
# Of a rollouter: since when it has dispatched and finished nothing; None while it need not.
idle_ns: int | None = None
# Samples that it has dispatched and not finished.
in_flight = 0
# The longest that this has ever been.
_longest_idle_ns = 0


def begin_phase(call: Call) -> None:
    """Note that a phase of the trainer begins."""
    global failed
    if call.event is not None and call.begin_ns is not None:
        failed = None
        usual_ns, longest_ns = _usual(call.event), None
        if call.event == _WAIT and usual_ns is not None:
            step_ns = _usual("step")
            if step_ns is not None and usual_ns < step_ns * _SHARE:
                longest_ns = sorted(_lengths[call.event])[-2]
        _phases[id(call)] = OpenPhase(
            call.event,
            call.begin_ns,
            call.step,
            usual_ns,
            longest_ns,
            thread=threading.get_ident(),
        )


def _usual(event: str) -> int | None:
    lengths = _lengths.get(event, ())
    if len(lengths) < _USUAL:
        return None
    middle = sorted(lengths)[(len(lengths) - 1) // 2 : len(lengths) // 2 + 1]
    return round(sum(middle) / len(middle))


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
    global failed, paused_ns, idle_ns, in_flight, _longest_idle_ns
    _phases.clear()
    _lengths.clear()
    failed = paused_ns = idle_ns = None
    in_flight = _longest_idle_ns = 0


def note_progress(at_ns: int) -> None:
    """Note that the rollouter of this process dispatched or finished a sample, or may do so from now on."""
    global idle_ns, _longest_idle_ns
    if idle_ns is not None:
        _longest_idle_ns = max(_longest_idle_ns, at_ns - idle_ns)
    idle_ns = at_ns


def open_phases() -> list[OpenPhase]:
    """Return the open phases, the outermost first; that of a rollouter's idling is a `NO_PROGRESS`."""
    found = sorted(_phases.copy().values(), key=lambda phase: phase.begin_ns)
    if idle_ns is not None:
        known_ns = _longest_idle_ns or None
        step = context.process.step
        found.append(OpenPhase(NO_PROGRESS, idle_ns, step, known_ns, known_ns, in_flight))
    return found


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
    step = {} if request.step is None else {"step": request.step}
    row = {"event": "request", **step, "extra": {**identity, "doing": doing}}
    return OpenCall(request.begin_ns, row)


def _running() -> Iterator[tuple[Call, OpenCall]]:
    """Find the calls that a thread is in."""
    for _, name, frames in other_threads():
        yield from _calls_in(frames, name)


def _suspended(loops: Iterable[Any]) -> Iterator[tuple[Call, OpenCall]]:
    """Find the calls that a task of one of these event loops is in."""
    for loop in loops:
        for task in tasks_of(loop):
            with contextlib.suppress(Exception):
                frames = [frame for _, frame in awaited_by(task.get_coro())]
                yield from _calls_in(frames, None)


def _calls_in(frames: list[FrameType], thread: str | None) -> Iterator[tuple[Call, OpenCall]]:
    """Find the wrappers among the frames; the frames inside of each show where its call stands."""
    calls = [(place, call_of(frame)) for place, frame in enumerate(frames)]
    for place, call in calls:
        if call is None or call.event is None or call.begin_ns is None:
            continue
        row: dict[str, Any] = {"event": text(call.event, _NAME_LIMIT)}
        if call.step is not None:
            row["step"] = call.step
        if identity := _identity(call):
            row["extra"] = identity
        if thread is not None:
            row["thread"] = thread
        inside = [each for each in frames[place + 1 :] if not is_wrapper(each)]
        yield call, OpenCall(call.begin_ns, row | Stack.of(inside).row())


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


def user_threads(loops: Collection[int]) -> list[tuple[str, Stack]]:
    """Return name and stack of threads that run the user's code, event loops and probed calls aside."""
    return [
        (name, Stack.of(frames))
        for ident, name, frames in other_threads()
        if ident not in loops and any(map(is_users, frames)) and not any(map(call_of, frames))
    ]


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return the facts of a failure that its exception has.

    Returns:
        `error`, the name of its type, of the original one where Ray wrapped it; if Ray names it, `pid`
        and `ip` of the process that raised it or died; `reason`, if the message has a known one.
    """
    cause = getattr(error, "cause", None)
    # Of a type that Ray makes of its own and the original one, that is: "RayTaskError(ValueError)".
    wrapped = type(error).__name__.startswith("RayTaskError") and isinstance(cause, BaseException)
    found: dict[str, Any] = {"error": text(type(cause if wrapped else error).__name__, _NAME_LIMIT)}
    # Its patterns are of no use before something fails.
    from verl_profiler.events.failure_texts import reason_in

    message = ""
    # The host's exceptions may fail to be written.
    with contextlib.suppress(Exception):
        message = str(error)[:_MESSAGE_LIMIT]
    places = re.findall(_ACTOR, message) or re.findall(_TASK, message)
    if places:
        # The innermost: the tasks that waited for it are named before it.
        found["pid"], found["ip"] = int(places[-1][0]), places[-1][1]
    reason = reason_in(message)
    return found if reason is None else {**found, "reason": reason}
