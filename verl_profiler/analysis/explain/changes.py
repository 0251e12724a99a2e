"""Counterfactual changes of a run: `CHANGES` lists those that `what_if` replays.

A change takes a model, and all models of its run, and returns the changed one; None without an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, pairwise
from operator import is_
from statistics import fmean, median
from typing import Any, TypeGuard

from verl_profiler.analysis.explain.model import (
    TRAINING,
    WEIGHT_SYNC,
    Call,
    Dispatch,
    Limits,
    Mark,
    Model,
    Operation,
    Request,
    Run,
    Stage,
    Take,
    Tools,
    Work,
    measured_us,
    tool_lengths,
)
from verl_profiler.analysis.explain.replica_speed import SLOWER
from verl_profiler.analysis.explain.speed import Speed, time_us
from verl_profiler.analysis.explain.worker_loops import looped
from verl_profiler.reading.quantiles import interpolated, least_values

UNCHANGED = "unchanged"
# Minimum number of requests of a step for a 95th percentile.
_ENOUGH = least_values(0.95)
# Tools with a change of their own: those with the most time.
_TOOLS = 3
# Characters of a tool's name in a description.
_NAME = 60
# Training is taken to be inversely proportional to the devices. It may gain less from more of them, or
# lose less with fewer: as much as to this power. Assumed.
_LEAST_SCALING = 0.75
_ADDED = "added replica"
# Loops whose balance saves at most this part of a step are balanced.
_LITTLE = 0.005
# A step that takes so many times the median for something stalled: the excess stays, whatever is faster.
_STALLED = 3.0


@dataclass(frozen=True)
class Changed:
    """Changed models, whose mean is the answer, and models between which the truth is.

    The bounds are for where one assumption decides.  They are compared with `before`, if that is not the
    model itself: what it has besides is no part of the change.
    """

    models: Sequence[Model]
    bounds: Sequence[Model] = ()
    before: Model | None = None


Changing = Callable[[Model, Sequence[Model]], Changed | None]


@dataclass(frozen=True)
class Change:
    """One counterfactual change.

    Args:
        about: A short description.
        changed: Returns the changed model.
        synchronous: Whether it is replayed in synchronous runs.
        asynchronous: Whether it is replayed in asynchronous runs.
        polls: Whether the trainer still polls.
        beyond: Whether replicas of a step run more concurrent calls than recorded: then the result has
            bounds.  In a cycle, the replay shows it.
    """

    about: str
    changed: Changing
    synchronous: bool = True
    asynchronous: bool = False
    polls: bool = True
    beyond: bool = False


def _model(change: Callable[[Model], Model | None]) -> Changing:
    """Return a change of a model by itself."""

    def changed(model: Model, _: Sequence[Model]) -> Changed | None:
        found = change(model)
        return None if found is None else Changed([found])

    return changed


def _stages(change: Callable[[Stage], Stage]) -> Changing:
    """Return a change of each stage of all requests."""
    return _model(
        lambda model: model.mapped(lambda request: _of_stages(request, map(change, request.stages)))
    )


def _calls(change: Callable[[Call], Call]) -> Changing:
    """Return a change of all generate calls that replicas run."""
    return _stages(lambda stage: change(stage) if _is_served(stage) else stage)


def _is_served(stage: Stage) -> TypeGuard[Call]:
    return isinstance(stage, Call) and stage.replica is not None


def from_tokens(model: Model, models: Sequence[Model]) -> Changed | None:
    """Give all tokens of a step the same work; None without tokens.

    In the model each call has its measured work; here its work is predicted from its tokens, so the
    difference shows the error of the speed model (token-model error).
    """
    calls = [stage for each in model.requests for stage in each.stages if _is_served(stage)]
    tokens = sum(call.tokens or 0 for call in calls)
    if not tokens:
        return None
    per_token = sum(call.work for call in calls if call.tokens) / tokens
    predicted = _calls(lambda c: c._replace(work=c.tokens * per_token) if c.tokens else c)
    return predicted(model, models)


def _of_stages(request: Request, stages: Iterable[Stage]) -> Request:
    """Return the request with other stages; the same object if they are equal."""
    changed = tuple(stages)
    if len(changed) == len(request.stages) and all(map(is_, changed, request.stages)):
        return request
    return request._replace(stages=changed)


def _capped(share: float, *, refilled: bool) -> Changing:
    """Stop the slowest requests (at least one) at P95, or replace them with typical ones."""

    def change(model: Model) -> Model | None:
        requests = model.requests
        if len(requests) < _ENOUGH:
            return None
        order = sorted(requests, key=lambda request: request.duration_us)
        limit = interpolated([request.duration_us for request in order], 0.95)
        slowest = {id(request) for request in order[-max(round(share * len(order)), 1) :]}
        typical = order[(len(order) - 1) // 2]

        def stopped(request: Request) -> Request:
            if id(request) not in slowest or request.duration_us <= limit:
                return request
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

        return model.mapped(stopped)

    return _model(change)


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
            tokens = None if stage.tokens is None else round(stage.tokens * part)
            kept.append(stage.scaled(part)._replace(tokens=tokens))
        else:
            kept.append(Work(length * part, own=False))
    return tuple(kept)


def tools_of_length(
    length_of: Callable[[float, float], float], only: str | None = None
) -> Changing:
    """Set the duration of each call of a tool, or of all, to `length_of` it and its tool's median."""

    def change(model: Model, models: Sequence[Model]) -> Changed | None:
        medians = model.tool_medians_us

        def changed(tool: str, us: float) -> float:
            return us if only not in (None, tool) else length_of(us, medians.get(tool, us))

        return _stages(lambda stage: stage.changed(changed) if isinstance(stage, Tools) else stage)(
            model, models
        )

    return change


