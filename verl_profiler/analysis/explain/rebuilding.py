"""Step models rebuilt from recorded events.

A request is a chain of generate calls, tool calls, and the worker's time between them.
A generate call waits as long as measured, then decodes a fixed amount of work at a speed that
depends on the replica's current load.  The dependence is that of the engine's iterations, if they were read, otherwise
fitted per replica to the calls of all steps that are rebuilt together, and the work is the integral of
that speed over the measured decoding.
So an unchanged replay reproduces the measured times, and in a changed one the remaining calls speed up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from verl_profiler.analysis.explain.calls import (
    Recorded,
    by_call,
    kv_tokens,
    peak,
    pools_of,
    recorded,
    requests_of,
    undivided_share,
)
from verl_profiler.analysis.explain.engine_speed import by_load, decoding
from verl_profiler.analysis.explain.iteration_times import pass_times
from verl_profiler.analysis.explain.model import (
    WEIGHT_SYNC,
    Dispatch,
    Limits,
    Mark,
    Model,
    Run,
    Take,
    tool_lengths,
)
from verl_profiler.analysis.explain.replay import lengths_us
from verl_profiler.analysis.explain.replica_speed import Speeds, replica_speeds
from verl_profiler.analysis.explain.step_rows import (
    APART_US,
    among,
    memory_bound_steps,
    polls_of,
    uneven_us,
)
from verl_profiler.analysis.selection import by_run, grouped
from verl_profiler.reading.tables.derivations import GEN_TOLERANCE_US, SYNCHRONOUS
from verl_profiler.reading.tables.tables import Tables

# Poll interval of verl's replay buffer (0.9.1); used if its polls were not recorded.
_POLL_US = 2_000_000
# Queueing for at least this share of the engine's time may come from a concurrency limit; the limit
# is accepted if a replay with it ends within this share of the measured time.
_QUEUED_SHARE = 0.05
_SLOTS_FIT = 0.05
_TRIES = 7
# Overlaps of calls that last for less than this share of the time are no concurrency.
_IGNORED_SHARE = 0.001
# The share of the phases after `gen` that is proportional to tokens has this prior (mean and standard
# deviation), updated by steps with different token counts.
TOKEN_PART = (0.8, 0.25)
_TOKEN_STEPS = 3
# Phases after `gen` that process the step's tokens.
_OF_TOKENS = ("old_log_prob", "ref", "values", "adv", "update_actor", "update_critic")
# A step whose phases after `gen` take this many times what they take of the median step, and what its tokens
# take at the median time per token, stalled: what it took has nothing to do with tokens.
_STALLED = 1.5


def step_models(tables: Tables, steps: Sequence[int]) -> list[Model]:
    """Rebuild these steps, without unfinished ones."""
    if not steps:
        return []
    within = among(steps)
    wholes = tables.rows(
        f"""
        WITH timed AS (
            SELECT run, step, end_us AS gen_end_us, begin_us AS gen_begin_us
            FROM gens WHERE in_step AND {within}
        ), waits AS (
            SELECT p.run, p.step, min(p.begin_us) AS wait_begin_us, max(p.end_us) AS wait_end_us
            FROM phases AS p JOIN timed AS g ON g.run = p.run AND g.step = p.step
                AND within(p.begin_us, p.end_us, gen_begin_us, gen_end_us)
            WHERE p.phase = 'sample_wait' GROUP BY p.run, p.step
        ), spent AS (
            SELECT run, step, sum(duration_us) FILTER (phase = 'update_weights') AS weights_us,
                sum(duration_us) FILTER (phase IN {_OF_TOKENS} AND NOT validate) AS after_us
            FROM phases WHERE parent = 'step' AND {within} GROUP BY run, step
        )
        SELECT s.run, s.step, s.begin_us, s.duration_us, g.gen_end_us, w.wait_begin_us,
            w.wait_end_us, coalesce(weights_us, 0) AS weights_us, coalesce(after_us, 0) AS after_us
        FROM steps AS s LEFT JOIN timed AS g USING (run, step) LEFT JOIN waits AS w USING (run, step)
        LEFT JOIN spent USING (run, step)
        WHERE s.finished AND s.{SYNCHRONOUS} AND {among(steps, "s.step")}
        ORDER BY s.run, s.step
        """
    )
    rows = recorded(tables, within)
    finished = (row for row in rows.requests if row["finished"] and row["request_id"] is not None)
    requests, calls, tools = (grouped(own, "run", "step") for own in (finished, *rows[1:]))
    pools = pools_of(tables, within, rows.tools)
    polls, uneven = polls_of(tables, steps), uneven_us(tables, steps)
    memory_bound, passes = memory_bound_steps(tables, steps), pass_times(tables)
    cells = decoding(tables, (min(steps), max(steps)))
    found: list[Model] = []
    for run, own in by_run(wholes).items():
        keys = [(run, whole["step"]) for whole in own]
        rollouts = [
            Recorded(requests.get(key, []), calls.get(key, []), tools.get(key, [])) for key in keys
        ]
        # Those whose engine's interval is known, of each replica.
        groups = [
            grouped((c for c in each.calls if c["engine_duration_us"] is not None), "replica")
            for each in rollouts
        ]
        known = [group for group, each in zip(groups, rollouts, strict=True) if each.requests]
        loads = by_load(cells[run]) if run in cells else None
        speeds = replica_speeds(known, passes.get(run, {}), loads)
        models = [
            _model(
                whole,
                rollout,
                group,
                speeds,
                polls.get(key, []),
                pools.get(run, {}),
                memory_bound=key in memory_bound,
            )
            for key, whole, rollout, group in zip(keys, own, rollouts, groups, strict=True)
        ]
        after = _after_token_us(
            [
                (model.tokens, float(whole["after_us"]))
                for model, whole in zip(models, own, strict=True)
                if model.requests
            ]
        )
        medians = {tool: median(lengths) for tool, lengths in tool_lengths(models).items()}
        found += (
            replace(
                model,
                uneven_us=uneven.get(key, 0.0),
                after_token_us=after,
                tool_medians_us=medians,
            )
            for key, model in zip(keys, models, strict=True)
        )
    return found


def _after_token_us(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit the time per token of the phases after `gen`, and its standard error.

    The prior is that most of it is proportional to tokens; steps with different token counts replace it.
    Stalled steps do not count.
    """
    if len(steps) < _TOKEN_STEPS or not all(tokens for tokens, _ in steps):
        return 0.0, 0.0
    usual, usual_token = median(time for _, time in steps), median(time / t for t, time in steps)
    steps = [
        (tokens, time)
        for tokens, time in steps
        if time <= _STALLED * max(usual, usual_token * tokens)
    ]
    tokens_mean, time_mean = fmean(t for t, _ in steps), fmean(time for _, time in steps)
    whole = time_mean / tokens_mean
    part, deviation = (value * whole for value in TOKEN_PART)
    spread = sum((tokens - tokens_mean) ** 2 for tokens, _ in steps)
    if not spread or not whole or len(steps) < _TOKEN_STEPS:
        return part, deviation
    slope = sum((t - tokens_mean) * (time - time_mean) for t, time in steps) / spread
    rests = sum((time - time_mean - slope * (t - tokens_mean)) ** 2 for t, time in steps)
    # Residuals of few steps are too small by chance: the error is at least 2 % of the time.
    noise = rests / (len(steps) - 2) + (0.02 * time_mean) ** 2
    known = spread / noise
    before = 1 / deviation**2
    both = (slope * known + part * before) / (known + before)
    return min(max(both, 0.0), whole), (known + before) ** -0.5


