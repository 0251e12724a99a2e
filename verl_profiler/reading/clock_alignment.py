"""Place the clocks of other nodes on the driver's, by the comparisons that it made during the run.

Each comparison estimates by how much another clock was ahead, to within a bound.  A line through
them (offset and drift) corrects the other node's times.  What is reported about the result is never
better than it is: the stated bound is the largest distance of a comparison from the line, plus that
comparison's own bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Ahead", "aheads", "fit"]

# A drift is estimated from so much time on; two crystals differ by less than the limit.
_DRIFT_FROM_NS = 60 * 10**9
_DRIFT_LIMIT = 5e-4
# Comparisons much less certain than the others say nothing.
_LOOSE = 2


@dataclass(frozen=True)
class Ahead:
    """How far another node's monotonic clock is ahead of the driver's.

    Args:
        at_ns: A time on the other clock.
        offset_ns: Other minus driver at that time.
        drift: By how much that grows per nanosecond of the other clock.
        bound_ns: How far the line may be from the true offset.
        residual_ns: How far the comparisons are from the line.
        samples: How many comparisons there are.
    """

    at_ns: int
    offset_ns: int
    drift: float
    bound_ns: int
    residual_ns: int
    samples: int


def fit(samples: Sequence[Sequence[int]]) -> Ahead | None:
    """Draw the line through comparisons.

    Args:
        samples: Of each: driver's monotonic ns, other minus driver ns, bound ns.

    Returns:
        None without samples.
    """
    if not samples:
        return None
    limit = _LOOSE * median(bound for _, _, bound in samples)
    # As times of the other clock, so that its events can be placed by what they know.
    points = [(at + ahead, ahead, bound) for at, ahead, bound in samples if bound <= limit]
    weights = [1 / max(bound, 1) ** 2 for _, _, bound in points]
    total = sum(weights)
    first_ns, first_ahead = points[0][0], points[0][1]
    # Small numbers, as differences: a float holds nanoseconds since a boot to microseconds only.
    places = [at - first_ns for at, _, _ in points]
    heights = [ahead - first_ahead for _, ahead, _ in points]
    middle = sum(w * x for w, x in zip(weights, places, strict=True)) / total
    height = sum(w * y for w, y in zip(weights, heights, strict=True)) / total
    spread = sum(w * (x - middle) ** 2 for w, x in zip(weights, places, strict=True))
    drift = 0.0
    if max(places) - min(places) >= _DRIFT_FROM_NS:
        slope = sum(
            w * (x - middle) * (y - height)
            for w, x, y in zip(weights, places, heights, strict=True)
        )
        drift = max(-_DRIFT_LIMIT, min(_DRIFT_LIMIT, slope / spread))
    distances = [
        abs(y - height - drift * (x - middle)) for x, y in zip(places, heights, strict=True)
    ]
    return Ahead(
        at_ns=first_ns + round(middle),
        offset_ns=first_ahead + round(height),
        drift=drift,
        bound_ns=round(
            max(far + bound for far, (_, _, bound) in zip(distances, points, strict=True))
        ),
        residual_ns=round(max(distances)),
        samples=len(points),
    )


def aheads(headers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Ahead]]:
    """Yield driver's boot id, another node's boot id and its clock's line, from all headers."""
    for header in headers.values():
        exchange: Mapping[str, Any] = header.get("clock_exchange") or {}
        for peer in exchange.get("peers") or ():
            line = fit(peer.get("samples") or ())
            if line is not None and exchange.get("boot_id") and peer.get("boot_id"):
                yield exchange["boot_id"], peer["boot_id"], line
