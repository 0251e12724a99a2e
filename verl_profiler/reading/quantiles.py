"""The one definition of a quantile: linear interpolation between the ordered values.

The quantile of share q of n ordered values is the value at place q * (n - 1), counted from 0, and
between two values in proportion; duckdb's `quantile_cont` and numpy's default.  A quantile near an
end of the range needs values beyond it: of fewer than 20 values, the 95th percentile is an
interpolation towards the maximum and does not describe a tail.  There, it is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def least_values(share: float) -> int:
    """Return how many values a quantile needs, so that one of them may lie beyond it.

    Args:
        share: 0.95 and 0.05 need 20 values, 0.99 needs 100; the median is one of any number.
    """
    beyond = min(share, 1 - share)
    return 1 if share == 0.5 or beyond <= 0 else math.ceil(round(1 / beyond, 6))


def interpolated(values: Sequence[float], share: float) -> float:
    """Return a quantile of however many values; see `quantile`.

    Args:
        values: At least one, ordered.
        share: From 0 to 1.
    """
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return a quantile.

    Args:
        values: In any order.
        share: From 0 to 1.

    Returns:
        In the unit of the values; None if they are too few, see `least_values`.
    """
    return None if len(values) < least_values(share) else interpolated(sorted(values), share)


def quantiles(column: str, *shares: float) -> str:
    """Return the SQL of a list of quantiles of a column, an aggregate.

    Args:
        column: An SQL expression; rows where it is NULL do not count.
        shares: From 0 to 1, in the order of the list.

    Returns:
        An expression whose elements are NULL where there are too few values.
    """
    every = f"quantile_cont({column}, [{', '.join(map(repr, shares))}])"
    return "[{}]".format(
        ", ".join(
            f"CASE WHEN count({column}) >= {least_values(share)} THEN {every}[{place}] END"
            for place, share in enumerate(shares, 1)
        )
    )
