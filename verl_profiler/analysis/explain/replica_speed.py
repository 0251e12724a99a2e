"""Decoding speed of replicas as a function of load, from their iterations or fitted to the recorded calls.

Where the engine's iterations were read, an iteration's time by batch is the speed, and a call's work are the
iterations that it takes.  Otherwise a line is fitted to the calls; that of each replica is shrunk towards the
line of all replicas.  The work of a call is the integral of that speed over its decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

from verl_profiler.analysis.explain.engine_speed import ReplicaLoads
from verl_profiler.analysis.explain.iteration_times import PassTimes
from verl_profiler.analysis.explain.speed import Speed, time_us, times_by_load

SLOWER = 1.2
"""A replica is slower than the others if its time per token is higher by this factor."""


class Speeds(NamedTuple):
    """Speeds of replicas, of one run.

    Args:
        slowness: Over all replicas and steps: time per unit of work (a token, if tokens are known), with n
            calls in the replica.  From iterations: of the slowest replica.
        slowness_of: That of each replica, if known.
        slope_error: Relative standard error of b, or of an iteration's time.
        load_varied: Whether there were enough calls at sufficiently different loads to fit b.
        during_prefill: Where the engines' iterations were read: the speed of decoding while a call is
            in prefill, and n is the number of calls that decode.  None: n includes those in prefill.
        most_read: Highest batch of each replica that was read; empty without `during_prefill`.
    """

    slowness: Speed = (1.0, 0.0)
    slowness_of: Mapping[str, Speed] = {}
    slope_error: float = 0.0
    load_varied: bool = False
    during_prefill: float | None = None
    most_read: Mapping[str, int] = {}


# The calls of a replica in a step, by its name.
_Groups: TypeAlias = Sequence[tuple[str, Sequence[dict[str, Any]]]]


def replica_speeds(
    steps: Sequence[Mapping[str, Sequence[dict[str, Any]]]],
    passes: Mapping[str, PassTimes],
    loads: ReplicaLoads | None,
) -> Speeds:
    """Take the replicas' speeds from their iterations if these were read, otherwise from the calls.

    Adds `work` to the calls, and where the iterations were read `own_prefill_us`.

    Args:
        steps: The calls of each step by replica, of one run.
        passes: By replica, as `pass_times` returns them.
        loads: What is fitted to the calls; None without any in the engines.
    """
    groups = [(replica, group) for each in steps for replica, group in each.items()]
    return _speeds_of_passes(groups, passes) or _speeds_of_calls(groups, loads)


def _speeds_of_calls(groups: _Groups, loads: ReplicaLoads | None) -> Speeds:
    """Take how load slows replicas down from the fit to all calls, and integrate the work of each."""
    found = Speeds()
    if loads is not None:
        line, lines = loads.lines()
        found = Speeds(line, lines, loads.error, loads.varied)
    for replica, group in groups:
        _integrate(group, found.slowness_of.get(replica, found.slowness))
    return found


# Speeds of decoding while a call is in prefill that are tried: engines stop it, or mix both in a pass.
_DURING_PREFILL = (0.0, 0.25, 0.5, 0.75, 1.0)
# The iterations that were read must have decoded at least this share of the calls' tokens.
_READ = 0.7


def _speeds_of_passes(groups: _Groups, passes: Mapping[str, PassTimes]) -> Speeds | None:
    """Take the speeds of replicas from their iterations, and the work of each call: its passes.

    Adds `own_prefill_us` to the calls.  Decoding is slower while another call is in prefill, by the factor with which
    calls of as many tokens take the most equal numbers of passes.

    Returns:
        None, without any change, if the iterations of a replica were not read, or too few of them.
    """
    tokens = dict.fromkeys(passes, 0)
    for replica, group in groups:
        if replica not in passes:
            return None
        tokens[replica] += sum(call["response_tokens"] or 0 for call in group)
    used = {name: each for name, each in passes.items() if tokens[name]}
    if not used or any(each.decoded < _READ * tokens[name] for name, each in used.items()):
        return None
    _, share = min((_unequal(groups, passes, share), share) for share in _DURING_PREFILL)
    for replica, group in groups:
        _integrate(group, passes[replica].speed, share)
        _share_prefill(group, passes[replica].prefill_token_us)
    slowest = max(used, key=lambda name: time_us(used[name].speed, used[name].most))
    return Speeds(
        used[slowest].speed,
        {name: each.speed for name, each in used.items()},
        fmean(each.error for each in used.values()) / 2,
        load_varied=True,
        during_prefill=share,
        most_read={name: each.most for name, each in used.items()},
    )


def _share_prefill(calls: Sequence[dict[str, Any]], token_us: float) -> None:
    """Set each call's `own_prefill_us`: its share of the time in which it was in prefill with others."""
    together: list[dict[str, Any]] = []
    end_us = 0
    for call in [*sorted(calls, key=lambda call: (call["started_us"], call["decoding_us"])), None]:
        if together and (call is None or call["started_us"] >= end_us):
            whole_us = end_us - together[0]["started_us"]
            parts = [
                token_us * max((each["prompt_tokens"] or 0) - (each["cached_tokens"] or 0), 0) + 1
                for each in together
            ]
            for each, part in zip(together, parts, strict=True):
                each["own_prefill_us"] = whole_us * part / sum(parts)
            together, end_us = [], 0
        if call is not None:
            together.append(call)
            end_us = max(end_us, call["decoding_us"])


def _unequal(groups: _Groups, passes: Mapping[str, PassTimes], share: float) -> float:
    """Return how much the calls' passes per token differ, relative to their mean."""
    works: list[tuple[float, float]] = []
    for replica, group in groups:
        _integrate(group, passes[replica].speed, share)
        works += [
            (call["work"], _decoded_tokens(call))
            for call in group
            if (call["response_tokens"] or 0) > 1
        ]
    tokens = sum(each for _, each in works)
    mean = sum(work for work, _ in works) / tokens if tokens else 0.0
    if not mean:
        return float("inf")
    return sum(abs(work - mean * each) for work, each in works) / (mean * tokens)


def _decoded_tokens(call: Mapping[str, Any]) -> int:
    # The first token belongs to prefill, if known.
    return call["response_tokens"] - (call["prefill_us"] is not None)


def _integrate(
    calls: Sequence[dict[str, Any]],
    speed: Speed,
    during_prefill: float | None = None,
) -> None:
    """Set each call's `work` to the forward passes of its replica during its decoding.

    Args:
        calls: Of one replica and step.
        speed: By the number of calls that run; with `during_prefill`, of those that decode.
        during_prefill: The factor by which passes are fewer while a call is in prefill.
    """
    points = sorted(
        (call[moment], order, place)
        for place, call in enumerate(calls)
        for order, moment in enumerate(("started_us", "decoding_us", "ended_us"))
    )
    times = times_by_load("line", speed, len(calls), len(calls))
    done, decoding, prefilling, before = 0.0, 0, 0, points[0][0] if points else 0
    for moment, order, place in points:
        factor = 1.0 if during_prefill is None or not prefilling else during_prefill
        running = decoding if during_prefill is not None else decoding + prefilling
        if running:
            done += (moment - before) / times[running] * factor
        before = moment
        if order == 0:
            prefilling += 1
        elif order == 1:
            prefilling -= 1
            decoding += 1
            calls[place]["work"] = done
        else:
            decoding -= 1
            calls[place]["work"] = done - calls[place]["work"]
