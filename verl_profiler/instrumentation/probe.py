"""What a probe is: the callables of the host that it watches, and what it does with their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from verl_profiler.recording.call import Call

EndTrace: TypeAlias = Callable[[Any, "BaseException | None"], None]
"""Called with the result of a call and the exception that ended it, one of them None."""
# A client of TransferQueue has a loop of its own, and nobody answers while weights or memory move.
_NO_REQUESTS = ("transfer_queue", "weights", "memory")


class Probe(msgspec.Struct, frozen=True):
    """One measurement.

    Args:
        event: The event that it records; None for a probe that records none.
        family: Its name in `profiler.events.exclude`.
        targets: `module:Class.attribute`, newest verl first.  Of the targets in one module the
            first that exists is probed; targets in different modules are all probed, since they
            are the same thing in different engines or trainers.
        reads: Parameters that the hooks read; a test checks them against the host's source.
        applies: Called first; where it returns False, the call is not measured.  Must not raise.
        enter: Called before the host's code, with the `Call`.
        leave: Called after it, with the `Call` and the result (None after an error).
        item: For generators of items: called with the `Call` and each item.
        trace: Called before everything else with the arguments, also where nothing is recorded;
            what it returns, if anything, is called after everything else.
        result: For plain functions: returns what the caller gets in place of the result.
        of_subclasses: True where the target is a base class's, and its subclasses' methods are probed:
            those of the classes that are given to `placing.place_on`.
        optional: True when verl may do without the target and nothing is lost.
        lost: What is unknown where a target is missing, if it is more than the event.
    """

    event: str | None
    family: str
    targets: tuple[str, ...]
    reads: tuple[str, ...] = ()
    applies: Callable[[], bool] | None = None
    enter: Callable[[Call], None] | None = None
    leave: Callable[[Call, Any], None] | None = None
    item: Callable[[Call, Any], None] | None = None
    trace: Callable[[tuple[Any, ...], dict[str, Any]], EndTrace | None] | None = None
    result: Callable[[Any], Any] | None = None
    of_subclasses: bool = False
    optional: bool = False
    lost: str | None = None

    name: str = ""
    """The event, or the attribute that is watched."""
    measures: bool = False
    """Whether it does anything where events are recorded."""
    requests_wait: bool = False
    """Whether requests may wait in an event loop in which it begins: then the loop is watched closely."""
    always: bool = False
    """Whether it does anything where none are."""

    def __post_init__(self) -> None:
        # Read per call; a property would cost a tenth of a microsecond there.
        msgspec.structs.force_setattr(
            self, "name", self.event or self.targets[0].rpartition(".")[2]
        )
        hooks = (self.event, self.enter, self.leave, self.item)
        msgspec.structs.force_setattr(self, "measures", hooks != (None,) * len(hooks))
        msgspec.structs.force_setattr(self, "requests_wait", self.family not in _NO_REQUESTS)
        always = (self.trace, self.result) != (None, None)
        msgspec.structs.force_setattr(self, "always", always)


def of_family(family: str) -> Callable[..., Probe]:
    """Return what makes a probe of a family: of its event, its targets, and the other arguments by name."""

    def probe(event: str | None, *targets: str, **others: Any) -> Probe:
        return Probe(event, family, targets, **others)

    return probe