def _model(
    whole: Mapping[str, Any],
    rollout: Recorded,
    groups: Mapping[str, Sequence[dict[str, Any]]],
    speeds: Speeds,
    poll_times: Sequence[int],
    pools: Mapping[str, int],
    *,
    memory_bound: bool,
) -> Model:
    """Return the model of a step, with the rollout if `gen` waited for requests."""
    begin, gen_end = whole["begin_us"], whole["gen_end_us"]
    duration, weights_us = whole["duration_us"], float(whole["weights_us"])
    weights = Run(weights_us, WEIGHT_SYNC)
    empty = Model(
        whole["run"],
        (whole["step"],),
        (duration,),
        (Mark(0), Run(duration - weights_us), weights),
    )
    until_us = -1 if gen_end is None else gen_end + GEN_TOLERANCE_US
    seen = [row for row in rollout.requests if row["end_us"] <= until_us]
    if not seen:
        return empty
    last = max(row["end_us"] for row in seen)
    wait_end = max(whole["wait_end_us"] or gen_end, last)
    polled, poll = _polled(poll_times, whole["wait_begin_us"], wait_end, last)
    most = max((peak(group, ignored=_IGNORED_SHARE) for group in groups.values()), default=0)
    took = Take(
        1, wait_end - (polled[-1] if polled else last), tuple(at - begin for at in polled), poll
    )
    after = Run(begin + duration - wait_end - weights_us)
    waiting = replace(
        empty,
        operations=(Mark(0), Dispatch(), took, after, weights),
        speeds=speeds,
        peak=most,
        undivided_share=undivided_share(rollout.calls),
    )

    def with_requests(limits: Limits | None = None) -> Model:
        requests = requests_of(
            seen,
            by_call(rollout.calls),
            rollout.tools,
            lambda row: row["begin_us"] - begin,
            queued=limits is None,
        )
        return replace(waiting.with_requests(requests), limits=limits or Limits(), pools=pools)

    free = with_requests()
    measured_us = lengths_us(replace(free, pools={}), polls=False)[0]

    def off_us(model: Model) -> float:
        return lengths_us(model, polls=False)[0] - measured_us

    if pools and abs(off_us(free)) > _SLOTS_FIT * (last - begin):
        pools = {}
        free = with_requests()
    queued = sum(
        call["started_us"] - call["arrived_us"] for group in groups.values() for call in group
    )
    served = _QUEUED_SHARE * sum(call["engine_duration_us"] or 0 for call in rollout.calls)
    if not most or queued <= served:
        return free
    full = sum(_waited_us(group, most) for group in groups.values()) > served
    possible = [Limits(calls=most)] if full and not memory_bound else []
    if memory_bound or any(call["retractions"] for call in rollout.calls):
        # Retracted calls had no space.
        sizes = (peak(group, kv_tokens, _IGNORED_SHARE) for group in groups.values())
        tokens = max(sizes, default=0)
        possible += [Limits(kv_tokens=tokens)] if tokens else [Limits(calls=most)] * memory_bound
    for limits in possible:
        # A call takes its tokens one after the other: fewer than those of all calls fit at once.
        below, room, above = 0.0, limits.kv_tokens, limits.kv_tokens
        for _ in range(1 if math.isinf(room) else _TRIES):
            limited = with_requests(limits._replace(kv_tokens=room))
            longer_us = off_us(limited)
            if abs(longer_us) <= _SLOTS_FIT * (last - begin):
                return limited
            below, above = (below, room) if longer_us < 0 else (room, above)
            room = (below + above) / 2
    return free


