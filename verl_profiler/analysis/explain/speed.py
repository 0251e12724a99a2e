"""Speed of a replica by its load: time per unit of work with so many concurrent calls.

A speed is a line (a, b), or one with bends (a, b, load, more, …): time per unit of work is a + b n, and
above each load `more` for each further call.  At loads that were never observed it is unknown; `BEYOND`
has its bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

Speed: TypeAlias = tuple[float, ...]

# Time per token with n calls in a replica that never ran more than `most`, by assumption.  A forward pass
# over more calls takes at least as long, and gives at least as many tokens per second: so `flat` and
# `saturated` are bounds, and the line lies between them.
BEYOND: dict[str, Callable[[Speed, int, int], float]] = {
    "line": lambda speed, n, _: time_us(speed, n),
    "flat": lambda speed, n, most: time_us(speed, min(n, most)),
    "saturated": lambda speed, n, most: time_us(speed, min(n, most)) * max(n / most, 1),
}


def time_us(speed: Speed, calls: float) -> float:
    """Return the time per unit of work with so many concurrent calls."""
    a, b, *bends = speed
    above = zip(bends[::2], bends[1::2], strict=True)
    return a + b * calls + sum(more * max(calls - load, 0.0) for load, more in above)


def grows_with_load(speed: Speed) -> bool:
    """Return whether a unit of work takes longer the more calls run."""
    return bool(speed[1] or any(speed[3::2]))


@lru_cache(256)
def times_by_load(beyond: str, speed: Speed, calls: int, most: int) -> list[float]:
    """Return the time per unit of work for 0, 1, … concurrent calls.

    Args:
        beyond: Assumption for loads above `most`, a key of `BEYOND`.
        speed: Of the replica.
        calls: Return it for up to so many calls.
        most: The highest load that was observed.
    """
    return [BEYOND[beyond](speed, running, most) for running in range(calls + 1)]
