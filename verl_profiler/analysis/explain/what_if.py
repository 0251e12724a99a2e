"""Counterfactual step times: the steps of a run replayed with one change.

A synchronous run is replayed step by step; an asynchronous one as the cycle of its steps, repeated.  Both
are replayed unchanged and with each of `changes_of`, in the same model, so that model errors common to
both cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import islice
from statistics import fmean, median
from typing import Any, NamedTuple

from verl_profiler.analysis.explain.asynchronous_model import RefusedError, models
from verl_profiler.analysis.explain.changes import (
    UNCHANGED,
    Change,
    Changed,
    Changing,
    as_fast,
    changes_of,
    from_tokens,
    scaled,
    times_in,
)
from verl_profiler.analysis.explain.model import (
    TRAINING,
    Mark,
    Model,
    Request,
    Take,
    measured_us,
)
from verl_profiler.analysis.explain.rebuilding import TOKEN_PART, step_models
from verl_profiler.analysis.explain.replay import Lengths, replay
from verl_profiler.analysis.explain.speed import grows_with_load
from verl_profiler.analysis.intervals import mean
from verl_profiler.analysis.selection import Rows, Steps, after_warm_up, in_steps
from verl_profiler.reading.losses import too_large
from verl_profiler.reading.tables.derivations import SYNCHRONOUS
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import share

# Relative standard errors of the model: of a saving, and of the speedup from lower load, in addition to
# the fitted slope's error; the last where the engines' iterations were read.  Assumed;
# benchmarks/bench_simulated_engines.py measures their coverage.
_MODEL_ERROR = 0.10
_LOAD_ERROR = 0.20
_READ_ERROR = 0.10
_LEVEL = 0.9
_NORMAL = 1.645
# A replay of one generate call takes 10 to 20 microseconds, and there are a dozen replays.  Of a
# synchronous run with more calls than this, every n-th step is replayed, at most this many.
_CALLS = 10_000
MOST_STEPS = 40
# Two runs with the same settings are assumed to differ by this share of a step in nine of ten pairs, in
# addition to the variation between their steps.
_RUN_SPREAD = 0.15
# With a larger replay error there is no answer about an asynchronous run.
LARGEST_ERROR = 0.10
# Steps of a cycle that are replayed before those that count, and how many count at least; the same where so
# many steps have more generate calls than this; with more of them there is no answer.
_REPEATED = ((10, 20), (2, 2))
REPEATED_CALLS, MOST_CALLS = 30_000, 200_000


class _Saving(NamedTuple):
    """What a change saves in each step of a model, in seconds.

    Args:
        saved_s: As recorded, with the trainer's polls.
        earlier_s: Without them.
        least_s: Lower bound of what is expected, where loads were never seen.
        most_s: Upper bound.
        error_s: Standard error of the model.
    """

    saved_s: list[float]
    earlier_s: list[float]
    least_s: list[float]
    most_s: list[float]
    error_s: float


def step_replays(tables: Tables, steps: Steps = None) -> Rows:
    """Replay synchronous steps unchanged and with each change.

    Returns:
        One row per run, step and change, first `unchanged`, then the keys of `changes_of`.  Of a run with
        too many generate calls to replay in seconds, every n-th step is replayed.
    """
    rebuilt = _rebuilt(tables, steps)
    return [row for own in rebuilt for row in _replays(own, changes_of(own), from_tokens)]


def what_if(tables: Tables, steps: Steps = None, known: Mapping[str, Cycle] | None = None) -> Rows:
    """Replay runs unchanged and with each change, and average the savings over the steps.

    Args:
        tables: Of the runs.
        steps: First and last step; None for all.
        known: What `cycles` returns, if it was called.

    Returns:
        Table `what_if`: one row per run and change, first `unchanged`, then the keys of
        `changes_of`.  The 95th percentile needs 20 requests; the gains are None if no step has as many.  The
        intervals allow for autocorrelated steps, and are widened by the model's error.
    """
    return [*synchronous_what_if(tables, steps), *asynchronous_what_if(tables, steps, known)]


def synchronous_what_if(tables: Tables, steps: Steps, only: Collection[str] | None = None) -> Rows:
    """Return the rows of `what_if` of synchronous runs, without the token-model error if of some changes `only`."""
    rows: Rows = []
    if only is not None and not only:
        return rows
    for own in _rebuilt(tables, steps):
        every = changes_of(own)
        changes = {name: each for name, each in every.items() if only is None or name in only}
        replays = _replays(own, changes, from_tokens if only is None else None)
        rows += _averages(own, changes, replays)
    return rows


def asynchronous_what_if(
    tables: Tables, steps: Steps = None, known: Mapping[str, Cycle] | None = None
) -> Rows:
    """Return the rows of `what_if` of asynchronous runs, each replayed as the cycle of its steps.

    Of the changes, those that can be answered; only `unchanged` where the run cannot be replayed.  The
    interval has the model's error and the replay error; its ends are bounds where loads exceed the
    recorded ones.
    """
    rows: Rows = []
    for run, cycle in (cycles(tables, steps) if known is None else known).items():
        if cycle.refused is not None:
            unchanged = {"run": run, "what": UNCHANGED, "about": _AS_MEASURED}
            rows.append({**dict.fromkeys(_COLUMNS), **unchanged, "refused": cycle.refused})
            continue
        own = [cycle.model]
        changes = changes_of(own)
        averages = _averages(own, changes, _replays(own, changes, known=[cycle.unchanged]))
        rows += [
            row for row in averages if row["what"] == UNCHANGED or row["expected_s"] is not None
        ]
    return rows


def _rebuilt(tables: Tables, steps: Steps) -> Iterable[Sequence[Model]]:
    """Return the models of the steps that are replayed, of each synchronous run."""
    found: dict[str, list[Model]] = {}
    for model in step_models(tables, chosen_steps(tables, steps)):
        found.setdefault(model.run, []).append(model)
    return found.values()


def _replays(
    models: Sequence[Model],
    changes: Mapping[str, Change],
    predicted: Changing | None = None,
    known: Sequence[Lengths] = (),
) -> Rows:
    """Return a row of `step_replays` of each step of one run.

    Args:
        models: Of the run.
        changes: What they are replayed with.
        predicted: The change that shows the token-model error; None leaves it out.
        known: The replays without a change.
    """
    rows: Rows = []
    for model, unchanged in zip(models, known or map(_replayed, models), strict=True):
        rows += _replay_rows(model, UNCHANGED, unchanged)
        same = None if predicted is None else predicted(model, models)
        if same is not None and model.step_us[0]:
            off_us = _replayed(same.models[0]).unpolled_us[0] - unchanged.unpolled_us[0]
            rows[-1]["tokens_share"] = off_us / model.step_us[0]
        for what, change in changes.items():
            changed = change.changed(model, models) if model.requests else None
            found = None
            if changed is not None:
                before = _replayed(changed.before) if changed.before else unchanged
                found = _saving(changed.before or model, before, changed, change)
            rows += _replay_rows(model, what, unchanged, found)
    return rows


def _replay_rows(
    model: Model, what: str, unchanged: Lengths, found: _Saving | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each step: unchanged, or with what a change saves, if that is known."""
    names = (
        "replayed_s", "saved_s", "earlier_s", "least_s", "most_s", "error_s", "residual_share",
        "tokens_share",
    )  # fmt: skip
    for place, (step, whole_us) in enumerate(zip(model.steps, model.step_us, strict=True)):
        own: dict[str, Any] = dict.fromkeys(names)
        replayed_us = unchanged.us[place]
        if what == UNCHANGED:
            own["replayed_s"] = replayed_us / 1e6
            own["residual_share"] = (replayed_us - whole_us) / whole_us if whole_us else 0.0
        elif found is not None and found.saved_s:
            own |= {name: each[place] for name, each in zip(names[1:5], found[:4], strict=True)}
            own["replayed_s"] = replayed_us / 1e6 - found.saved_s[place]
            own["error_s"] = found.error_s
        about = {"run": model.run, "step": step, "what": what, "engine": model.engine}
        yield {**about, "duration_s": whole_us / 1e6, **own}


