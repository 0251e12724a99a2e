"""Latency of the rehearsal's tools: a seeded lognormal distribution with a heavy tail.

Real tools (sandboxes, searches, other models) are mostly fast and sometimes very slow.  The tail
gives a rehearsal's profile the shape of a real run's.
"""

from __future__ import annotations

import random

from verl_profiler.rehearsal.perturbations import setting

__all__ = ["latency_s"]


def latency_s(
    key: str,
    median_s: float = 0.06,
    sigma: float = 0.6,
    tail_share: float = 0.02,
    tail_s: float = 0.7,
    tool: str = "",
) -> float:
    """Return the latency of one call in seconds, multiplied by `rehearsal.tool_latency`.

    Args:
        key: Identifies the call: the same key has the same latency.
        median_s: Median of the lognormal part.
        sigma: Spread of the lognormal part; 0.6 puts its 95th percentile at 2.7 medians.
        tail_share: Fraction of calls that take `tail_s` longer, 0 to 1.
        tail_s: Mean additional latency of those calls, uniform from 0.5 to 1.5 times this.
        tool: The tool's name, for a setting that has a factor for each of some tools.
    """
    rng = random.Random(key)
    seconds = median_s * rng.lognormvariate(0, sigma)
    if rng.random() < tail_share:
        seconds += tail_s * rng.uniform(0.5, 1.5)
    factor: float | dict[str, float] = setting("tool_latency")
    return seconds * (factor.get(tool, 1.0) if isinstance(factor, dict) else factor)
