"""The event loops of agent-loop workers: which part of a request's stages is a wait for its loop.

A worker's event loop runs one thing at a time.  While a request's own work blocks it, the others wait:
those that begin, those whose generate call has ended, and those whose tool has answered.  Recorded are
only the times at which the loop got to them, so the waits are part of the stages before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from verl_profiler.analysis.explain.model import Call, Request, Stage, Tools, Work, measured_us

# Work of a loop with shorter pauses is one busy time.
_PAUSE_US = 1000.0
# Stands for a tool: what a generate call takes before it arrives at its engine.
_WAY = "way to the engine"
_LOOP = "event loop of "


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


def looped(
    requests: Sequence[Request], least_us: float
) -> tuple[list[Request], dict[str, float]] | None:
    """Return the requests with their own work in a pool of one, their worker's loop, and the work by loop.

    What a request waits for its loop is then a part of its work, and not of the stage before.  None if no
    loop has more work than the mean one by `least_us`: balance saves no more than that.
    """
    # The returns are no work: most runs need no chains with them.
    busy_us = [sum(job.busy_us for job in own) for own in _by_worker(requests).values()]
    if not busy_us or max(busy_us) - fmean(busy_us) <= least_us:
        return None
    chains = [_with_returns(request) for request in requests]
    jobs = _by_worker(chains)
    loads = {_LOOP + name: sum(job.busy_us for job in own) for name, own in jobs.items()}
    lengths = _tool_lengths(job for own in jobs.values() for job in own)
    for worker, own in jobs.items():
        for job in own:
            # A request is dispatched with the others of its worker, when their work began.
            answered_us = job.earliest_us + lengths.get(job.tool or "", 0.0)
            ready_us = min(max(answered_us, job.chain_us), job.begin_us)
            chains[job.request] = _in_loop(chains[job.request], job, ready_us, _LOOP + worker)
    return chains, loads


def _by_worker(requests: Iterable[Request]) -> dict[str, list[_Job]]:
    """Return the own work of each worker's requests, with how long its loop was busy with it."""
    jobs: dict[str, list[_Job]] = {}
    for place, request in enumerate(requests):
        jobs.setdefault(request.worker, []).extend(_jobs(place, request))
    for own in jobs.values():
        _set_busy(own)
    return jobs


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


def _in_loop(request: Request, job: _Job, ready_us: float, loop: str) -> Request:
    """Let a job wait for its loop; the wait is no longer the end of the stage before, or before the request."""
    stages = list(request.stages)
    length_us = job.end_us - ready_us
    served = job.busy_us / length_us if length_us else 1.0
    stages[job.stage] = Work(length_us, own=True, pool=loop, served=served)
    if not job.stage:
        return request._replace(begin_us=ready_us, stages=tuple(stages))
    stages[job.stage - 1] = _without_end(stages[job.stage - 1], job.begin_us - ready_us)
    return request._replace(stages=tuple(stages))


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
            ),
            stalled_us=max(stage.stalled_us - less_us, 0.0),
        )
    return stage
