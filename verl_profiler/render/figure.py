"""The sheet that every plot is drawn on: title, axes, legends, and how it is written to a file."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from verl_profiler.render.colors import GRID, INK, MUTED
from verl_profiler.render.visible import visible

__all__ = [
    "FORMATS",
    "SEQUENCE",
    "bars",
    "end_labels",
    "legend",
    "plain",
    "save",
    "settings",
    "sheet",
    "short",
    "stack",
    "step_axis",
    "time_unit",
    "value_axis",
]

FORMATS = ("png", "svg", "pdf")

# More bars than this touch each other.
_TOUCHING = 60

_SETTINGS: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "path.simplify": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "verl-profiler",
    "text.color": INK,
    # Names come from the run; a dollar sign in one is a dollar sign.
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8.5,
}

# From light to dark, the same lightness steps for everyone; white is left out.
SEQUENCE: Colormap = LinearSegmentedColormap.from_list(
    "verl_profiler", ["#D6E6F2", "#8FBBDD", "#4B8CC2", "#1B5A95", "#0B2A4F"]
)


def settings() -> Any:
    """Return a context in which figures look as they should."""
    return mpl.rc_context(_SETTINGS)


def sheet(
    title: str,
    about: str,
    *,
    size: tuple[float, float] = (10, 5.2),
    panels: tuple[int, int] = (1, 1),
    notes: Sequence[str] = (),
    **grid: Any,
) -> tuple[Figure, list[Axes]]:
    """Make a figure with its title (the finding), a line about the data, and its panels.

    Args:
        title: What is seen, with numbers.
        about: Run, steps and how many of what.
        size: Width and height in inches.
        panels: Rows and columns.
        notes: Sentences below the panels.
        grid: For `Figure.subplots`.
    """
    width, height = size
    titles = textwrap.wrap(plain(title), int(width * 9.4)) or [""]
    abouts = textwrap.wrap(plain(about), int(width * 14))
    below = [line for note in notes for line in textwrap.wrap(plain(note), int(width * 14.5))]
    top = 0.12 + 0.235 * len(titles) + 0.17 * len(abouts) + 0.08
    bottom = 0.06 + 0.155 * len(below)
    figure = Figure(figsize=(width, height), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(
        rect=(0.004, bottom / height, 0.992, 1 - (top + bottom) / height),
        h_pad=0.06,
        w_pad=0.06,
        wspace=0.04,
        hspace=0.05,
    )
    at = 1 - 0.12 / height
    for line in titles:
        figure.text(0.012, at, line, ha="left", va="top", fontsize=13, fontweight="bold")
        at -= 0.235 / height
    for line in abouts:
        figure.text(0.012, at - 0.02 / height, line, ha="left", va="top", color=MUTED)
        at -= 0.17 / height
    at = (0.03 + 0.155 * len(below)) / height
    for line in below:
        figure.text(0.012, at, line, ha="left", va="top", fontsize=8, color=MUTED)
        at -= 0.155 / height
    made = figure.subplots(*panels, squeeze=False, **grid)
    return figure, [axes for row in made for axes in row]


def save(figure: Figure, file: IO[bytes], form: str, *, description: str | None = None) -> None:
    """Write a figure; the same figure gives the same bytes.

    A PNG file carries the description, if there is one, near its beginning.
    """
    metadata: dict[str, Any] = {
        "png": {"Software": None, "Description": description},
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
    }[form]
    with settings(), warnings.catch_warnings():
        # A name in a script that the font does not have is drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(file, format=form, dpi=150, metadata=metadata)


def plain(text: object) -> str:
    """Escape what is no visible character of a name that comes from the run; XML lacks most of it."""
    return visible(str(text))


def short(text: object, width: int = 28) -> str:
    """Shorten a name for an axis."""
    name = plain(text)
    return name if len(name) <= width else name[: width - 1] + "\u2026"


def time_unit(longest_s: float | None) -> tuple[float, str]:
    """Return what to multiply seconds with, and the unit, for an axis up to `longest_s`."""
    longest = longest_s or 0.0
    if longest < 0.5:
        return 1000.0, "ms"
    return (1.0, "s") if longest < 3600 else (1 / 60, "min")


def value_axis(axes: Axes, label: str, *, of: str = "y", percent: bool = False) -> None:
    """Name an axis with its unit and let it begin at zero; draw first, then call this."""
    axis = axes.yaxis if of == "y" else axes.xaxis
    axis.set_label_text(label)
    low, high = axes.dataLim.intervaly if of == "y" else axes.dataLim.intervalx
    high = high * 1.06 if math.isfinite(high) and high > 0 else 1.0
    low = min(low * 1.06, 0.0) if math.isfinite(low) else 0.0
    (axes.set_ylim if of == "y" else axes.set_xlim)(low, high)
    if percent:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.4g} %"))
    else:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def step_axis(axes: Axes, steps: Sequence[float]) -> None:
    """Make the horizontal axis one of steps: whole numbers, all of them when they fit."""
    axes.set_xlabel("step")
    low, high = min(steps), max(steps)
    axes.set_xlim(low - 0.6, high + 0.6)
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=12, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.grid(visible=False, axis="x")


def stack(
    axes: Axes,
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


def bars(
    axes: Axes,
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


def legend(axes: Axes, *, title: str | None = None, reverse: bool = False) -> None:
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
    axes: Axes,
    labels: Sequence[tuple[float, str, str] | tuple[float, str, str, str]],
    *,
    gap: float = 0.052,
) -> None:
    """Label lines at the right edge of a panel, pushed apart where they would overlap.

    Each label is a value on the vertical axis, a text, a color and, if not solid, a line style;
    `gap` is the least distance, as a share of the vertical axis.
    """
    low, high = axes.get_ylim()
    span = (high - low) or 1.0
    shown = sorted(
        (label for label in labels if math.isfinite(label[0])), key=lambda label: label[0]
    )
    places = [(label[0] - low) / span for label in shown]
    for number in range(1, len(places)):
        places[number] = max(places[number], places[number - 1] + gap)
    if places:
        places[-1] = min(places[-1], 1.0)
    for number in reversed(range(len(places) - 1)):
        places[number] = min(places[number], places[number + 1] - gap)
    for place, (_, text, code, *style) in zip(places, shown, strict=True):
        axes.plot(
            [1.012, 1.042],
            [place, place],
            transform=axes.transAxes,
            color=code,
            linestyle=style[0] if style else "-",
            linewidth=2.0,
            clip_on=False,
            scalex=False,
            scaley=False,
        )
        axes.text(
            1.042,
            place,
            f"  {plain(text)}",
            transform=axes.transAxes,
            fontsize=8.5,
            va="center",
            ha="left",
        )
