"""Steps made up second by second, so that every answer about them is known beforehand.

A step is specified (`Step`), and `run_of` writes the events that verl would have left and says what is
true of it.  The truth comes from how the step is put together here, and shares no code with the
analyses: who owns each microsecond, when each request ends, what the step takes.  What a change would
save is known by making the changed step.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from truth.rows import event_row, role_of

from verl_profiler.reading.tables.tables import Tables

SECOND = 1_000_000
EPOCH = 1_795_228_400 * SECOND


@dataclass(frozen=True)
class Turn:
    """One turn: on the way, in the engine, back, in the worker, in tools that run side by side.

    The engine holds each call for `held_us` before it begins, and its server notices the end after
    `late_us` of the way back.  With `failed` the tools' calls end in that error.  A call may come while
    the engine is paused for another `parked_us`, go to another `replica` than its request's, and lose
    `lost_us` of its decoding to `retractions`.  Without `timed` the engine reports none of its times.
    """

    tokens: int = 50
    token_us: int = 10_000
    prefill_us: int = 20_000
    acquire_us: int = 500
    way_us: int = 1_500
    back_us: int = 1_000
    held_us: int = 0
    late_us: int = 0
    own_us: int = 700
    tools: tuple[tuple[str, int], ...] = ()
    failed: str | None = None
    parked_us: int = 0
    replica: int | None = None
    prompt: int | None = None
    cached: int | None = None
    retractions: int = 0
    lost_us: int = 0
    timed: bool = True

    @property
    def decode_us(self) -> int:
        return self.tokens * self.token_us + self.lost_us


@dataclass(frozen=True)
class Request:
    """One request, of the prompt `uid`; its reward function runs for the last `scored_us` of its reward."""

    turns: tuple[Turn, ...] = (Turn(),)
    worker: int = 0
    replica: int = 0
    begin_us: int = 10_000
    build_us: int = 3_000
    reward_us: int = 20_000
    scored_us: int | None = None
    put_us: int = 2_000
    uid: str | None = None


@dataclass(frozen=True)
class Phase:
    """A phase of the trainer: handed over, done by ranks that begin together, collected.

    `passes_us`: when each rank's forward pass begins and ends, after it has begun.
    """

    name: str
    ranks_us: tuple[int, ...]
    before_us: int = 4_000
    after_us: int = 3_000
    passes_us: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Step:
    """One step; `poll_us` None: the trainer is told; `slots` None: replicas run everything.

    `testing_us` and `pause_us` lie between it and the next one.  With `stall` a worker's loop does not
    run from one time to another, in the function `stalled_by`, called for the request `stalled_of`.
    """

    requests: tuple[Request, ...]
    phases: tuple[Phase, ...] = (
        Phase("old_log_prob", (300_000, 310_000)),
        Phase("update_actor", (900_000, 880_000)),
        Phase("update_weights", (150_000, 140_000)),
    )
    poll_us: int | None = None
    look_us: int = 5_000
    fetch_us: int = 8_000
    gap_us: int = 1_000
    slots: int | None = None
    stall: tuple[int, int, int] | None = None
    stalled_by: str | None = None
    stalled_of: int | None = None
    stalled_too: tuple[str, ...] = ()
    sleep_us: int = 0
    save_us: int = 0
    testing_us: int = 0
    pause_us: int = 20_000


@dataclass
class Truth:
    """What is so: times in microseconds after the step's begin."""

    duration_us: int = 0
    categories: dict[str, int] = field(default_factory=dict)
    ends_us: list[int] = field(default_factory=list)
    last: int = 0


RANK_EVENTS = {
    "old_log_prob": "compute_log_prob",
    "ref": "compute_ref_log_prob",
    "update_actor": "update_actor",
    "update_weights": "update_weights",
}


class Writer:
    """Collects the events of one step; times are microseconds after its begin."""

    def __init__(self, step: int, begin_us: int) -> None:
        self.step = step
        self.begin_us = begin_us
        self.events: list[dict[str, Any]] = []

    def span(self, name: str, event: str, begin: int, end: int, **more: Any) -> None:
        begin_us, end_us = self.begin_us + begin, self.begin_us + end
        self.events.append(event_row(name, event, begin_us, end_us, step=self.step, **more))


def run_of(*steps: Step, hosts: Mapping[str, str] | None = None) -> tuple[Tables, list[Truth]]:
    """Make the tables of a run of these steps, and what is true of each; `hosts` by process."""
    events, truths = events_of(*steps)
    return tables_of(events, hosts), truths


def events_of(*steps: Step) -> tuple[list[dict[str, Any]], list[Truth]]:
    """Make the events of a run of these steps, and what is true of each."""
    events: list[dict[str, Any]] = []
    truths = []
    begin = EPOCH
    for number, step in enumerate(steps, 1):
        writer = Writer(number, begin)
        truths.append(_write(writer, step))
        events += writer.events
        begin += truths[-1].duration_us + step.testing_us + step.pause_us
    return events, truths


