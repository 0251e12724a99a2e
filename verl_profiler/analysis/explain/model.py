"""What is replayed of a run: the trainer's operations, the batches in flight, and the replicas.

A synchronous step has one batch in flight, and the trainer takes it once; an asynchronous run is a cycle
of its recorded steps, which take from what is in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from verl_profiler.analysis.explain.replica_speed import Speeds
from verl_profiler.analysis.explain.speed import Speed

TRAINING, WEIGHT_SYNC = "training", "weight_sync"


class Call(NamedTuple):
    """A generate call: wait before the engine runs it, fixed time, decoding work, return; as measured.

    `queue_us` is the time in the engine's queue within `before_us`, `cold_us` the prefill within
    `fixed_us` of tokens that the previous call had cached, `kv_tokens` what the call occupies of a KV cache.
    """

    before_us: float
    fixed_us: float
    work: float
    after_us: float
    seen_us: float
    replica: str | None
    turn: int | None
    tokens: int | None = None
    queue_us: float = 0.0
    cold_us: float = 0.0
    kv_tokens: float = 0.0

    def scaled(self, part: float, *names: str) -> Call:
        """Multiply its work and its times, or those of these names."""
        every = names or ("before_us", "fixed_us", "cold_us", "work", "after_us", "seen_us")
        changed: dict[str, Any] = {name: getattr(self, name) * part for name in every}
        return self._replace(**changed)


class Tools(NamedTuple):
    """The tool calls of one turn: start (relative to the first), duration and tool of each.

    All but `served` of the time is a wait for the `pool`, if requests share one.  Of each call, `stalled_us`
    are a wait for the worker's event loop, which no change of the tools makes shorter.
    """

    calls: tuple[tuple[float, float, str], ...]
    turn: int | None
    pool: str | None = None
    served: float = 1.0
    stalled_us: float = 0.0

    @property
    def length_us(self) -> float:
        """From the first start to the last end."""
        if len(self.calls) == 1:
            return self.calls[0][0] + self.calls[0][1]
        return max([begin + length for begin, length, _ in self.calls])

    def changed(self, length_of: Callable[[str, float], float]) -> Tools:
        """Change the durations of calls; sequential calls stay sequential."""
        lengths = [
            length_of(tool, max(length - self.stalled_us, 0.0)) + min(self.stalled_us, length)
            for _, length, tool in self.calls
        ]
        if all(new == call[1] for new, call in zip(lengths, self.calls, strict=True)):
            return self
        calls: list[tuple[float, float, str]] = []
        seen = moved = shift = 0.0
        for (begin, length, tool), new in sorted(zip(self.calls, lengths, strict=True)):
            if begin >= seen:
                shift = seen - moved
            calls.append((begin - shift, new, tool))
            seen = max(seen, begin + length)
            moved = max(moved, calls[-1][0] + calls[-1][1])
        return self._replace(calls=tuple(calls))


class Work(NamedTuple):
    """Time between calls; `own` if the worker's event loop was busy with it; `pool` and `served` as of tools."""

    length_us: float
    own: bool
    pool: str | None = None
    served: float = 1.0


Stage = Call | Tools | Work


def measured_us(stage: Stage) -> float:
    """Return the measured duration of a stage."""
    return stage.seen_us if isinstance(stage, Call) else stage.length_us


class Request(NamedTuple):
    """One request: its start (relative to the step's), its measured duration, and its stages.

    `prompt_tokens` and `response_tokens` are the trained tokens, `generated` the tokens that its calls
    generated, `group` its prompt and `request_id` its name; all as measured.
    """

    begin_us: float
    duration_us: float
    worker: str
    turns: int
    stages: tuple[Stage, ...]
    prompt_tokens: int = 0
    response_tokens: int = 0
    generated: int = 0
    group: str | None = None
    request_id: str | None = None

    @property
    def tokens(self) -> float:
        """Trained tokens; response tokens in proportion to the tokens that its stages still generate."""
        if not self.generated:
            return self.prompt_tokens + self.response_tokens
        left = sum(stage.tokens or 0 for stage in self.stages if isinstance(stage, Call))
        return self.prompt_tokens + self.response_tokens * left / self.generated


class Limits(NamedTuple):
    """What bounds the calls that a replica runs at once: their number, and their tokens in its KV cache."""

    calls: float = math.inf
    kv_tokens: float = math.inf


class Unit(NamedTuple):
    """What is dispatched and taken as a whole, a prompt or a batch; its requests begin after the dispatch."""

    requests: tuple[Request, ...]
    dropped: bool = False


class Run(NamedTuple):
    """The trainer is busy; `serves` is whether the replicas run calls meanwhile.

    A negative length is an earlier end of what runs before.
    """

    length_us: float
    state: str = TRAINING
    serves: bool = True


class Take(NamedTuple):
    """The trainer waits for so many units, and has them `lag_us` after it noticed that they are ready.

    It notices at once, or polls: at these times after the begin of the step, then every `poll_us`.
    """

    units: int
    lag_us: float
    polls_us: tuple[float, ...] = ()
    poll_us: float = 0.0


class Dispatch(NamedTuple):
    """Units are dispatched up to the limit."""


class Mark(NamedTuple):
    """A step begins: the one at this place among the recorded ones."""

    place: int


Operation = Run | Take | Dispatch | Mark


