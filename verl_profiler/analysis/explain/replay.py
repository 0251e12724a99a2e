"""Simulation of requests on replicas whose speed depends on their load.

The speed at loads that were never observed is unknown; `BEYOND` has its bounds.  A speed is a line
(a, b), or one with bends (a, b, load, more, …): time per unit of work is a + b n, and above each load
`more` for each further call.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from verl_profiler.analysis.explain.chains import Call, Request, Stage

__all__ = [
    "BEYOND",
    "LOAD_ERROR",
    "MODEL_ERROR",
    "READ_ERROR",
    "Limits",
    "Speed",
    "ends_alone_us",
    "grows_with_load",
    "mean_speed",
    "replicas_of",
    "request_ends",
    "time_us",
    "times_by_load",
]

Speed: TypeAlias = tuple[float, ...]


class Limits(NamedTuple):
    """What bounds the calls that a replica runs at once: their number, and their tokens in its KV cache."""

    calls: float = math.inf
    kv_tokens: float = math.inf


# Relative standard errors of the model: of a saving, and of the speedup from lower load, in addition to
# the fitted slope's error; the last where the engines' iterations were read.  Assumed;
# benchmarks/bench_simulated_engines.py measures their coverage.
MODEL_ERROR = 0.10
LOAD_ERROR = 0.20
READ_ERROR = 0.10

_NO_LIMITS = Limits()
# Times of a replay that differ by less than this are equal.
_SAME_US = 1e-3
# Time per token with n calls in a replica that never ran more than `most`, by assumption.  A forward pass
# over more calls takes at least as long, and gives at least as many tokens per second: so `flat` and
# `saturated` are bounds, and the line lies between them.
BEYOND: dict[str, Callable[[Speed, int, int], float]] = {
    "line": lambda speed, n, _: time_us(speed, n),
    "flat": lambda speed, n, most: time_us(speed, min(n, most)),
    "saturated": lambda speed, n, most: time_us(speed, min(n, most)) * max(n / most, 1),
}


class _Replica:
    """A replica in a replay: running calls share its speed, others wait in FIFO order.

    With `during_prefill`, a pass decodes for the calls that are not in prefill, and is slower by that
    factor while one is: 0 stops decoding, 1 changes nothing.  Calls that begin while others are in prefill
    are prefilled with them, and take as long as all of them together.
    """

    __slots__ = (
        "at_us",
        "base",
        "check_us",
        "decoding",
        "done",
        "during_prefill",
        "kv_tokens",
        "per_work",
        "prefill_end_us",
        "prefilling",
        "running",
        "times",
        "waiting",
    )

    def __init__(self, times: Sequence[float], during_prefill: float | None) -> None:
        self.running = 0
        self.prefilling: list[tuple[int, Call]] = []
        self.prefill_end_us = 0.0
        self.kv_tokens = 0.0
        self.times = times
        self.during_prefill = during_prefill
        # Time per unit of work, without and with what prefill takes of it.
        self.base = self.per_work = times[0]
        self.waiting: deque[tuple[int, Call]] = deque()
        # A heap of calls by the cumulative work per call at which each finishes.
        self.decoding: list[tuple[float, int, Call]] = []
        self.done = 0.0
        self.at_us = 0.0
        self.check_us = math.inf

    def set_speed(self) -> None:
        """Set the time per unit of work to that of the calls that run now."""
        share = self.during_prefill
        if share is None:
            self.base = self.per_work = self.times[self.running]
            return
        self.base = self.per_work = self.times[max(self.running - len(self.prefilling), 1)]
        if self.prefilling:
            self.per_work = self.base / share if share else math.inf

    def begin(self, now_us: float, place: int, call: Call) -> float:
        """Begin the prefill of a call, and return when it ends."""
        if self.during_prefill is None:
            return now_us + call.fixed_us
        begin_us = self.prefill_end_us if self.prefilling else now_us
        self.prefill_end_us = begin_us + call.fixed_us
        self.prefilling.append((place, call))
        return self.prefill_end_us

    def ends_prefill(self, now_us: float) -> bool:
        """Return whether a prefill ends now that was not prolonged by further calls."""
        if self.during_prefill is None:
            return True
        return bool(self.prefilling) and now_us == self.prefill_end_us


# Event types: a call arrives at its replica, decodes there, or a replica may finish one.
_ARRIVES, _DECODES, _DONE = range(3)


def _replay(
    requests: Sequence[Request],
    replicas: Mapping[str, _Replica],
    limits: Limits,
    *,
    even: bool,
) -> list[float]:
    """Simulate requests on replicas; return when each ends.

    An event loop over a heap; a report runs it a hundred thousand times.
    """
    push, pop, number = heapq.heappush, heapq.heappop, count().__next__
    most, most_tokens = limits
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
        elif (what == _DONE and now_us != replica.check_us) or (
            what == _DECODES and not replica.ends_prefill(now_us)
        ):
            continue
        if replica.running:
            replica.done += (now_us - replica.at_us) / replica.per_work
        replica.at_us = now_us
        decoding = replica.decoding
        if what == _ARRIVES:
            replica.waiting.append((place, call))
        elif what == _DECODES:
            if replica.during_prefill is None:
                push(decoding, (replica.done + call.work, place, call))
            else:
                for place, call in replica.prefilling:
                    push(decoding, (replica.done + call.work, place, call))
                replica.prefilling.clear()
                replica.set_speed()
        else:
            replica.check_us = math.inf
            if (decoding[0][0] - replica.done) * replica.base <= _SAME_US:
                _, place, call = pop(decoding)
                replica.running -= 1
                replica.kv_tokens -= call.kv_tokens
                replica.set_speed()
                go_on(now_us + call.after_us, place)
        while replica.waiting and replica.running < most:
            tokens = replica.kv_tokens + replica.waiting[0][1].kv_tokens
            if tokens > most_tokens and replica.running:
                break
            place, call = replica.waiting.popleft()
            replica.running += 1
            replica.kv_tokens = tokens
            decodes_us = replica.begin(now_us, place, call)
            replica.set_speed()
            push(heap, (decodes_us, number(), _DECODES, place, call, replica))
        if decoding and what != _ARRIVES:
            # Calls that join delay it: then nothing finishes now, and the check is rescheduled.
            left = decoding[0][0] - replica.done
            soon = left * replica.base <= _SAME_US
            next_us = now_us if soon else now_us + left * replica.per_work
            if next_us < replica.check_us:
                replica.check_us = next_us
                push(heap, (next_us, number(), _DONE, 0, None, replica))
    return ends_us


def request_ends(
    requests: Sequence[Request],
    per_work: Mapping[str, Sequence[float]],
    limits: Limits = _NO_LIMITS,
    *,
    even: bool = False,
    known_us: Mapping[int, float] | None = None,
    during_prefill: float | None = None,
) -> list[float]:
    """Replay requests and return the end time of each.

    Args:
        requests: Each runs at most one generate call at a time.
        per_work: By replica, time per unit of work for 0, 1, … concurrent calls.
        limits: Of each replica.
        even: Route each call to the replica with the fewest calls.
        known_us: End times of some requests if they share no replica, by `id`.
        during_prefill: Speed of decoding while a call is in prefill; None if only the number of calls
            matters, those in prefill included.
    """
    ranges = [(min(times), max(times)) for times in per_work.values()]
    flat = all(low == high for low, high in ranges)
    alone_is_enough = limits == _NO_LIMITS and during_prefill in (None, 1)
    if alone_is_enough and flat and (not even or len(set(ranges)) <= 1):
        known = known_us or {}
        alone = {name: times[0] for name, times in per_work.items()}
        return [known[id(r)] if id(r) in known else ends_alone_us(r, alone) for r in requests]
    replicas = {name: _Replica(times, during_prefill) for name, times in per_work.items()}
    return _replay(requests, replicas, limits, even=even)


def time_us(speed: Speed, calls: float) -> float:
    """Return the time per unit of work with so many concurrent calls."""
    a, b, *bends = speed
    above = zip(bends[::2], bends[1::2], strict=True)
    return a + b * calls + sum(more * max(calls - load, 0.0) for load, more in above)


def grows_with_load(speed: Speed) -> bool:
    """Return whether a unit of work takes longer the more calls run."""
    return bool(speed[1] or any(speed[3::2]))


def mean_speed(speeds: Sequence[Speed]) -> Speed:
    """Return the speed that takes the mean time of all, at any load."""
    many = len(speeds)
    a, b = (sum(speed[place] for speed in speeds) / many for place in (0, 1))
    bends = [value for speed in speeds for value in speed[2:]]
    return (a, b, *(value / many if place % 2 else value for place, value in enumerate(bends)))


@lru_cache(256)
def times_by_load(beyond: str, speed: Speed, calls: int, most: int) -> list[float]:
    """Return the time per unit of work for 0, 1, … concurrent calls.

    Args:
        beyond: Assumption for loads above `most`, a key of `BEYOND`.
        speed: Of the replica.
        calls: Return it for up to so many calls.
        most: The highest load that was observed.
    """
    return [BEYOND[beyond](speed, running, most) for running in range(calls + 1)]


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
