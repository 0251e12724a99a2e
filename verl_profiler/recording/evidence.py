"""What a process shows of itself while a phase of the trainer is stuck: gathered then, and only then.

Each source runs in a daemon thread of its own, and what has not answered in time is left behind: an engine
that hangs holds up neither the others nor the run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from verl_profiler.recording import event_loop_lag
from verl_profiler.recording.stacks import all_threads, frames_of, running_frames, tasks_by_stack

# At most 0.5 MB per process, with names of 200 characters.
_THREADS, _STACKS, _PLACES = 50, 40, 25
_RUN_FOREVER = asyncio.BaseEventLoop.run_forever.__code__

_sources: dict[str, Callable[[], Any]] = {}
# Sources that have not answered yet.
_running: dict[str, threading.Thread] = {}


def add_source_of(name: str, owner: Any, source: Callable[[Any], Any]) -> None:
    """Add what a function returns for an object of the host, as long as the object is there.

    Args:
        name: Key of it.  A later source of the same name replaces it.
        owner: Is not kept alive; one that takes no weak reference is left out.
        source: Gets `owner`, and returns a dict of plain values, empty for nothing; called in a thread of
            its own.
    """
    with contextlib.suppress(TypeError):
        reference = weakref.ref(owner)
        _sources[name] = lambda: {} if reference() is None else source(reference())


def gather(patience_s: float = 6.0) -> dict[str, Any]:
    """Return the evidence of this process, after a few seconds at most.

    Args:
        patience_s: For all sources together.

    Returns:
        By source what it found; `unanswered`, the sources that did not answer in time, and `errors`, why
        others have nothing. See docs/stuck.md.
    """
    sources: dict[str, Callable[[], Any]] = {"stacks": _stacks, **_sources}
    found: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, source in sources.items():
        # One that still hangs since the last time is not called again.
        if name not in _running or not _running[name].is_alive():
            thread = threading.Thread(
                target=_call,
                args=(name, source, found, errors),
                name=f"verl-profiler evidence {name}",
                daemon=True,
            )
            _running[name] = thread
            thread.start()
    until_s = time.monotonic() + patience_s
    for name in sources:
        _running[name].join(max(0.0, until_s - time.monotonic()))
    unanswered = [name for name in sources if _running[name].is_alive()]
    # What a source finds later is not of this moment.
    return {
        **found.copy(),
        **({"unanswered": unanswered} if unanswered else {}),
        **({"errors": errors.copy()} if errors else {}),
    }


def _call(
    name: str, source: Callable[[], Any], found: dict[str, Any], errors: dict[str, str]
) -> None:
    try:
        content = source()
        if content:
            found[name] = content
    except Exception as error:  # noqa: BLE001  whatever the host's objects and the kernel do
        errors[name] = type(error).__name__


def _stacks() -> dict[str, Any]:
    loops = {id(loop): loop for loop in (*event_loop_lag.watched_loops(), *_running_loops())}
    return {
        "threads": all_threads(_THREADS, _PLACES),
        "tasks": tasks_by_stack(loops.values(), _STACKS, _PLACES),
    }


def _running_loops() -> Iterable[Any]:
    """Give the event loops that a thread runs; uvloop's leave no frame."""
    for innermost in running_frames().values():
        for frame in frames_of(innermost):
            if frame.f_code is _RUN_FOREVER:
                yield frame.f_locals.get("self")


def on_loop(
    loop: Any, ask: Callable[[], Any], *, loop_s: float = 1.5, answer_s: float = 3.0
) -> Any:
    """Return what a coroutine of the host returns in its event loop; from another thread.

    It is never cancelled: what it waits for may be shared with the host.

    Args:
        loop: A running event loop.
        ask: Returns the coroutine; called in the loop.
        loop_s: How long to wait for the loop.
        answer_s: How long to wait for what the coroutine waits for.

    Raises:
        TimeoutError: `the event loop` or `the answer`, whichever did not come in time.
    """
    reached = threading.Event()

    async def run() -> Any:
        reached.set()
        return await ask()

    answer = asyncio.run_coroutine_threadsafe(run(), loop)
    if not reached.wait(loop_s):
        raise TimeoutError("the event loop")
    try:
        return answer.result(answer_s)
    except concurrent.futures.TimeoutError:
        raise TimeoutError("the answer") from None
