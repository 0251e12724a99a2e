"""The event loops of agent-loop workers as queues: what balancing their work would change.

A worker's event loop runs one thing at a time.  While a request's own work blocks it, the others wait:
those that begin, those whose generate call has ended, and those whose tool has answered.  Recorded are
only the times at which the loop got to them, so the waits are part of the stages before.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean, median

from verl_profiler.analysis.explain.model import Call, Request, Stage, Tools, Work, measured_us

__all__ = ["balanced"]

# Work of a loop with shorter pauses is one busy time.
_PAUSE_US = 1000.0
# Stands for a tool: what a generate call takes before it arrives at its engine.
_WAY = "way to the engine"


@dataclass
class _Job:
    """Own work of a request, from `begin_us` to `end_us` as recorded; `stage` is its place in the chain.

    It was ready for its loop at `ready_us`: later than `earliest_us` where `tool` was called before or the
    request begins, else then.  It kept the loop busy for `busy_us`, and `chain_us` is since when the loop
    had been busy.
    """

    request: int
    stage: int
    begin_us: float
    end_us: float
    earliest_us: float
    tool: str | None
    busy_us: float = 0.0
    chain_us: float = 0.0
    ready_us: float = 0.0

    @property
    def known(self) -> bool:
        """Whether it is recorded when the request was ready."""
        return self.tool is None and self.earliest_us > float("-inf")


def balanced(requests: Sequence[Request]) -> list[Request]:
    """Return the requests with each worker's work scaled to the mean over the workers.

    How long requests wait for their loops follows from a queue with the scaled work.  Engines and tools
    keep their durations.
    """
    jobs: dict[str, list[_Job]] = {}
    chains = [_with_returns(request) for request in requests]
    for place, request in enumerate(chains):
        jobs.setdefault(request.worker, []).extend(_jobs(place, request))
    for own in jobs.values():
        _set_busy(own)
    lengths = _tool_lengths(job for own in jobs.values() for job in own)
    for own in jobs.values():
        _set_ready(own, lengths)
    loads = {worker: sum(job.busy_us for job in own) for worker, own in jobs.items()}
    mean_us = fmean(loads.values()) if loads else 0.0
    changed = list(requests)
    for worker, own in jobs.items():
        if not loads[worker] or loads[worker] == mean_us:
            continue
        by_request: dict[int, list[_Job]] = {}
        for job in sorted(own, key=lambda job: (job.request, job.stage)):
            by_request.setdefault(job.request, []).append(job)
        factors = 1.0, mean_us / loads[worker]
        now, then = (_lengths(by_request.values(), factor) for factor in factors)
        for place, parts in by_request.items():
            changed[place] = _with_waits(chains[place], parts, now, then)
    return changed


def _with_returns(request: Request) -> Request:
    """Return the request with own work after each return to the loop, if only of length 0.

    These are the ends of generate calls and tools, and the load balancer's answer on the way to the engine,
    which becomes a stage of its own.
    """
    stages: list[Stage] = []
    for stage in request.stages:
        if (
            stages
            and isinstance(stages[-1], Call | Tools)
            and not (isinstance(stage, Work) and stage.own)
        ):
            stages.append(Work(0.0, own=True))
        if isinstance(stage, Call) and stage.replica is not None:
            way_us = stage.before_us - stage.queue_us
            stages += [Tools(((0.0, way_us, _WAY),), stage.turn), Work(0.0, own=True)]
            seen_us = stage.seen_us - way_us
            stages.append(stage._replace(before_us=stage.queue_us, seen_us=seen_us))
        else:
            stages.append(stage)
    return request._replace(stages=tuple(stages))


def _jobs(place: int, request: Request) -> list[_Job]:
    """Return the own work in a request's chain."""
    found: list[_Job] = []
    now_us = request.begin_us
    earliest_us, tool = float("-inf"), None
    for number, stage in enumerate(request.stages):
        begin_us = now_us
        now_us += measured_us(stage)
        if isinstance(stage, Call):
            earliest_us, tool = now_us - stage.after_us, None
            continue
        if isinstance(stage, Tools):
            _, _, tool = max(stage.calls, key=lambda call: call[0] + call[1])
            earliest_us = begin_us
            continue
        if stage.own:
            found.append(_Job(place, number, begin_us, now_us, earliest_us, tool))
        earliest_us, tool = now_us, None
    return found


