"""Simulation of a run: the trainer, the units in flight, and replicas whose speed depends on their load.

The trainer repeats its operations.  Units are dispatched up to a limit, their requests take their chain of
calls and tools, and wait until the trainer takes them.  While the trainer does what stops the replicas,
calls are interrupted and begin or go on afterwards.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any, NamedTuple

from verl_profiler.analysis.explain.model import (
    Call,
    Dispatch,
    Limits,
    Mark,
    Model,
    Run,
    Stage,
    Take,
    Unit,
)
from verl_profiler.analysis.explain.speed import times_by_load

_NO_LIMITS = Limits()
_NO_CALL = Call(0.0, 0.0, 0.0, 0.0, 0.0, None, None)
# Times of a replay that differ by less than this are equal.
_SAME_US = 1e-3


class Lengths(NamedTuple):
    """Lengths of steps, also as if the trainer had not polled in vain; fewer if it waits in vain.

    `most` is the maximum number of concurrent calls of each replica; empty if calls do not affect each other.
    """

    us: list[float]
    unpolled_us: list[float]
    most: Mapping[str, int]


@dataclass(eq=False, slots=True)
class _Flight:
    """A unit in flight: how many of its requests are open."""

    unit: Unit
    open: int


@dataclass(eq=False, slots=True)
class _Request:
    """A request, with its generate call in flight; without a replica once that was interrupted.

    `home` is the replica of all of its calls, if it has one.  `target` is the work per call of the replica
    at which the call ends; None until it decodes.
    """

    flight: _Flight
    stages: Iterator[Stage]
    home: _Replica | None = None
    replica: _Replica | None = None
    pool: _Pool | None = None
    call: Call = _NO_CALL
    left: float = 0.0
    target: float | None = None
    decodes_us: float = 0.0

    def again(self, now_us: float, model: Model) -> _Request:
        """Interrupt the call; return what sends it again, or goes on with it."""
        left, replica, call = self.left, self.replica, self.call
        if self.target is not None and replica is not None:
            left = call.work if model.redo else self.target - replica.done
        if not model.aborts:
            call = call._replace(fixed_us=max(self.decodes_us - now_us, 0.0))
        self.replica = None
        return replace(self, replica=replica, call=call, left=left, target=None)


@dataclass(eq=False, slots=True)
class _Replica:
    """A replica: running calls share its speed, others wait in FIFO order.

    With `during_prefill`, a pass decodes for the calls that are not in prefill, and is slower by that
    factor while one is: 0 stops decoding, 1 changes nothing.  Calls that begin while others are in prefill
    are prefilled with them, and take as long as all of them together.

    `base` and `per_work` are the time per unit of work, without and with what prefill takes of it; `open`
    counts all calls that came and have not ended, those that are interrupted included.  `decoding` is a heap
    of calls by the cumulative work per call (`done`) at which each finishes, `check_us` when the next may.
    """

    times: Sequence[float]
    during_prefill: float | None
    base: float
    per_work: float
    running: dict[_Request, None] = field(default_factory=dict[_Request, None])
    waiting: deque[_Request] = field(default_factory=deque[_Request])
    prefilling: list[_Request] = field(default_factory=list[_Request])
    decoding: list[tuple[float, int, _Request]] = field(
        default_factory=list[tuple[float, int, _Request]]
    )
    open: int = 0
    most: int = 0
    kv_tokens: float = 0.0
    prefill_end_us: float = 0.0
    done: float = 0.0
    at_us: float = 0.0
    check_us: float = math.inf

    def set_speed(self) -> None:
        """Set the time per unit of work to that of the calls that run now."""
        share = self.during_prefill
        if share is None:
            self.base = self.per_work = self.times[len(self.running)]
            return
        self.base = self.per_work = self.times[max(len(self.decoding), 1)]
        if self.prefilling:
            self.per_work = self.base / share if share else math.inf

    def work(self, now_us: float) -> None:
        """Add the work per call since the last event of the replica."""
        if self.running:
            self.done += (now_us - self.at_us) / self.per_work
        self.at_us = now_us


@dataclass(eq=False, slots=True)
class _Pool:
    """What runs so many calls at once; others wait in FIFO order, with the time that they take."""

    free: int
    waiting: deque[tuple[_Request, float]] = field(default_factory=deque["tuple[_Request, float]"])


class _Simulation:
    """One replay; see `replay`."""

    def __init__(self, model: Model, steps: int, beyond: str) -> None:
        self.model = model
        self.steps = steps
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self.number = count().__next__
        most_open = model.limit * max((len(unit.requests) for unit in model.units), default=0)
        prefill = model.speeds.during_prefill
        self.replicas: dict[str, _Replica] = {}
        for name, most in model.most_running.items():
            times = times_by_load(beyond, model.speed_of(name), most_open, most)
            self.replicas[name] = _Replica(times, prefill, times[0], times[0])
        ranges = {(min(each.times), max(each.times)) for each in self.replicas.values()}
        self.limited = model.limits != _NO_LIMITS
        self.pools = {name: _Pool(most) for name, most in model.pools.items()}
        # Then a call takes as long as it takes alone.
        self.alone = (
            not self.limited
            and prefill in (None, 1)
            and all(low == high for low, high in ranges)
            and (model.routing is None or len(ranges) <= 1)
            and all(each.serves for each in model.operations if isinstance(each, Run))
        )
        self.serves = True
        self.halted: deque[tuple[_Request, bool]] = deque()
        self.next_unit = 0
        self.outstanding = self.open = self.allowed = 0
        self.ready = 0
        self.dropped = 0
        self.taking: Take | None = None
        self.operation = 0
        self.polled_us = 0.0
        # Begin of each step, and how long the trainer polled before in vain.
        self.begins: list[tuple[float, float]] = []

    def run(self) -> Lengths:
        self._dispatch()
        self._advance()
        heap, pop = self.heap, heapq.heappop
        while heap and len(self.begins) <= self.steps:
            self.now, _, what, which = pop(heap)
            what(which)
        most = {} if self.alone else {name: each.most for name, each in self.replicas.items()}
        pairs = [(end - begin, late) for (begin, _), (end, late) in pairwise(self.begins)]
        return Lengths([us for us, _ in pairs], [us - late for us, late in pairs], most)

    def _at(self, time_us: float, what: Callable[[Any], None], which: Any = None) -> None:
        heapq.heappush(self.heap, (time_us, self.number(), what, which))

    # The trainer.

    def _advance(self, _: Any = None) -> None:
        """Let the trainer go on until it is busy or waits."""
        operations = self.model.operations
        at_us = self.now
        while len(self.begins) <= self.steps:
            operation = operations[self.operation % len(operations)]
            if isinstance(operation, Mark):
                self.begins.append((at_us, self.polled_us))
                self.polled_us = 0.0
            elif isinstance(operation, Run) and operation.serves == self.serves:
                at_us += operation.length_us
            elif at_us > self.now:
                self._at(at_us, self._advance)
                return
            elif isinstance(operation, Dispatch):
                self._dispatch()
            elif isinstance(operation, Run):
                self._serve(operation.serves)
                continue
            else:
                self._serve(True)
                self.operation += 1
                self.taking = operation
                self._drop()
                self._take()
                return
            self.operation += 1

    def _take(self) -> None:
        """Take the units that the trainer waits for, if there are as many."""
        taking = self.taking
        if taking is None or self.ready < taking.units:
            return
        self.taking = None
        self.ready -= taking.units
        self.outstanding -= taking.units
        polled_us = 0.0
        if taking.polls_us:
            since_us = self.now - self.begins[-1][0]
            polled_us = _polled_us(taking, since_us) - since_us
        self.polled_us += polled_us
        self._at(self.now + polled_us + taking.lag_us, self._advance)

    def _drop(self) -> None:
        """Drop what is to be dropped, and dispatch as much instead."""
        dropped, self.dropped = self.dropped, 0
        self.outstanding -= dropped
        if dropped:
            self._dispatch()

    # Units and their requests.

    def _dispatch(self) -> None:
        self.allowed = self.model.limit - self.outstanding
        self._fill()

    def _fill(self) -> None:
        """Let requests of so many units run as the last dispatch allowed, and as may run at once."""
        units = self.model.units
        while units and self.allowed > 0 and self.open < self.model.at_once:
            unit = units[self.next_unit % len(units)]
            self.next_unit += 1
            self.allowed -= 1
            self.open += 1
            self.outstanding += 1
            flight = _Flight(unit, len(unit.requests))
            for request in unit.requests:
                self._go_on(self.now + request.begin_us, _Request(flight, iter(request.stages)))

    def _go_on(self, now_us: float, request: _Request) -> None:
        """Advance a request to its next generate call or its end."""
        for stage in request.stages:
            if not isinstance(stage, Call):
                if stage.pool in self.pools:
                    request.pool = self.pools[stage.pool]
                    self._at(now_us, self._join, (request, stage.length_us * stage.served))
                    return
                now_us += stage.length_us
                continue
            if stage.replica is not None and not self.alone:
                request.call, request.left, request.target = stage, stage.work, None
                self._at(now_us + stage.before_us, self._arrive, request)
                return
            per_work = 1.0 if stage.replica is None else self.replicas[stage.replica].base
            now_us += stage.before_us + stage.fixed_us + stage.work * per_work + stage.after_us
        self._at(now_us, self._end, request.flight)

    def _join(self, what: tuple[_Request, float]) -> None:
        """Run a call of a pool, or let it wait."""
        pool = what[0].pool
        if pool is None or not pool.free:
            (pool or _Pool(0)).waiting.append(what)
            return
        pool.free -= 1
        self._at(self.now + what[1], self._leave, what[0])

    def _leave(self, request: _Request) -> None:
        pool, request.pool = request.pool, None
        if pool is not None:
            pool.free += 1
            if pool.waiting:
                self._join(pool.waiting.popleft())
        self._go_on(self.now, request)

    def _end(self, flight: _Flight) -> None:
        flight.open -= 1
        if flight.open:
            return
        self.open -= 1
        self._fill()
        if flight.unit.dropped:
            self.dropped += 1
            if self.taking is not None:
                self._drop()
            return
        self.ready += 1
        self._take()

    # Replicas.

    def _serve(self, serves: bool) -> None:
        """Stop all replicas, or start them."""
        if serves == self.serves:
            return
        self.serves = serves
        if serves:
            halted, self.halted = self.halted, deque()
            for request, interrupted in halted:
                again = interrupted and self.model.aborts
                later_us = self.model.parked_us + request.call.before_us if again else 0.0
                self._at(self.now + later_us, self._enter, request)
            return
        for replica in self.replicas.values():
            replica.work(self.now)
            self.halted += ((each.again(self.now, self.model), True) for each in replica.running)
            self.halted += ((each, False) for each in replica.waiting)
            for calls in (replica.running, replica.waiting, replica.prefilling, replica.decoding):
                calls.clear()
            replica.kv_tokens = 0.0
            replica.check_us = math.inf

    def _arrive(self, request: _Request) -> None:
        replica = self.replicas[request.call.replica or ""]
        if self.model.routing is not None:
            replica = self._route(request, replica)
        request.replica = replica
        replica.open += 1
        self._enter(request)

    def _route(self, request: _Request, recorded: _Replica) -> _Replica:
        if self.model.routing == "call":
            return min(self.replicas.values(), key=lambda each: each.open)
        if request.home is None:
            request.home = min(
                self.replicas.values(), key=lambda each: (each.open, each is not recorded)
            )
        return request.home

    def _enter(self, request: _Request) -> None:
        """Run a call, or let it wait for its replica."""
        replica = request.replica
        if not self.serves:
            self.halted.append((request, False))
        elif replica is not None:
            replica.work(self.now)
            if self.limited:
                replica.waiting.append(request)
                self._admit(replica)
            else:
                self._prefill(replica, request)

    def _admit(self, replica: _Replica) -> None:
        """Run calls that wait, while there is room."""
        most, most_tokens = self.model.limits
        while replica.waiting and len(replica.running) < most:
            tokens = replica.kv_tokens + replica.waiting[0].call.kv_tokens
            if tokens > most_tokens and replica.running:
                break
            replica.kv_tokens = tokens
            self._prefill(replica, replica.waiting.popleft())

    def _prefill(self, replica: _Replica, request: _Request) -> None:
        """Begin the prefill of a call, behind that of others if these matter."""
        running = replica.running
        running[request] = None
        end_us = self.now + request.call.fixed_us
        if replica.during_prefill is None:
            replica.base = replica.per_work = replica.times[len(running)]
            replica.most = max(replica.most, len(running))
        else:
            if replica.prefilling:
                end_us = replica.prefill_end_us + request.call.fixed_us
            replica.prefill_end_us = end_us
            replica.prefilling.append(request)
            replica.set_speed()
        request.decodes_us = end_us
        heapq.heappush(self.heap, (end_us, self.number(), self._decode, request))

    def _decode(self, request: _Request) -> None:
        """Begin to decode: each call by itself, or all that are in prefill after the last of them."""
        replica = request.replica
        if replica is None:
            return
        decoding = replica.decoding
        if replica.during_prefill is None:
            replica.work(self.now)
            request.target = replica.done + request.left
            heapq.heappush(decoding, (request.target, self.number(), request))
        elif replica.prefilling[-1] is request:
            replica.work(self.now)
            calls, replica.prefilling = replica.prefilling, []
            for each in calls:
                each.target = replica.done + each.left
                heapq.heappush(decoding, (each.target, self.number(), each))
            replica.most = max(replica.most, len(decoding))
            replica.set_speed()
        else:
            return
        self._check(replica)

    def _check(self, replica: _Replica) -> None:
        """Schedule the next end of a call, if it is earlier than what is scheduled.

        If it is later, nothing ends then, and it is scheduled again.
        """
        left = replica.decoding[0][0] - replica.done
        # What has no work left ends, whatever prefill does.
        soon = left * replica.base <= _SAME_US
        next_us = self.now if soon else self.now + left * replica.per_work
        if next_us < replica.check_us:
            replica.check_us = next_us
            heapq.heappush(self.heap, (next_us, self.number(), self._finish, replica))

    def _finish(self, replica: _Replica) -> None:
        now_us, decoding = self.now, replica.decoding
        if now_us != replica.check_us:
            return
        replica.check_us = math.inf
        replica.work(now_us)
        if (decoding[0][0] - replica.done) * replica.base <= _SAME_US:
            while decoding and (decoding[0][0] - replica.done) * replica.base <= _SAME_US:
                request = heapq.heappop(decoding)[2]
                del replica.running[request]
                replica.open -= 1
                replica.kv_tokens -= request.call.kv_tokens
                self._go_on(now_us + request.call.after_us, request)
            replica.set_speed()
            if replica.waiting:
                self._admit(replica)
        if decoding:
            self._check(replica)


def _polled_us(taking: Take, since_us: float) -> float:
    """Return when a poll finds units that are ready this long after the begin of the step."""
    polls_us = taking.polls_us
    place = bisect_left(polls_us, since_us - 1)
    if place < len(polls_us):
        return polls_us[place]
    return polls_us[-1] - ((polls_us[-1] - (since_us - 1)) // taking.poll_us) * taking.poll_us


def replay(model: Model, steps: int = 1, beyond: str = "line") -> Lengths:
    """Repeat the operations of a model until this many steps have ended.

    Args:
        model: Each of its requests runs at most one generate call at a time.
        steps: How many.
        beyond: Assumption for loads that were never observed, a key of `BEYOND`.
    """
    return _Simulation(model, steps, beyond).run()


def lengths_us(
    model: Model, steps: int = 1, beyond: str = "line", *, polls: bool = True
) -> list[float]:
    """Return the lengths of the replayed steps; without `polls`, as if no poll came too late."""
    found = replay(model, steps, beyond)
    return found.us if polls else found.unpolled_us
