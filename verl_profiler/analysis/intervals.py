"""Intervals and tests for means over steps, which are not independent of each other.

A series of steps is an AR(1) process with an unknown autocorrelation: for each of a grid of
autocorrelations the series is whitened and fitted by least squares, which gives a Student distribution,
and these are mixed by how well they explain the series (the marginal likelihood under flat priors of the
mean and of the logarithm of the variance) and by a prior.  Few steps do not determine their
autocorrelation, so there the prior decides; with many steps it hardly matters.

`benchmarks/README.md` has the autocorrelations of public logs; `benchmarks/bench_diff.py` measures
coverage, false alarms and power.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

# With fewer steps there is no interval.
LEAST_STEPS = 3
LEAST_FOR_A_LINE = 5
# Work is a covariate where it explains so much of the variance within each of both runs.
_EXPLAINED = 0.5

# Autocorrelations, and the prior: so much of it is at none, the rest is normal around a center.  The logs
# have more at none; this is the prior with the most power whose false alarms are at most 5 % up to an
# autocorrelation of 0.3, and 10 % at 0.5, with 3 to 40 steps.
_GRID = np.append(np.arange(19) / 20, (0.93, 0.95))
_INDEPENDENT = 0.6
_CENTER, _SPREAD = 0.5, 0.1
# Intervals of means, which nobody tests for a difference, have to cover also where steps are alike: more
# weight on high autocorrelations, whose density is 1 / (1 - rho^2).
_CAUTIOUS = 0.3
# A change of this probability to be detected is called detectable.
_POWER = 0.8
_DRAWS = 400
_STEPS_TO_QUANTILE = 100
# Of numerical integration (Gauss and Legendre).
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(64)

_Array = NDArray[np.float64]
Statistic = Callable[[_Array], _Array]


@dataclass(frozen=True, eq=False)
class Estimate:
    """A mean, or a difference of means, as a mixture of Student distributions around one value.

    Args:
        value: The estimate.
        scale: Standard errors, one for each autocorrelation.
        freedom: Degrees of freedom, likewise.
        weight: How likely each autocorrelation is; adds up to 1.
        effective: How many independent steps the steps of each series are worth.
    """

    value: float
    scale: _Array
    freedom: _Array
    weight: _Array
    effective: tuple[float, ...]

    @cached_property
    def p(self) -> float:
        """The probability of a value as far from 0 where the truth is 0."""
        below, _ = _student(self.freedom, abs(self.value) / self.scale)
        return max(0.0, 2 * (1 - float(self.weight @ below)))

    def half_width(self, level: float = 0.95) -> float:
        """Return how far the ends of the interval are from the value."""
        return self._distance(1 - (1 - level) / 2)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the ends of the interval that holds the truth with this probability."""
        half = self.half_width(level)
        return self.value - half, self.value + half

    @cached_property
    def detectable(self) -> float:
        """The smallest true value that such series distinguish from 0 at 5 % with a power of 80 %."""
        return self.half_width() + self._distance(_POWER)

    def _distance(self, share: float) -> float:
        """Return the quantile of the mixture around 0, above one half.

        The distribution is concave there: Newton's steps from 0 never go too far.
        """
        at = 0.0
        for _ in range(_STEPS_TO_QUANTILE):
            below, density = _student(self.freedom, at / self.scale)
            step = (share - float(self.weight @ below)) / float(
                self.weight @ (density / self.scale)
            )
            at += step
            if step <= 1e-12 * at:
                break
        return at


@dataclass(frozen=True, eq=False)
class _Fit:
    """A regression of one series, for each autocorrelation.

    Args:
        variance: Of the coefficient.
        freedom: Degrees of freedom.
        likelihood: Logarithm of the marginal likelihood.
        factor: The coefficient's variance, in parts of a step's.
    """

    variance: _Array
    freedom: int
    likelihood: _Array
    factor: _Array


def mean(values: Sequence[float], steps: Sequence[int] | None = None) -> Estimate | None:
    """Estimate the mean of a series.

    Args:
        values: One per step, in their order.
        steps: Their numbers, ascending; steps far from each other are less alike.

    Returns:
        None with fewer than `LEAST_STEPS`.
    """
    if len(values) < LEAST_STEPS:
        return None
    series = np.asarray(values, float)
    fit = _fitted(series, np.ones((len(series), 1)), _times(series, steps))
    weight = _weights(fit.likelihood, cautious=True)
    return _estimate(float(series.mean()), (fit,), weight)