def _set_busy(jobs: list[_Job]) -> None:
    """Sort jobs by their ends, and set for what part of each the loop was busy with it.

    Of jobs that overlap, the one that ended first ran while both were there.
    """
    jobs.sort(key=lambda job: (job.end_us, job.begin_us))
    # Times at which the loop was busy, in their order.
    busy: list[tuple[float, float]] = []
    for job in jobs:
        begin_us, job.busy_us = job.begin_us, job.end_us - job.begin_us
        while busy and busy[-1][1] >= job.begin_us - _PAUSE_US:
            first_us, last_us = busy.pop()
            begin_us = min(begin_us, first_us)
            job.busy_us -= max(last_us - max(first_us, job.begin_us), 0.0)
        busy.append((begin_us, job.end_us))
    for job in jobs:
        job.chain_us, _ = busy[bisect_right(busy, (job.begin_us, float("inf"))) - 1]


def _tool_lengths(jobs: Iterable[_Job]) -> dict[str, float]:
    """Return the median duration of each tool's calls after which no request waited for its loop."""
    lengths: dict[str, list[float]] = {}
    for job in jobs:
        if job.tool is not None and job.begin_us - job.chain_us <= _PAUSE_US:
            lengths.setdefault(job.tool, []).append(job.begin_us - job.earliest_us)
    return {tool: median(each) for tool, each in lengths.items()}


def _set_ready(jobs: Sequence[_Job], tool_lengths: Mapping[str, float]) -> None:
    """Set when each job was ready for its loop.

    What ran later was ready later: that bounds when a tool had answered.  Within that, it took as long as
    without a wait.  A request is dispatched with the others of its worker, when their work began.
    """
    least_us = float("-inf")
    for job in jobs:
        job.ready_us = min(max(job.earliest_us, job.chain_us, least_us), job.begin_us)
        if job.known:
            least_us = job.ready_us
    most_us = float("inf")
    for job in reversed(jobs):
        most_us = min(most_us, job.ready_us if job.known else job.begin_us)
        if job.tool is not None:
            answered_us = job.earliest_us + tool_lengths.get(job.tool, 0.0)
            job.ready_us = max(job.ready_us, min(answered_us, most_us))


def _lengths(chains: Iterable[Sequence[_Job]], factor: float) -> dict[int, float]:
    """Return by `id` for how long each job waits and runs if its work is scaled: a FIFO queue.

    Args:
        chains: The jobs of each request of a worker, in order.
        factor: Of their work.
    """
    number = count()
    heap = [(chain[0].ready_us, next(number), chain, 0) for chain in chains]
    heapq.heapify(heap)
    free_us = float("-inf")
    found: dict[int, float] = {}
    while heap:
        ready_us, _, chain, place = heapq.heappop(heap)
        job = chain[place]
        free_us = max(ready_us, free_us) + job.busy_us * factor
        found[id(job)] = free_us - ready_us
        if place + 1 < len(chain):
            after = chain[place + 1]
            ready_us = free_us + max(after.ready_us - job.end_us, 0.0)
            heapq.heappush(heap, (ready_us, next(number), chain, place + 1))
    return found


def _with_waits(
    request: Request, jobs: Sequence[_Job], now: Mapping[int, float], then: Mapping[int, float]
) -> Request:
    """Replace own work and the waits for it by those in a queue with scaled work.

    Args:
        request: What the jobs are of; the waits are the ends of the stages before them.
        jobs: In its order.
        now: By `id` of the job, the length of waiting and work in the queue with the measured work.
        then: The same with the scaled work.
    """
    stages = list(request.stages)
    # By how much the queue with the measured work is shorter than measured.
    missing_us = 0.0
    for job in jobs:
        waited_us = job.begin_us - job.ready_us
        missing_us += waited_us + job.end_us - job.begin_us - now[id(job)]
        stages[job.stage] = Work(then[id(job)], own=True)
        if job.stage:
            stages[job.stage - 1] = _without_end(stages[job.stage - 1], waited_us)
    last = jobs[-1]
    stages[last.stage] = Work(max(then[id(last)] + missing_us, 0.0), own=True)
    begin_us = request.begin_us
    if jobs[0].stage == 0:
        begin_us = jobs[0].ready_us
    return request._replace(begin_us=begin_us, stages=tuple(stages))


def _without_end(stage: Stage, less_us: float) -> Stage:
    """Return a stage that ends earlier."""
    if isinstance(stage, Call):
        less_us = min(less_us, stage.after_us)
        return stage._replace(after_us=stage.after_us - less_us, seen_us=stage.seen_us - less_us)
    if isinstance(stage, Tools):
        end_us = max(stage.length_us - less_us, 0.0)
        return stage._replace(
            calls=tuple(
                (min(begin, end_us), min(length, max(end_us - begin, 0.0)), tool)
                for begin, length, tool in stage.calls
            )
        )
    return stage
