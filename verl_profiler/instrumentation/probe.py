"""What a probe is: an event, the callables of the host that it watches, and what it reads from a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verl_profiler.recording.call import Call

__all__ = ["Probe"]


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
