"""One running call of a probed callable, between its begin and its event."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any

import msgspec


# Tracked by the garbage collector: a host's object may hold its own running generator, whose frame
# holds the wrapper's call, which holds the arguments, which hold the object.
class Call(msgspec.Struct):
    """One running call of a probed callable.

    Attributes:
        event: The event's name; a hook sets it to None to record nothing.
        begin_ns: When it began; an `enter` hook may move it.
        names: The host's parameters.
        args: What it was called with.
        kwargs: What it was called with by name.
        extra: Fields that a hook wants in the event.
        request: The request to take the identity from; None for the current one.
        step: verl's global step; None for that of the request or the process.
        state: Whatever the probe's hooks hand to each other.
        error: The exception that ended the call, if one did; for the `leave` hook alone.
        binding: What `bind` set, until it is taken back.
        end_ns: When it ended.
        range: Its NVTX range, where ranges are opened.
        trace: What ends its trace, where the probe has one.
    """

    event: str | None
    begin_ns: int | None
    names: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    end_ns: int = 0
    extra: dict[str, Any] | None = None
    request: Any = None
    step: int | None = None
    state: Any = None
    error: BaseException | None = None
    range: Any = None
    trace: Any = None
    binding: tuple[Token[Any], Any] | None = None

    def bind(self, variable: ContextVar[Any], value: Any) -> None:
        """Set a context variable until the call is over; also if a hook fails, or none is run."""
        self.binding = variable.set(value), value

    def release(self) -> None:
        """Let go of all that belongs to the host; the frame of a failed call lives on in a traceback."""
        self.names = self.args = ()
        self.kwargs = {}
        self.extra = self.request = self.state = self.error = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name, without defaults that the caller left out."""
        arguments = dict(zip(self.names, self.args))  # noqa: B905  `strict=` costs more than the dict
        if self.kwargs:
            arguments.update(self.kwargs)
        return arguments


def status_of(error: BaseException) -> str:
    """Return the `status` of a call that ended with this exception."""
    if isinstance(error, GeneratorExit):
        return "unfinished"
    return "error" if isinstance(error, Exception) else "cancelled"


def outcome_of(error: BaseException) -> dict[str, Any]:
    """Return the fields of a call that ended with this exception."""
    return {"status": status_of(error), "error": type(error).__name__}
