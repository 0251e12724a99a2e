"""A comparison of two runs as a page: one file, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.render.html import digest, part, template, trusted
from verl_profiler.views.diff_cells import change_cells
from verl_profiler.views.diff_text import (
    HEADINGS,
    conclusion,
    differences,
    groups,
    left_out_names,
    note,
    sides,
    verdict,
)

__all__ = ["diff_page"]

# The drawn intervals: width in pixels, and the largest change that is drawn in full.
_WIDTH = 240
_LARGEST = 0.5
_EDGE = 4


def diff_page(document: Mapping[str, Any]) -> str:
    """Write the page.

    Args:
        document: What `diff_text.gathered` returns.
    """
    style = part("report.css")
    reach = _reach(document["metrics"])
    return template("diff.html").render(
        title=" and ".join(run["name"] for run in document["runs"]),
        lead=conclusion(document),
        sides=[*sides(document), *differences(document).splitlines()],
        verdicts=[verdict(each) for each in document["conditions"]],
        headings=HEADINGS,
        note=f"{note(document)} {left_out_names(document)}".rstrip(),
        groups=[
            (title, [(change_cells(row), _interval(row, reach)) for row in rows])
            for title, rows in groups(document)
        ],
        width=_WIDTH,
        middle=_WIDTH / 2,
        reach=f"{reach:.0%}",
        # The package's own file.
        style=trusted(style),
        policy=f"default-src 'none'; style-src '{digest(style)}'; img-src data:; base-uri 'none'",
    )


def _reach(metrics: list[Mapping[str, Any]]) -> float:
    """Return the change at the edge of the drawing."""
    shown = [
        abs(end / row["a"])
        for row in metrics
        if row["a"] and row["low"] is not None
        for end in (row["low"], row["high"])
    ]
    return min(max(shown, default=_LARGEST), _LARGEST) or _LARGEST


def _interval(row: Mapping[str, Any], reach: float) -> dict[str, Any] | None:
    """Return where an interval and its point are drawn, in pixels; None where there is none."""
    if not row["a"] or row["low"] is None:
        return None
    low, point, high = (
        _WIDTH / 2 + (_WIDTH / 2 - _EDGE) * max(-1.0, min(1.0, value / abs(row["a"]) / reach))
        for value in (row["low"], row["difference"], row["high"])
    )
    return {
        "x": round(low, 1),
        "width": max(round(high - low, 1), 1),
        "point": round(point, 1),
        "significant": row["significant"],
    }