def mean_difference(
    a: Mapping[int, float],
    b: Mapping[int, float],
    statistic: Statistic | None = None,
    *,
    paired: bool = False,
) -> Estimate | None:
    """Estimate by how much a statistic of B's steps is above that of A's.

    Args:
        a: Values by step.
        b: Likewise.
        statistic: Takes the last axis away; None for the mean.
        paired: The steps of both are the same, and each is compared with its partner.

    Returns:
        None with fewer than `LEAST_STEPS` of either.
    """
    if min(len(a), len(b)) < LEAST_STEPS:
        return None
    first, second = _series(a), _series(b)
    value = _value(first[1], second[1], statistic)
    if paired:
        series = second[1] - first[1]
        fit = _fitted(series, np.ones((len(series), 1)), first[0])
        ratio = _ratio(np.stack([first[1], second[1]]), statistic)
        return _estimate(value, (fit,), _weights(fit.likelihood), [ratio])
    fits = tuple(_fitted(each, np.ones((len(each), 1)), times) for times, each in (first, second))
    weight = _weights(fits[0].likelihood + fits[1].likelihood)
    ratios = [_ratio(each[None], statistic) for _, each in (first, second)]
    return _estimate(value, fits, weight, ratios)


def jump(
    a: Mapping[int, float], b: Mapping[int, float], statistic: Statistic | None = None
) -> Estimate | None:
    """Estimate the jump between two ranges of one series, beyond a line through both.

    Args:
        a: Values by step.
        b: Those of other steps of the same run.
        statistic: As in `mean_difference`.

    Returns:
        None with fewer than `LEAST_STEPS` of either.
    """
    if min(len(a), len(b)) < LEAST_STEPS:
        return None
    times, series = _series({**a, **b})
    member = np.isin(times, list(b))
    design = np.stack([member.astype(float), np.ones(len(times)), times - times.mean()], axis=1)
    growth = np.linalg.lstsq(design, series, rcond=None)[0][2]
    level = series - growth * (times - times.mean())
    value = _value(level[~member], level[member], statistic)
    fit = _fitted(series, design, times)
    ratio = max(_ratio(each[None], statistic) for each in (level[~member], level[member]))
    return _estimate(value, (fit,), _weights(fit.likelihood), [ratio])


def difference_of_launches(first: _Array, second: _Array, within: float) -> Estimate:
    """Estimate by how much launches of B are above those of A, by Student's test.

    Args:
        first: One value of each launch.
        second: Likewise; two launches at least of one of them.
        within: The variance of a launch's value by that of its steps: launches that happen to be
            closer to each other do not make it smaller.
    """
    freedom = len(first) + len(second) - 2
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in (first, second))
    least = (1e-12 * max(np.abs(first).max(), np.abs(second).max())) ** 2 + 1e-200
    variance = max(squares / freedom, within, least)
    scale = (variance * (1 / len(first) + 1 / len(second))) ** 0.5
    return Estimate(
        float(second.mean() - first.mean()),
        np.asarray([scale]),
        np.asarray([float(freedom)]),
        np.ones(1),
        (float(len(first)), float(len(second))),
    )


def difference_at_equal(
    a: Mapping[int, float],
    b: Mapping[int, float],
    work_a: Mapping[int, float],
    work_b: Mapping[int, float],
) -> Estimate | None:
    """Estimate by how much B's steps are above A's with the same work, by a line common to both.

    Args:
        a: Values by step.
        b: Likewise.
        work_a: What explains them, such as tokens.
        work_b: Likewise.

    Returns:
        None with fewer than `LEAST_FOR_A_LINE` of either, or where it explains less than half of the
        variance within A or within B.
    """
    if (
        min(len(a), len(b)) < LEAST_FOR_A_LINE
        or a.keys() != work_a.keys()
        or b.keys() != work_b.keys()
    ):
        return None
    (times_a, first), (times_b, second) = _series(a), _series(b)
    works = _series(work_a)[1], _series(work_b)[1]
    y, work = np.concatenate([first, second]), np.concatenate(works)
    for values, each in zip((first, second), works, strict=True):
        if not (values.std() and each.std()):
            return None
        if np.corrcoef(values, each)[0, 1] < _EXPLAINED**0.5:
            return None
    member = np.repeat([0.0, 1.0], [len(a), len(b)])
    design = np.stack([member, np.ones(len(y)), work / work.mean()], axis=1)
    # So far from each other, the runs are independent.
    times = np.concatenate([times_a, times_a[-1] + 1e6 + times_b])
    fit = _fitted(y, design, times)
    value = float(np.asarray(np.linalg.lstsq(design, y, rcond=None)[0], float)[0])
    return _estimate(value, (fit,), _weights(fit.likelihood))


def slope(values: Mapping[int, float]) -> float:
    """Return by how much a series grows per step, by least squares."""
    times, series = _series(values)
    times = times - times.mean()
    return float(times @ series) / (float(times @ times) or 1.0)


