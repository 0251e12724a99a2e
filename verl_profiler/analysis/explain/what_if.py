"""Counterfactual step times: the steps replayed with one change.

`step_model` replays each step unchanged and with each of `changes_of`, in the same model, so that model
errors common to both cancel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import is_
from statistics import fmean, median
from typing import Any

from verl_profiler.analysis.explain.chains import Request, measured_us
from verl_profiler.analysis.explain.changes import (
    UNCHANGED,
    Change,
    changes_of,
    tool_lengths,
)
from verl_profiler.analysis.explain.rebuilding import step_models
from verl_profiler.analysis.explain.replay import (
    LOAD_ERROR,
    MODEL_ERROR,
    READ_ERROR,
    grows_with_load,
)
from verl_profiler.analysis.explain.step_model import StepModel
from verl_profiler.analysis.selection import Rows, Steps, after_warm_up, in_steps
from verl_profiler.reading.detail_notes import too_large
from verl_profiler.reading.tables.derivations import SYNCHRONOUS
from verl_profiler.reading.tables.tables import Tables

__all__ = [
    "averages",
    "chosen_steps",
    "replays_and_averages",
    "replays_of",
    "step_replays",
    "what_if",
]

# A replay of one generate call takes 10 to 20 microseconds, and there are a dozen replays.  Of a run
# with more calls than this, every n-th step is replayed, at most this many.
_CALLS = 10_000
_STEPS = 40
_LEVEL = 0.9
# Two runs with the same settings are assumed to differ by this share of a step in nine of ten pairs, in
# addition to the variation between their steps.
_RUN_SPREAD = 0.15
_NORMAL = 1.645


def step_replays(tables: Tables, steps: Steps = None) -> Rows:
    """Replay steps unchanged and with each change.

    Returns:
        Table `step_replays`: one row per run, step and change, first `unchanged`, then the keys of
        `changes_of`.  Of a run with too many generate calls to replay in seconds, every n-th step is
        replayed.
    """
    return replays_of(step_models(tables, chosen_steps(tables, steps)))


def what_if(tables: Tables, steps: Steps = None) -> Rows:
    """Average the savings over steps.

    Returns:
        Table `what_if`: one row per run and change, first `unchanged`, then the keys of
        `changes_of`.  The 95th percentile needs 20 requests; the gains are None if no step has as many.  The
        intervals allow for autocorrelated steps, and are widened by the model's error.
    """
    return replays_and_averages(tables, steps)[1]


def replays_and_averages(tables: Tables, steps: Steps = None) -> tuple[Rows, Rows]:
    """Return the rows of `step_replays` and of `what_if`, replaying once."""
    models = step_models(tables, chosen_steps(tables, steps))
    replays = replays_of(models)
    return replays, averages(models, replays)


def averages(models: Sequence[StepModel], replays: Rows) -> Rows:
    """Average the rows of `step_replays` over the steps of each run, as `what_if` returns them."""
    rows: Rows = []
    changes = changes_of(models)
    for run in dict.fromkeys(model.run for model in models):
        own = [model for model in models if model.run == run]
        step_s = fmean(model.duration_us for model in own) / 1e6
        for what in (UNCHANGED, *changes):
            answers = [
                row
                for row in replays
                if row["run"] == run and row["what"] == what and row["replayed_s"] is not None
            ]
            row: dict[str, Any] = {
                "run": run,
                "what": what,
                "about": "as measured",
                "engine": own[0].engine,
                "steps": len(answers),
                "step_s": step_s,
                "saved_s": None,
                "share": None,
                "earlier_s": None,
                "expected_s": None,
                "low_s": None,
                "high_s": None,
                "pair_low_s": None,
                "pair_high_s": None,
                "between_runs_s": None,
                "residual_share": None,
                "tokens_share": None,
            }
            if what == UNCHANGED:
                row["residual_share"] = median(abs(each["residual_share"]) for each in answers)
                known = [abs(e["tokens_share"]) for e in answers if e["tokens_share"] is not None]
                row["tokens_share"] = median(known) if known else None
            elif not answers:
                row["about"] = changes[what].about
            else:
                saved = fmean(each["saved_s"] for each in answers)
                earlier = fmean(each["earlier_s"] for each in answers)
                expected = earlier if changes[what].polls else saved
                least, most = ([each[of] for each in answers] for of in ("least_s", "most_s"))
                replayed = [each["step"] for each in answers]
                low, _ = _interval(least, replayed)
                _, high = _interval(most, replayed)
                if low is None and least != most:
                    low, high = fmean(least), fmean(most)
                # The model error is common to all steps: averaging does not reduce it.
                error = _NORMAL * fmean(each["error_s"] for each in answers)
                low, high = _wider(expected, low, high, error)
                durations = [each["duration_s"] for each in answers]
                between_runs = _between_runs_s(durations, replayed)
                pair = _wider(expected, low, high, between_runs)
                row |= {
                    "about": changes[what].about,
                    "saved_s": saved,
                    "share": expected / step_s if step_s else None,
                    "earlier_s": earlier,
                    "expected_s": expected,
                    "low_s": low,
                    "high_s": high,
                    "pair_low_s": pair[0],
                    "pair_high_s": pair[1],
                    "between_runs_s": between_runs,
                }
            rows.append(row)
    return rows


def replays_of(models: Sequence[StepModel]) -> Rows:
    """Replay models unchanged and with each change, as `step_replays` returns them."""
    medians = {tool: median(each) for tool, each in tool_lengths(models).items()}
    changes = changes_of(models)
    rows: Rows = []
    for model in models:
        last = model.last_end_us()
        unchanged = model.length_us(last)
        residual = unchanged - model.duration_us
        first = _replay(model, UNCHANGED, unchanged)
        first["residual_s"] = residual / 1e6
        first["residual_share"] = residual / model.duration_us if model.duration_us else 0.0
        predicted = model.from_tokens()
        if predicted is not None and model.duration_us:
            off = predicted - model.length_us(last, polls=False)
            first["tokens_share"] = off / model.duration_us
        rows.append(first)
        for what, change in changes.items():
            if len(model.requests) < change.least or (change.batches and not model.load_varied):
                rows.append(_replay(model, what, None))
                continue
            if change.batches is not None and model.requests:
                batches = change.batches(model, models)
            else:
                batches = [_changed(model, model.requests, change, medians)]
            answers = [_answer(model, batch, last, change) for batch in batches]
            row = _replay(model, what, 0.0)
            row |= {name: fmean(each[name] for each in answers) for name in answers[0]}
            row["replayed_s"] = unchanged / 1e6 - row["saved_s"]
            rows.append(row)
    return rows


def _answer(
    model: StepModel, requests: Sequence[Request], last_us: float, change: Change
) -> dict[str, float]:
    """Return the saving of a change with these requests: five columns of `step_replays`."""
    saved, earlier = _saved_us(model, requests, last_us, change)
    expected = earlier if change.polls else saved
    least, most = _bounds_s(model, requests, last_us, change, expected)
    error = _error_us(model, requests, change, expected)
    return {
        "saved_s": saved / 1e6,
        "earlier_s": earlier / 1e6,
        "least_s": least,
        "most_s": most,
        "error_s": error / 1e6,
    }


def _error_us(
    model: StepModel, requests: Sequence[Request], change: Change, expected_us: float
) -> float:
    """Return the standard error of the model in the saving of a change."""
    untouched = requests is model.requests and change.limits is None and not change.even
    if untouched or not _slower_with_load(model):
        by_load = 0.0
    elif change.limits is not None or change.even or change.batches is not None:
        by_load = expected_us
    else:
        # The saving if calls kept their measured speed.
        own, other = (
            max((_kept_us(request) for request in each), default=0.0)
            for each in (model.requests, requests)
        )
        by_load = expected_us - (own - other)
    after_us = model.after_change_us(requests)[1]
    return math.hypot(
        MODEL_ERROR * expected_us,
        math.hypot(LOAD_ERROR if model.during_prefill is None else READ_ERROR, model.slope_error)
        * by_load,
        after_us,
    )


def _kept_us(request: Request) -> float:
    return request.begin_us + sum(map(measured_us, request.stages))


def _replay(model: StepModel, what: str, replayed_us: float | None) -> dict[str, Any]:
    return {
        "run": model.run,
        "step": model.step,
        "what": what,
        "engine": model.engine,
        "duration_s": model.duration_us / 1e6,
        "replayed_s": None if replayed_us is None else replayed_us / 1e6,
        **dict.fromkeys(
            (
                "saved_s",
                "earlier_s",
                "least_s",
                "most_s",
                "error_s",
                "residual_s",
                "residual_share",
                "tokens_share",
            )
        ),
    }


def _changed(
    model: StepModel, requests: Sequence[Request], change: Change, medians: Mapping[str, float]
) -> Sequence[Request]:
    """Return the changed requests; the same object if the change touches none of them."""
    if change.requests is None or not requests:
        return requests
    changed = change.requests(model, requests, medians)
    same = len(changed) == len(requests) and all(map(is_, changed, requests))
    return requests if same else changed


def _saved_us(
    model: StepModel,
    changed: Sequence[Request],
    last_us: float,
    change: Change,
    beyond: str = "line",
) -> tuple[float, float]:
    """Return the saving of a change, and the saving without polling.

    `changed` are the changed requests, `last_us` is the end of the last unchanged one, `beyond` is a
    key of `BEYOND`.
    """
    limits = None if change.limits is None else change.limits(model)
    changed_last = last_us
    speeds = None if change.speeds is None else change.speeds(model)
    if changed is not model.requests or limits is not None or change.even or speeds:
        changed_last = model.last_end_us(
            changed, limits=limits, even=change.even, beyond=beyond, speeds=speeds
        )
    more = change.saved_us(model) - model.after_change_us(changed)[0]
    saved = model.length_us(last_us) - model.length_us(changed_last, polls=change.polls)
    earlier = model.length_us(last_us, polls=False) - model.length_us(changed_last, polls=False)
    return saved + more, earlier + more


def _slower_with_load(model: StepModel) -> bool:
    return any(map(grows_with_load, (model.slowness, *model.slowness_of.values())))


def _bounds_s(
    model: StepModel,
    changed: Sequence[Request],
    last_us: float,
    change: Change,
    saved_us: float,
) -> tuple[float, float]:
    """Return the bounds of a change's saving in s, given the saving by the fitted line.

    Without polling, unless the change itself removes polling.
    """
    if not change.beyond:
        return saved_us / 1e6, saved_us / 1e6
    least = _saved_us(model, changed, last_us, change, "saturated")[change.polls]
    # If load does not slow calls down, the line is flat. The time of an iteration is measured up to the
    # highest batch, and convex: it goes on at least as steeply as it was there.
    steepest = not _slower_with_load(model) or model.during_prefill is not None
    most = (
        saved_us if steepest else _saved_us(model, changed, last_us, change, "flat")[change.polls]
    )
    return least / 1e6, most / 1e6


def chosen_steps(tables: Tables, steps: Steps = None) -> list[int]:
    """Choose every n-th step after the warm-up, so that the replay takes seconds.

    Steps with too many calls are left out (`Run.notes`).
    """
    large = [row["step"] for row in too_large(tables)]
    steps = after_warm_up(tables, steps)
    counted = tables.rows(
        "SELECT s.step, coalesce(sum(c.calls), 0) AS calls FROM steps AS s LEFT JOIN ("
        "SELECT run, step, count(*) AS calls FROM engine_calls WHERE NOT validate "
        f"AND {in_steps(steps)} GROUP BY run, step) AS c USING (run, step) "
        f"WHERE s.finished AND s.{SYNCHRONOUS} AND {in_steps(steps, 's.step')} "
        # A replay needs the calls of all requests.
        "AND NOT EXISTS (SELECT 1 FROM requests AS r WHERE r.run = s.run AND r.step = s.step "
        f"AND NOT r.validate AND NOT r.detailed) AND NOT list_contains({large}::INTEGER[], s.step) "
        "GROUP BY s.step ORDER BY s.step"
    )
    calls = sum(row["calls"] for row in counted)
    every = max(-(-len(counted) // _STEPS), -(-calls // _CALLS), 1)
    return [row["step"] for row in counted[every // 2 :: every] or counted[:1]]


def _wider(
    value: float, low: float | None, high: float | None, more: float
) -> tuple[float | None, float | None]:
    """Widen an interval on both sides by an independent error."""
    if low is None or high is None:
        return None, None
    return value - math.hypot(value - low, more), value + math.hypot(high - value, more)


def _between_runs_s(durations_s: Sequence[float], steps: Sequence[int]) -> float:
    """Return the 90 % bound of the difference between two runs with the same settings, in s."""
    low, high = _interval(durations_s, steps)
    chance = 0.0 if low is None or high is None else (high - low) / 2 * math.sqrt(2)
    return math.hypot(chance, _RUN_SPREAD * fmean(durations_s))


def _interval(saved: Sequence[float], steps: Sequence[int]) -> tuple[float | None, float | None]:
    """Return the 90 % interval of a mean over steps; None with too few steps."""
    # Imported here because few commands need scipy.
    from verl_profiler.analysis.intervals import mean

    estimate = mean(saved, steps)
    return (None, None) if estimate is None else estimate.interval(_LEVEL)