def _halved(length_us: float, _: float) -> float:
    return length_us / 2


def without_build(request: Request) -> Request:
    """Remove the worker's own time before a request's first generate call; it may wait after that."""
    first = request.stages[0]
    calls = any(isinstance(each, Call) for each in request.stages[1:3])
    own = calls and isinstance(first, Work) and first.own
    return _of_stages(request, request.stages[1:] if own else request.stages)


def _one_turn_fewer(model: Model) -> Model:
    """Remove the last turn of the requests with the most turns."""
    last = max((request.turns for request in model.requests), default=0) - 1
    if last < 1:
        return model
    return model.mapped(
        lambda request: _of_stages(
            request, (s for s in request.stages if isinstance(s, Work) or s.turn != last)
        )
    )


def without_queue(call: Call, part: float = 0.0) -> Call:
    """Remove the time in the engine's queue but a part of it."""
    if not call.queue_us:
        return call
    left_us = part * call.queue_us
    return call._replace(before_us=call.before_us - call.queue_us + left_us, queue_us=left_us)


def _no_queue(model: Model, models: Sequence[Model]) -> Changed | None:
    """Remove the time in the engine's queue from generate calls, and the limits that it comes from."""
    changed = _calls(without_queue)(model, models)
    return changed and _limits(lambda _: Limits())(changed.models[0], models)


def _without_cold_prefill(call: Call) -> Call:
    """Remove the prefill of tokens that the previous call had cached."""
    if not call.cold_us:
        return call
    return call._replace(fixed_us=call.fixed_us - call.cold_us, cold_us=0.0)


def _shorter(share: float) -> Callable[[Call], Call]:
    """Scale the tokens of a generate call by a factor."""
    return lambda call: (
        call._replace(work=call.work * share, tokens=round(call.tokens * share))
        if call.tokens
        else call
    )


def _equally_fast(model: Model) -> Model:
    """Give slower replicas the speed of the median one of the others."""
    known = model.speeds.slowness_of
    return as_fast(model, [name for name in known if _others(model, name)[1] >= SLOWER])


