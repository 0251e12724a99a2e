"""The one definition of a quantile: linear interpolation between the ordered values.

It is that of duckdb's `quantile_cont` and of numpy's default.  A quantile near the end of the range
needs values beyond it: of fewer than 20 values, the 95th percentile is an interpolation towards the
maximum and says nothing about a tail.
"""

from __future__ import annotations

import math

__all__ = ["least_values"]


def least_values(share: float) -> int:
    """Return how many values a quantile needs, so that one of them may lie beyond it.

    Args:
        share: 0.95 needs 20 values, 0.99 needs 100; the median is one of any number.
    """
    return math.ceil(round(1 / (1 - share), 6)) if share > 0.5 else 1
