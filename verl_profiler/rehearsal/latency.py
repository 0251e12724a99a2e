"""Latency of the rehearsal's tools: a seeded lognormal distribution with a heavy tail.

Real tools (sandboxes, searches, other models) are mostly fast and sometimes very slow.  The tail
gives a rehearsal's profile the shape of a real run's.
"""

from __future__ import annotations

import asyncio
import random


def latency_s(
    key: str,
    median_s: float = 0.06,
    sigma: float = 0.6,
    tail_share: float = 0.02,
    tail_s: float = 0.7,
    tool: str = "",
) -> float:
    """Return the latency of one call in seconds.

    Args:
        key: Identifies the call: the same key has the same latency.
        median_s: Median of the lognormal part.
        sigma: Spread of the lognormal part; 0.6 puts its 95th percentile at 2.7 medians.
        tail_share: Fraction of calls that take `tail_s` longer, 0 to 1.
        tail_s: Mean additional latency of those calls, uniform from 0.5 to 1.5 times this.
        tool: The tool's name.
    """
    rng = random.Random(key)
    seconds = median_s * rng.lognormvariate(0, sigma)
    if rng.random() < tail_share:
        seconds += tail_s * rng.uniform(0.5, 1.5)
    return seconds


async def spend(key: str, *, tool: str, **distribution: float) -> None:
    """Wait for the latency of one call; the arguments are those of `latency_s`."""
    await asyncio.sleep(latency_s(key, tool=tool, **distribution))
