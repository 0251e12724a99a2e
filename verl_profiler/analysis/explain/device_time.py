"""Integrates what devices did over time: each moment of each device has one account.

A device group is one replica's devices, or the devices of a pool without replicas.  What it does at a
moment follows from the trainer's state, from its own state (paused, switched) and from its running
calls, whose time is divided evenly among them.  Nothing here depends on names of events.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    Times = NDArray[int64]

_Timed = TypeVar("_Timed", bound=tuple[Any, ...])

# Of a replica that never runs so many calls at a time in a window, none are few.
_MANY = 8
_FEW = 1 / 4


class Span(NamedTuple):
    """Something that has a state from one time to another, in microseconds."""

    begin_us: int
    end_us: int
    state: str


@dataclass(frozen=True)
class Group:
    """Devices that are always in the same state.

    Args:
        devices: How many.
        states: What they do when they run no calls, without overlaps and in order.
        calls: What they run, any number at a time: begins and ends, in any order, by the state that
            each stands for.
        yields: The states in which running calls count, instead of the state.  None: in all.
        otherwise: The state outside of all `states`.
        few: What the calls of a state count as while fewer than a quarter of the window's most run.
    """

    devices: float
    states: Sequence[Span] = ()
    calls: Mapping[str, tuple[Times, Times]] = field(
        default_factory=dict[str, "tuple[Times, Times]"]
    )
    yields: frozenset[str] | None = None
    otherwise: str = "unattributed"
    few: Mapping[str, str] = field(default_factory=dict[str, str])


def overlaps(
    spans: Sequence[_Timed], begin_us: float, end_us: float
) -> Iterator[tuple[_Timed, float]]:
    """Yield those of spans without overlaps, in order, that lie between two times, and for how long."""
    first = max(bisect_right(spans, begin_us, key=lambda span: span[0]) - 1, 0)
    for span in takewhile(lambda span: span[0] < end_us, spans[first:]):
        length_us = min(span[1], end_us) - max(span[0], begin_us)
        if length_us > 0:
            yield span, length_us


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Return what is innermost at each time: spans without overlaps, in order.

    Of spans that overlap without containing each other, the one that began later counts.
    """
    last_first = reversed([*spans])
    found = swept(last_first, lambda span: (-span.begin_us, span.end_us), lambda span: span.state)
    return [Span(begin_us, end_us, span.state) for begin_us, end_us, span in found]


def swept(
    spans: Iterable[_Timed], order: Callable[[_Timed], Any], kind: Callable[[_Timed], Any]
) -> list[tuple[int, int, _Timed]]:
    """Return which of the spans that are open at a time is first in an order, from when until when.

    Args:
        spans: Each begins with its begin and its end.
        order: What they are ordered by.
        kind: Neighbors of the same kind are one.
    """
    ordered = sorted(spans, key=lambda span: span[0])
    open_: list[tuple[Any, int, _Timed]] = []
    found: list[tuple[int, int, _Timed]] = []
    place = 0
    for begin, end in pairwise(sorted({moment for span in ordered for moment in span[:2]})):
        while place < len(ordered) and ordered[place][0] <= begin:
            heapq.heappush(open_, (order(ordered[place]), place, ordered[place]))
            place += 1
        while open_ and open_[0][2][1] <= begin:
            heapq.heappop(open_)
        if not open_:
            continue
        span = open_[0][2]
        if found and found[-1][1] == begin and kind(found[-1][2]) == kind(span):
            found[-1] = (found[-1][0], end, span)
        else:
            found.append((begin, end, span))
    return found


def integrate(
    windows: Sequence[tuple[int, int]], groups: Iterable[Group]
) -> list[dict[str, float]]:
    """Return the device-seconds of each state or call, for each window.

    Args:
        windows: Begin and end in microseconds, without overlaps and in order.
        groups: Of one pool.

    Returns:
        For each window, seconds by state; they add up to its length times the devices.
    """
    found: list[dict[str, float]] = [{} for _ in windows]
    for group in groups:
        _integrate(windows, group, found)
    return found


def _integrate(
    windows: Sequence[tuple[int, int]], group: Group, found: list[dict[str, float]]
) -> None:
    # Imported here because few commands need it.
    import numpy as np

    states = [group.otherwise, *(span.state for span in group.states), *group.calls]
    states += group.few.values()
    number = {state: place for place, state in enumerate(dict.fromkeys(states))}
    changes = np.array([time for span in group.states for time in span[:2]], np.int64)
    begins = {name: np.sort(begins) for name, (begins, _) in group.calls.items()}
    ends = {name: np.sort(ends) for name, (_, ends) in group.calls.items()}
    bounds = np.array([time for window in windows for time in window], np.int64)
    edges = np.unique(np.concatenate([bounds, changes, *begins.values(), *ends.values()]))
    if len(edges) < 2:
        return
    times, lengths = edges[:-1], np.diff(edges) / 1e6 * group.devices
    firsts = np.array([begin for begin, _ in windows], np.int64)
    lasts = np.array([end for _, end in windows], np.int64)
    window = np.searchsorted(firsts, times, "right") - 1
    inside = (window >= 0) & (times < lasts[window])
    # After an odd number of changes, a time is inside a span.
    change = np.searchsorted(changes, times, "right")
    otherwise = number[group.otherwise]
    inner = np.array([*(number[span.state] for span in group.states), otherwise])
    state = np.where(change % 2, inner[change // 2], otherwise)
    running = {
        name: np.searchsorted(begins[name], times, "right")
        - np.searchsorted(ends[name], times, "right")
        for name in begins
    }
    total = sum(running.values(), np.zeros(len(times), np.int64))
    calls = inside & (total > 0)
    if group.yields is not None:
        calls &= np.isin(state, [number[name] for name in group.yields if name in number])
    sums = np.zeros((len(windows), len(number)))
    still = inside & ~calls
    np.add.at(sums, (window[still], state[still]), lengths[still])
    most = np.zeros(len(windows), np.int64)
    np.maximum.at(most, window[calls], total[calls])
    most = most[window]
    few = calls & (most >= _MANY) & (total < most * _FEW)
    for name, count in running.items():
        for chosen, state in ((calls & ~few, name), (few, group.few.get(name, name))):
            spent = lengths[chosen] * count[chosen] / total[chosen]
            np.add.at(sums[:, number[state]], window[chosen], spent)
    for place, row in enumerate(sums):
        for name, at in number.items():
            if row[at]:
                found[place][name] = found[place].get(name, 0.0) + float(row[at])
