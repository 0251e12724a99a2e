"""Horizontal bars with names, the first on top, and what is drawn at their places."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_profiler.render.axes import Row, value_axis
from verl_profiler.render.colors import ACCENT, GRID, INK, MUTED
from verl_profiler.render.figure import plain, tint

if TYPE_CHECKING:
    from verl_profiler.render.panel import Panel

__all__ = ["bar_texts", "bars", "colored_bars", "percentile_marks", "savings"]


def bars(
    axes: Panel,
    names: Sequence[str],
    series: Iterable[tuple[str, Sequence[float], Any]],
    *,
    hatched: Mapping[str, str] | None = None,
) -> list[float]:
    """Stack horizontal bars, the first on top, and return the length of each."""
    places = list(range(len(names)))
    marks = hatched or {}
    base = [0.0] * len(names)
    for name, values, code in series:
        axes.barh(
            places,
            values,
            0.74,
            left=base,
            color=code,
            label=plain(name),
            linewidth=0.5,
            edgecolor=MUTED if name in marks else "white",
            hatch=marks.get(name),
        )
        base = [low + value for low, value in zip(base, values, strict=True)]
    axes.set_yticks(places, [plain(name) for name in names])
    # A few bars stay as thin as many.
    axes.set_ylim(max(len(names), 3) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    return base


def colored_bars(
    axes: Panel,
    names: Sequence[str],
    values: Sequence[float],
    colors: Sequence[Any],
    pale: Sequence[float] | None = None,
) -> list[float]:
    """Draw horizontal bars, each in its color, on pale ones that may be longer."""
    lengths = bars(axes, names, [("", pale or values, GRID)])
    axes.barh(range(len(values)), values, 0.74, color=colors)
    return lengths


def bar_texts(
    axes: Panel, lengths: Sequence[float], texts: Iterable[str], label: str, room: float
) -> None:
    """Write a text at the end of each bar and name the axis.

    Args:
        axes: The panel.
        lengths: Of the bars, the first on top.
        texts: One per bar.
        label: Of the horizontal axis, with its unit.
        room: The length of the axis, in longest bars.
    """
    for place, (length, text) in enumerate(zip(lengths, texts, strict=True)):
        axes.text(length, place, f"  {text}", va="center", fontsize=8)
    value_axis(axes, label, of="x")
    axes.set_xlim(0, (max(lengths) or 1) * room)


def savings(axes: Panel, rows: Sequence[Row], *, factor: float, unit: str) -> None:
    """Draw a bar per change, with its interval where it has one.

    Args:
        axes: The panel.
        rows: With about, expected_s, low_s and high_s (None without an interval), the first on top.
        factor: What to multiply seconds with.
        unit: Of the axis.
    """
    saved = [row["expected_s"] * factor for row in rows]
    bars(axes, [row["about"] for row in rows], [("saved", saved, ACCENT)])
    for place, row in enumerate(rows):
        if row["low_s"] is not None:
            ends = [row["low_s"] * factor, row["high_s"] * factor]
            axes.plot(ends, [place, place], color=INK, lw=1.4)
    value_axis(axes, f"saved per step [{unit}]", of="x")
    axes.axvline(0, color=MUTED, linewidth=0.8)


def percentile_marks(
    axes: Panel,
    rows: Sequence[Row],
    places: Sequence[float],
    names: Mapping[str, float],
    *,
    factor: float,
    markersize: float,
    labeled: bool = True,
) -> None:
    """Mark percentiles on horizontal lines: the darker the higher, the longest with a stroke.

    Args:
        axes: The panel.
        rows: With a column `p50_s`, `max_s`, … for each name.
        places: The height of each row.
        names: Place in the sequence of colors by name, such as `p50` or `max`.
        factor: What to multiply seconds with.
        markersize: Of the dots, in points.
        labeled: The legend has the names.
    """
    for name, place in names.items():
        longest = name == "max"
        values = [
            math.nan if row[f"{name}_s"] is None else row[f"{name}_s"] * factor for row in rows
        ]
        if all(map(math.isnan, values)):
            # Too few values for this percentile everywhere: no entry in the legend either.
            continue
        axes.plot(
            values,
            places,
            "|" if longest else "o",
            color=tint(place),
            markersize=11 if longest else markersize,
            markeredgewidth=1.6 if longest else 0.3,
            label=(name if longest else name.upper()) if labeled else None,
        )
