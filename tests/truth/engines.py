"""Runs of engines that give each of their calls a token in each pass, for a known truth.

A pass of a replica with n calls takes a + b n, times noise; calls that come are prefilled in a pass of
their own, in which the others stand still.  Requests go to the replica with the fewest at their first
turn and stay there, as verl's do; phases after the rollout take a fixed time and a time per token.
What a change really saves is known by running the changed engine.  Shares no code with the analyses.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from truth.engine_readings import iterations, reading
from truth.synthetic import Phase, Request, Step, Turn, events_of


@dataclass(frozen=True)
class Engines:
    """What a run is made of.

    Args:
        prompts: Per step.
        samples: Per prompt.
        replicas: (a, b) of each, in microseconds.
        prefill_us: A prefill pass takes this, and half of it more for each further call in it.
        turns: Likely numbers of turns.
        tokens: Shortest and longest mean response of a turn; each is exponential around it.
        noise: Of each pass.
        step_noise: Of all of a step, the same for all replicas and phases.
        run_noise: Of all of a run.
        routing: `sticky` or, for each call anew, `fewest`.
        fixed_us: What the phases after the rollout take, whatever they are given.
        token_us: What they take per token on top.
        prompt_tokens: Of each request.
        tool_factor: Of tools' times; `tokens_factor` of responses' lengths.
        fewer_turns: The requests with the most turns have so many fewer.
        kv_tokens: A replica runs calls whose prompts and responses are at most so many tokens.
    """

    prompts: int = 8
    samples: int = 4
    replicas: tuple[tuple[float, float], ...] = ((6_000, 700), (6_000, 700))
    prefill_us: float = 9_000
    turns: tuple[int, ...] = (1, 2, 2, 3, 3, 4, 5)
    tokens: tuple[float, float] = (15, 60)
    tool_us: float = 150_000
    noise: float = 0.15
    step_noise: float = 0.04
    run_noise: float = 0.0
    routing: str = "sticky"
    slots: int = 64
    fixed_us: float = 150_000
    token_us: float = 180
    prompt_tokens: int = 40
    tool_factor: float = 1.0
    tokens_factor: float = 1.0
    fewer_turns: int = 0
    kv_tokens: int | None = None


@dataclass(frozen=True)
class Pass:
    """One pass of a replica, in microseconds after its step's begin; a prefill pass decodes nothing."""

    replica: int
    begin_us: float
    end_us: float
    decoding: int
    prefill_tokens: int
    running: int
    waiting: int
    kv_tokens: int


@dataclass
class _Request:
    turns: list[tuple[int, int]]
    replica: int | None = None
    begin_us: float = 0.0
    turn: int = 0
    left: int = 0
    arrived: float = 0.0
    begun: float = 0.0
    first: float = 0.0


def _requests(made: Engines, source: random.Random) -> list[_Request]:
    """Draw a step's requests; those of one prompt are alike."""
    requests = []
    for _ in range(made.prompts):
        mean = source.uniform(*made.tokens)
        typical = source.choice(made.turns)
        for _ in range(made.samples):
            count = max(1, typical + source.choice((-1, 0, 0, 1)))
            turns = [
                (
                    max(round(max(2, source.gammavariate(3, mean / 3)) * made.tokens_factor), 2),
                    round(source.gammavariate(2, made.tool_us / 2) * made.tool_factor),
                )
                for _ in range(count)
            ]
            requests.append(_Request(turns))
    most = max(len(request.turns) for request in requests) - made.fewer_turns
    for request in requests:
        request.turns = request.turns[: max(most, 1)]
    return requests


_ACQUIRE, _WAY, _BACK, _OWN, _BUILD, _GAP = 500, 1_500, 1_000, 700, 3_000, 1_000


