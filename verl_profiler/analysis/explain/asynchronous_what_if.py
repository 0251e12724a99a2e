"""Counterfactual step times of asynchronous runs: their cycle replayed with one change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from verl_profiler.analysis.explain.asynchronous_changes import ASYNCHRONOUS_CHANGES, Changed
from verl_profiler.analysis.explain.asynchronous_cycle import Generate
from verl_profiler.analysis.explain.asynchronous_model import Model, RefusedError, models, times_of
from verl_profiler.analysis.explain.asynchronous_replay import replay
from verl_profiler.analysis.explain.changes import UNCHANGED
from verl_profiler.analysis.explain.replay import (
    LOAD_ERROR,
    MODEL_ERROR,
    READ_ERROR,
    grows_with_load,
)
from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["LARGEST_ERROR", "asynchronous_what_if"]

# With a larger replay error there is no answer.
LARGEST_ERROR = 0.10
_LEVEL = 0.9
_NORMAL = 1.645
# Steps that are replayed before those that count, and how many count at least.
_BEFORE, _COUNTED = 10, 20
# The same where so many steps have more generate calls than this. A call takes 10 to 15 microseconds in
# each of up to 20 replays; with more of them there is no answer.
_BEFORE_MANY, _COUNTED_MANY = 2, 2
_CALLS, _MOST_CALLS = 30_000, 200_000


def asynchronous_what_if(tables: Tables, steps: Steps = None) -> Rows:
    """Replay the cycle of asynchronous runs unchanged and with each change.

    Returns:
        Table `asynchronous_what_if`: one row per asynchronous run and change, first `unchanged`, then
        the keys of `ASYNCHRONOUS_CHANGES` that can be answered; only `unchanged` where the run cannot
        be replayed.  The interval has the model's error and the replay error; its ends are bounds
        where loads exceed the recorded ones.
    """
    rows: Rows = []
    for run, model in models(tables, steps).items():
        rows += (
            _refusal(run, str(model)) if isinstance(model, RefusedError) else _answers(run, model)
        )
    return rows


def _row(run: str, what: str, about: str, **more: Any) -> dict[str, Any]:
    names = (
        "steps", "step_s", "replayed_s", "residual_share", "expected_s", "share", "low_s", "high_s",
        "engine", "undivided_share", "refused",
    )  # fmt: skip
    return {"run": run, "what": what, "about": about, **dict.fromkeys(names), **more}


def _refusal(run: str, reason: str, **more: Any) -> Rows:
    return [_row(run, UNCHANGED, "as measured", refused=reason, **more)]


def _answers(run: str, model: Model) -> Rows:
    measured = model.mean_us
    known = {
        "steps": len(model.steps),
        "step_s": measured / 1e6,
        "engine": model.engine,
        "undivided_share": model.undivided_share,
    }
    if _calls(model, sum(_repeated(model))) > _MOST_CALLS:
        reason = f"a replay takes more than {_MOST_CALLS:,} generate calls"
        return _refusal(run, reason, **known)
    first = _replayed(model)
    if first is None:
        return _refusal(run, "the replay waits for samples that are never dispatched", **known)
    error = fmean(first[0]) / measured - 1
    known |= {"replayed_s": fmean(first[0]) / 1e6, "residual_share": error}
    if abs(error) > LARGEST_ERROR:
        reason = (
            f"the replay without a change takes {abs(error):.0%} "
            f"{'longer' if error > 0 else 'shorter'} than the steps; "
            f"answers need at most {LARGEST_ERROR:.0%}"
        )
        return _refusal(run, reason, **known)
    rows = [_row(run, UNCHANGED, "as measured", **known)]
    for what, change in ASYNCHRONOUS_CHANGES.items():
        changed = change.changed(model)
        if changed is not None:
            rows += _answer(run, what, change.about, model, changed, first[0])
    return rows


def _answer(
    run: str, what: str, about: str, model: Model, changed: Changed, unchanged: list[float]
) -> Iterator[dict[str, Any]]:
    line = _replayed(changed.model)
    if line is None:
        return
    lengths, most = line
    if changed.model.cycle.balanced:
        # Other routes than the recorded ones are not part of the change.
        rerouted = _replayed(replace(model, cycle=replace(model.cycle, balanced=True)))
        if rerouted is None:
            return
        unchanged = rerouted[0]
    saved = _saved(unchanged, lengths)
    expected = fmean(saved)
    bounds = [_replayed(bound) for bound in changed.bounds]
    if any(most[name] > peak for name, peak in changed.model.most_running.items()):
        # The time of an iteration is convex: it goes on at least as steeply as at the highest batch.
        beyond = ("saturated", "flat") if model.engine == "calls" else ("saturated",)
        bounds += [_replayed(changed.model, each) for each in beyond]
    answers = [saved, *(_saved(unchanged, each[0]) for each in bounds if each is not None)]
    least, best = min(answers, key=fmean), max(answers, key=fmean)
    low, high = _interval(model, least)[0], _interval(model, best)[1]
    step_s = model.mean_us / 1e6
    known = LOAD_ERROR if model.engine == "calls" else READ_ERROR
    load = math.hypot(known, model.slope_error) if _loaded(model) else 0.0
    error = math.hypot(
        _NORMAL * math.hypot(MODEL_ERROR, load) * expected,
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
        # Nothing is 0, not -0.
        low_s=0.0 + expected - math.hypot(expected - min(low, expected), error),
        high_s=expected + math.hypot(max(high, expected) - expected, error),
        engine=model.engine,
    )


def _loaded(model: Model) -> bool:
    return any(map(grows_with_load, model.slowness.values()))


def _saved(unchanged: list[float], changed: list[float]) -> list[float]:
    # Lengths that differ only by rounding are equal, and 0 is not negative.
    return [
        round((before - after) / 1e6, 6) + 0.0
        for before, after in zip(unchanged, changed, strict=True)
    ]


def _interval(model: Model, saved: list[float]) -> tuple[float, float]:
    """Return the 90 % interval of the mean over the steps."""
    # Imported here because few commands need scipy.
    from verl_profiler.analysis.intervals import mean

    estimate = mean(saved, list(model.steps))
    if estimate is None:
        return fmean(saved), fmean(saved)
    return estimate.interval(_LEVEL)


def _replayed(model: Model, beyond: str = "line") -> tuple[list[float], Mapping[str, int]] | None:
    """Return the mean length of each step in a long replay, and the most calls of each replica."""
    places = len(model.steps)
    before, counted = _repeated(model)
    total = (before + counted) * places
    times = times_of(model.slowness, model.most_running, beyond)
    begins, most = replay(replace(model.cycle, times=times), total)
    if len(begins) <= total:
        return None
    return _lengths(begins, places, before * places), most


def _repeated(model: Model) -> tuple[int, int]:
    """Return how many cycles are replayed before those that count, and how many count."""
    settled = 2 * model.cycle.limit / max(model.batch, 1)
    few = _cycles(model, max(settled, _BEFORE), _COUNTED)
    if _calls(model, sum(few)) <= _CALLS:
        return few
    return _cycles(model, max(settled, _BEFORE_MANY), _COUNTED_MANY)


def _cycles(model: Model, before: float, counted: float) -> tuple[int, int]:
    places = len(model.steps)
    # An even number: units may alternate between two cycles.
    return math.ceil(before / places), 2 * math.ceil(counted / (2 * places))


def _calls(model: Model, cycles: int) -> float:
    """Return how many generate calls so many cycles have."""
    units = model.cycle.units
    calls = sum(
        isinstance(stage, Generate) for unit in units for _, c in unit.requests for stage in c
    )
    return calls / len(units) * model.batch * len(model.steps) * cycles


def _lengths(begins: Sequence[tuple[int, float]], places: int, skipped: int) -> list[float]:
    """Return the mean length of the steps at each place, without the first `skipped` ones."""
    sums, counts = [0.0] * places, [0] * places
    for (place, begin), (_, end) in list(pairwise(begins))[skipped:]:
        sums[place] += end - begin
        counts[place] += 1
    return [total / max(number, 1) for total, number in zip(sums, counts, strict=True)]
