"""Step models rebuilt from recorded events.

A request is a chain of generate calls, tool calls, and the worker's time between them.
A generate call waits as long as measured, then decodes a fixed amount of work at a speed that
depends on the replica's current load.  The dependence is that of the engine's iterations, if they were read, otherwise
fitted per replica to the calls of all steps that are rebuilt together, and the work is the integral of
that speed over the measured decoding.
So an unchanged replay reproduces the measured times, and in a changed one the remaining calls speed up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Any

from verl_profiler.analysis.explain.chains import Call, Request, Stage, Tools, Work
from verl_profiler.analysis.explain.iteration_times import pass_times
from verl_profiler.analysis.explain.replica_speed import replica_speeds
from verl_profiler.analysis.explain.step_model import POLL_US, StepModel
from verl_profiler.analysis.explain.step_rows import (
    APART_US,
    Rollout,
    after_us,
    among,
    memory_bound_steps,
    polls_of,
    rollouts_of,
    uneven_us,
)
from verl_profiler.reading.tables.derivations import GEN_TOLERANCE_US, SYNCHRONOUS
from verl_profiler.reading.tables.tables import Tables

__all__ = ["engine_interval", "step_models"]

# Queueing for at least this share of the engine's time may come from a concurrency limit; the limit
# is accepted if a replay with it ends within this share of the measured time.
_QUEUED_SHARE = 0.05
_SLOTS_FIT = 0.05
# Overlaps of calls that last for less than this share of the time are no concurrency.
_IGNORED_SHARE = 0.001
# The share of the phases after `gen` that is proportional to tokens has this prior (mean and standard
# deviation), updated by steps with different token counts.
_TOKEN_PART = (0.8, 0.25)
_TOKEN_STEPS = 3


def engine_interval(call: Mapping[str, Any]) -> tuple[int, int]:
    """Return the engine's interval of a row of `engine_calls`, on the client's clock.

    If the server's interval does not fit into the client's (another host's clock), it is centered
    in it.
    """
    begin, length = call["engine_begin_us"], min(call["engine_duration_us"], call["duration_us"])
    if begin < call["begin_us"] or begin + length > call["end_us"]:
        begin = call["begin_us"] + (call["duration_us"] - length) // 2
    return begin, begin + length


def step_models(tables: Tables, steps: Sequence[int]) -> list[StepModel]:
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
        ), syncs AS (
            SELECT run, step, sum(duration_us) AS weights_us FROM phases
            WHERE phase = 'update_weights' AND parent = 'step' AND {within} GROUP BY run, step
        )
        SELECT s.run, s.step, s.begin_us, s.duration_us, g.gen_end_us, w.wait_begin_us,
            w.wait_end_us, coalesce(y.weights_us, 0) AS weights_us
        FROM steps AS s LEFT JOIN timed AS g USING (run, step) LEFT JOIN waits AS w USING (run, step)
        LEFT JOIN syncs AS y USING (run, step)
        WHERE s.finished AND s.{SYNCHRONOUS} AND {among(steps, "s.step")}
        ORDER BY s.run, s.step
        """
    )
    rollouts = rollouts_of(tables, steps)
    poll_times = polls_of(tables, steps)
    uneven = uneven_us(tables, steps)
    phases = after_us(tables, steps)
    runs = dict.fromkeys(run for run, _ in rollouts)
    prepared = {key: _by_replica(rollout.calls) for key, rollout in rollouts.items()}
    passes = pass_times(tables)
    speeds = {
        run: replica_speeds(
            [groups for key, groups in prepared.items() if key[0] == run], passes.get(run, {})
        )
        for run in runs
    }
    memory_bound = memory_bound_steps(tables, steps)
    models: list[StepModel] = []
    for whole in wholes:
        key = whole["run"], whole["step"]
        model = StepModel(
            *key,
            whole["duration_us"],
            weights_us=whole["weights_us"],
            uneven_us=uneven.get(key, 0),
        )
        if key in rollouts:
            model = replace(model, **speeds[key[0]]._asdict())
        rolled = _with_rollout(
            model,
            whole,
            rollouts.get(key),
            prepared.get(key, {}),
            poll_times.get(key, []),
            memory_bound=key in memory_bound,
        )
        models.append(rolled)
    after = {
        run: _after_token_us(
            [
                (model.tokens, phases.get((run, model.step), 0.0))
                for model in models
                if model.run == run and model.requests
            ]
        )
        for run in runs
    }
    return [replace(m, after_token_us=after.get(m.run, (0.0, 0.0))) for m in models]