def _step(
    made: Engines,
    source: random.Random,
    shapes: random.Random,
    speed: float,
    passes: list[Pass],
) -> Step:
    requests = _requests(made, shapes)
    waiting: list[list[_Request]] = [[] for _ in made.replicas]
    running: list[list[_Request]] = [[] for _ in made.replicas]
    busy = [False] * len(made.replicas)
    served: dict[int, list[Turn]] = {id(request): [] for request in requests}
    heap: list[tuple[float, int, Any, Any]] = []
    number = iter(range(10**9)).__next__
    in_flight = [0] * len(made.replicas)
    for place, request in enumerate(requests):
        request.begin_us = 10_000 + 200.0 * place
        at = _GAP + request.begin_us + _BUILD + _ACQUIRE + _WAY
        heapq.heappush(heap, (at, number(), "arrives", request))

    def tokens_of(request: _Request) -> int:
        before = sum(count for count, _ in request.turns[: request.turn])
        return made.prompt_tokens + before + request.turns[request.turn][0]

    def pass_us(replica: int, calls: int) -> float:
        a, b = made.replicas[replica]
        return (a + b * calls) * speed * source.lognormvariate(0, made.noise)

    def begin_pass(now: float, replica: int) -> None:
        free = max(made.slots - len(running[replica]), 0)
        if made.kv_tokens is not None:
            used = sum(map(tokens_of, running[replica]))
            fits = 0
            for request in waiting[replica]:
                used += tokens_of(request)
                if used > made.kv_tokens:
                    break
                fits += 1
            free = min(free, fits)
        begun, waiting[replica] = waiting[replica][:free], waiting[replica][free:]
        if not begun and not running[replica]:
            busy[replica] = False
            return
        busy[replica] = True
        for request in begun:
            request.begun = now
        slow = made.replicas[replica][0] / made.replicas[0][0]
        length = (
            made.prefill_us * slow * (1 + len(begun)) / 2 * speed
            if begun
            else pass_us(replica, len(running[replica]))
        )
        passes.append(
            Pass(
                replica,
                now,
                now + length,
                0 if begun else len(running[replica]),
                made.prompt_tokens * len(begun),
                len(running[replica]) + len(begun),
                len(waiting[replica]),
                sum(map(tokens_of, [*running[replica], *begun])),
            )
        )
        heapq.heappush(heap, (now + length, number(), replica, begun))

    def finish(now: float, request: _Request) -> None:
        tokens, tool = request.turns[request.turn]
        last = request.turn == len(request.turns) - 1
        in_flight[request.replica or 0] -= 1
        served[id(request)].append(
            Turn(
                tokens=tokens,
                token_us=max(round((now - request.first) / tokens), 1),
                prefill_us=round(request.first - request.begun),
                held_us=round(request.begun - request.arrived),
                acquire_us=_ACQUIRE,
                way_us=_WAY,
                back_us=_BACK,
                own_us=_OWN,
                prompt=None
                if made.kv_tokens is None
                else tokens_of(request) - request.turns[request.turn][0],
                tools=() if last else (("search", tool),),
            )
        )
        replicas_of[id(request)].append(request.replica or 0)
        request.turn += 1
        if not last:
            at = now + _BACK + _OWN + tool + _ACQUIRE + _WAY
            heapq.heappush(heap, (at, number(), "arrives", request))

    replicas_of: dict[int, list[int]] = {id(request): [] for request in requests}
    while heap:
        now, _, what, which = heapq.heappop(heap)
        if what == "arrives":
            if which.replica is None or made.routing == "fewest":
                which.replica = min(range(len(in_flight)), key=in_flight.__getitem__)
            in_flight[which.replica] += 1
            which.arrived, which.left = now, which.turns[which.turn][0]
            waiting[which.replica].append(which)
            if not busy[which.replica]:
                begin_pass(now, which.replica)
            continue
        for request in which or running[what]:
            request.first = request.first if not which else now
            request.left -= 1
        if which:
            running[what] += which
        for request in [each for each in running[what] if each.left <= 0]:
            running[what].remove(request)
            finish(now, request)
        begin_pass(now, what)
    tokens = sum(
        made.prompt_tokens + sum(count for count, _ in request.turns) for request in requests
    )
    worked = [
        (made.fixed_us + made.token_us * share * tokens) * speed * source.lognormvariate(0, 0.03)
        for share in (0.5, 1.5)
    ]
    return Step(
        tuple(
            Request(
                turns=tuple(served[id(request)]),
                worker=place % 2,
                replica=replicas_of[id(request)][0],
                begin_us=round(request.begin_us),
                build_us=_BUILD,
                uid=f"prompt {place // made.samples}",
            )
            for place, request in enumerate(requests)
        ),
        phases=(
            Phase("old_log_prob", (round(worked[0]),)),
            Phase("update_actor", (round(worked[1]),)),
            Phase("update_weights", (150_000, 140_000)),
        ),
        gap_us=_GAP,
    )


