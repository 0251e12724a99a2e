"""What is replayed of an asynchronous run: the trainer's operations, and the chains of its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "Chain",
    "Cycle",
    "Dispatch",
    "Generate",
    "Mark",
    "Operation",
    "Run",
    "Take",
    "Unit",
    "Work",
    "is_balanced",
]

# Replicas whose calls take this much more or less than the mean have about the same load.
_ABOUT_THE_SAME = 0.15


class Generate(NamedTuple):
    """A generate call: fixed time (client and prefill), and work at the speed of its replica.

    `prefill_us` is not part of the fixed time where a replica's calls are slower during prefill.
    """

    fixed_us: float
    work: float
    replica: str
    prefill_us: float = 0.0


class Work(NamedTuple):
    """Time without a replica; `tool` if a tool call."""

    length_us: float
    tool: bool


Chain = tuple[Generate | Work, ...]


class Unit(NamedTuple):
    """A prompt: when its requests begin after the dispatch, their chains, whether it was dropped."""

    requests: tuple[tuple[float, Chain], ...]
    dropped: bool = False


class Run(NamedTuple):
    """The trainer is busy; `serves` is whether the replicas run calls meanwhile."""

    length_us: float
    state: str
    serves: bool


class Take(NamedTuple):
    """The trainer waits for so many units, and has them `lag_us` later."""

    units: int
    lag_us: float


class Dispatch(NamedTuple):
    """Units are dispatched up to the limit."""


class Mark(NamedTuple):
    """A step begins: the one at this place among the recorded ones."""

    place: int


Operation = Run | Take | Dispatch | Mark


@dataclass(frozen=True)
class Cycle:
    """A cycle of operations and the units that it uses in turn.

    Args:
        operations: Of the recorded steps; repeated.
        units: In the order of their dispatch; repeated.
        limit: Units that may be dispatched and not yet taken.
        times: Time per unit of work of each replica for 0, 1, … concurrent calls.
        during_prefill: Speed of decoding while a call of the replica is in prefill, and `times` is by
            the calls that decode; None if only the number of calls matters, those in prefill included.
        redo: Whether an interrupted call begins anew.
        parked_us: Time after the interruption until such a call is sent again.
        balanced: Whether all calls of a request go to the replica that had the fewest calls when it
            began, as verl's load balancer does, instead of the recorded one.
    """

    operations: tuple[Operation, ...]
    units: tuple[Unit, ...]
    limit: int
    times: Mapping[str, Callable[[int], float]]
    during_prefill: float | None = None
    redo: bool = False
    parked_us: float = 0.0
    balanced: bool = False


def is_balanced(units: Sequence[Unit], times: Mapping[str, Callable[[int], float]]) -> bool:
    """Return whether the replicas have about the same work, in time that it takes them alone."""
    work = dict.fromkeys(times, 0.0)
    for unit in units:
        for _, chain in unit.requests:
            for stage in chain:
                if isinstance(stage, Generate):
                    work[stage.replica] += stage.work * times[stage.replica](1)
    mean = sum(work.values()) / max(len(work), 1)
    return all(abs(each - mean) <= _ABOUT_THE_SAME * mean for each in work.values())
