"""The sheet that every plot is drawn on, and how it is written to a file.

matplotlib is imported by the functions that draw: whoever only lists the plots does without it.
"""

from __future__ import annotations

import functools
import importlib
import textwrap
import warnings
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from verl_profiler.render.colors import GRID, INK, MUTED
from verl_profiler.render.visible import visible

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from verl_profiler.render.panel import Panel

__all__ = [
    "FORMATS",
    "check_installed",
    "colorbar",
    "colormap",
    "patch",
    "plain",
    "save",
    "settings",
    "sheet",
    "short",
    "tint",
]

FORMATS = ("png", "svg", "pdf")

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


@functools.cache
def colormap(*, white: bool = False) -> Colormap:
    """Return the colors of a sequence, from light to dark in even steps of lightness."""
    from matplotlib.colors import LinearSegmentedColormap

    if white:
        return LinearSegmentedColormap.from_list(
            "later", ["#FFFFFF", "#8FBBDD", "#1B5A95", "#0B2A4F"]
        )
    return LinearSegmentedColormap.from_list(
        "verl_profiler", ["#D6E6F2", "#8FBBDD", "#4B8CC2", "#1B5A95", "#0B2A4F"]
    )


def tint(place: float) -> Any:
    """Return a color of the sequence: 0 is the lightest, 1 the darkest."""
    return colormap()(place)


def check_installed() -> None:
    """Import matplotlib; a missing one ends a command before it reads anything."""
    importlib.import_module("matplotlib")


def colorbar(
    figure: Figure,
    axes: Panel,
    ends: tuple[float, float],
    label: str,
    *,
    bins: int,
    white: bool = False,
    **place: Any,
) -> Any:
    """Add a scale of colors to a panel and return how values are placed on it.

    Args:
        figure: The figure.
        axes: The panel.
        ends: The lowest and the highest value.
        label: Of the scale, with its unit.
        bins: At most so many intervals; without white, marks are whole numbers.
        white: The lowest value is white.
        place: For `Figure.colorbar`.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    scale = Normalize(*ends)
    # matplotlib's stubs leave out the types of keyword arguments.
    drawn: Any = figure
    drawn.colorbar(
        ScalarMappable(scale, colormap(white=white)),
        ax=axes,
        label=label,
        ticks=MaxNLocator(nbins=bins, integer=not white),
        **place,
    )
    return scale


def patch(code: Any, label: str, alpha: float | None = None) -> Patch:
    """Return an entry of a legend."""
    from matplotlib.patches import Patch

    return Patch(color=code, alpha=alpha, label=label)


def settings() -> Any:
    """Return a context in which figures look as they should."""
    mpl: Any = importlib.import_module("matplotlib")
    return mpl.rc_context(_SETTINGS)


def sheet(
    title: str,
    about: str,
    *,
    size: tuple[float, float] = (10, 5.2),
    panels: tuple[int, int] = (1, 1),
    notes: str | Sequence[str] = (),
    **grid: Any,
) -> tuple[Figure, list[Panel]]:
    """Make a figure with its title (the finding), a line about the data, and its panels.

    Args:
        title: What is seen, with numbers.
        about: Run, steps and how many of what.
        size: Width and height in inches.
        panels: Rows and columns.
        notes: A text below the panels, or several.
        grid: For `Figure.subplots`.
    """
    from matplotlib.figure import Figure

    width, height = size
    titles = textwrap.wrap(plain(title), int(width * 9.4)) or [""]
    abouts = textwrap.wrap(plain(about), int(width * 14))
    listed = [notes] if isinstance(notes, str) else notes
    below = [line for note in listed for line in textwrap.wrap(plain(note), int(width * 14.5))]
    top = 0.12 + 0.235 * len(titles) + 0.17 * len(abouts) + 0.08
    bottom = 0.06 + 0.155 * len(below)
    figure: Any = Figure(figsize=(width, height), layout="constrained")
    engine = figure.get_layout_engine()
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
    made: Sequence[Sequence[Panel]] = figure.subplots(*panels, squeeze=False, **grid)
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
        drawn: Any = figure
        drawn.savefig(file, format=form, dpi=150, metadata=metadata)


def plain(text: object) -> str:
    """Escape what is no visible character of a name that comes from the run; XML lacks most of it."""
    return visible(str(text))


def short(text: object, width: int = 28) -> str:
    """Shorten a name for an axis."""
    name = plain(text)
    return name if len(name) <= width else name[: width - 1] + "\u2026"
