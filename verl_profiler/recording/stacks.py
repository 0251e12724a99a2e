"""Where threads and coroutines stand: functions and lines, no paths, arguments or values."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from verl_profiler.recording.call import Call

_MOST_FRAMES = 500
# Of one task: coroutines that await each other.
_MOST_COROUTINES = 100
_MOST_TASKS = 5000
_STACK = 14
_STEPS = ("async_generator_asend", "async_generator_athrow", "coroutine_wrapper")
_OWN = "verl-profiler "
_NAME_LIMIT = 200
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_REHEARSAL = os.path.join(_PACKAGE, "rehearsal", "")
_WRAPPER = os.path.join(_PACKAGE, "instrumentation", "wrapping.py")
_STDLIB = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


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
    def of(cls, frames: list[FrameType], count: int = _STACK) -> Stack:
        """Read it from frames, the outermost first; `count` places at most."""
        if not frames:
            return cls()
        frames = [each for each in frames if not is_wrapper(each)] or frames
        user = _last(frames, is_users)
        at = _last(frames, _is_installed)
        at = at if frames.index(at) >= frames.index(user) else user
        if not is_users(user) and not _is_installed(at):
            at = frames[-1]
        places = tuple(map(place, frames[-count:]))
        named = is_users(user) and user is not at
        return cls(place(at), place(user) if named else None, places)

    def row(self) -> dict[str, Any]:
        """Return it as the file of open calls has it; empty for an empty one."""
        found = {"at": self.at, "user": self.user, "stack": self.places or None}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def of_thread(cls, thread: int) -> Stack:
        """Read that of a thread; empty if it has ended."""
        return cls.of(frames_of(running_frames().get(thread)))


def _last(frames: list[FrameType], matches: Callable[[FrameType], bool]) -> FrameType:
    """Return the innermost frame that matches; the outermost of all if none does."""
    return next((each for each in frames[::-1] if matches(each)), frames[0])


def call_of(frame: FrameType) -> Call | None:
    """Return the probed call whose wrapper a frame is of, if it is one."""
    call = frame.f_locals.get("call") if is_wrapper(frame) else None
    return call if type(call) is Call else None


def _is_package(filename: str) -> bool:
    return any(part in filename for part in _PACKAGES)


def is_python(filename: str) -> bool:
    """Whether a file is Python's own."""
    return filename.startswith(_STDLIB) and not _is_package(filename)


def is_wrapper(frame: FrameType) -> bool:
    """Whether this is a wrapper of ours; its local variable `call` is the probed call."""
    return frame.f_code.co_filename == _WRAPPER


def _is_installed(frame: FrameType) -> bool:
    """Whether this is of an installed package: neither Python's own, nor ours."""
    filename = frame.f_code.co_filename
    return not (filename.startswith(_PACKAGE) or is_python(filename))


def is_users(frame: FrameType) -> bool:
    """Whether this is the user's code: neither ours, nor Python's, nor of an installed package."""
    filename = frame.f_code.co_filename
    own = filename.startswith(_PACKAGE) and not filename.startswith(_REHEARSAL)
    return not (own or is_python(filename) or _is_package(filename))


def name_of(frame: FrameType) -> str:
    """Return `module:function` of a frame."""
    module = frame.f_globals.get("__name__")
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
    return f"{module if isinstance(module, str) else '?'}:{name}"[:_NAME_LIMIT]


def place(frame: FrameType) -> str:
    """Return a function and its line; no path, no argument."""
    return f"{name_of(frame)}:{frame.f_lineno or 0}"


def running_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by `threading.get_ident`."""
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage]


def frames_of(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of a thread, the outermost first."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def other_threads() -> Iterator[tuple[int, str, list[FrameType]]]:
    """Give `threading.get_ident`, name and frames of the threads that run Python, this one and ours aside."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, innermost in running_frames().items():
        name = names.get(ident, "")
        if ident != threading.get_ident() and not name.startswith(_OWN):
            yield ident, name, frames_of(innermost)


def tasks_of(loop: Any) -> list[Any]:
    """Return the tasks of an event loop, at most 5000."""
    tasks: Iterable[Any] = ()
    # Tasks come and go meanwhile.
    with contextlib.suppress(Exception):
        tasks = asyncio.all_tasks(loop)
    return list(tasks)[:_MOST_TASKS]


def awaited_by(awaited: Any) -> Iterator[tuple[Any, FrameType]]:
    """Give a coroutine and those that it awaits with their frames, the outermost first."""
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
                    yield awaited, frame
                awaited = getattr(awaited, inner)
                break
        else:
            break


def _is_driven(awaited: Any) -> bool:
    return inspect.isasyncgen(awaited) or inspect.iscoroutine(awaited)


def all_threads(most: int, places: int) -> list[dict[str, Any]]:
    """Return name and stack of the threads that run Python, ours aside."""
    return [
        {"thread": name, "stack": list(map(place, frames[-places:]))}
        for _, name, frames in itertools.islice(other_threads(), most)
    ]


def tasks_by_stack(loops: Iterable[Any], most: int, places: int) -> list[dict[str, Any]]:
    """Return the stacks of all tasks of event loops, the most frequent first.

    Args:
        loops: Event loops of this process.
        most: So many different stacks.
        places: So many functions of each, the innermost last.

    Returns:
        `tasks`: how many stand there; `stack`; `awaits`: type of what the innermost one awaits.
    """
    counts: Counter[tuple[tuple[str, ...], str]] = Counter()
    for loop in loops:
        for task in tasks_of(loop):
            with contextlib.suppress(Exception):
                chain = list(awaited_by(task.get_coro()))
                stack = tuple(place(frame) for _, frame in chain[-places:])
                awaits = type(getattr(task, "_fut_waiter", None)).__name__
                counts[stack, "" if awaits == "NoneType" else awaits] += 1
    return [
        {"tasks": count, "stack": list(stack), **({"awaits": awaits} if awaits else {})}
        for (stack, awaits), count in counts.most_common(most)
    ]