def steps_of(made: Engines, steps: int, seed: int) -> list[Step]:
    """Run so many steps; the same seed draws the same requests, whatever the engines are."""
    return steps_and_passes(made, steps, seed)[0]


def steps_and_passes(made: Engines, steps: int, seed: int) -> tuple[list[Step], list[list[Pass]]]:
    """Run so many steps; return them and the passes of each."""
    source, shapes = random.Random(f"times {seed} {made}"), random.Random(f"shapes {seed}")
    run = source.lognormvariate(0, made.run_noise)
    passes: list[list[Pass]] = [[] for _ in range(steps)]
    found = [
        _step(made, source, shapes, run * source.lognormvariate(0, made.step_noise), own)
        for own in passes
    ]
    return found, passes


def iteration_events(
    events: Sequence[dict[str, Any]], passes: Sequence[Sequence[Pass]], row_us: int = 100_000
) -> list[dict[str, Any]]:
    """Return the rows that a profiler would record of these passes: 100 ms, or until the replica idles."""
    begins = [event["begin_us"] for event in events if event["event"] == "step"]
    rows = []
    for begin, own in zip(begins, passes, strict=True):
        for replica in sorted({each.replica for each in own}):
            row: list[Pass] = []
            for each in (each for each in own if each.replica == replica):
                if row and (
                    each.begin_us > row[-1].end_us or row[-1].end_us - row[0].begin_us >= row_us
                ):
                    rows.append(_iterations(begin, row))
                    row = []
                row.append(each)
            rows.append(_iterations(begin, row))
    return rows


def _iterations(begin_us: int, row: Sequence[Pass]) -> dict[str, Any]:
    name = f"engine_{row[0].replica}"
    first, last = begin_us + round(row[0].begin_us), begin_us + round(row[-1].end_us)
    busy_s = sum(each.end_us - each.begin_us for each in row) / 1e6
    return iterations(
        name,
        first,
        last,
        iterations=len(row),
        busy_s=busy_s,
        device_s=busy_s,
        decode_requests=sum(each.decoding for each in row),
        prefill_tokens=sum(each.prefill_tokens for each in row),
    )


def state_events(
    events: Sequence[dict[str, Any]], passes: Sequence[Sequence[Pass]], made: Engines
) -> list[dict[str, Any]]:
    """Return what a profiler would read of each replica after every tenth pass, and as it idles."""
    begins = [event["begin_us"] for event in events if event["event"] == "step"]
    rows = []
    for number, (begin, own) in enumerate(zip(begins, passes, strict=True), 1):
        for place, each in enumerate(own):
            idles = each is own[-1]
            if place % 10 and not idles:
                continue
            rows.append(
                reading(
                    f"engine_{each.replica}",
                    begin + round(each.end_us),
                    step=number,
                    running_requests=0 if idles else each.running,
                    waiting_requests=0 if idles else each.waiting,
                    running_limit=made.slots,
                    kv_used_tokens=0 if idles else each.kv_tokens,
                    kv_capacity_tokens=made.kv_tokens or 1_000_000,
                )
            )
    return rows


def changed(made: Engines, **more: Any) -> Engines:
    """Make other engines."""
    return replace(made, **more)


def mean_s(made: Engines, steps: int) -> float:
    """Return the mean length of so many steps, in s."""
    _, truths = events_of(*steps_of(made, steps, 0))
    return fmean(truth.duration_us for truth in truths) / 1e6
