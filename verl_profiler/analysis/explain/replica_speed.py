"""Decoding speed of replicas as a function of load, from their iterations or fitted to the recorded calls.

Where the engine's iterations were read, an iteration's time by batch is the speed, and a call's work are the
iterations that it takes.  Otherwise a line is fitted to the calls; that of each replica is shrunk towards the
line of all replicas.  The work of a call is the integral of that speed over its decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from verl_profiler.analysis.explain.iteration_times import PassTimes
from verl_profiler.analysis.explain.speed import Speed, time_us, times_by_load

SLOWER = 1.2
"""A replica is slower than the others if its time per token is higher by this factor."""

# Minimum number of calls and minimum range of loads for a fit; number of calls at which a replica's
# own line has the same weight as that of all replicas.
_FITTED_CALLS = 20
_LOAD_RATIO = 1.5
_SHRUNK_CALLS = 20
# Loads are means over forward passes, which depend on the fit: number of iterations.
_ROUNDS = 3


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


class _Seen(NamedTuple):
    """One call: mean load of its forward passes, its tokens, its decoding time."""

    load: float
    tokens: float
    time_us: float


def replica_speeds(
    steps: Sequence[Mapping[str, Sequence[dict[str, Any]]]], passes: Mapping[str, PassTimes]
) -> Speeds:
    """Take the replicas' speeds from their iterations if these were read, otherwise from the calls.

    Adds `work` to the calls, and where the iterations were read `own_prefill_us`.

    Args:
        steps: The calls of each step by replica, of one run.
        passes: By replica, as `pass_times` returns them.
    """
    return _speeds_of_passes(steps, passes) or _speeds_of_calls(steps)


def _speeds_of_calls(steps: Sequence[Mapping[str, Sequence[dict[str, Any]]]]) -> Speeds:
    """Fit how load slows replicas down, over all steps, and the work of each call.

    Adds `work` to the calls.  A forward pass generates one token per call, so the relevant load is
    the mean over passes; the mean over time is higher, as passes with many calls take longer.

    Args:
        steps: The calls of each step by replica, of one run.
    """
    found = Speeds()
    for _ in range(_ROUNDS):
        seen: dict[str, list[_Seen]] = {}
        for groups in steps:
            for replica, group in groups.items():
                speed = found.slowness_of.get(replica, found.slowness)
                _integrate(group, speed, by_load=True)
                loads = [call["work"] for call in group]
                _integrate(group, speed)
                known = seen.setdefault(replica, [])
                known += [
                    _Seen(load / call["work"], _decoded_tokens(call), _decoded_us(call))
                    for load, call in zip(loads, group, strict=True)
                    if _decoded_us(call) > 0 and (call["response_tokens"] or 0) > 1
                ]
        found = _fitted(seen)
        if not found.slowness[1]:
            break
    for groups in steps:
        for replica, group in groups.items():
            speed = found.slowness_of.get(replica, found.slowness)
            _integrate(group, speed)
    return found


# Speeds of decoding while a call is in prefill that are tried: engines stop it, or mix both in a pass.
_DURING_PREFILL = (0.0, 0.25, 0.5, 0.75, 1.0)
# The iterations that were read must have decoded at least this share of the calls' tokens.
_READ = 0.7


def _speeds_of_passes(
    steps: Sequence[Mapping[str, Sequence[dict[str, Any]]]], passes: Mapping[str, PassTimes]
) -> Speeds | None:
    """Take the speeds of replicas from their iterations, and the work of each call: its passes.

    Adds `work` and `own_prefill_us` to the calls.  Decoding is slower while another call is in prefill, by the factor with which
    calls of as many tokens take the most equal numbers of passes.

    Args:
        steps: The calls of each step by replica, of one run.
        passes: By replica, as `pass_times` returns them.

    Returns:
        None, without any change, if the iterations of a replica were not read, or too few of them.
    """
    tokens = dict.fromkeys(passes, 0)
    for groups in steps:
        for replica, group in groups.items():
            if replica not in passes:
                return None
            tokens[replica] += sum(call["response_tokens"] or 0 for call in group)
    used = {name: each for name, each in passes.items() if tokens[name]}
    if not used or any(each.decoded < _READ * tokens[name] for name, each in used.items()):
        return None
    _, share = min((_unequal(steps, passes, share), share) for share in _DURING_PREFILL)
    for groups in steps:
        for replica, group in groups.items():
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


def _unequal(
    steps: Sequence[Mapping[str, Sequence[dict[str, Any]]]],
    passes: Mapping[str, PassTimes],
    share: float,
) -> float:
    """Return how much the calls' passes per token differ, relative to their mean."""
    works: list[tuple[float, float]] = []
    for groups in steps:
        for replica, group in groups.items():
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


