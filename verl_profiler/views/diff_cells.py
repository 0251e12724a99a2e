"""Values and changes of a comparison as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.units import seconds, share

__all__ = ["amount", "change_cells", "in_brackets", "moved", "signed"]

# What is smaller than this share of both values is a rounding error.
_NONE = 1e-9


def change_cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row of the table: metric, both values, the change, its interval and p."""
    low, high = row["low"], row["high"]
    interval = "drift" if row["drift"] else "-"
    if low is not None:
        interval = f"{moved(row, low)} to {moved(row, high)}"
    chance = row["adjusted_p"]
    return [
        f"≈ {row['metric']}" if row["estimated"] else row["metric"],
        amount(row["a"], row["unit"]),
        amount(row["b"], row["unit"]),
        moved(row),
        signed(row["share"]),
        interval,
        "-" if chance is None else f"{chance:.3f}" if chance >= 0.001 else "<0.001",
    ]


def amount(value: float, unit: str) -> str:
    """Write a value of a metric."""
    if unit == "s":
        return seconds(value)
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number}{unit}"


def signed(value: float | None) -> str:
    """Write a relative change, with its sign."""
    if value is None:
        return "-"
    return f"{'+' if value >= 0 else '-'}{share(abs(value))}"


def moved(row: Mapping[str, Any], value: float | None = None) -> str:
    """Write the difference of a metric, or another one of its unit, with its sign."""
    difference = row["difference"] if value is None else value
    if abs(difference) < _NONE * max(abs(row["a"]), abs(row["b"]), _NONE):
        difference = 0.0
    return f"{'+' if difference >= 0 else '-'}{amount(abs(difference), row['unit'])}"


def in_brackets(value: float | None) -> str:
    """Write a relative change in parentheses; empty for None."""
    return "" if value is None else f" ({signed(value)})"
