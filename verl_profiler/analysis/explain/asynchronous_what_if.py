"""Counterfactual step times of asynchronous runs: their cycle replayed with one change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from verl_profiler.analysis.explain.asynchronous_model import Model, RefusedError, models, times_of
from verl_profiler.analysis.explain.asynchronous_replay import (
    Chain,
    Cycle,
    Dispatch,
    Generate,
    Operation,
    Run,
    Take,
    replay,
    step_lengths,
)
from verl_profiler.analysis.explain.changes import UNCHANGED
from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["ASYNCHRONOUS_CHANGES", "LARGEST_ERROR", "asynchronous_what_if"]

# With a larger replay error there is no answer.
LARGEST_ERROR = 0.10
_LEVEL = 0.9
_NORMAL = 1.645
# Relative standard errors of the model, as in the synchronous replay: of the saving, and of the
# part that comes from changed load.
_MODEL_ERROR = 0.10
_LOAD_ERROR = 0.20
# Steps that are replayed before those that count, and how many count at least.
_BEFORE, _COUNTED = 10, 20

_Changed = Callable[[Model], "Cycle | None"]


@dataclass(frozen=True)
class AsynchronousChange:
    """A counterfactual change: a short description, and the changed cycle (None: no answer)."""

    about: str
    cycle: _Changed


def _scaled(state: str) -> _Changed:
    """Halve what the trainer does in a state."""

    def changed(model: Model) -> Cycle | None:
        operations = tuple(
            each._replace(length_us=each.length_us / 2)
            if isinstance(each, Run) and each.state == state
            else each
            for each in model.cycle.operations
        )
        return replace(model.cycle, operations=operations)

    return changed


def _chains(change: Callable[[Chain], Chain]) -> _Changed:
    """Change the chains of all requests."""

    def changed(model: Model) -> Cycle | None:
        units = tuple(
            unit._replace(
                requests=tuple((lag_us, change(chain)) for lag_us, chain in unit.requests)
            )
            for unit in model.cycle.units
        )
        return replace(model.cycle, units=units)

    return changed


def _faster_calls(chain: Chain) -> Chain:
    return tuple(
        each._replace(fixed_us=each.fixed_us / 2, work=each.work / 2)
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


def _more_in_flight(model: Model) -> Cycle | None:
    """Raise the limit by one batch; more samples would be dropped than are recorded, if any are."""
    if any(unit.dropped for unit in model.cycle.units):
        return None
    limit = model.cycle.limit + max(round(model.batch), 1)
    return replace(model.cycle, limit=limit)


def _seldom_synced(model: Model) -> Cycle | None:
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
    return replace(model.cycle, operations=tuple(kept), limit=limit)


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


def _often_synced(model: Model) -> Cycle | None:
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
    return replace(model.cycle, operations=tuple(kept))


# The changes, by name.
ASYNCHRONOUS_CHANGES: dict[str, AsynchronousChange] = {
    "training_twice_as_fast": AsynchronousChange("halve the training", _scaled("training")),
    "calls_twice_as_fast": AsynchronousChange("halve every generate call", _chains(_faster_calls)),
    "tools_twice_as_fast": AsynchronousChange("halve every tool call", _chains(_faster_tools)),
    "weights_twice_as_fast": AsynchronousChange("halve the weight sync", _scaled("weight_sync")),
    "one_batch_more_in_flight": AsynchronousChange(
        "dispatch one more batch in advance", _more_in_flight
    ),
    "weight_sync_half_as_often": AsynchronousChange(
        "sync the weights half as often", _seldom_synced
    ),
    "weight_sync_twice_as_often": AsynchronousChange(
        "sync the weights twice as often", _often_synced
    ),
}


def asynchronous_what_if(tables: Tables, steps: Steps = None) -> Rows:
    """Replay the cycle of asynchronous runs unchanged and with each change.

    Returns:
        One row per asynchronous run and what, `unchanged` first, then the keys of
        `ASYNCHRONOUS_CHANGES` (those that can be answered): about, steps (that the cycle was rebuilt
        from), step_s (mean, measured), replayed_s (mean of the replay), replay_error (replayed minus
        measured as a share of the latter; for `unchanged`), expected_s (long-run mean saving per step;
        negative if steps take longer), share (of step_s), low_s and high_s (its 90 % interval, with
        the model's error and the replay error; its ends are bounds where loads exceed the recorded
        ones), refused (why there is no answer: then `unchanged` is the only row).
    """
    rows: Rows = []
    for run, model in models(tables, steps).items():
        rows += (
            _refusal(run, str(model)) if isinstance(model, RefusedError) else _answers(run, model)
        )
    return rows


def _row(run: str, what: str, about: str, **more: Any) -> dict[str, Any]:
    names = (
        "steps", "step_s", "replayed_s", "replay_error", "expected_s", "share", "low_s", "high_s",
        "refused",
    )  # fmt: skip
    return {"run": run, "what": what, "about": about, **dict.fromkeys(names), **more}


def _refusal(run: str, reason: str, **more: Any) -> Rows:
    return [_row(run, UNCHANGED, "as measured", refused=reason, **more)]


def _answers(run: str, model: Model) -> Rows:
    measured = model.mean_us
    first = _replayed(model, model.cycle)
    known = {"steps": len(model.steps), "step_s": measured / 1e6}
    if first is None:
        return _refusal(run, "the replay waits for samples that are never dispatched", **known)
    error = fmean(first[0]) / measured - 1
    known |= {"replayed_s": fmean(first[0]) / 1e6, "replay_error": error}
    if abs(error) > LARGEST_ERROR:
        reason = (
            f"the replay without a change takes {abs(error):.0%} "
            f"{'longer' if error > 0 else 'shorter'} than the steps; "
            f"answers need at most {LARGEST_ERROR:.0%}"
        )
        return _refusal(run, reason, **known)
    rows = [_row(run, UNCHANGED, "as measured", **known)]
    for what, change in ASYNCHRONOUS_CHANGES.items():
        cycle = change.cycle(model)
        if cycle is not None:
            rows += _answer(run, what, change.about, model, cycle, first[0])
    return rows


def _answer(
    run: str, what: str, about: str, model: Model, cycle: Cycle, unchanged: list[float]
) -> Iterator[dict[str, Any]]:
    line = _replayed(model, cycle)
    if line is None:
        return
    lengths, most = line
    saved = _saved(unchanged, lengths)
    expected = fmean(saved)
    least = best = saved
    if any(most[name] > peak for name, peak in model.most_running.items()):
        bounds = [_replayed(model, cycle, beyond) for beyond in ("saturated", "flat")]
        least, best = (saved if each is None else _saved(unchanged, each[0]) for each in bounds)
    low, high = _interval(model, least)[0], _interval(model, best)[1]
    step_s = model.mean_us / 1e6
    load = math.hypot(_LOAD_ERROR, model.slope_error) if _loaded(model) else 0.0
    error = math.hypot(
        _NORMAL * math.hypot(_MODEL_ERROR, load) * expected,
        # A replay error is not known to be the same with a change.
        fmean(unchanged) / 1e6 - step_s,
    )
    yield _row(
        run,
        what,
        about,
        steps=len(model.steps),
        step_s=step_s,
        replayed_s=fmean(lengths) / 1e6,
        expected_s=expected,
        share=expected / step_s,
        low_s=expected - math.hypot(expected - min(low, expected), error),
        high_s=expected + math.hypot(max(high, expected) - expected, error),
    )


def _loaded(model: Model) -> bool:
    return any(b for _, b in model.slowness.values())


def _saved(unchanged: list[float], changed: list[float]) -> list[float]:
    # Equal lengths are no saving, not a negative one.
    return [(before - after) / 1e6 + 0.0 for before, after in zip(unchanged, changed, strict=True)]


def _interval(model: Model, saved: list[float]) -> tuple[float, float]:
    """Return the 90 % interval of the mean over the steps."""
    # Imported here because few commands need scipy.
    from verl_profiler.analysis.intervals import mean

    estimate = mean(saved, list(model.steps))
    if estimate is None:
        return fmean(saved), fmean(saved)
    return estimate.interval(_LEVEL)


def _replayed(
    model: Model, cycle: Cycle, beyond: str = "line"
) -> tuple[list[float], Mapping[str, int]] | None:
    """Return the mean length of each step in a long replay, and the most calls of each replica."""
    places = len(model.steps)
    before = -(-max(_BEFORE, 2 * cycle.limit / max(model.batch, 1)) // places)
    counted = 2 * -(-_COUNTED // (2 * places))
    total = int(before + counted) * places
    used = replace(cycle, times=times_of(model.slowness, model.most_running, beyond))
    begins, most = replay(used, total)
    if len(begins) <= total:
        return None
    return step_lengths(begins, places, int(before) * places), most