def tables_of(events: list[dict[str, Any]], hosts: Mapping[str, str] | None = None) -> Tables:
    """Make tables of events, with a process for each name in them."""
    names = dict.fromkeys(event["name"] for event in events)
    processes = [
        {
            "run": "made",
            "name": name,
            "role": role_of(name),
            "rank": int(name.rpartition("_")[2]),
            "host": (hosts or {}).get(name),
            "replica": int(name.rpartition("_")[2]) if name.startswith("engine") else None,
        }
        for name in names
    ]
    return Tables.of({"events": events, "processes": processes})


def _write(writer: Writer, step: Step) -> Truth:
    truth = Truth()
    gen = step.gap_us
    chains = _served(step)
    for place, chain in enumerate(chains):
        truth.ends_us.append(_write_request(writer, step, place, gen, chain))
    truth.last = max(
        range(len(chains)),
        key=lambda place: (truth.ends_us[place], -step.requests[place].begin_us),
    )
    categories: dict[str, int] = {"dispatch": step.requests[truth.last].begin_us}
    for category, length in _owned(step.requests[truth.last], chains[truth.last]):
        categories[category] = categories.get(category, 0) + length
    last = truth.ends_us[truth.last]
    look, polls = _looks(writer, step, gen, last)
    wait_end = look + step.look_us + step.fetch_us
    writer.span("trainer_0", "tq_get", look + step.look_us, wait_end)
    categories["polling"] = look - last - polls
    categories["transfer"] = categories.get("transfer", 0) + polls + step.look_us + step.fetch_us
    writer.span("trainer_0", "sample_wait", gen, wait_end)
    slept = wait_end + step.sleep_us
    if step.sleep_us:
        writer.span("trainer_0", "sleep_replicas", wait_end, slept)
        writer.span("engine_0", "memory_release", wait_end + 100, slept - 100)
        categories["sleep_replicas"] = step.sleep_us
    writer.span("trainer_0", "gen", gen, slept + 1_000)
    categories["gen"] = 1_000
    now = slept + 1_000
    for phase in step.phases:
        now = _write_phase(writer, phase, now + step.gap_us, categories)
    if step.save_us:
        writer.span("trainer_0", "save_checkpoint", now, now + step.save_us)
        categories["save_checkpoint"] = step.save_us
        now += step.save_us
    truth.duration_us = now + step.gap_us
    categories["unexplained"] = categories.get("unexplained", 0) + step.gap_us * (
        2 + len(step.phases)
    )
    writer.span("trainer_0", "step", 0, truth.duration_us)
    if step.testing_us:
        tested = truth.duration_us + step.testing_us
        writer.span("trainer_0", "testing", truth.duration_us, tested)
    if step.stall:
        worker, begin, end = step.stall
        lag: dict[str, Any] = {"loop": "main", "during": step.stalled_by}
        if step.stalled_of is not None:
            lag |= {"request_id": f"q{step.stalled_of:04d}", "function": step.stalled_by}
        for name in (f"worker_{worker}", *step.stalled_too):
            writer.span(name, "event_loop_lag", begin, end, **lag)
    truth.categories = {category: length for category, length in categories.items() if length}
    return truth


def _looks(writer: Writer, step: Step, begin: int, last: int) -> tuple[int, int]:
    """Write the trainer's looks; return when it looked with success, and its looks in vain since."""
    if step.poll_us is None:
        writer.span("trainer_0", "tq_meta", last, last + step.look_us, op="kv_list")
        return last, 0
    look, since = begin, 0
    while True:
        writer.span("trainer_0", "tq_meta", look, look + step.look_us, op="kv_list")
        if look >= last:
            return look, since
        since += max(look + step.look_us - max(look, last), 0)
        look += step.look_us + step.poll_us


def _served(step: Step) -> list[list[tuple[int, int]]]:
    """Return (queue, begin of serving) for each turn of each request: first come, first served."""
    free: dict[int, list[int]] = {}
    chains: list[list[tuple[int, int]]] = [[] for _ in step.requests]
    arrivals = []
    for place, request in enumerate(step.requests):
        first = request.turns[0]
        at = step.gap_us + request.begin_us + request.build_us + first.acquire_us + first.way_us
        heapq.heappush(arrivals, (at, place, 0))
    while arrivals:
        at, place, turn = heapq.heappop(arrivals)
        request = step.requests[place]
        spec = request.turns[turn]
        slots = free.setdefault(_replica(request, spec), [])
        begin = at + spec.parked_us + spec.held_us
        if step.slots is not None and len(slots) >= step.slots:
            begin = max(begin, heapq.heappop(slots))
        end = begin + spec.prefill_us + spec.decode_us
        heapq.heappush(slots, end)
        chains[place].append((begin - at - spec.parked_us, begin))
        if turn + 1 < len(request.turns):
            after = request.turns[turn + 1]
            at = end + spec.back_us + spec.own_us + _tools_us(spec)
            heapq.heappush(arrivals, (at + after.acquire_us + after.way_us, place, turn + 1))
    return chains


def _replica(request: Request, turn: Turn) -> int:
    return request.replica if turn.replica is None else turn.replica