def _polled(
    poll_times: Sequence[int], wait_begin: int | None, wait_end: int, last: int
) -> tuple[list[int], float]:
    """Return the times of the polls, up to the one that found all samples, and the poll interval.

    If the trainer's TransferQueue calls were not recorded, verl's default polling is assumed, if it
    is consistent with the time at which the trainer had its samples.
    """
    found = [at for at in poll_times if at < wait_end]
    apart = [after - before for before, after in pairwise(found)]
    poll = median(apart) if apart else _POLL_US
    polls = found and wait_begin is not None and found[0] - wait_begin <= APART_US
    if polls and found[-1] >= last > found[-1] - 1.5 * poll:
        return found, poll
    if poll_times or wait_begin is None or not 0 <= wait_end - last <= _POLL_US:
        return [], poll
    return list(range(wait_end, wait_begin, -_POLL_US))[::-1], poll


def _waited_us(calls: Iterable[Mapping[str, Any]], full: int) -> float:
    """Add up how long calls waited while this many ran."""
    changes = sorted(
        change
        for call in calls
        for change in (
            (call["arrived_us"], 0, 1),
            (call["started_us"], 1, -1),
            (call["ended_us"], -1, 0),
        )
    )
    waited = running = waiting = 0
    for (now_us, begun, come), (next_us, *_) in pairwise(changes):
        running += begun
        waiting += come
        if running >= full:
            waited += waiting * (next_us - now_us)
    return waited
