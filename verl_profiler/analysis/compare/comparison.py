"""Test whether two groups of steps differ by more than noise.

The unit of observation is a step: its requests share the engines, so they are not independent.  Steps
can be autocorrelated; `analysis.intervals` computes differences and intervals accordingly.  With several
launches of a side, the unit is a launch.  The
headline metrics are tested separately from all others: the step at 5 %; gen (or samples/s), tokens/s and the time
from step to step at 5 % if the step is significant, else at 1 % together.  All others share a false discovery rate (Benjamini and
Hochberg) of 1 %.  Without any difference, at most about 5 of 100 comparisons report a significant one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_profiler.analysis.intervals import (
    Statistic,
    difference_of_launches,
    jump,
    mean_difference,
)
from verl_profiler.reading.quantiles import least_values

# Significance level, and the complement of the intervals' level.
ALPHA = 0.05
# Level that the other headline metrics share, and false discovery rate of all others.
_OTHERS = 0.01
# Comparisons of asynchronous runs have samples per second instead of gen.
HEADLINES = (
    "step.mean",
    "gen.mean",
    "samples_per_s.mean",
    "generated_tokens_per_s.mean",
    "step_to_step.mean",
)
# The work of a step: if it differs, step times are not comparable.
WORKLOAD = (
    "requests.mean",
    "turns_per_request.mean",
    "prompt_tokens.mean",
    "generated_tokens.mean",
    "tool_tokens.mean",
    "total_tokens.mean",
    "tool_call.count",
)
# A change of work by this share is reported, significant or not.
_WORK_SHARE = 0.1
# Of a change, in each row.
_FIGURES = (
    *("a", "b", "difference", "share", "low", "high", "p", "adjusted_p", "significant"),
    *("testable", "detectable", "drift"),
)
# Pairing steps removes the variation that both runs share but halves the degrees of freedom.  It is used
# only with at least this many pairs and this correlation.
_PAIRS = 8
_CORRELATION = 0.7
# Keys of the steps of different launches are so far apart.
_LAUNCH = 10**10


@dataclass(frozen=True)
class Metric:
    """A metric of both groups of steps.

    Args:
        name: For example `gen.mean` or `request.p95`.
        unit: 's', '/s' or ''.
        a: Values of the first group, by `key` of the step.
        b: Values of the second group.
        statistic: How a group's steps are aggregated: 'mean', 'max', 'p50' and so on.
        one_run: Both groups are ranges of one run, so a common drift is not a change.
        estimated: A step of them is estimated from the requests whose details were recorded.
    """

    name: str
    unit: str
    a: dict[int, float]
    b: dict[int, float]
    statistic: str = "mean"
    one_run: bool = False
    estimated: bool = False


@dataclass
class Change:
    """The change of a metric.

    Args:
        metric: The metric.
        a: The first group's value.
        b: The second group's value.
        difference: `b - a`.
        low: The lower end of the difference's 95 % interval; None with too few steps, or
            with `drift`.
        high: The upper end.
        p: The p-value; None with too few steps.
        detectable: The smallest difference that is detected with 80 % power.
        effective: Effective sample sizes of A and B, allowing for autocorrelation; for pairs, one number.
        drift: The groups are ranges of one run, and a linear trend explains the difference: `p`
            is that of a jump in addition to the trend.
        adjusted_p: `p`, adjusted for multiple comparisons; see `adjusted`.
    """

    metric: Metric
    a: float
    b: float
    difference: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    detectable: float | None = None
    effective: tuple[float, ...] = ()
    drift: bool = False
    adjusted_p: float | None = None

    @property
    def share(self) -> float | None:
        """`difference` as a share of `a`."""
        return self.difference / self.a if self.a else None

    @property
    def testable(self) -> bool:
        """Whether a change by all of `a`, such as a doubling, would have been noticed."""
        if self.p is None or self.detectable is None:
            return False
        return self.significant or not self.a or self.detectable <= abs(self.a)

    @property
    def significant(self) -> bool:
        """Whether this is more than noise."""
        return self.adjusted_p is not None and self.adjusted_p <= ALPHA


def key(launch: int, step: int) -> int:
    """Return the key of a step of one of several launches, numbered from 0."""
    return launch * _LAUNCH + step


def step_of(place: int) -> int:
    """Return the step of a key."""
    return place % _LAUNCH


def change(metric: Metric) -> Change:
    """Compare a metric between two groups of steps."""
    a, b = metric.a, metric.b
    statistic = _statistic(metric.statistic)
    launches = [_by_launch(group) for group in (a, b)]
    first, second = (np.asarray([statistic(each) for each in side], float) for side in launches)
    before, after = float(first.mean()), float(second.mean())
    found = Change(metric, before, after, after - before)
    if max(map(len, launches)) > 1:
        within = [
            float(each.var(ddof=1)) / len(each)
            for side in launches
            for each in side
            if len(each) > 1
        ]
        least = float(np.mean(within)) if within else 0.0
        estimate = difference_of_launches(first, second, least)
        found.p, found.detectable = estimate.p, estimate.detectable
        found.effective = estimate.effective
        found.low, found.high = estimate.interval(1 - ALPHA)
        return found
    if metric.statistic == "max":
        # The maximum of few steps has no reliable interval.
        return found
    of = None if metric.statistic == "mean" else statistic
    if of is not None and min(len(a), len(b)) < least_values(_share(metric.statistic)):
        return found
    estimate = mean_difference(a, b, of, paired=_are_pairs(a, b))
    if estimate is None:
        return found
    found.p, found.detectable = estimate.p, estimate.detectable
    found.effective = estimate.effective
    if metric.one_run and not a.keys() & b.keys():
        beyond = jump(a, b, of)
        if beyond is not None and beyond.p > estimate.p:
            found.p, found.detectable = beyond.p, beyond.detectable
            found.drift = estimate.p <= ALPHA < beyond.p
    if not found.drift:
        found.low, found.high = estimate.interval(1 - ALPHA)
    return found


def _by_launch(values: Mapping[int, float]) -> list[NDArray[np.float64]]:
    """Return the values of the steps of each launch."""
    launches: dict[int, list[float]] = {}
    for place, value in values.items():
        launches.setdefault(place // _LAUNCH, []).append(value)
    return [np.asarray(each, float) for each in launches.values()]


def adjusted(changes: Sequence[Change]) -> None:
    """Set `adjusted_p` of metrics that are tested together."""
    tested = {each.metric.name: each for each in changes if each.p is not None}
    headline = [tested.pop(name) for name in HEADLINES if name in tested]
    before = 0.0
    for place, each in enumerate(headline):
        # In order, while the previous one is significant; or alone, at its share of the level.
        before = max(before, each.p or 0)
        alone = (each.p or 0) * (1 if place == 0 else (len(headline) - 1) * ALPHA / _OTHERS)
        each.adjusted_p = min(before, alone)
    others = sorted(tested.values(), key=lambda each: -(each.p or 0))
    lowest = 1.0
    for place, each in enumerate(others):
        rate = (each.p or 0) * len(others) / (len(others) - place)
        lowest = min(lowest, rate * ALPHA / _OTHERS)
        each.adjusted_p = lowest


def _are_pairs(a: Mapping[int, float], b: Mapping[int, float]) -> bool:
    if a.keys() != b.keys() or len(a) < _PAIRS:
        return False
    series = np.array([[each[step] for step in sorted(a)] for each in (a, b)], float)
    if not np.ptp(series, axis=1).all():
        return False
    return bool(np.corrcoef(series)[0, 1] >= _CORRELATION)


def _share(name: str) -> float:
    return int(name[1:]) / 100


def _statistic(name: str) -> Statistic:
    if name == "mean":
        return lambda values: values.mean(-1)
    if name == "max":
        return lambda values: values.max(-1)
    share = _share(name)

    def quantile(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.quantile(values, share, axis=-1)

    return quantile


def metric_rows(changes: Sequence[Change]) -> dict[str, Any]:
    """Return `metrics`, a row each, headline metrics first, and `workload`, the names of those that differ in work."""
    ordered = sorted(changes, key=_order)
    return {
        "workload": [each.metric.name for each in ordered if _work_differs(each)],
        "metrics": [
            {
                "metric": each.metric.name,
                "unit": each.metric.unit,
                "headline": each.metric.name in HEADLINES,
                **{name: getattr(each, name) for name in _FIGURES},
                "effective_steps": list(each.effective),
                "estimated": each.metric.estimated,
            }
            for each in ordered
        ],
    }


def _work_differs(each: Change) -> bool:
    if each.metric.name not in WORKLOAD:
        return False
    large = each.share is None or abs(each.share) >= _WORK_SHARE
    return each.significant or (bool(each.difference) and large)


def _order(each: Change) -> tuple[Any, ...]:
    name = each.metric.name
    first = (*HEADLINES, "step.p50")
    place = first.index(name) if name in first else len(first)
    lengths = each.metric.unit == "s"
    size = -abs(each.difference) if lengths else -abs(each.share or 0)
    return (place, not lengths, size, name)
