"""NVTX ranges of our events, so that a timeline of nsys shows requests, turns and phases.

Each probed call and each `span` of the user's opens a range in the domain `verl_profiler`: its
message is the event, its category the probe family, its payload the turn, or the step outside a
request.  Plain calls nest in their thread (push and pop); coroutines overlap in one thread and so
use start and end.

The choice is made once per process; one that no tool watches pays a comparison per call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from typing import Any

from verl_profiler.environ import NVTX_LIBRARY
from verl_profiler.events.vocabulary import NVTX_DOMAIN
from verl_profiler.recording import context, observers
from verl_profiler.recording.call import Call
from verl_profiler.recording.complaints import announce


def is_on() -> bool:
    """Whether this process opens ranges."""
    return isinstance(observers.current, _Ranges)


def tool_attached() -> bool:
    """Whether a tool has put its NVTX library into this process.

    verl's `tool=torch` names a library that does not exist, to keep tools out.
    """
    library = os.environ.get(NVTX_LIBRARY, "")
    if not library or "/" in library:
        return os.path.exists(library)
    # As NVTX does; ncu's has no folder.
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def switch_on() -> bool:
    """Open ranges in this process from now on, if a tool is attached.

    Returns:
        Whether ranges are opened now.
    """
    if is_on():
        return True
    if not tool_attached():
        return False
    try:
        import nvtx  # pyright: ignore[reportMissingImports]
    except ImportError:
        announce(
            "WARNING nvtx is not installed, so nsys will not show verl-profiler's ranges. (no-nvtx)"
        )
        return False
    observers.current = _Ranges(nvtx)
    return True


def switch_off() -> None:
    """Open no further ranges."""
    if is_on():
        observers.current = None


def _payload() -> int:
    request = context.current_request.get()
    if request is None:
        return context.process.step
    return request.turn if request.turn is not None else request.step or 0


# Under `Call.range` of a plain call: its range is the innermost of its thread.
_PUSHED = object()


class _Ranges:
    """The observer that opens and ends them."""

    def __init__(self, nvtx: Any) -> None:
        self._start, self._end = nvtx.start_range, nvtx.end_range
        self._push, self._pop = nvtx.push_range, nvtx.pop_range
        self._open_turns: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def call_begins(self, call: Call, family: str, in_loop: bool | None) -> None:
        with contextlib.suppress(Exception):
            if in_loop is False:
                self._push(call.event, None, NVTX_DOMAIN, family, _payload())
                call.range = _PUSHED
            else:
                call.range = self._start(call.event, None, NVTX_DOMAIN, family, _payload())

    def call_ends(self, call: Call) -> None:
        with contextlib.suppress(Exception):
            self._pop(NVTX_DOMAIN) if call.range is _PUSHED else self._end(call.range)

    def span_begins(self, event: str) -> Any:
        with contextlib.suppress(Exception):
            return self._start(event, None, NVTX_DOMAIN, "user", _payload())
        return None

    def span_ends(self, handle: Any) -> None:
        with contextlib.suppress(Exception):
            self._end(handle)

    def turn_begins(self, request: Any, number: int) -> None:
        with contextlib.suppress(Exception):
            self._open_turns[request] = self._start("turn", None, NVTX_DOMAIN, "rollout", number)

    def turn_ends(self, request: Any) -> None:
        with contextlib.suppress(Exception):
            turn = self._open_turns.pop(request, None)
            if turn is not None:
                self._end(turn)