def _others(model: Model, name: str, without: Collection[str] = ()) -> tuple[Speed, float]:
    """Return the speed of the median one of the other replicas, and how much longer this one takes than that."""
    known = model.speeds.slowness_of
    load = max(model.peak or max(model.most_running.values(), default=1), 2) / 2

    def token_us(other: str) -> float:
        return time_us(known[other], load)

    others = sorted((each for each in known if each not in {name, *without}), key=token_us)
    if not others:
        return known[name], 1.0
    middle = others[(len(others) - 1) // 2]
    return known[middle], token_us(name) / token_us(middle)


def as_fast(model: Model, slow: Collection[str]) -> Model:
    """Give these replicas the speed of the median one of the others."""
    known = model.speeds.slowness_of
    speeds = {name: _others(model, name, slow)[0] for name in slow if name in known}
    if not speeds:
        return model
    return replace(model, speeds=model.speeds._replace(slowness_of={**known, **speeds}))


def _limits(change: Callable[[Model], Limits]) -> Changing:
    """Return a change of the replicas' limits."""

    def changed(model: Model) -> Model:
        limits = change(model)
        return model if limits == model.limits else replace(model, limits=limits)

    return _model(changed)


def _twice(name: str) -> Callable[[Model], Limits]:
    """Double one of the limits; infinity stays."""
    return lambda model: model.limits._replace(**{name: 2 * getattr(model.limits, name)})


def _halves(model: Model, _: Sequence[Model]) -> Changed | None:
    """Group a step's requests by prompt; with a single prompt, one group per request."""
    if not model.speeds.load_varied:
        return None
    requests = model.requests
    names = [request.group for request in requests]
    groups: list[Any] = list(dict.fromkeys(names))
    if len(groups) < 2 or None in groups:
        groups = names = list(range(len(requests)))
    first = set(groups[0::2])
    halves: tuple[list[Request], list[Request]] = ([], [])
    for name, request in zip(names, requests, strict=True):
        halves[name in first].append(request)
    return Changed([model.with_requests(half) for half in halves if half])


def _doubled(model: Model, models: Sequence[Model]) -> Changed | None:
    """Combine the requests of a step with those of another step of its run, or with its own.

    Other steps are other samples: their longest request may be longer than the step's own.
    """
    if not model.speeds.load_varied:
        return None
    own = [each for each in models if each.requests]
    place = next((n for n, each in enumerate(own) if each is model), 0)
    others = [own[place - 1], own[(place + 1) % len(own)]] if len(own) > 1 else own[:1]
    return Changed([model.with_requests([*model.requests, *each.requests]) for each in others])


def _even_workers(model: Model, _: Sequence[Model]) -> Changed | None:
    """Scale the work of each worker's event loop to the mean over the workers."""
    found = looped(model.requests, _LITTLE * model.mean_us)
    if found is None:
        return Changed([model])
    requests, loads = found
    mean_us = fmean(loads.values())
    pools = {**model.pools, **dict.fromkeys(loads, 1)}
    before = replace(model.with_requests(requests), pools=pools)

    def scaled(stage: Stage) -> Stage:
        load_us = loads.get(stage.pool or "") if isinstance(stage, Work) else None
        if not load_us or not isinstance(stage, Work):
            return stage
        return stage._replace(length_us=stage.length_us * mean_us / load_us)

    changed = _stages(scaled)(before, [before])
    return None if changed is None else replace(changed, before=before)


def scaled(
    state: str, factor: float | Sequence[float]
) -> Callable[[Model, Sequence[Model]], Changed]:
    """Multiply what the trainer does in a state, by one factor in each step.

    A single factor is for what each step does, without the excess of stalled steps over the median.
    """

    def changed(model: Model, models: Sequence[Model]) -> Changed:
        own = times_in(model, state)
        if isinstance(factor, (int, float)):
            known = [model] if model.asynchronous else models
            steps = [us for each in known for us in times_in(each, state) if us > 0]
            usual = median(steps) if steps else 0.0
            parts = [
                usual / us if us > _STALLED * usual and state in (TRAINING, WEIGHT_SYNC) else 1.0
                for us in own
            ]
            factors = [1 + (factor - 1) * part for part in parts]
        else:
            factors = factor
        following = iter(factors)
        kept: list[Operation] = []
        now = 1.0
        for each in model.operations:
            if isinstance(each, Mark):
                now = next(following)
            if isinstance(each, Run) and each.state == state:
                kept.append(each._replace(length_us=each.length_us * now))
            else:
                kept.append(each)
        return Changed([replace(model, operations=tuple(kept))])

    return changed


def times_in(model: Model, state: str) -> list[float]:
    """Return how long the trainer is in a state, in each step."""
    found: list[float] = []
    for each in model.operations:
        if isinstance(each, Mark):
            found.append(0.0)
        elif isinstance(each, Run) and each.state == state:
            found[-1] += each.length_us
    return found


def _in_flight(batches: int) -> Changing:
    """Move the limit by batches; how many samples would be dropped then is not recorded.

    More samples are routed anew, as verl's load balancer does: with the recorded routes, repeated, a replica that
    had a little more work would collect all of them.
    """

    def changed(model: Model, _: Sequence[Model]) -> Changed | None:
        limit = model.limit + batches * max(round(model.batch), 1)
        if limit < 1 or any(unit.dropped for unit in model.units):
            return None
        if batches < 0:
            return Changed([replace(model, limit=limit)])
        # Other routes than the recorded ones are not part of the change.
        before = replace(model, routing="request")
        return Changed([replace(before, limit=limit)], before=before)

    return changed


def _moved(replicas: int) -> Changing:
    """Move devices of one replica between the pools; requests are spread over the replicas in turn."""

    def changed(model: Model, _: Sequence[Model]) -> Changed | None:
        names = list(model.standalone)
        left = model.trainer_devices - replicas * model.replica_devices
        if not model.replica_devices or left <= 0 or len(names) + replicas < 1:
            return None
        most = {name: peak for name, peak in model.most_running.items() if name in names}
        if not most:
            return None
        if replicas > 0:
            most[_ADDED] = max(most.values())
        elif len(most) > 1:
            most.pop(names[-1], None)
        base = replace(_spread(model, sorted(most)), most_running=most)
        trained, less = (
            scaled(TRAINING, (model.trainer_devices / left) ** power)(base, [base]).models
            for power in (1.0, _LEAST_SCALING)
        )
        return Changed(trained, less)

    return changed


def _spread(model: Model, names: Sequence[str]) -> Model:
    """Give every request one replica for all of its calls."""
    turn = cycle(names)

    def on_one(request: Request) -> Request:
        name = next(turn)
        return _of_stages(
            request,
            (s._replace(replica=name) if isinstance(s, Call) else s for s in request.stages),
        )

    return model.mapped(on_one)


def _seldom_synced(model: Model) -> Model | None:
    """Leave out every second weight sync; on shared devices it is a part of the mode switch."""
    if not model.standalone:
        return None
    operations = model.operations
    if sum(_syncs(operations)) % 2:
        # Then the syncs of two cycles alternate.
        operations = (*operations, *operations)
    kept = [
        each
        for each, number in zip(operations, accumulate(_syncs(operations)), strict=True)
        # A rollouter may go on when new weights arrive.
        if number % 2 == 0
        or not (_is_sync(each) or (model.rollouter and isinstance(each, Dispatch)))
    ]
    limit = model.limit * (2 if model.rollouter else 1)
    return replace(model, operations=tuple(kept), limit=limit)


def _is_sync(operation: Operation) -> TypeGuard[Run]:
    return isinstance(operation, Run) and operation.state == WEIGHT_SYNC


def _syncs(operations: tuple[Operation, ...]) -> list[bool]:
    """Return for each operation whether a weight sync begins with it."""
    found: list[bool] = []
    inside = False
    for each in operations:
        found.append(_is_sync(each) and not inside)
        if isinstance(each, Run) and each.length_us > 0:
            inside = _is_sync(each)
    return found


def _often_synced(model: Model) -> Model | None:
    """Add a weight sync in the middle between two, if the trainer takes samples several times between."""
    if not model.standalone or model.rollouter:
        return None
    operations = model.operations
    count = len(operations)
    begins = [place for place, begins in enumerate(_syncs(operations)) if begins]
    if not begins or sum(isinstance(each, Take) for each in operations) < 2 * len(begins):
        return None
    length_us = sum(each.length_us for each in operations if _is_sync(each)) / len(begins)
    added: set[int] = set()
    for first, last in pairwise([*begins, begins[0] + count]):
        places = (place % count for place in range(first, last))
        takes = [place for place in places if isinstance(operations[place], Take)]
        if len(takes) >= 2:
            added.add(takes[len(takes) // 2])
    kept: list[Operation] = []
    for place, each in enumerate(operations):
        if place in added:
            kept.append(Run(length_us, WEIGHT_SYNC, serves=False))
        kept.append(each)
    return replace(model, operations=tuple(kept))


def _of_cycles(about: str, changed: Changing) -> Change:
    return Change(about, changed, synchronous=False, asynchronous=True)


# The changes, by name.
CHANGES: dict[str, Change] = {
    "no_polling": Change(
        "notify the trainer when samples are ready",
        _model(lambda model: replace(model, operations=_without_polls(model))),
        polls=False,
    ),
    **{
        f"slowest_{percent}_percent{'_refilled' if refilled else ''}": Change(
            f"replace the slowest {percent} % with typical requests"
            if refilled
            else f"stop the slowest {percent} % of the requests at P95",
            _capped(percent / 100, refilled=refilled),
        )
        for percent in (1, 5)
        for refilled in (False, True)
    },
    "tools_at_median": Change("cap every tool call at its tool's median", tools_of_length(min)),
    "training_twice_as_fast": _of_cycles("halve the training", scaled(TRAINING, 0.5)),
    "calls_twice_as_fast": _of_cycles(
        "halve every generate call",
        _calls(lambda call: call.scaled(0.5, "before_us", "fixed_us", "work", "after_us")),
    ),
    "tools_twice_as_fast": Change(
        "halve every tool call",
        tools_of_length(_halved),
        asynchronous=True,
    ),
    "no_prompt_build": Change(
        "skip prompt building",
        _model(lambda model: model.mapped(without_build)),
        beyond=True,
    ),
    "one_turn_fewer": Change(
        "one turn fewer for requests with the most turns", _model(_one_turn_fewer)
    ),
    "responses_a_quarter_shorter": Change("25 % shorter responses", _calls(_shorter(0.75))),
    "half_the_requests": Change("half as many prompts per step", _halves),
    "twice_the_requests": Change(
        "twice as many prompts per step (load not observed)", _doubled, beyond=True
    ),
    "replicas_equally_fast": Change(
        "bring slower replicas up to the others' speed", _model(_equally_fast)
    ),
    "even_replicas": Change(
        "route generate calls to the least loaded replica",
        _model(lambda model: replace(model, routing="call")),
    ),
    "even_workers": Change(
        "balance work over the workers' event loops",
        _even_workers,
    ),
    "even_ranks": Change(
        "balance the ranks in each phase",
        _model(lambda model: replace(model, operations=(*model.operations, Run(-model.uneven_us)))),
    ),
    "weights_twice_as_fast": Change(
        "halve the weight sync", scaled(WEIGHT_SYNC, 0.5), asynchronous=True
    ),
    "no_queue": Change("no engine queue (load not observed)", _no_queue, beyond=True),
    "twice_the_slots": Change(
        "double the engine's concurrency (not observed)", _limits(_twice("calls")), beyond=True
    ),
    "half_the_slots": Change(
        "halve the engine's concurrency",
        _limits(lambda model: model.limits._replace(calls=max(model.peak // 2, 1))),
    ),
    "twice_the_kv_cache": Change(
        "double the engine's KV cache (load not observed)",
        _limits(_twice("kv_tokens")),
        beyond=True,
    ),
    "prefix_cache_kept": Change(
        "keep each conversation in the prefix cache between its calls",
        _calls(_without_cold_prefill),
    ),
    "no_pause_after_aborts": _of_cycles(
        "resend aborted calls without a pause",
        _model(lambda model: replace(model, parked_us=0.0) if model.parked_us > 0 else None),
    ),
    "one_batch_more_in_flight": _of_cycles("dispatch one more batch in advance", _in_flight(1)),
    "one_batch_fewer_in_flight": _of_cycles("dispatch one batch fewer in advance", _in_flight(-1)),
    "weight_sync_half_as_often": _of_cycles(
        "sync the weights half as often", _model(_seldom_synced)
    ),
    "weight_sync_twice_as_often": _of_cycles(
        "sync the weights twice as often", _model(_often_synced)
    ),
    "one_replica_more": _of_cycles("move devices from the trainer to one more replica", _moved(1)),
    "one_replica_fewer": _of_cycles("move the devices of one replica to the trainer", _moved(-1)),
}


def _without_polls(model: Model) -> tuple[Operation, ...]:
    return tuple(
        each._replace(polls_us=()) if isinstance(each, Take) else each for each in model.operations
    )


def changes_of(models: Sequence[Model]) -> dict[str, Change]:
    """Return those of `CHANGES` that a run is replayed with.

    Args:
        models: The synchronous steps that are replayed, or the cycle of an asynchronous run.

    Returns:
        The changes by name, in the order of their rows.  `tool_twice_as_fast:NAME` halves one tool: of
        synchronous steps with several tools, one for each of those with the most time.
    """
    asynchronous = models[0].asynchronous
    totals = {tool: sum(lengths) for tool, lengths in tool_lengths(models).items()}
    several = len(totals) > 1 and not asynchronous
    tools = sorted(totals, key=totals.__getitem__, reverse=True)[:_TOOLS] if several else []
    found: dict[str, Change] = {}
    for name, change in CHANGES.items():
        if change.asynchronous if asynchronous else change.synchronous:
            found[name] = change
        if name == "tools_twice_as_fast":
            for tool in tools:
                about = f"halve every call of {tool[:_NAME]}"
                found[f"tool_twice_as_fast:{tool}"] = Change(about, tools_of_length(_halved, tool))
    return found
