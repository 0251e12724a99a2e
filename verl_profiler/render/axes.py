"""What plots are made of: axes with units, lines and bars over steps, labels and legends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_profiler.render.figure import plain
from verl_profiler.units import BYTE_UNITS

if TYPE_CHECKING:
    from verl_profiler.render.panel import Panel

__all__ = [
    "EndLabel",
    "Line",
    "end_labels",
    "legend",
    "percent",
    "size_axis",
    "stack",
    "step_axis",
    "step_lines",
    "step_stack",
    "time_unit",
    "value_axis",
    "whole_numbers",
]

Row = Mapping[str, Any]
# Rows with a step, the column to draw, a name, a color and, if not solid, a line style.
Line = tuple[Sequence[Row], str, str, Any] | tuple[Sequence[Row], str, str, Any, str]


class EndLabel(NamedTuple):
    """The label of a line at the right edge of a panel."""

    value: float
    """Where the line ends on the vertical axis."""

    text: str

    color: Any

    style: str = "-"
    """Of the line."""


# More bars than this touch each other.
_TOUCHING = 60
# Up to so many steps, the points of a line are marked.
_MARKED = 30


def time_unit(longest_s: float | None) -> tuple[float, str]:
    """Return what to multiply seconds with, and the unit, for an axis up to `longest_s`."""
    longest = longest_s or 0.0
    if longest < 0.5:
        return 1000.0, "ms"
    return (1.0, "s") if longest < 3600 else (1 / 60, "min")


def percent(value: float) -> str:
    """Write a share for an axis."""
    return f"{value * 100:.4g} %"


def _number(value: float) -> str:
    return f"{value:,.10g}"


def value_axis(
    axes: Panel, label: str, *, of: str = "y", form: Callable[[float], str] = _number
) -> None:
    """Name an axis with its unit and let it begin at zero; draw first, then call this."""
    axis = axes.yaxis if of == "y" else axes.xaxis
    (axes.set_ylabel if of == "y" else axes.set_xlabel)(label)
    low, high = axes.dataLim.intervaly if of == "y" else axes.dataLim.intervalx
    high = high * 1.06 if math.isfinite(high) and high > 0 else 1.0
    low = min(low * 1.06, 0.0) if math.isfinite(low) else 0.0
    (axes.set_ylim if of == "y" else axes.set_xlim)(low, high)
    axis.set_major_formatter(lambda value, _: form(value))


def size_axis(axes: Panel, label: str) -> None:
    """Name a vertical axis of bytes, with ticks at round numbers of its unit; draw first."""
    from matplotlib.ticker import MaxNLocator

    def power() -> int:
        return min(int(math.log(max(*axes.get_ylim(), 1.0), 1024)), 4)

    class Binary(MaxNLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            unit = 1024 ** power()
            return super().tick_values(vmin / unit, vmax / unit) * unit

    value_axis(
        axes,
        label,
        form=lambda value: f"{value / 1024 ** power():,.4g} {BYTE_UNITS[power()]}",
    )
    axes.yaxis.set_major_locator(Binary(nbins=6))


def step_axis(axes: Panel, steps: Sequence[float]) -> None:
    """Make the horizontal axis one of steps: whole numbers, all of them when they fit."""
    axes.set_xlabel("step")
    low, high = min(steps), max(steps)
    axes.set_xlim(low - 0.6, high + 0.6)
    whole_numbers(axes, steps=[1, 2, 5, 10])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")


def whole_numbers(axes: Panel, **intervals: Any) -> None:
    """Mark the horizontal axis at whole numbers, without lines through the panel."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1, **intervals))
    axes.grid(visible=False, axis="x")


