"""Counterfactual changes of an asynchronous run: `ASYNCHRONOUS_CHANGES` lists those that are replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from verl_profiler.analysis.explain.asynchronous_cycle import (
    Chain,
    Dispatch,
    Generate,
    Operation,
    Run,
    Take,
    is_balanced,
)
from verl_profiler.analysis.explain.asynchronous_model import Model, times_of
from verl_profiler.analysis.explain.replay import mean_speed

__all__ = ["ASYNCHRONOUS_CHANGES", "AsynchronousChange", "Changed"]

# Training is taken to be inversely proportional to the devices. It may gain less from more of them, or
# lose less with fewer: as much as to this power. Assumed.
_LEAST_SCALING = 0.75
_ADDED = "added replica"


@dataclass(frozen=True)
class Changed:
    """A changed model, and models between which the truth is, where one assumption decides."""

    model: Model
    bounds: Sequence[Model] = ()


@dataclass(frozen=True)
class AsynchronousChange:
    """A counterfactual change: a short description, and the changed model (None: no answer)."""

    about: str
    changed: Callable[[Model], Changed | None]


def _with(model: Model, **parts: Any) -> Changed:
    return Changed(replace(model, cycle=replace(model.cycle, **parts)))


def _scaled(state: str, factor: float) -> Callable[[Model], Changed]:
    """Multiply what the trainer does in a state."""

    def changed(model: Model) -> Changed:
        return _with(model, operations=_with_lengths(model, state, factor))

    return changed


def _with_lengths(model: Model, state: str, factor: float) -> tuple[Operation, ...]:
    return tuple(
        each._replace(length_us=each.length_us * factor)
        if isinstance(each, Run) and each.state == state
        else each
        for each in model.cycle.operations
    )


def _chains(change: Callable[[Chain], Chain]) -> Callable[[Model], Changed]:
    """Change the chains of all requests."""

    def changed(model: Model) -> Changed:
        units = tuple(
            unit._replace(
                requests=tuple((lag_us, change(chain)) for lag_us, chain in unit.requests)
            )
            for unit in model.cycle.units
        )
        return _with(model, units=units)

    return changed


def _faster_calls(chain: Chain) -> Chain:
    return tuple(
        each._replace(
            fixed_us=each.fixed_us / 2, work=each.work / 2, prefill_us=each.prefill_us / 2
        )
        if isinstance(each, Generate)
        else each
        for each in chain
    )


def _faster_tools(chain: Chain) -> Chain:
    return tuple(
        each
        if isinstance(each, Generate) or not each.tool
        else each._replace(length_us=each.length_us / 2)
        for each in chain
    )


def _in_flight(batches: int) -> Callable[[Model], Changed | None]:
    """Move the limit by batches; how many samples would be dropped then is not recorded.

    More samples are routed anew: with the recorded routes, repeated, a replica that had a little more work
    would collect all of them.
    """

    def changed(model: Model) -> Changed | None:
        limit = model.cycle.limit + batches * max(round(model.batch), 1)
        if limit < 1 or any(unit.dropped for unit in model.cycle.units):
            return None
        cycle = model.cycle
        return _with(
            model, limit=limit, balanced=batches > 0 and is_balanced(cycle.units, cycle.times)
        )

    return changed


def _resumed_at_once(model: Model) -> Changed | None:
    """Send interrupted calls again without the pause after an abort."""
    return _with(model, parked_us=0.0) if model.cycle.parked_us > 0 else None


def _moved(replicas: int) -> Callable[[Model], Changed | None]:
    """Move devices of one replica between the pools; requests are spread over the replicas in turn."""

    def changed(model: Model) -> Changed | None:
        names = list(model.standalone)
        left = model.trainer_devices - replicas * model.replica_devices
        if not model.replica_devices or left <= 0 or len(names) + replicas < 1:
            return None
        slowness = {name: line for name, line in model.slowness.items() if name in names}
        most = {name: peak for name, peak in model.most_running.items() if name in names}
        if not slowness:
            return None
        if replicas > 0:
            slowness[_ADDED] = mean_speed(list(slowness.values()))
            most[_ADDED] = max(most.values(), default=1)
        elif len(slowness) > 1:
            slowness.pop(names[-1], None)
            most.pop(names[-1], None)
        cycle = replace(
            model.cycle,
            units=_spread(model, sorted(slowness)),
            times=times_of(slowness, most, "line"),
        )
        base = replace(model, slowness=slowness, most_running=most, cycle=cycle)
        factor = model.trainer_devices / left

        def trained(power: float) -> Model:
            operations = _with_lengths(base, "training", factor**power)
            return replace(base, cycle=replace(cycle, operations=operations))

        return Changed(trained(1.0), (trained(_LEAST_SCALING),))

    return changed


def _spread(model: Model, names: Sequence[str]) -> Any:
    """Give every request one replica for all of its calls."""
    number = count().__next__

    def on_one(chain: Chain) -> Chain:
        name = names[number() % len(names)]
        return tuple(
            each._replace(replica=name) if isinstance(each, Generate) else each for each in chain
        )

    return _chains(on_one)(model).model.cycle.units


def _seldom_synced(model: Model) -> Changed | None:
    """Leave out every second weight sync; on shared devices it is a part of the mode switch."""
    if not model.separate:
        return None
    operations = model.cycle.operations
    if sum(_syncs(operations)) % 2:
        # Then the syncs of two cycles alternate.
        operations = (*operations, *operations)
    kept: list[Operation] = []
    number = 0
    left_out = False
    for each, syncs in zip(operations, _syncs(operations), strict=True):
        if syncs:
            number += 1
            left_out = number % 2 == 1
        if isinstance(each, Run) and each.state == "weight_sync":
            if left_out:
                continue
        elif isinstance(each, Dispatch) and left_out and model.rollouter:
            # A rollouter may go on when new weights arrive.
            continue
        kept.append(each)
    limit = model.cycle.limit * (2 if model.rollouter else 1)
    return _with(model, operations=tuple(kept), limit=limit)


def _syncs(operations: tuple[Operation, ...]) -> list[bool]:
    """Return for each operation whether a weight sync begins with it."""
    found: list[bool] = []
    inside = False
    for each in operations:
        is_sync = isinstance(each, Run) and each.state == "weight_sync"
        found.append(is_sync and not inside)
        if isinstance(each, Run) and each.length_us > 0:
            inside = is_sync
    return found


def _often_synced(model: Model) -> Changed | None:
    """Add a weight sync in the middle between two, if the trainer takes samples several times between."""
    if not model.separate or model.rollouter:
        return None
    operations = model.cycle.operations
    syncs = [each for each in operations if isinstance(each, Run) and each.state == "weight_sync"]
    begins = [place for place, begins in enumerate(_syncs(operations)) if begins]
    takes = [place for place, each in enumerate(operations) if isinstance(each, Take)]
    if not begins or len(takes) < 2 * len(begins):
        return None
    length_us = sum(each.length_us for each in syncs) / len(begins)
    added: set[int] = set()
    for first, last in zip([begins[-1] - len(operations), *begins], begins, strict=False):
        # From the take after a sync to the next sync, over the end of the cycle.
        inside = sorted(
            place
            for take in takes
            for place in (take - len(operations), take)
            if first < place < last
        )
        if len(inside) >= 2:
            added.add(inside[len(inside) // 2] % len(operations))
    kept: list[Operation] = []
    for place, each in enumerate(operations):
        if place in added:
            kept.append(Run(length_us, "weight_sync", serves=False))
        kept.append(each)
    return _with(model, operations=tuple(kept))


# The changes, by name.
ASYNCHRONOUS_CHANGES: dict[str, AsynchronousChange] = {
    "training_twice_as_fast": AsynchronousChange("halve the training", _scaled("training", 0.5)),
    "calls_twice_as_fast": AsynchronousChange("halve every generate call", _chains(_faster_calls)),
    "tools_twice_as_fast": AsynchronousChange("halve every tool call", _chains(_faster_tools)),
    "weights_twice_as_fast": AsynchronousChange(
        "halve the weight sync", _scaled("weight_sync", 0.5)
    ),
    "no_pause_after_aborts": AsynchronousChange(
        "resend aborted calls without a pause", _resumed_at_once
    ),
    "one_batch_more_in_flight": AsynchronousChange(
        "dispatch one more batch in advance", _in_flight(1)
    ),
    "one_batch_fewer_in_flight": AsynchronousChange(
        "dispatch one batch fewer in advance", _in_flight(-1)
    ),
    "weight_sync_half_as_often": AsynchronousChange(
        "sync the weights half as often", _seldom_synced
    ),
    "weight_sync_twice_as_often": AsynchronousChange(
        "sync the weights twice as often", _often_synced
    ),
    "one_replica_more": AsynchronousChange(
        "move devices from the trainer to one more replica", _moved(1)
    ),
    "one_replica_fewer": AsynchronousChange(
        "move the devices of one replica to the trainer", _moved(-1)
    ),
}
