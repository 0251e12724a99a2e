"""What a probe is, and the table of all probes.

A probe names an event, the callables of verl that it watches, and what it reads from a call.
Nothing in this package imports verl, Ray, SGLang or torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import msgspec

__all__ = ["Call", "Probe", "all_probes", "select"]

# The modules that hold `PROBES`, grouped by the part of verl that is watched.
_MODULES = (
    "trainer",
    "rollout",
    "engine",
    "reward",
    "workers",
    "weights",
    "memory",
    "transfer_queue",
)


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


@dataclass(frozen=True)
class Probe:
    """One measurement.

    Args:
        event: The event that it records; None for a probe that only keeps the context.
        family: The switch under `profiler.events.families`.
        targets: `module:Class.attribute`, newest verl first.  Of the targets in one module the
            first that exists is probed; targets in different modules are all probed, since they
            are the same thing in different engines or trainers.
        reads: Parameters that the hooks read; a test checks them against the host's source.
        enter: Called before the host's code, with the `Call`.
        leave: Called after it, with the `Call` and the result (None after an error).
        item: For generators of items: called with the `Call` and each item.
        optional: True when verl may do without the target and nothing is lost.
    """

    event: str | None
    family: str
    targets: tuple[str, ...]
    reads: tuple[str, ...] = ()
    enter: Callable[[Call], None] | None = None
    leave: Callable[[Call, Any], None] | None = None
    item: Callable[[Call, Any], None] | None = None
    optional: bool = False

    name: str = field(init=False)
    """The event, or the attribute that is watched."""

    def __post_init__(self) -> None:
        # Read per call; a property would cost a tenth of a microsecond there.
        object.__setattr__(self, "name", self.event or self.targets[0].rpartition(".")[2])


def all_probes() -> list[Probe]:
    """Return every probe of the table."""
    return [
        probe
        for name in _MODULES
        for probe in importlib.import_module(f"verl_profiler.probes.{name}").PROBES
    ]


def select(families: Iterable[str]) -> list[Probe]:
    """Return the probes of the given families."""
    wanted = frozenset(families)
    return [probe for probe in all_probes() if probe.family in wanted]
