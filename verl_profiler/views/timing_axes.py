"""Lines, areas and marks over the steps of a console log, with gaps where steps are missing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from verl_profiler.analysis.selection import Rows
from verl_profiler.render.axes import EndLabel, end_labels, step_axis, value_axis
from verl_profiler.render.colors import INK, MUTED, PHASE_COLORS
from verl_profiler.render.figure import plain

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

    from verl_profiler.render.panel import Panel

__all__ = ["areas", "finish", "gapped", "middle_lines", "step_line", "step_times"]

_MARKED_POINTS = 80
_MARKED = {"validation": "validated", "checkpoint": "checkpoint"}


def gapped(values: dict[int, float], factor: float = 1.0) -> tuple[list[float], list[float]]:
    """Return the points of a line that is broken where steps are missing."""
    steps = sorted(values)
    strides = [after - before for before, after in pairwise(steps)]
    stride = statistics.median_low(strides) if strides else 1
    xs: list[float] = []
    ys: list[float] = []
    for step in steps:
        if xs and step - xs[-1] > stride:
            xs.append(xs[-1] + stride / 2)
            ys.append(float("nan"))
        xs.append(step)
        ys.append(values[step] * factor)
    return xs, ys


def step_line(axes: Panel, values: dict[int, float], factor: float = 1.0, **style: Any) -> None:
    """Draw a line over steps, broken where steps are missing."""
    if not values:
        return
    xs, ys = gapped(values, factor)
    broken = len(values) == 1 or len(xs) > len(values)
    marker = "o" if broken or len(values) <= _MARKED_POINTS else None
    axes.plot(xs, ys, marker=marker, markersize=3, **style)


def middle_lines(
    axes: Panel,
    values: dict[int, float],
    code: str,
    words: Callable[[float], str],
    factor: float = 1.0,
) -> None:
    """Draw the mean and the median across the panel."""
    if not values:
        return
    for name, value, style in (
        ("mean", statistics.fmean(values.values()), ":"),
        ("median", statistics.median(values.values()), "--"),
    ):
        axes.axhline(
            value * factor,
            color=code,
            linestyle=style,
            linewidth=1.0,
            label=f"{name} {words(value)}",
        )


def areas(
    axes: Panel, steps: Sequence[int], series: Iterable[tuple[str, list[float], str]], hatched: Any
) -> None:
    """Stack areas over many steps; nothing is drawn where steps are missing."""
    base = dict.fromkeys(steps, 0.0)
    for name, values, code in series:
        top = {step: base[step] + value for step, value in zip(steps, values, strict=True)}
        xs, lows = gapped(base)
        axes.fill_between(
            xs,
            lows,
            gapped(top)[1],
            step="mid",
            facecolor=code,
            edgecolor="white" if name in hatched else code,
            linewidth=0,
            label=plain(name),
            hatch=hatched.get(name),
        )
        base = top


def finish(
    axes: Panel,
    steps: Rows,
    label: str,
    labels: Sequence[EndLabel] = (),
    *,
    log: bool = False,
    named: bool = True,
) -> None:
    """Name the axes, mark the special steps (`named` in a legend), and label the lines."""
    step_axis(axes, [row["step"] for row in steps])
    if log:
        axes.set_yscale("log")
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        value_axis(axes, label)
    _mark(axes, steps, named=named)
    if labels:
        _end_labels(axes, labels, log=log)


def step_times(axes: Panel, values: dict[int, float]) -> None:
    """Draw how long each step took: a stroke per bar, or one line where there are many."""
    label = "step (timing_s/step)"
    if len(values) > _MARKED_POINTS:
        axes.plot(*gapped(values), color=INK, linewidth=0.6, drawstyle="steps-mid", label=label)
    elif values:
        begins, ends = ([step + side for step in values] for side in (-0.46, 0.46))
        heights = list(values.values())
        axes.hlines(heights, begins, ends, colors=INK, linestyles="--", label=label)


def _mark(axes: Panel, steps: Rows, *, named: bool) -> None:
    """Mark validation and checkpoints above the panel, and where a launch begins inside it."""
    resumed = [row["step"] - 0.5 for row in steps[1:] if row["first_of_launch"]]
    handles: list[tuple[Line2D, str]] = []
    for step in resumed:
        line = axes.axvline(step, color=MUTED, linestyle="-.", linewidth=1.0)
        handles = [(line, "training resumed")]
    for key, marker, code in (
        ("validation", "v", PHASE_COLORS["testing"]),
        ("checkpoint", "s", PHASE_COLORS["save_checkpoint"]),
    ):
        marked = [row["step"] for row in steps if row[_MARKED[key]]]
        if marked:
            (points,) = axes.plot(
                marked,
                [1.014 if key == "validation" else 1.042] * len(marked),
                transform=axes.get_xaxis_transform(),
                linestyle="none",
                marker=marker,
                markersize=4.5 if len(marked) <= _MARKED_POINTS else 2.5,
                color=code,
                clip_on=False,
                label="_",
            )
            handles.append((points, key))
    if handles and named:
        made = axes.legend(
            *zip(*handles, strict=True),
            loc="lower right",
            bbox_to_anchor=(1.0, 1.05),
            borderaxespad=0.0,
            ncols=len(handles),
        )
        axes.add_artist(made)
    shown = axes.get_legend_handles_labels()
    if shown[1]:
        axes.legend(*shown, loc="lower right", ncols=len(shown[1]))


def _end_labels(axes: Panel, labels: Sequence[EndLabel], *, log: bool) -> None:
    if not log:
        end_labels(axes, labels)
        return
    ordered = sorted(labels, key=lambda label: -label.value)
    handles = [axes.plot([], [], color=each.color, linestyle=each.style)[0] for each in ordered]
    axes.legend(
        handles,
        [plain(each.text) for each in ordered],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.0),
    )