@dataclass(frozen=True)
class Model:
    """A rebuilt synchronous step, or the cycle of the steps of an asynchronous run.

    Args:
        steps: The recorded steps, in order.
        step_us: Their lengths; from begin to begin if asynchronous.
        operations: Of the trainer; repeated.
        units: In the order of their dispatch; repeated.
        limit: Units that may be dispatched and not yet taken.
        at_once: Units of which requests may run at once.
        speeds: Of the replicas.
        most_running: Maximum number of concurrent calls of each replica, as recorded.
        peak: That of any replica.
        limits: Of each replica, if calls queued because of them.
        pools: How many calls of tools or rewards run at once, if others waited for them.
        routing: Where calls go: each to the recorded replica (None), to the one with the fewest calls
            (`call`), or all calls of a request to the one with the fewest when it begins, as verl's load
            balancer does (`request`).
        redo: Whether an interrupted call begins anew.
        aborts: Whether it is sent again, and its prefill repeated; else it goes on where it was.
        parked_us: Time after the interruption until such a call is sent again.
        tokens: Of all requests of a synchronous step, as measured.
        after_token_us: Time per token of the phases after `gen` of a synchronous step, and its standard
            error; zeros with too few steps.
        uneven_us: Saving in the phases if every rank took the ranks' mean.
        tool_medians_us: Median duration of each tool's calls, over all steps.
        asynchronous: Whether it is a cycle.
        batch: Units that a step consumes (mean).
        standalone: Replicas with devices of their own; none if all are on the trainer's.
        rollouter: Whether a rollouter dispatches, which new weights permit to go on.
        trainer_devices: Devices of the trainer.
        replica_devices: Devices of each replica with devices of its own; 0 if unknown.
        undivided_share: Part of the generate calls of which all engine time counts as decoding.
    """

    run: str
    steps: tuple[int, ...]
    step_us: tuple[float, ...]
    operations: tuple[Operation, ...]
    units: tuple[Unit, ...] = ()
    limit: int = 1
    at_once: float = math.inf
    speeds: Speeds = field(default_factory=Speeds)
    most_running: Mapping[str, int] = field(default_factory=dict[str, int])
    peak: int = 0
    limits: Limits = field(default_factory=Limits)
    pools: Mapping[str, int] = field(default_factory=dict[str, int])
    routing: str | None = None
    redo: bool = False
    aborts: bool = True
    parked_us: float = 0.0
    tokens: float = 0.0
    after_token_us: tuple[float, float] = (0.0, 0.0)
    uneven_us: float = 0.0
    tool_medians_us: Mapping[str, float] = field(default_factory=dict[str, float])
    asynchronous: bool = False
    batch: float = 1.0
    standalone: tuple[str, ...] = ()
    rollouter: bool = False
    trainer_devices: float = 0.0
    replica_devices: float = 0.0
    undivided_share: float = 0.0

    @property
    def engine(self) -> str:
        """What the engine's speed is from: `iterations` that it reported, or the `calls`."""
        return "calls" if self.speeds.during_prefill is None else "iterations"

    @property
    def mean_us(self) -> float:
        """Mean length of the recorded steps."""
        return sum(self.step_us) / len(self.step_us)

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        """The requests that a synchronous step waited for; of a cycle, all."""
        return tuple(chain.from_iterable(unit.requests for unit in self.units))

    @property
    def calls(self) -> int:
        """Number of generate calls, which determines the cost of a replay."""
        return sum(isinstance(s, Call) for r in self.requests for s in r.stages)

    def speed_of(self, replica: str) -> Speed:
        """Return the speed of a replica; that of all if its own is unknown."""
        return self.speeds.slowness_of.get(replica, self.speeds.slowness)

    def with_requests(self, requests: Sequence[Request]) -> Model:
        """Return the synchronous step with other requests; the phases after `gen` follow their tokens."""
        own, tokens, most = self.requests, self.tokens, self.most_running
        if len(requests) == len(own):
            pairs = [(a, b) for a, b in zip(requests, own, strict=True) if a is not b]
            if not pairs:
                return self
            tokens += sum(a.tokens - b.tokens for a, b in pairs)
        else:
            tokens = sum(request.tokens for request in requests)
            calls = [s for r in requests for s in r.stages if isinstance(s, Call)]
            names = sorted({call.replica for call in calls if call.replica is not None})
            peak, read = self.peak or len(requests), self.speeds.most_read
            most = {name: max(peak, read.get(name, 0)) for name in names}
        more_us = self.after_token_us[0] * (tokens - self.tokens)
        return replace(
            self,
            units=(Unit(tuple(requests)),),
            most_running=most,
            tokens=tokens,
            operations=(*self.operations, Run(more_us)),
        )

    def mapped(self, change: Callable[[Request], Request]) -> Model:
        """Return the model with each request changed."""
        if not self.asynchronous:
            return self.with_requests([change(request) for request in self.requests])
        units = (unit._replace(requests=tuple(map(change, unit.requests))) for unit in self.units)
        return replace(self, units=tuple(units))


def tool_lengths(models: Iterable[Model]) -> dict[str, list[float]]:
    """Return the durations of the calls of each tool, in microseconds."""
    found: dict[str, list[float]] = {}
    for model in models:
        for request in model.requests:
            for stage in request.stages:
                if isinstance(stage, Tools):
                    for _, length, tool in stage.calls:
                        found.setdefault(tool, []).append(length)
    return found
