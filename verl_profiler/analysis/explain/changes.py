"""Counterfactual changes of a step: `CHANGES` lists those that `what_if` replays in every run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from verl_profiler.analysis.explain.chains import Call, Request, Stage, Tools, Work, measured_us
from verl_profiler.analysis.explain.replay import Limits, Speed, time_us
from verl_profiler.analysis.explain.replica_speed import SLOWER
from verl_profiler.analysis.explain.step_model import StepModel
from verl_profiler.analysis.explain.worker_loops import balanced
from verl_profiler.reading.quantiles import interpolated, least_values

__all__ = [
    "CHANGES",
    "UNCHANGED",
    "Change",
    "changes_of",
    "tool_lengths",
    "tools_of_length",
]

UNCHANGED = "unchanged"
# Minimum number of requests of a step for a 95th percentile.
_ENOUGH = least_values(0.95)
# Tools with a change of their own: those with the most time.
_TOOLS = 3
# Characters of a tool's name in a description.
_NAME = 60


@dataclass(frozen=True)
class Change:
    """One counterfactual change.

    Args:
        about: A short description.
        requests: Transforms the requests of a step; receives the median duration of each tool.
        polls: Whether the trainer still polls.
        even: Whether to route generate calls to the least loaded replica.
        limits: Limits of a replica; None as measured.
        saved_us: The saving outside the rollout.
        speeds: Those of the replicas that change.
        batches: Builds whole batches from a step and the others, instead of `requests`; the saving is
            the mean over them.
        beyond: Whether replicas run more concurrent calls than recorded: then the result has bounds.
        least: Minimum number of requests in a step.
    """

    about: str
    requests: (
        Callable[[StepModel, Sequence[Request], Mapping[str, float]], list[Request]] | None
    ) = None
    polls: bool = True
    even: bool = False
    limits: Callable[[StepModel], Limits | None] | None = None
    saved_us: Callable[[StepModel], float] = lambda _: 0.0
    speeds: Callable[[StepModel], dict[str, Speed]] | None = None
    batches: Callable[[StepModel, Sequence[StepModel]], list[list[Request]]] | None = None
    beyond: bool = False
    least: int = 1


def _of_stages(request: Request, stages: Iterable[Stage]) -> Request:
    """Return the request with other stages; the same object if they are equal."""
    changed = tuple(stages)
    if len(changed) == len(request.stages) and all(map(is_, changed, request.stages)):
        return request
    return request._replace(stages=changed)


def _capped(share: float, *, refilled: bool) -> Callable[..., list[Request]]:
    """Stop the slowest requests (at least one) at P95, or replace them with typical ones."""

    def change(_: StepModel, requests: Sequence[Request], __: Any) -> list[Request]:
        order = sorted(requests, key=lambda request: request.duration_us)
        limit = interpolated([request.duration_us for request in order], 0.95)
        slowest = {id(request) for request in order[-max(round(share * len(order)), 1) :]}
        typical = order[(len(order) - 1) // 2]

        def stopped(request: Request) -> Request:
            cut = _cut(request.stages, limit)
            if not refilled:
                return request._replace(stages=cut)
            # Stopped requests are not trained on.
            return request._replace(
                stages=(*cut, *typical.stages),
                prompt_tokens=typical.prompt_tokens,
                response_tokens=typical.response_tokens,
                generated=0,
            )

        return [
            stopped(request) if id(request) in slowest and request.duration_us > limit else request
            for request in requests
        ]

    return change


def _cut(stages: Sequence[Stage], limit_us: float) -> tuple[Stage, ...]:
    """Truncate a chain at a time, by the measured durations.

    A truncated call keeps the same share of each of its components.
    """
    kept: list[Stage] = []
    for stage in stages:
        if limit_us <= 0:
            break
        length = measured_us(stage)
        part = min(limit_us / length, 1.0) if length else 1.0
        limit_us -= length
        if part == 1.0:
            kept.append(stage)
        elif isinstance(stage, Call):
            kept.append(
                stage._replace(
                    tokens=None if stage.tokens is None else round(stage.tokens * part),
                    before_us=stage.before_us * part,
                    fixed_us=stage.fixed_us * part,
                    cold_us=stage.cold_us * part,
                    work=stage.work * part,
                    after_us=stage.after_us * part,
                    seen_us=length * part,
                )
            )
        else:
            kept.append(Work(length * part, own=False))
    return tuple(kept)


def tools_of_length(length_of: Callable[[float, float], float]) -> Callable[..., list[Request]]:
    """Set each tool call's duration to `length_of` its duration and its tool's median."""

    def change(
        _: StepModel, requests: Sequence[Request], medians: Mapping[str, float]
    ) -> list[Request]:
        return _with_tools(
            requests, lambda tool, measured: length_of(measured, medians.get(tool, measured))
        )

    return change


def _one_tool(name: str) -> Callable[..., list[Request]]:
    """Halve the calls of one tool."""

    def change(_: StepModel, requests: Sequence[Request], __: Any) -> list[Request]:
        return _with_tools(
            requests, lambda tool, measured: measured / 2 if tool == name else measured
        )

    return change


def _with_tools(
    requests: Sequence[Request], length_of: Callable[[str, float], float]
) -> list[Request]:
    def changed(stage: Stage) -> Stage:
        return stage.changed(length_of) if isinstance(stage, Tools) else stage

    return [_of_stages(request, map(changed, request.stages)) for request in requests]


def _one_turn_fewer(model: StepModel, requests: Sequence[Request], _: Any) -> list[Request]:
    """Remove the last turn of the requests with the most turns."""
    last = max((request.turns for request in model.requests), default=0) - 1
    if last < 1:
        return list(requests)
    return [
        _of_stages(request, (s for s in request.stages if isinstance(s, Work) or s.turn != last))
        for request in requests
    ]


def _without_queue(_: StepModel, requests: Sequence[Request], __: Any) -> list[Request]:
    """Remove the time in the engine's queue from generate calls."""

    def changed(stage: Stage) -> Stage:
        if isinstance(stage, Call) and stage.queue_us:
            return stage._replace(before_us=stage.before_us - stage.queue_us, queue_us=0.0)
        return stage

    return [_of_stages(request, map(changed, request.stages)) for request in requests]


