"""Tell whether two groups of steps differ, or only by the noise that steps have anyway.

A step is the unit: its requests wait for the same engines, so a thousand of them are no thousand
observations.  Whether a difference is noise is asked by exchanging steps between the groups (all
exchanges of a few steps, a sample of those of many), and where both have the same steps also within
pairs; its interval comes from drawing the steps
again (bootstrap), widened for few steps.  Where many figures are asked at once, the false discovery
rate is held (Benjamini and Hochberg): where nothing differs, any of them is called certain in at
most 5 of 100 comparisons.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from operator import itemgetter
from statistics import NormalDist
from typing import Any

__all__ = ["ALPHA", "Change", "Figure", "adjusted", "change", "smallest_p"]

# Both the share of false alarms and what an interval leaves out.
ALPHA = 0.05
_EXCHANGES = 4_999
_DRAWS = 1_999
# With fewer common steps, exchanges within pairs cannot tell much: 2 of 2^n is the least chance.
_PAIRS = 8
# The 97.5 % quantile of Student's distribution, by degrees of freedom from 1 on.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
# One group's members, and the others'.
_Split = tuple[Callable[[Sequence[float]], Any], Callable[[Sequence[float]], Any]]


@dataclass(frozen=True)
class Figure:
    """What is compared.

    Args:
        name: For example `gen.mean` or `request.p95`.
        unit: 's', '/s' or ''.
        a: The values of the first group's steps, by step.
        b: Those of the second.
        statistic: What a group's value is over its steps: 'mean', 'max' or 'p50' and the like.
    """

    name: str
    unit: str
    a: dict[int, float]
    b: dict[int, float]
    statistic: str = "mean"


@dataclass
class Change:
    """How a figure differs.

    Args:
        figure: What.
        a: The first group's value.
        b: The second's.
        low: The lower end of the interval of `b - a`; None with one step.
        high: The upper end.
        p: The chance of a difference as large where there is none; None where there are too few
            steps for any difference to be certain.
        p_up: The same for an increase as large, which needs fewer steps.
        p_down: The same for a decrease as large.
        adjusted_p: `p`, with regard to the number of figures.
    """

    figure: Figure
    a: float
    b: float
    low: float | None
    high: float | None
    p: float | None
    p_up: float | None
    p_down: float | None
    adjusted_p: float | None = None

    @property
    def share(self) -> float | None:
        """`b - a` as a share of `a`."""
        return (self.b - self.a) / self.a if self.a else None

    @property
    def certain(self) -> bool:
        """Whether this is more than noise."""
        return self.adjusted_p is not None and self.adjusted_p <= ALPHA


def change(figure: Figure) -> Change:
    """Compare a figure of two groups of steps."""
    paired = figure.a.keys() == figure.b.keys() and len(figure.a) >= _PAIRS
    # Pairs lie at the same places of both lists.
    first = [figure.a[step] for step in sorted(figure.a)]
    second = [figure.b[step] for step in sorted(figure.b)]
    statistic = _statistic(figure.statistic)
    a, b = statistic(first), statistic(second)
    # Always the same way round, so that random deals say the same of A and B as of B and A.
    turned = (len(second), second) < (len(first), first)
    if turned:
        first, second = second, first
    pool = first + second
    low = high = None
    chances: tuple[float | None, ...] = (None, None, None)
    sizes = (len(first), len(second))
    if smallest_p(*sizes) <= ALPHA:
        ways = (False, True) if paired else (False,)
        asked = [_chances(statistic, pool, _exchanges(*sizes, way)) for way in ways]
        # The better of two questions, at the price of two.
        chances = tuple(min(1.0, min(each) * len(ways)) for each in zip(*asked, strict=True))
        # With groups of the same size, the exchange of all steps is as far, the other way.
        if smallest_p(*sizes) * (1 + (sizes[0] == sizes[1])) > ALPHA:
            chances = (None, *chances[1:])
    if min(sizes) > 1:
        drawn = sorted(
            statistic(take_b(pool)) - statistic(take_a(pool))
            for take_a, take_b in _draws(*sizes, paired)
        )
        place = _tail(min(sizes)) * len(drawn)
        low, high = drawn[math.floor(place)], drawn[-1 - math.floor(place)]
    if turned:
        chances = (chances[0], *chances[:0:-1])
        low, high = (None, None) if low is None or high is None else (-high, -low)
    return Change(figure, a, b, low, high, *chances)


def _chances(
    statistic: Callable[[Sequence[float]], float], pool: Sequence[float], splits: Sequence[_Split]
) -> tuple[float, float, float]:
    """Return how often exchanged steps differ as much, as much upwards, and as much downwards."""
    differences = [statistic(take_b(pool)) - statistic(take_a(pool)) for take_a, take_b in splits]
    measured = differences[0]
    # Differences that are equal but for rounding are equal.
    margin = 1e-12 * max(map(abs, pool))
    counts = (
        sum(abs(each) >= abs(measured) - margin for each in differences),
        sum(each >= measured - margin for each in differences),
        sum(each <= measured + margin for each in differences),
    )
    larger, above, below = (count / len(splits) for count in counts)
    return larger, above, below


def adjusted(changes: Sequence[Change]) -> None:
    """Set `adjusted_p` of figures that were asked at once."""
    tested = sorted(
        (each for each in changes if each.p is not None), key=lambda each: -(each.p or 0)
    )
    lowest = 1.0
    for place, each in enumerate(tested):
        lowest = min(lowest, (each.p or 0) * len(tested) / (len(tested) - place))
        each.adjusted_p = lowest


@lru_cache
def smallest_p(a: int, b: int) -> float:
    """Return the least chance that any difference of so many steps can have, in one direction."""
    return 1 / math.comb(a + b, a) if min(a, b) else 1.0


def _statistic(name: str) -> Callable[[Sequence[float]], float]:
    if name == "mean":
        return lambda values: sum(values) / len(values)
    if name == "max":
        return max
    share = int(name[1:]) / 100
    return lambda values: _quantile(sorted(values), share)


def _quantile(values: Sequence[float], share: float) -> float:
    place = share * (len(values) - 1)
    below = math.floor(place)
    rest = place - below
    return values[below] + (rest and rest * (values[below + 1] - values[below]))


@lru_cache(maxsize=8)
def _exchanges(a: int, b: int, paired: bool) -> list[_Split]:
    """Return ways to deal the steps to the groups; the first is as they are."""
    everyone = range(a + b)
    if paired:
        few = 2**a <= _EXCHANGES

        def chosen() -> Iterator[tuple[int, ...]]:
            signs = product((0, a), repeat=a) if few else _random_signs(a)
            for sign in signs:
                yield tuple(place + shift for place, shift in enumerate(sign))

    else:
        few = math.comb(a + b, a) <= _EXCHANGES

        def chosen() -> Iterator[tuple[int, ...]]:
            if few:
                yield from combinations(everyone, a)
                return
            source = random.Random(0)  # noqa: S311  the same answer every time
            for _ in range(_EXCHANGES):
                yield tuple(source.sample(everyone, a))

    splits = [
        _split(first, [place for place in everyone if place not in set(first)])
        for first in chosen()
    ]
    # A sample counts what was measured as one of its members.
    return splits if few else [_split(range(a), range(a, a + b)), *splits]


def _random_signs(count: int) -> Iterator[tuple[int, ...]]:
    source = random.Random(0)  # noqa: S311
    for _ in range(_EXCHANGES):
        yield tuple(source.choice((0, count)) for _ in range(count))


@lru_cache(maxsize=8)
def _draws(a: int, b: int, paired: bool) -> list[_Split]:
    """Return draws of as many steps of each group, with repetition; of pairs where they are."""
    source = random.Random(1)  # noqa: S311
    splits = []
    for _ in range(_DRAWS):
        first = source.choices(range(a), k=a)
        second = [place + a for place in first] if paired else source.choices(range(a, a + b), k=b)
        splits.append(_split(first, second))
    return splits


def _split(first: Sequence[int], second: Sequence[int]) -> _Split:
    return _getter(first), _getter(second)


def _getter(places: Sequence[int]) -> Callable[[Sequence[float]], Any]:
    """Return `itemgetter`, which gives no tuple for one place."""
    if len(places) == 1:
        (place,) = places
        return lambda values: (values[place],)
    return itemgetter(*places)


@lru_cache
def _tail(steps: int) -> float:
    """Return which share of the draws lies outside, on each side, so that few steps tell little.

    Hesterberg's expanded percentile interval: the bootstrap's spread is too small by
    sqrt((n - 1) / n), and its tails are those of a normal distribution instead of Student's.
    """
    freedom = min(steps - 1, len(_STUDENT))
    width = _STUDENT[freedom - 1] if steps - 1 <= len(_STUDENT) else NormalDist().inv_cdf(0.975)
    return NormalDist().cdf(-math.sqrt(steps / (steps - 1)) * width)