def _after_token_us(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit the time per token of the phases after `gen`, and its standard error.

    The prior is that most of it is proportional to tokens; steps with different token counts replace it.
    """
    if len(steps) < _TOKEN_STEPS or not all(tokens for tokens, _ in steps):
        return 0.0, 0.0
    tokens_mean, time_mean = fmean(t for t, _ in steps), fmean(time for _, time in steps)
    whole = time_mean / tokens_mean
    part, deviation = (value * whole for value in _TOKEN_PART)
    spread = sum((tokens - tokens_mean) ** 2 for tokens, _ in steps)
    if not spread or not whole:
        return part, deviation
    slope = sum((t - tokens_mean) * (time - time_mean) for t, time in steps) / spread
    rests = sum((time - time_mean - slope * (t - tokens_mean)) ** 2 for t, time in steps)
    # Residuals of few steps are too small by chance: the error is at least 2 % of the time.
    noise = rests / (len(steps) - 2) + (0.02 * time_mean) ** 2
    known = spread / noise
    before = 1 / deviation**2
    both = (slope * known + part * before) / (known + before)
    return min(max(both, 0.0), whole), (known + before) ** -0.5


def _with_rollout(
    model: StepModel,
    whole: Mapping[str, Any],
    rollout: Rollout | None,
    groups: Mapping[str, Sequence[dict[str, Any]]],
    poll_times: Sequence[int],
    *,
    memory_bound: bool,
) -> StepModel:
    """Add the rollout to the model, if `gen` waited for requests."""
    begin, gen_end = whole["begin_us"], whole["gen_end_us"]
    if rollout is None or gen_end is None:
        return model
    seen = [row for row in rollout.requests if row["end_us"] <= gen_end + GEN_TOLERANCE_US]
    if not seen:
        return model
    last = max(row["end_us"] for row in seen)
    wait_end = max(whole["wait_end_us"] or gen_end, last)
    peak = max(map(_peak, groups.values()), default=0)
    queued = sum(
        sum(call["started_us"] - call["arrived_us"] for call in group)
        if memory_bound
        else _waited_us(group, peak)
        for group in groups.values()
    )
    kv_tokens = max((_peak(group, _kv_tokens) for group in groups.values()), default=0)
    polled, poll = _polled(poll_times, whole["wait_begin_us"], wait_end, last)
    model = replace(
        model,
        last_us=last - begin,
        wait_end_us=wait_end - begin,
        polls_us=tuple(at - begin for at in polled),
        poll_us=poll,
        most_running=peak,
    )

    def with_requests(**limits: float) -> StepModel:
        requests = tuple(_request(row, begin, rollout, queued=not limits) for row in seen)
        return replace(model, requests=requests, **limits)

    served = sum(call["engine_duration_us"] or 0 for call in rollout.calls)
    if peak and queued > _QUEUED_SHARE * served:
        full = {"kv_tokens": kv_tokens} if memory_bound and kv_tokens else {"max_concurrency": peak}
        limited = with_requests(**full)
        replayed = limited.replayed(polls=False)
        if abs(replayed - with_requests().replayed(polls=False)) <= _SLOTS_FIT * last:
            return limited
    return with_requests()


def _polled(
    poll_times: Sequence[int], wait_begin: int | None, wait_end: int, last: int
) -> tuple[list[int], float]:
    """Return the times of the polls, up to the one that found all samples, and the poll interval.

    If the trainer's TransferQueue calls were not recorded, verl's default polling is assumed, if it
    is consistent with the time at which the trainer had its samples.
    """
    found = [at for at in poll_times if at < wait_end]
    apart = [after - before for before, after in pairwise(found)]
    poll = median(apart) if apart else POLL_US
    polls = found and wait_begin is not None and found[0] - wait_begin <= APART_US
    if polls and found[-1] >= last > found[-1] - 1.5 * poll:
        return found, poll
    if poll_times or wait_begin is None or not 0 <= wait_end - last <= POLL_US:
        return [], poll
    return list(range(wait_end, wait_begin, -POLL_US))[::-1], poll


def _by_replica(calls: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group calls by replica; add `arrived_us`, `started_us`, `decoding_us`, `ended_us`."""
    replicas: dict[str, list[dict[str, Any]]] = {}
    for call in calls:
        if call["engine_duration_us"] is None:
            continue
        begin, end = engine_interval(call)
        begin = min(begin + (call["parked_us"] or 0), end)
        started = min(begin + (call["queue_us"] or 0), end)
        decoding = min(started + (call["prefill_us"] or 0), end)
        call |= {"arrived_us": begin, "started_us": started, "decoding_us": decoding}
        # The server's span lasts until its event loop notices, when other calls already run.
        decoded = decoding + call["decode_us"] if call["decode_us"] else end
        call["ended_us"] = min(decoded, end)
        replicas.setdefault(call["engine_name"] or "", []).append(call)
    return replicas


def _kv_tokens(call: Mapping[str, Any]) -> int:
    return (call["prompt_tokens"] or 0) + (call["response_tokens"] or 0)


def _peak(
    calls: Iterable[Mapping[str, Any]], size: Callable[[Mapping[str, Any]], int] = lambda _: 1
) -> int:
    """Return the maximum number of concurrent calls, or of `size`; back-to-back calls do not overlap.

    Clocks of an engine and its server differ by some microseconds: what lasts for less than a thousandth
    of the time does not count.
    """
    changes = sorted(
        change
        for call in calls
        if call["ended_us"] > call["started_us"]
        for change in ((call["started_us"], size(call)), (call["ended_us"], -size(call)))
    )
    lasted: dict[int, int] = {}
    level = 0
    for (now_us, change), (next_us, _) in pairwise(changes):
        level += change
        if level > 0 and next_us > now_us:
            lasted[level] = lasted.get(level, 0) + next_us - now_us
    above_us, ignored_us = 0, _IGNORED_SHARE * sum(lasted.values())
    for level in sorted(lasted, reverse=True):
        above_us += lasted[level]
        if above_us > ignored_us:
            return level
    return 0


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


def _request(row: Mapping[str, Any], begin_us: int, rollout: Rollout, *, queued: bool) -> Request:
    """Build a request's chain; its durations add up to the measured one.

    `queued` keeps the queueing times as measured, instead of simulating them.
    """
    key = row["name"], row["request_id"]
    tools = groupby(rollout.tools_of.get(key, ()), key=lambda call: call["turn"])
    stages: list[Stage] = []
    cursor = row["begin_us"]
    items: list[tuple[int, int, Stage | None]] = [
        (call["begin_us"], call["end_us"], _call(call, queued=queued))
        for call in rollout.calls_of.get(key, ())
    ]
    for turn, group in tools:
        calls = list(group)
        first, last = calls[0]["begin_us"], max(call["end_us"] for call in calls)
        lengths = tuple(
            (call["begin_us"] - first, call["duration_us"], call["tool"] or "tool")
            for call in calls
        )
        items.append((first, last, Tools(lengths, turn)))
    for first, last, stage in sorted(items, key=lambda item: item[:2]):
        end = min(last, row["end_us"])
        if end <= cursor:
            continue
        if first > cursor:
            stages.append(Work(first - cursor, own=True))
        # Calls that overlap another one, or the end of the request, keep only the time that they add.
        whole = first >= cursor and end == last
        stages.append(stage if whole and stage else Work(end - max(first, cursor), own=False))
        cursor = end
    rest = row["end_us"] - cursor
    reward = min(row["reward_us"] or 0, rest)
    stages += [Work(rest - reward, own=True), Work(reward, own=False)]
    generated = sum(stage.tokens or 0 for stage in stages if isinstance(stage, Call))
    return Request(
        row["begin_us"] - begin_us,
        row["duration_us"],
        row["name"],
        row["turns"] or 0,
        tuple(stages),
        row["prompt_tokens"] or 0,
        row["response_tokens"] or generated,
        generated,
        row["uid"],
    )


def _call(call: Mapping[str, Any], *, queued: bool) -> Call:
    if "work" not in call:
        return Call(0.0, call["duration_us"], 0.0, 0.0, call["duration_us"], None, call["turn"])
    queue_us = call["started_us"] - call["arrived_us"] if queued else 0.0
    whole_us = call["decoding_us"] - call["started_us"]
    fixed_us = call.get("own_prefill_us", whole_us)
    cold_us = min(call["cold_us"] or 0, whole_us)
    return Call(
        call["arrived_us"] + queue_us - call["begin_us"],
        fixed_us,
        call["work"],
        call["end_us"] - call["ended_us"],
        call["duration_us"],
        call["engine_name"] or "",
        call["turn"],
        call["response_tokens"],
        queue_us,
        cold_us * fixed_us / whole_us if whole_us else 0.0,
        _kv_tokens(call),
    )