def step_lines(
    axes: Panel,
    lines: Iterable[Line],
    steps: Sequence[float],
    label: str,
    title: str = "",
    *,
    factor: float = 1.0,
    form: Callable[[float], str] = _number,
    top: float | None = None,
    gap: float = 0.052,
    marked: bool | None = None,
    broken: bool = False,
    markersize: float = 3.5,
) -> None:
    """Draw lines over steps, each named at the right edge of the panel.

    Args:
        axes: The panel.
        lines: What to draw; rows without a value are left out, a line without any as well.
        steps: Those of the axis.
        label: Of the vertical axis, with its unit.
        title: Of the panel.
        factor: What to multiply values with.
        form: Writes a value of the axis.
        top: The end of the axis; a little above the highest value when None.
        gap: The least distance of names, as a share of the axis.
        marked: Points are marked; when None, if there are few steps.
        broken: Lines have gaps where values are missing.
        markersize: Of the points, in points.
    """
    marked = len(steps) <= _MARKED if marked is None else marked
    labels: list[EndLabel] = []
    for rows, key, name, code, *style in lines:
        drawn = [row for row in rows if broken or row[key] is not None]
        if not drawn:
            continue
        values = [math.nan if row[key] is None else row[key] * factor for row in drawn]
        axes.plot(
            [row["step"] for row in drawn],
            values,
            color=code,
            marker="o" if marked else None,
            markersize=markersize,
            linestyle=style[0] if style else "-",
        )
        labels.append(EndLabel(values[-1], name, code, *style))
    step_axis(axes, steps)
    value_axis(axes, label, form=form)
    if top is not None:
        axes.set_ylim(0, top)
    end_labels(axes, labels, gap=gap)
    axes.set_title(title)


def stack(
    axes: Panel,
    steps: Sequence[float],
    series: Iterable[tuple[str, Sequence[float], Any]],
    *,
    hatched: Mapping[str, str] | None = None,
) -> list[float]:
    """Stack bars over steps and return the height of each.

    A series is a name, its values and a color, from the bottom up; `hatched` has hatches by name.
    """
    touching = len(steps) > _TOUCHING
    marks = hatched or {}
    base = [0.0] * len(steps)
    for name, values, code in series:
        axes.bar(
            steps,
            values,
            1.0 if touching else 0.78,
            bottom=base,
            color=code,
            label=plain(name),
            linewidth=0 if touching else 0.5,
            edgecolor="white" if name in marks or not touching else code,
            hatch=marks.get(name),
        )
        base = [low + value for low, value in zip(base, values, strict=True)]
    return base


def step_stack(
    axes: Panel,
    steps: Sequence[float],
    series: Iterable[tuple[str, Sequence[float], Any]],
    label: str,
    title: str = "",
    *,
    form: Callable[[float], str] = _number,
    hatched: Mapping[str, str] | None = None,
    legend_title: str | None = None,
) -> list[float]:
    """Fill a panel with bars stacked over steps, its axes and its legend.

    Args:
        axes: The panel.
        steps: Those of the axis.
        series: A name, values and a color each, from the bottom up.
        label: Of the vertical axis, with its unit.
        title: Of the panel.
        form: Writes a value of the axis.
        hatched: Hatches by name.
        legend_title: Of the legend.

    Returns:
        The height of each bar.
    """
    tops = stack(axes, steps, series, hatched=hatched)
    step_axis(axes, steps)
    value_axis(axes, label, form=form)
    legend(axes, title=legend_title, reverse=True)
    axes.set_title(title)
    return tops


def legend(axes: Panel, *, title: str | None = None, reverse: bool = False) -> None:
    """Put the legend to the right of the panel, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    if reverse:
        handles, labels = handles[::-1], labels[::-1]
    made = axes.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(1.005, 1.0),
        borderaxespad=0.0,
        title=title,
        handlelength=1.3,
        alignment="left",
    )
    made.get_title().set_fontsize(8.5)


def end_labels(
    axes: Panel,
    labels: Sequence[EndLabel],
    *,
    gap: float = 0.052,
) -> None:
    """Label lines at the right edge of a panel, pushed apart where they would overlap.

    `gap` is the least distance, as a share of the vertical axis.
    """
    low, high = axes.get_ylim()
    span = (high - low) or 1.0
    shown = sorted(
        (label for label in labels if math.isfinite(label.value)), key=lambda label: label.value
    )
    places = [(label.value - low) / span for label in shown]
    for number in range(1, len(places)):
        places[number] = max(places[number], places[number - 1] + gap)
    if places:
        places[-1] = min(places[-1], 1.0)
    for number in reversed(range(len(places) - 1)):
        places[number] = min(places[number], places[number + 1] - gap)
    for place, label in zip(places, shown, strict=True):
        axes.plot(
            [1.012, 1.042],
            [place, place],
            transform=axes.transAxes,
            color=label.color,
            linestyle=label.style,
            linewidth=2.0,
            clip_on=False,
            scalex=False,
            scaley=False,
        )
        axes.text(
            1.042,
            place,
            f"  {plain(label.text)}",
            transform=axes.transAxes,
            fontsize=8.5,
            va="center",
            ha="left",
        )
