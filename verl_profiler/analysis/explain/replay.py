"""Simulation of requests on replicas whose speed depends on their load.

The speed at loads that were never observed is unknown; `BEYOND` has its bounds.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

from verl_profiler.analysis.explain.chains import Call, Request, Stage

__all__ = ["BEYOND", "ends_alone_us", "replicas_of", "request_ends", "times_by_load"]

# Times of a replay that differ by less than this are equal.
_SAME_US = 1e-3
# Time per token with n calls in a replica that never ran more than `most`, by assumption, from
# (a, b) of the fitted line.  A forward pass over more calls takes at least as long, and gives at least
# as many tokens per second: so `flat` and `saturated` are bounds, and the line lies between them.
BEYOND: dict[str, Callable[[float, float, int, int], float]] = {
    "line": lambda a, b, n, _: a + b * n,
    "flat": lambda a, b, n, most: a + b * min(n, most),
    "saturated": lambda a, b, n, most: (a + b * min(n, most)) * max(n / most, 1),
}


class _Replica:
    """A replica in a replay: running calls share its speed, others wait in FIFO order."""

    __slots__ = (
        "at_us",
        "check_us",
        "decoding",
        "done",
        "per_work",
        "running",
        "times",
        "waiting",
    )

    def __init__(self, times: Sequence[float]) -> None:
        self.running = 0
        self.times = times
        self.per_work = times[0]
        self.waiting: deque[tuple[int, Call]] = deque()
        # A heap of calls by the cumulative work per call at which each finishes.
        self.decoding: list[tuple[float, int, Call]] = []
        self.done = 0.0
        self.at_us = 0.0
        self.check_us = math.inf


# Event types: a call arrives at its replica, decodes there, or a replica may finish one.
_ARRIVES, _DECODES, _DONE = range(3)


def _replay(
    requests: Sequence[Request],
    replicas: Mapping[str, _Replica],
    max_concurrency: float,
    *,
    even: bool,
) -> list[float]:
    """Simulate requests on replicas; return when each ends.

    An event loop over a heap; a report runs it a hundred thousand times.
    """
    push, pop, number = heapq.heappush, heapq.heappop, count().__next__
    heap: list[tuple[float, int, int, int, Any, Any]] = []
    upcoming = [iter(request.stages) for request in requests]
    ends_us = [0.0] * len(requests)

    def go_on(now_us: float, place: int) -> None:
        """Advance the request to its next generate call or its end."""
        for stage in upcoming[place]:
            if not isinstance(stage, Call):
                now_us += stage.length_us
            elif stage.replica is None:
                now_us += _alone_us(stage, {})
            else:
                replica = None if even else replicas[stage.replica]
                push(heap, (now_us + stage.before_us, number(), _ARRIVES, place, stage, replica))
                return
        ends_us[place] = now_us

    for place, request in enumerate(requests):
        go_on(request.begin_us, place)
    while heap:
        now_us, _, what, place, call, replica = pop(heap)
        if replica is None:
            replica = min(replicas.values(), key=lambda each: each.running + len(each.waiting))
        elif what == _DONE and now_us != replica.check_us:
            continue
        if replica.running:
            replica.done += (now_us - replica.at_us) / replica.per_work
        replica.at_us = now_us
        decoding = replica.decoding
        if what == _ARRIVES:
            replica.waiting.append((place, call))
        elif what == _DECODES:
            push(decoding, (replica.done + call.work, place, call))
        else:
            replica.check_us = math.inf
            if (decoding[0][0] - replica.done) * replica.per_work <= _SAME_US:
                _, place, call = pop(decoding)
                replica.running -= 1
                replica.per_work = replica.times[replica.running]
                go_on(now_us + call.after_us, place)
        while replica.waiting and replica.running < max_concurrency:
            place, call = replica.waiting.popleft()
            replica.running += 1
            replica.per_work = replica.times[replica.running]
            push(heap, (now_us + call.fixed_us, number(), _DECODES, place, call, replica))
        if decoding and what != _ARRIVES:
            # Calls that join delay it: then nothing finishes now, and the check is rescheduled.
            left = decoding[0][0] - replica.done
            next_us = now_us + left * replica.per_work if left > 0 else now_us
            if next_us < replica.check_us:
                replica.check_us = next_us
                push(heap, (next_us, number(), _DONE, 0, None, replica))
    return ends_us


def request_ends(
    requests: Sequence[Request],
    per_work: Mapping[str, Sequence[float]],
    max_concurrency: int | None,
    *,
    even: bool = False,
    known_us: Mapping[int, float] | None = None,
) -> list[float]:
    """Replay requests and return the end time of each.

    Args:
        requests: Each runs at most one generate call at a time.
        per_work: By replica, time per unit of work for 0, 1, … concurrent calls.
        max_concurrency: Maximum concurrency of a replica; None for no limit.
        even: Route each call to the replica with the fewest calls.
        known_us: End times of some requests if they share no replica, by `id`.
    """
    ranges = [(min(times), max(times)) for times in per_work.values()]
    flat = all(low == high for low, high in ranges)
    if max_concurrency is None and flat and (not even or len(set(ranges)) <= 1):
        known = known_us or {}
        alone = {name: times[0] for name, times in per_work.items()}
        return [known[id(r)] if id(r) in known else ends_alone_us(r, alone) for r in requests]
    replicas = {name: _Replica(times) for name, times in per_work.items()}
    return _replay(requests, replicas, max_concurrency or math.inf, even=even)


@lru_cache(256)
def times_by_load(beyond: str, a: float, b: float, calls: int, most: int) -> list[float]:
    """Return the time per unit of work for 0, 1, … concurrent calls."""
    return [BEYOND[beyond](a, b, running, most) for running in range(calls + 1)]


def replicas_of(requests: Sequence[Request]) -> list[str]:
    """Return the sorted names of the replicas that the requests used."""
    names = {stage.replica for r in requests for stage in r.stages if isinstance(stage, Call)}
    return sorted(name for name in names if name is not None)


def ends_alone_us(request: Request, per_work: Mapping[str, float]) -> float:
    """Return the end time of a request that shares no replica.

    Args:
        request: A request whose replicas are all in `per_work`.
        per_work: By replica, time per unit of work.
    """
    end_us = request.begin_us
    for stage in request.stages:
        end_us += _alone_us(stage, per_work)
    return end_us


def _alone_us(stage: Stage, per_work: Mapping[str, float]) -> float:
    """Return the duration of a stage that shares no replica."""
    if isinstance(stage, Call):
        work_us = stage.work if stage.replica is None else stage.work * per_work[stage.replica]
        return stage.before_us + stage.fixed_us + work_us + stage.after_us
    return stage.length_us