_AS_MEASURED = "as measured"
_COLUMNS = (
    "run", "what", "about", "engine", "steps", "step_s", "replayed_s", "saved_s", "share", "earlier_s",
    "expected_s", "low_s", "high_s", "pair_low_s", "pair_high_s", "between_runs_s", "residual_share",
    "tokens_share", "undivided_share", "refused",
)  # fmt: skip


def _averages(models: Sequence[Model], changes: Mapping[str, Change], replays: Rows) -> Rows:
    """Average the rows of `step_replays` of one run over its steps, as `what_if` returns them."""
    step_s = fmean(model.mean_us for model in models) / 1e6
    rows: Rows = []
    for what in (UNCHANGED, *changes):
        answers = [row for row in replays if row["what"] == what and row["replayed_s"] is not None]
        row: dict[str, Any] = dict.fromkeys(_COLUMNS)
        row |= {
            "run": models[0].run,
            "what": what,
            "about": _AS_MEASURED if what == UNCHANGED else changes[what].about,
            "engine": models[0].engine,
            "steps": len(answers),
            "step_s": step_s,
        }
        rows.append(row)
        if answers:
            row["replayed_s"] = fmean(each["replayed_s"] for each in answers)
        if what == UNCHANGED:
            row["residual_share"] = median(abs(each["residual_share"]) for each in answers)
            if models[0].asynchronous:
                row["residual_share"] = row["replayed_s"] / step_s - 1
            known = [abs(e["tokens_share"]) for e in answers if e["tokens_share"] is not None]
            row["tokens_share"] = median(known) if known else None
            row["undivided_share"] = fmean(model.undivided_share for model in models)
        elif answers:
            saved = fmean(each["saved_s"] for each in answers)
            earlier = fmean(each["earlier_s"] for each in answers)
            expected = earlier if changes[what].polls else saved
            least, most = ([each[of] for each in answers] for of in ("least_s", "most_s"))
            replayed = [each["step"] for each in answers]
            # The model error is common to all steps: averaging does not reduce it.
            error = _NORMAL * fmean(each["error_s"] for each in answers)
            low, high = _wider(expected, *_interval(least, most, replayed), error)
            between_runs = _between_runs_s([each["duration_s"] for each in answers], replayed)
            pair = _wider(expected, low, high, between_runs)
            row |= {
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
    return rows


def cycles(tables: Tables, steps: Steps = None) -> dict[str, Cycle]:
    """Rebuild the cycle of each asynchronous run, and replay it as it was."""
    found = {run: Cycle(model) for run, model in models(tables, steps).items()}
    off = [run for run, cycle in found.items() if cycle.off]
    # Steps may alternate: an odd number of them is no cycle.
    again = models(tables, steps, off, 1) if off else {}
    fewer = {run: Cycle(model) for run, model in again.items()}
    return found | {run: cycle for run, cycle in fewer.items() if cycle.refused is None}


class Cycle:
    """The cycle of an asynchronous run, replayed as it was.

    There are no answers where it has `refused`: why, such as that it cannot be rebuilt, or that the replay is `off`.
    """

    def __init__(self, model: Model | RefusedError) -> None:
        self.refused: str | None = None
        self.off = False
        if isinstance(model, RefusedError):
            self.refused = str(model)
            return
        self.model = model
        if _calls(model, sum(_repeated(model))) > MOST_CALLS:
            self.refused = f"a replay takes more than {MOST_CALLS:,} generate calls"
            return
        self.unchanged = _replayed(model)
        if not self.unchanged.us:
            self.refused = "the replay waits for samples that are never dispatched"
            return
        error = fmean(self.unchanged.us) / model.mean_us - 1
        if self._off(self.unchanged.us) > LARGEST_ERROR:
            self.off = True
            self.refused = (
                f"the replay without a change is {share(abs(error))} "
                f"{'longer' if error > 0 else 'shorter'} than the steps; "
                f"answers need at most {share(LARGEST_ERROR)}"
            )

    def saved_s(
        self, change: Callable[[Request], Request], slow: Collection[str] = ()
    ) -> dict[int, float]:
        """Return what each step saves with each request changed; empty without an answer.

        Slow replicas are as fast as the others then, and the load balancer avoids them no longer.
        """
        if self.refused is not None:
            return {}
        changed = self.model.mapped(change)
        before = self.unchanged.us
        # Part of the training is proportional to the tokens.
        kept = [
            1 - TOKEN_PART[0] * max(1 - after / max(own, 1.0), 0.0)
            for own, after in zip(_tokens(self.model), _tokens(changed), strict=True)
        ]
        changed = as_fast(changed, slow)
        if slow and self._routed_us:
            changed = replace(changed, routing="request")
            # Of both, what is closer to the recorded steps.
            before = min(before, self._routed_us, key=self._off)
        return self.saved_with(changed, kept, before=before)

    def _off(self, us: Sequence[float]) -> float:
        """Return how far replayed lengths are from the recorded ones, as a share of these."""
        return abs(fmean(us) / self.model.mean_us - 1)

    @cached_property
    def _routed_us(self) -> Sequence[float]:
        """The replay with new requests on the replica with the fewest; empty if they were recorded elsewhere."""
        found = _replayed(replace(self.model, routing="request")).us
        return found if found and self._off(found) <= LARGEST_ERROR else []

    def trained_s(self, less_s: float | Mapping[int, float], state: str = TRAINING) -> float:
        """Return how much shorter a step is with so much less of a state, in all steps or in each; all of it without an answer."""
        each_s = [*less_s.values()] if isinstance(less_s, Mapping) else [less_s]
        mean_s = fmean(each_s)
        if self.refused is not None or not mean_s:
            return mean_s
        spent_s = [us / 1e6 for us in times_in(self.model, state)]
        kept: float | list[float] = 1 - min(mean_s / max(fmean(spent_s), 1e-6), 1.0)
        if isinstance(less_s, Mapping):
            each_s = [less_s.get(step, 0.0) for step in self.model.steps]
            pairs = zip(each_s, spent_s, strict=True)
            kept = [1 - min(own / max(spent, 1e-6), 1.0) for own, spent in pairs]
        saved = self.saved_with(self.model, kept, state)
        # Steps get no shorter than by what the trainer does less; those that are not replayed are as the others.
        part = fmean(saved.values()) / fmean(each_s) if saved and any(each_s) else 1.0
        return min(max(part, 0.0), 1.0) * mean_s

    def saved_with(
        self,
        changed: Model,
        kept: float | Sequence[float] = 1.0,
        state: str = TRAINING,
        before: Sequence[float] | None = None,
    ) -> dict[int, float]:
        """Return what each step saves with the changed model, and with a part of a state of the trainer.

        Compared with lengths `before`; None for those of the unchanged model.
        """
        if kept != 1:
            changed = scaled(state, kept)(changed, [changed]).models[0]
        saved = _saved_s(self.unchanged.us if before is None else before, _replayed(changed).us)
        return dict(zip(self.model.steps, saved, strict=True)) if saved else {}


def _tokens(model: Model) -> list[float]:
    """Return the trained tokens of each step, which takes units in the order of their dispatch."""
    tokens = iter(
        [
            sum(request.tokens for request in unit.requests)
            for unit in model.units
            if not unit.dropped
        ]
    )
    found: list[float] = []
    for each in model.operations:
        if isinstance(each, Mark):
            found.append(0.0)
        elif isinstance(each, Take):
            found[-1] += sum(islice(tokens, each.units))
    return found


def _repeated(model: Model) -> tuple[int, int]:
    """Return how many cycles are replayed before those that count, and how many count."""
    if not model.asynchronous:
        return 0, 1
    places = len(model.steps)
    settled = 2 * model.limit / max(model.batch, 1)
    found = 0, 0
    for before, counted in _REPEATED:
        # An even number: units may alternate between two cycles.
        found = math.ceil(max(settled, before) / places), 2 * math.ceil(counted / (2 * places))
        if _calls(model, sum(found)) <= REPEATED_CALLS:
            break
    return found


def _calls(model: Model, cycles: int) -> float:
    """Return how many generate calls so many cycles have."""
    return model.calls / len(model.units) * model.batch * len(model.steps) * cycles


def _replayed(model: Model, beyond: str = "line") -> Lengths:
    """Replay a model, a cycle repeatedly; no lengths if the trainer waits for what is never dispatched."""
    places = len(model.steps)
    before, counted = _repeated(model)
    found = replay(model, (before + counted) * places, beyond)
    if len(found.us) < (before + counted) * places:
        return Lengths([], [], found.most)

    def means(us: list[float]) -> list[float]:
        return [fmean(us[before * places + place :: places]) for place in range(places)]

    return Lengths(means(found.us), means(found.unpolled_us), found.most)


def _saving(model: Model, unchanged: Lengths, changed: Changed, change: Change) -> _Saving:
    """Return what a change saves: the mean over the changed models."""
    found = [_saving_of(model, unchanged, each, changed, change) for each in changed.models]
    columns: list[Any] = [*zip(*found, strict=True)]
    saved, earlier, least, most = ([fmean(v) for v in zip(*of, strict=True)] for of in columns[:4])
    error_s = fmean(columns[4])
    if model.asynchronous:
        # A replay error is not known to be the same with a change.
        error_s = math.hypot(error_s, (fmean(unchanged.us) - model.mean_us) / 1e6 / _NORMAL)
    return _Saving(saved, earlier, least, most, error_s)


def _saving_of(
    model: Model, unchanged: Lengths, other: Model, changed: Changed, change: Change
) -> _Saving:
    if other is model:
        nothing = [0.0] * len(unchanged.us)
        return _Saving(nothing, nothing, nothing, nothing, 0.0)
    replayed = _replayed(other)
    saved = _saved_s(unchanged.us, replayed.us)
    earlier = _saved_s(unchanged.unpolled_us, replayed.unpolled_us)
    expected = earlier if change.polls else saved
    bounds = [_replayed(each) for each in changed.bounds]
    if _unseen(other, replayed, change):
        # If load does not slow calls down, the line is flat. The time of an iteration is measured up to the
        # highest batch, and convex: it goes on at least as steeply as it was there.
        steepest = not _slower_with_load(model) or model.engine != "calls"
        bounds += [_replayed(other, each) for each in ("saturated", "flat")[: 1 if steepest else 2]]
    ends = [expected] + [
        _saved_s(unchanged.unpolled_us, each.unpolled_us)
        if change.polls
        else _saved_s(unchanged.us, each.us)
        for each in bounds
        if each.us
    ]
    if not expected:
        return _Saving([], [], [], [], 0.0)
    least, most = min(ends, key=fmean), max(ends, key=fmean)
    return _Saving(saved, earlier, least, most, _error_s(model, other, fmean(expected)))


def _unseen(other: Model, replayed: Lengths, change: Change) -> bool:
    """Return whether replicas may run more concurrent calls than recorded."""
    if not other.asynchronous:
        return change.beyond
    return any(replayed.most.get(name, 0) > peak for name, peak in other.most_running.items())


def _saved_s(unchanged_us: Sequence[float], changed_us: Sequence[float]) -> list[float]:
    if not changed_us:
        return []
    # Lengths that differ only by rounding are equal, and 0 is not negative.
    return [
        round((before - after) / 1e6, 9) + 0.0
        for before, after in zip(unchanged_us, changed_us, strict=True)
    ]


def _error_s(model: Model, other: Model, expected_s: float) -> float:
    """Return the standard error of the model in the saving of a change."""
    if not _slower_with_load(model):
        by_load = 0.0
    elif (
        model.asynchronous
        or (other.limits, other.routing) != (model.limits, model.routing)
        or len(other.requests) != len(model.requests)
    ):
        by_load = expected_s
    elif other.units is model.units:
        by_load = 0.0
    else:
        # The saving if calls kept their measured speed.
        own, kept = (
            max((r.begin_us + sum(map(measured_us, r.stages)) for r in each.requests), default=0.0)
            for each in (model, other)
        )
        by_load = expected_s - (own - kept) / 1e6
    load_error = _LOAD_ERROR if model.engine == "calls" else _READ_ERROR
    return math.hypot(
        _MODEL_ERROR * expected_s,
        math.hypot(load_error, model.speeds.slope_error) * by_load,
        model.after_token_us[1] * abs(other.tokens - model.tokens) / 1e6,
    )


def _slower_with_load(model: Model) -> bool:
    speeds = model.speeds
    return any(map(grows_with_load, (speeds.slowness, *speeds.slowness_of.values())))


def _wider(
    value: float, low: float | None, high: float | None, more: float
) -> tuple[float | None, float | None]:
    """Widen an interval on both sides by an independent error."""
    if low is None or high is None:
        return None, None
    # Nothing is 0, not -0.
    return (
        0.0 + value - math.hypot(value - min(low, value), more),
        value + math.hypot(max(high, value) - value, more),
    )


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
    every = max(-(-len(counted) // MOST_STEPS), -(-calls // _CALLS), 1)
    return [row["step"] for row in counted[every // 2 :: every] or counted[:1]]


def _between_runs_s(durations_s: Sequence[float], steps: Sequence[int]) -> float:
    """Return the 90 % bound of the difference between two runs with the same settings, in s."""
    low, high = _interval(durations_s, durations_s, steps)
    chance = 0.0 if low is None or high is None else (high - low) / 2 * math.sqrt(2)
    return math.hypot(chance, _RUN_SPREAD * fmean(durations_s))


def _interval(
    least: Sequence[float], most: Sequence[float], steps: Sequence[int]
) -> tuple[float | None, float | None]:
    """Return the 90 % interval of a mean over steps between bounds; None with too few steps."""
    first, second = (_interval_of(tuple(each), tuple(steps)) for each in (least, most))
    if first is not None and second is not None:
        return first[0], second[1]
    return (fmean(least), fmean(most)) if list(least) != list(most) else (None, None)


@lru_cache(maxsize=64)
def _interval_of(values: tuple[float, ...], steps: tuple[int, ...]) -> tuple[float, float] | None:
    found = mean(values, steps)
    return None if found is None else found.interval(_LEVEL)
