"""How long the rehearsal's tools take: a seeded lognormal with a heavy tail.

Real tools (sandboxes, searches, other models) are mostly quick and sometimes very slow.  The tail
is here so that a profile of a rehearsal shows what a profile of a real run shows.
"""

from __future__ import annotations

import random

from verl_profiler.rehearsal.perturbations import asked

__all__ = ["latency_s"]


def latency_s(
    key: str,
    median_s: float = 0.06,
    sigma: float = 0.6,
    tail_share: float = 0.02,
    tail_s: float = 0.7,
) -> float:
    """Return the latency of one call, times what `rehearsal.tool_latency` says.

    Args:
        key: What the call is: the same key has the same latency.
        median_s: Median of the lognormal part.
        sigma: Spread of the lognormal part; 0.6 puts its 95th percentile at 2.7 medians.
        tail_share: Part of the calls that take `tail_s` longer, 0 to 1.
        tail_s: Mean of what a call of the tail takes in addition, from half to one and a half.
    """
    rng = random.Random(key)
    seconds = median_s * rng.lognormvariate(0, sigma)
    if rng.random() < tail_share:
        seconds += tail_s * rng.uniform(0.5, 1.5)
    return seconds * asked("tool_latency")
