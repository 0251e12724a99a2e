"""NVTX ranges of our events, so that a timeline of nsys shows requests, turns and phases.

Each probed call and each `span` of the user's opens a range in the domain `verl_profiler`: its
message is the event, its category the probe family, its payload the turn, or the step outside a
request.  Plain calls nest in their thread (push and pop); coroutines overlap in one thread and so
use start and end.

The choice is made once per process, by replacing functions, so that a process that no tool watches
pays nothing.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any

from verl_profiler.environ import NVTX_LIBRARY
from verl_profiler.events.vocabulary import NVTX_DOMAIN
from verl_profiler.instrumentation import wrapping
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.probes import rollout
from verl_profiler.recording import api, context, recorder
from verl_profiler.recording.call import Call

__all__ = ["is_on", "switch_off", "switch_on", "tool_attached"]

_originals: dict[tuple[Any, str], Any] = {}


def is_on() -> bool:
    """Whether this process opens ranges."""
    return bool(_originals)


def tool_attached() -> bool:
    """Whether a tool has put its NVTX library into this process.

    verl's `tool=torch` names a library that does not exist, to keep tools out.
    """
    library = os.environ.get(NVTX_LIBRARY)
    return bool(library) and os.path.exists(library or "")


def switch_on(*, always: bool = False) -> bool:
    """Open ranges in this process from now on.

    Args:
        always: Also where no tool is attached.

    Returns:
        Whether ranges are opened now.
    """
    if is_on():
        return True
    if not always and not tool_attached():
        return False
    try:
        import nvtx
    except ImportError:
        recorder.say("WARNING nvtx is not installed, so nsys shows no ranges of ours. (no-nvtx)")
        return False
    _replace(wrapping, "_enter", _entering(wrapping._enter, nvtx))
    _replace(wrapping, "_leave", _leaving(wrapping._leave, nvtx))
    _replace(api._Span, "__enter__", _span_entering(api._Span.__enter__, nvtx))
    _replace(api._Span, "__exit__", _span_leaving(api._Span.__exit__, nvtx))
    open_turns: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    _replace(rollout, "_open_turn", _turn_opening(rollout._open_turn, nvtx, open_turns))
    _replace(rollout, "_close_turn", _turn_closing(rollout._close_turn, nvtx, open_turns))
    return True


def switch_off() -> None:
    """Put the functions without ranges back."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    _originals[owner, name] = original
    # By name and module it is the original, so a wrapper that Ray ships by value finds on the other
    # side whatever stands there.
    function.__name__, function.__qualname__ = original.__name__, original.__qualname__
    function.__module__ = original.__module__
    setattr(owner, name, function)


def _payload() -> int:
    request = context.current_request.get()
    if request is None:
        return context.process.step
    return request.turn if request.turn is not None else request.step or 0


# Under `Call.range` of a plain call: its range is the innermost of its thread.
_PUSHED = object()


def _entering(original: Callable[..., Any], nvtx: Any) -> Callable[..., Any]:
    start, push = nvtx.start_range, nvtx.push_range

    def enter(
        probe: Probe, names: Any, args: Any, kwargs: Any, in_loop: bool | None
    ) -> Call | None:
        call = original(probe, names, args, kwargs, in_loop)
        if call is None or call.event is None:
            return call
        with contextlib.suppress(Exception):
            if in_loop is False:
                push(call.event, None, NVTX_DOMAIN, probe.family, _payload())
                call.range = _PUSHED
            else:
                call.range = start(call.event, None, NVTX_DOMAIN, probe.family, _payload())
        return call

    return enter


def _leaving(original: Callable[..., Any], nvtx: Any) -> Callable[..., Any]:
    end, pop = nvtx.end_range, nvtx.pop_range

    def leave(
        probe: Probe, call: Call | None, result: Any, error: Any, *, blocking: bool = False
    ) -> None:
        if call is not None and call.range is not None:
            with contextlib.suppress(Exception):
                pop(NVTX_DOMAIN) if call.range is _PUSHED else end(call.range)
        original(probe, call, result, error, blocking=blocking)

    return leave


def _span_entering(original: Callable[..., Any], nvtx: Any) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        with contextlib.suppress(Exception):
            self._range = nvtx.start_range(self._event, None, NVTX_DOMAIN, "user", _payload())
        return original(self)

    return enter


def _span_leaving(original: Callable[..., Any], nvtx: Any) -> Callable[..., Any]:
    def leave(self: Any, kind: Any, error: Any, traceback: Any) -> None:
        with contextlib.suppress(Exception):
            nvtx.end_range(self._range)
        original(self, kind, error, traceback)

    return leave


def _turn_opening(original: Callable[..., Any], nvtx: Any, open_turns: Any) -> Callable[..., Any]:
    def open_turn(request: Any, number: int) -> None:
        original(request, number)
        with contextlib.suppress(Exception):
            open_turns[request] = nvtx.start_range("turn", None, NVTX_DOMAIN, "rollout", number)

    return open_turn


def _turn_closing(original: Callable[..., Any], nvtx: Any, open_turns: Any) -> Callable[..., Any]:
    def close_turn(request: Any, *arguments: Any) -> None:
        with contextlib.suppress(KeyError):
            nvtx.end_range(open_turns.pop(request))
        original(request, *arguments)

    return close_turn