def _decoded_us(call: Mapping[str, Any]) -> float:
    return call["ended_us"] - call["decoding_us"]


def _decoded_tokens(call: Mapping[str, Any]) -> int:
    # The first token belongs to prefill, if known.
    return call["response_tokens"] - (call["prefill_us"] is not None)


def _fitted(seen: Mapping[str, Sequence[_Seen]]) -> Speeds:
    """Fit time per token = a + b load to all replicas, with a factor per replica, then to each.

    The replicas' factors and lines are shrunk towards their common value.
    """
    calls = [call for group in seen.values() for call in group]
    tokens = sum(call.tokens for call in calls)
    if not tokens:
        return Speeds()
    mean_us = sum(call.time_us for call in calls) / len(calls)
    loads = [call.load for call in calls]
    varied = len(calls) >= _FITTED_CALLS and max(loads) >= _LOAD_RATIO * min(loads)
    factors = dict.fromkeys(seen, 1.0)
    line, error = (mean_us * len(calls) / tokens, 0.0), 0.0
    for _ in range(_ROUNDS if len(seen) > 1 else 1):
        scaled = [
            call._replace(time_us=call.time_us / factors[replica])
            for replica, group in seen.items()
            for call in group
        ]
        line, error = _line(scaled, sloped=varied)
        for replica, group in seen.items():
            expected = sum(call.tokens * (line[0] + line[1] * call.load) for call in group)
            prior = _SHRUNK_CALLS * mean_us
            factors[replica] = (sum(call.time_us for call in group) + prior) / (expected + prior)
    own = {
        replica: _own_line(group, (factors[replica] * line[0], factors[replica] * line[1]), calls)
        for replica, group in seen.items()
    }
    return Speeds(line, own, error, varied)


def _line(calls: Sequence[_Seen], *, sloped: bool) -> tuple[tuple[float, float], float]:
    """Fit time per token = a + b load, weighted by tokens; b = 0 if load has no effect.

    Returns:
        (a, b), both non-negative; the relative standard error of b.
    """
    tokens = sum(call.tokens for call in calls)
    time_mean = sum(call.time_us for call in calls) / tokens
    load_mean = sum(call.tokens * call.load for call in calls) / tokens
    spread = sum(call.tokens * (call.load - load_mean) ** 2 for call in calls)
    if not sloped or not spread:
        return (time_mean, 0.0), 0.0
    b = sum((c.load - load_mean) * (c.time_us - c.tokens * time_mean) for c in calls) / spread
    if b * load_mean < 0.02 * time_mean:
        return (time_mean, 0.0), 0.0
    a = time_mean - b * load_mean
    # From the residuals (heteroscedastic), as scatter depends on length and load.
    rests = sum(
        ((c.load - load_mean) * (c.time_us - c.tokens * (a + b * c.load))) ** 2 for c in calls
    )
    error = rests**0.5 / spread / b
    return ((a, b) if a > 0 else (0.0, time_mean / load_mean)), error


def _own_line(
    calls: Sequence[_Seen], prior: tuple[float, float], everybody: Sequence[_Seen]
) -> tuple[float, float]:
    """Fit a replica's line, with pseudo-observations from the prior's line."""
    if not prior[1]:
        return prior
    share = _SHRUNK_CALLS / len(everybody)
    made = [
        _Seen(
            call.load, call.tokens * share, call.tokens * share * (prior[0] + prior[1] * call.load)
        )
        for call in everybody
    ]
    both = [*calls, *made]
    line, _ = _line(both, sloped=True)
    return line


def _integrate(
    calls: Sequence[dict[str, Any]],
    speed: Speed,
    during_prefill: float | None = None,
    *,
    by_load: bool = False,
) -> None:
    """Set each call's `work` to the forward passes of its replica during its decoding.

    Args:
        calls: Of one replica and step.
        speed: By the number of calls that run; with `during_prefill`, of those that decode.
        during_prefill: The factor by which passes are fewer while a call is in prefill.
        by_load: Count each pass as often as calls run.
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
            passes = (moment - before) / times[running] * factor
            done += passes * running if by_load else passes
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