def _without_cold_prefill(_: StepModel, requests: Sequence[Request], __: Any) -> list[Request]:
    """Remove the prefill of tokens that the previous call had cached."""

    def changed(stage: Stage) -> Stage:
        if isinstance(stage, Call) and stage.cold_us:
            return stage._replace(fixed_us=stage.fixed_us - stage.cold_us, cold_us=0.0)
        return stage

    return [_of_stages(request, map(changed, request.stages)) for request in requests]


def _shorter(share: float) -> Callable[..., list[Request]]:
    """Scale the tokens of each generate call by a factor."""

    def change(_: StepModel, requests: Sequence[Request], __: Any) -> list[Request]:
        def changed(stage: Stage) -> Stage:
            if not isinstance(stage, Call) or not stage.tokens or stage.replica is None:
                return stage
            return stage._replace(work=stage.work * share, tokens=round(stage.tokens * share))

        return [_of_stages(request, map(changed, request.stages)) for request in requests]

    return change


def _equally_fast(model: StepModel) -> dict[str, Speed]:
    """Give slower replicas the speed of the median one of the others."""
    load = max(model.most_running / 2, 1.0)

    def token_us(name: str) -> float:
        return time_us(model.slowness_of[name], load)

    speeds: dict[str, Speed] = {}
    for name in model.slowness_of:
        others = sorted((other for other in model.slowness_of if other != name), key=token_us)
        if others:
            middle = others[(len(others) - 1) // 2]
            if token_us(name) >= SLOWER * token_us(middle):
                speeds[name] = model.slowness_of[middle]
    return speeds


def _halves(model: StepModel, _: Sequence[StepModel]) -> list[list[Request]]:
    """Group a step's requests by prompt; with a single prompt, one group per request."""
    names = [request.group for request in model.requests]
    groups: list[Any] = list(dict.fromkeys(names))
    if len(groups) < 2 or None in groups:
        groups = names = list(range(len(model.requests)))
    first = set(groups[0::2])
    halves: tuple[list[Request], list[Request]] = ([], [])
    for name, request in zip(names, model.requests, strict=True):
        halves[name in first].append(request)
    return [half for half in halves if half]


def _doubled(model: StepModel, models: Sequence[StepModel]) -> list[list[Request]]:
    """Combine the requests of a step with those of another step of its run, or with its own.

    Other steps are other samples: their longest request may be longer than the step's own.
    """
    own = [each for each in models if each.run == model.run and each.requests]
    place = next((n for n, each in enumerate(own) if each is model), 0)
    others = [own[place - 1], own[(place + 1) % len(own)]] if len(own) > 1 else own[:1]
    return [[*model.requests, *other.requests] for other in others]


# The changes, by name.
CHANGES: dict[str, Change] = {
    "no_polling": Change("notify the trainer when samples are ready", polls=False),
    "slowest_1_percent": Change(
        "stop the slowest 1 % of the requests at P95",
        requests=_capped(0.01, refilled=False),
        least=_ENOUGH,
    ),
    "slowest_1_percent_refilled": Change(
        "replace the slowest 1 % with typical requests",
        requests=_capped(0.01, refilled=True),
        least=_ENOUGH,
    ),
    "slowest_5_percent": Change(
        "stop the slowest 5 % of the requests at P95",
        requests=_capped(0.05, refilled=False),
        least=_ENOUGH,
    ),
    "slowest_5_percent_refilled": Change(
        "replace the slowest 5 % with typical requests",
        requests=_capped(0.05, refilled=True),
        least=_ENOUGH,
    ),
    "tools_at_median": Change(
        "cap every tool call at its tool's median", requests=tools_of_length(min)
    ),
    "tools_twice_as_fast": Change(
        "halve every tool call",
        requests=tools_of_length(lambda length, _: length / 2),
    ),
    "one_turn_fewer": Change(
        "one turn fewer for requests with the most turns", requests=_one_turn_fewer
    ),
    "responses_a_quarter_shorter": Change("25 % shorter responses", requests=_shorter(0.75)),
    "half_the_requests": Change("half as many prompts per step", batches=_halves),
    "twice_the_requests": Change(
        "twice as many prompts per step (load not observed)", batches=_doubled, beyond=True
    ),
    "replicas_equally_fast": Change(
        "bring slower replicas up to the others' speed", speeds=_equally_fast
    ),
    "even_replicas": Change("route generate calls to the least loaded replica", even=True),
    "even_workers": Change(
        "balance work over the workers' event loops",
        requests=lambda _, requests, __: balanced(requests),
    ),
    "even_ranks": Change("balance the ranks in each phase", saved_us=lambda model: model.uneven_us),
    "weights_twice_as_fast": Change(
        "halve the weight sync", saved_us=lambda model: model.weights_us / 2
    ),
    "no_queue": Change(
        "no engine queue (load not observed)",
        requests=_without_queue,
        limits=lambda model: None if model.limits == Limits() else Limits(),
        beyond=True,
    ),
    "twice_the_slots": Change(
        "double the engine's concurrency (not observed)",
        limits=lambda model: (
            model.limits._replace(calls=2 * model.max_concurrency)
            if model.max_concurrency
            else None
        ),
        beyond=True,
    ),
    "half_the_slots": Change(
        "halve the engine's concurrency",
        limits=lambda model: model.limits._replace(calls=max(model.most_running // 2, 1)),
    ),
    "twice_the_kv_cache": Change(
        "double the engine's KV cache (load not observed)",
        limits=lambda model: (
            model.limits._replace(kv_tokens=2 * model.kv_tokens) if model.kv_tokens else None
        ),
        beyond=True,
    ),
    "prefix_cache_kept": Change(
        "find in the prefix cache what the previous call left there", requests=_without_cold_prefill
    ),
}


def tool_lengths(models: Iterable[StepModel]) -> dict[str, list[float]]:
    """Return the durations of the calls of each tool, in microseconds."""
    found: dict[str, list[float]] = {}
    for model in models:
        for request in model.requests:
            for stage in request.stages:
                if isinstance(stage, Tools):
                    for _, length, tool in stage.calls:
                        found.setdefault(tool, []).append(length)
    return found


def changes_of(models: Sequence[StepModel]) -> dict[str, Change]:
    """Return `CHANGES` and, of steps with several tools, one for each of those with the most time.

    Args:
        models: The steps that are replayed.

    Returns:
        The changes by name, in the order of their rows; `tool_twice_as_fast:NAME` halves one tool.
    """
    totals = {tool: sum(lengths) for tool, lengths in tool_lengths(models).items()}
    tools = sorted(totals, key=totals.__getitem__, reverse=True)[:_TOOLS] if len(totals) > 1 else []
    found: dict[str, Change] = {}
    for name, change in CHANGES.items():
        found[name] = change
        if name == "tools_twice_as_fast":
            for tool in tools:
                about = f"halve every call of {tool[:_NAME]}"
                found[f"tool_twice_as_fast:{tool}"] = Change(about, requests=_one_tool(tool))
    return found