def _tools_us(turn: Turn) -> int:
    return max((length for _, length in turn.tools), default=0)


def _owned(request: Request, chain: list[tuple[int, int]]) -> list[tuple[str, int]]:
    """Say what each microsecond of a request went to."""
    owned = [("prompt_build", request.build_us)]
    for turn, (queue, _) in zip(request.turns, chain, strict=True):
        owned += [
            ("server_acquire", turn.acquire_us),
            ("transport", turn.way_us + turn.back_us),
            ("parked", turn.parked_us),
            ("queue", queue),
            ("prefill", turn.prefill_us),
            ("decode", turn.decode_us),
            ("token_merge", turn.own_us),
            ("tool", _tools_us(turn)),
        ]
    return [*owned, ("reward", request.reward_us), ("transfer", request.put_us)]


def _write_request(
    writer: Writer, step: Step, place: int, gen: int, chain: list[tuple[int, int]]
) -> int:
    request = step.requests[place]
    name = f"worker_{request.worker}"
    who = {"request_id": f"q{place:04d}"}
    begin = gen + request.begin_us
    now = begin + request.build_us
    if request.build_us:
        writer.span(name, "prompt_build", begin, now, **who)
    for number, (turn, (queue, served)) in enumerate(zip(request.turns, chain, strict=True)):
        here = {**who, "turn": number}
        call = {"engine_request_id": f"{who['request_id']}-{writer.step}-{number}"}
        call["response_tokens"] = turn.tokens
        engine = f"engine_{_replica(request, turn)}"
        if turn.prompt is not None:
            call["prompt_tokens"] = turn.prompt
        first = now
        arrived = now + turn.acquire_us + turn.way_us
        end = served + turn.prefill_us + turn.decode_us
        writer.span(name, "server_acquire", now, now + turn.acquire_us, **here)
        writer.span(
            engine,
            "engine_request",
            arrived,
            end + turn.late_us,
            **call,
            **(
                {
                    "queue_s": queue / 1e6,
                    "prefill_s": turn.prefill_us / 1e6,
                    "decode_s": turn.decode_us / 1e6,
                }
                if turn.timed
                else {}
            ),
            **{"cached_tokens": turn.cached} if turn.cached is not None else {},
            **{"retractions": turn.retractions} if turn.retractions else {},
        )
        if turn.parked_us:
            parked = {"engine_request_id": call["engine_request_id"]}
            writer.span(engine, "engine_parked", arrived, arrived + turn.parked_us, **parked)
        now = end + turn.back_us
        writer.span(name, "engine_call", first, now, **here, **call)
        writer.span(name, "token_merge", now, now + turn.own_us, **here, of="response")
        now += turn.own_us
        for tool, length in turn.tools:
            status = {"status": "error", "error": turn.failed} if turn.failed else {}
            writer.span(name, "tool_call", now, now + length, **here, tool=tool, **status)
        if turn.tools:
            writer.span(name, "tool_execution", now, now + _tools_us(turn), **here)
        now += _tools_us(turn)
        writer.span(name, "turn", first, now, **here)
    writer.span(name, "agent_loop", begin, now, **who)
    after = now + request.reward_us
    writer.span(name, "reward", now, after, **who)
    if request.uid is not None:
        who["uid"] = request.uid
    if request.scored_us is not None:
        # Those of one prompt have the same uid.
        ids = {"uid": "u0", "session": place}
        times = {"wait_s": (request.reward_us - request.scored_us) / 1e6}
        times["compute_s"] = request.scored_us / 1e6
        writer.span("reward_0", "reward_score", now, after, **ids, **times)
        who |= ids
    writer.span(name, "tq_put", after, after + request.put_us, **who)
    writer.span(name, "postprocess", now, after + request.put_us, **who)
    end = after + request.put_us
    writer.span(name, "request", begin, end, **who, turns=len(request.turns))
    return end


def _write_phase(writer: Writer, phase: Phase, begin: int, categories: dict[str, int]) -> int:
    ranks = begin + phase.before_us
    for rank, length in enumerate(phase.ranks_us):
        writer.span(f"actor_{rank}", RANK_EVENTS[phase.name], ranks, ranks + length)
    for rank, (first, last) in enumerate(phase.passes_us):
        for event in ("infer_batch", "forward_backward"):
            writer.span(f"actor_{rank}", event, ranks + first, ranks + last)
    worked = max(phase.ranks_us, default=0)
    end = ranks + worked + phase.after_us
    writer.span("trainer_0", phase.name, begin, end)
    handed = phase.before_us + phase.after_us
    handover = phase.name if phase.name == "update_weights" else "handover"
    for category, length in ((phase.name, worked), (handover, handed)):
        categories[category] = categories.get(category, 0) + length
    return end


def with_turns(step: Step, change: Any) -> Step:
    """Make the step with each turn changed."""
    return replace(
        step,
        requests=tuple(
            replace(request, turns=tuple(change(turn) for turn in request.turns))
            for request in step.requests
        ),
    )