def _student(freedom: _Array, at: _Array) -> tuple[_Array, _Array]:
    """Return Student's distribution and its density at values of at least 0.

    Importing scipy's takes 0.3 s.
    """
    scale = np.asarray(
        [
            math.exp(math.lgamma((each + 1) / 2) - math.lgamma(each / 2)) / math.pi**0.5
            for each in freedom
        ]
    )
    # With the tangent of an angle for the value, the density is a power of the cosine.
    half = np.arctan(at / np.sqrt(freedom)) / 2
    powers = np.cos(half[:, None] * (1 + _NODES)) ** (freedom[:, None] - 1)
    density = scale / np.sqrt(freedom) * (1 + at**2 / freedom) ** (-(freedom + 1) / 2)
    return 0.5 + scale * half * (powers @ _NODE_WEIGHTS), density


def _series(values: Mapping[int, float]) -> tuple[_Array, _Array]:
    steps = sorted(values)
    return np.asarray(steps, float), np.asarray([values[step] for step in steps], float)


def _times(series: _Array, steps: Sequence[int] | None) -> _Array:
    return np.arange(len(series), dtype=float) if steps is None else np.asarray(steps, float)


def _value(first: _Array, second: _Array, statistic: Statistic | None) -> float:
    of = statistic or _mean
    return float(of(second) - of(first))


def _mean(values: _Array) -> _Array:
    return values.mean(-1)


def _fitted(series: _Array, design: _Array, times: _Array) -> _Fit:
    """Fit the design's first coefficient, for every autocorrelation at once."""
    rho = _GRID[:, None] ** np.diff(times)
    shrink = np.sqrt(1 - rho**2)

    def whitened(values: _Array) -> _Array:
        columns: _Array = np.transpose(values)[..., None, :]
        rest: _Array = (columns[..., 1:] - rho * columns[..., :-1]) / shrink
        first = np.broadcast_to(columns[..., :1], (*rest.shape[:-1], 1))
        return np.concatenate([first, rest], -1)

    y = whitened(series)
    x = np.moveaxis(whitened(design), 0, -1)
    inverse = np.linalg.inv(np.swapaxes(x, -1, -2) @ x)
    fitted = inverse @ (np.swapaxes(x, -1, -2) @ y[..., None])
    residual = (y - (x @ fitted)[..., 0]) ** 2
    freedom = len(series) - design.shape[1]
    # A constant series has no noise but that of rounding, and shows no autocorrelation.
    least = (1e-12 * np.abs(series).max()) ** 2 + 1e-200
    squares = residual.sum(-1)
    if squares.max() <= least:
        squares, likelihood = np.full_like(squares, least), np.zeros_like(squares)
    else:
        squares = np.maximum(squares, least)
        likelihood = (
            np.linalg.slogdet(inverse)[1] / 2
            - np.log(shrink).sum(-1)
            - freedom / 2 * np.log(squares)
        )
    factor = inverse[:, 0, 0]
    return _Fit(squares / freedom * factor, freedom, likelihood, np.asarray(factor, float))


@lru_cache(maxsize=2)
def _prior(*, cautious: bool) -> _Array:
    widths: _Array = np.asarray(np.gradient(_GRID), float)  # pyright: ignore[reportUnknownMemberType]
    if cautious:
        density, at_none = widths / (1 - _GRID**2), _CAUTIOUS
    else:
        density, at_none = widths * np.exp(-(((_GRID - _CENTER) / _SPREAD) ** 2) / 2), _INDEPENDENT
    prior = density / density.sum() * (1 - at_none)
    prior[0] += at_none
    return prior


def _weights(likelihood: _Array, *, cautious: bool = False) -> _Array:
    weight = _prior(cautious=cautious) * np.exp(likelihood - likelihood.max())
    return weight / weight.sum()


def _estimate(
    value: float, fits: Sequence[_Fit], weight: _Array, ratios: Sequence[float] = (1.0, 1.0)
) -> Estimate:
    """Put the fits of independent series together (Welch and Satterthwaite)."""
    parts = [fit.variance * ratio**2 for fit, ratio in zip(fits, ratios, strict=False)]
    variance = np.sum(parts, axis=0)
    freedom = 1 / np.sum(
        [(part / variance) ** 2 / fit.freedom for part, fit in zip(parts, fits, strict=True)],
        axis=0,
    )
    effective = tuple(float(1 / (weight @ fit.factor)) for fit in fits)
    return Estimate(value, np.sqrt(variance), freedom, weight, effective)


def _ratio(series: _Array, statistic: Statistic | None) -> float:
    """Return how much more a statistic varies than the mean does, at least 1.

    From samples drawn with repetition; autocorrelation widens both, and the mean's more.

    Args:
        series: One series as its only row; or two rows, of whose difference this is, drawn together.
        statistic: None for the mean.
    """
    if statistic is None:
        return 1.0
    chance = np.random.default_rng(0)
    drawn = series[:, chance.integers(0, series.shape[1], (_DRAWS, series.shape[1]))]
    means, others = (
        float((of(drawn)[-1] - (of(drawn)[0] if len(series) > 1 else 0.0)).var())
        for of in (_mean, statistic)
    )
    return max(1.0, (others / means) ** 0.5) if means else 1.0
