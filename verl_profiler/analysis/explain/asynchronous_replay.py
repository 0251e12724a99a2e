"""Simulation of the cycle of an asynchronous run: trainer, samples in flight, replicas, weight syncs.

The trainer repeats the operations of the recorded steps.  Samples are dispatched up to a limit, take their
chain of calls and tools on replicas whose speed depends on their load, and wait until the trainer takes
them.  While the trainer does what stops the replicas, calls are interrupted and begin or go on afterwards.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from verl_profiler.analysis.explain.asynchronous_cycle import (
    Chain,
    Cycle,
    Dispatch,
    Generate,
    Mark,
    Run,
    Take,
    Unit,
    Work,
)

__all__ = ["replay"]

_SAME_US = 1e-3


@dataclass
class _Call:
    """A generate call in flight; `epoch` counts its interruptions, whose events are void."""

    request: _Request
    stage: Generate
    replica: _Replica
    left: float
    epoch: int = 0
    sent: bool = False
    target: float = 0.0


@dataclass
class _Request:
    unit: _InFlight
    stages: Chain
    place: int = 0
    replica: _Replica | None = None


@dataclass
class _InFlight:
    unit: Unit
    open: int = 0


@dataclass
class _Replica:
    """Calls that run share its speed; `decoding` is ordered by the work per call at their end.

    `open` counts all of its calls, those that are interrupted included.
    """

    times: Callable[[int], float]
    during_prefill: float | None = None
    running: dict[int, _Call] = field(default_factory=dict[int, _Call])
    prefilling: list[_Call] = field(default_factory=list[_Call])
    prefill_end_us: float = 0.0
    decoding: list[tuple[float, int, _Call, int]] = field(
        default_factory=list[tuple[float, int, _Call, int]]
    )
    done: float = 0.0
    at_us: float = 0.0
    check: int = 0
    most: int = 0
    open: int = 0

    def base_us(self) -> float:
        """Return the time per unit of work of a call, without what prefill takes of it."""
        if self.during_prefill is None:
            return self.times(len(self.running))
        return self.times(max(len(self.decoding), 1))

    def per_work_us(self) -> float:
        """Return the time per unit of work of a call; infinite while prefill stops decoding."""
        if not self.prefilling:
            return self.base_us()
        return self.base_us() / self.during_prefill if self.during_prefill else math.inf


class _Replay:
    """One replay; see `replay`."""

    def __init__(self, cycle: Cycle, steps: int) -> None:
        self.cycle = cycle
        self.steps = steps
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = count().__next__
        self.replicas = {
            name: _Replica(times, cycle.during_prefill) for name, times in cycle.times.items()
        }
        self.serves = True
        self.halted: deque[tuple[_Call, bool]] = deque()
        self.next_unit = 0
        self.outstanding = 0
        self.ready = 0
        self.dropped = 0
        self.taking: Take | None = None
        self.operation = 0
        self.begins: list[tuple[int, float]] = []

    def run(self) -> list[tuple[int, float]]:
        self._dispatch()
        self._advance()
        while self.heap and len(self.begins) <= self.steps:
            self.now, _, what, which = heapq.heappop(self.heap)
            what(*which)
        return self.begins

    def most_running(self) -> dict[str, int]:
        return {name: replica.most for name, replica in self.replicas.items()}

    def _at(self, time_us: float, what: Callable[..., None], *which: Any) -> None:
        heapq.heappush(self.heap, (time_us, self.number(), what, which))

    # The trainer.

    def _advance(self) -> None:
        """Let the trainer go on until it is busy or waits."""
        operations = self.cycle.operations
        while len(self.begins) <= self.steps:
            operation = operations[self.operation % len(operations)]
            self.operation += 1
            if isinstance(operation, Mark):
                self.begins.append((operation.place, self.now))
            elif isinstance(operation, Dispatch):
                self._dispatch()
            elif isinstance(operation, Run):
                self._serve(operation.serves)
                if operation.length_us > 0:
                    self._at(self.now + operation.length_us, self._advance)
                    return
            else:
                self._serve(True)
                self.taking = operation
                self._drop()
                self._take()
                return

    def _take(self) -> None:
        """Take the units that the trainer waits for, if there are as many."""
        taking = self.taking
        if taking is None or self.ready < taking.units:
            return
        self.taking = None
        self.ready -= taking.units
        self.outstanding -= taking.units
        self._at(self.now + taking.lag_us, self._advance)

    def _drop(self) -> None:
        """Drop what is to be dropped, and dispatch as much instead."""
        dropped, self.dropped = self.dropped, 0
        self.outstanding -= dropped
        if dropped:
            self._dispatch()

    # Samples.

    def _dispatch(self) -> None:
        units = self.cycle.units
        while self.outstanding < self.cycle.limit:
            unit = units[self.next_unit % len(units)]
            self.next_unit += 1
            self.outstanding += 1
            flight = _InFlight(unit, len(unit.requests))
            for lag_us, stages in unit.requests:
                self._at(self.now + lag_us, self._go_on, _Request(flight, stages))

    def _go_on(self, request: _Request) -> None:
        """Advance a request to its next stage or its end."""
        if request.place == len(request.stages):
            request.unit.open -= 1
            if not request.unit.open:
                self._finished(request.unit.unit)
            return
        stage = request.stages[request.place]
        request.place += 1
        if isinstance(stage, Work):
            self._at(self.now + stage.length_us, self._go_on, request)
        else:
            replica = self._route(request, stage)
            replica.open += 1
            self._send(_Call(request, stage, replica, stage.work))

    def _route(self, request: _Request, stage: Generate) -> _Replica:
        recorded = self.replicas[stage.replica]
        if not self.cycle.balanced:
            return recorded
        if request.replica is None:
            request.replica = min(
                self.replicas.values(), key=lambda each: (each.open, each is not recorded)
            )
        return request.replica

    def _finished(self, unit: Unit) -> None:
        if unit.dropped:
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
            for call, interrupted in halted:
                parked_us = self.cycle.parked_us if interrupted else 0.0
                self._at(self.now + parked_us, self._send, call)
            return
        for replica in self.replicas.values():
            self._pass(replica)
            for call in replica.running.values():
                if call.sent:
                    call.left = call.stage.work if self.cycle.redo else call.target - replica.done
                call.sent = False
                call.epoch += 1
                self.halted.append((call, True))
            replica.running.clear()
            replica.prefilling.clear()
            replica.decoding.clear()
            replica.check += 1

    def _send(self, call: _Call) -> None:
        if not self.serves:
            self.halted.append((call, False))
            return
        replica = call.replica
        self._pass(replica)
        replica.running[id(call)] = call
        begin = self._prefill
        if replica.during_prefill is None:
            replica.most = max(replica.most, len(replica.running))
            begin = self._decode
        self._at(self.now + call.stage.fixed_us, begin, replica, call, call.epoch)
        self._check(replica)

    def _prefill(self, replica: _Replica, call: _Call, epoch: int) -> None:
        """Begin the prefill of a call, behind that of others; all of them decode after the last."""
        if call.epoch != epoch:
            return
        self._pass(replica)
        begin_us = replica.prefill_end_us if replica.prefilling else self.now
        replica.prefill_end_us = begin_us + call.stage.prefill_us
        replica.prefilling.append(call)
        self._at(replica.prefill_end_us, self._prefilled, replica, call, epoch)
        self._check(replica)

    def _prefilled(self, replica: _Replica, call: _Call, epoch: int) -> None:
        if call.epoch == epoch and replica.prefilling[-1] is call:
            self._begin(replica, replica.prefilling)

    def _decode(self, replica: _Replica, call: _Call, epoch: int) -> None:
        if call.epoch == epoch:
            self._begin(replica, [call])

    def _begin(self, replica: _Replica, calls: list[_Call]) -> None:
        self._pass(replica)
        replica.prefilling = []
        for call in calls:
            call.sent = True
            call.target = replica.done + call.left
            heapq.heappush(replica.decoding, (call.target, self.number(), call, call.epoch))
        if replica.during_prefill is not None:
            replica.most = max(replica.most, len(replica.decoding))
        self._check(replica)

    def _pass(self, replica: _Replica) -> None:
        """Add the work per call since the last event of the replica."""
        if replica.running:
            replica.done += (self.now - replica.at_us) / replica.per_work_us()
        replica.at_us = self.now

    def _check(self, replica: _Replica) -> None:
        """Schedule the next end of a call; an earlier schedule is void."""
        replica.check += 1
        if replica.decoding:
            left = max(replica.decoding[0][0] - replica.done, 0.0)
            # What has no work left ends, whatever prefill does.
            wait_us = left * replica.per_work_us() if left else 0.0
            if wait_us < math.inf:
                self._at(self.now + wait_us, self._done, replica, replica.check)

    def _done(self, replica: _Replica, check: int) -> None:
        if replica.check != check:
            return
        self._pass(replica)
        time_us = replica.base_us()
        while replica.decoding and (replica.decoding[0][0] - replica.done) * time_us <= _SAME_US:
            call = heapq.heappop(replica.decoding)[2]
            del replica.running[id(call)]
            replica.open -= 1
            self._at(self.now, self._go_on, call.request)
        self._check(replica)


def replay(cycle: Cycle, steps: int) -> tuple[list[tuple[int, float]], dict[str, int]]:
    """Repeat a cycle until this many steps have ended.

    Returns:
        Place (in the cycle) and begin in microseconds of each step, and of the one after the last;
        fewer if the trainer waits for samples that are never dispatched. The maximum number of
        concurrent calls of each replica.
    """
    made = _Replay(cycle, steps)
    begins = made.run()
    return begins, made.most_running()
