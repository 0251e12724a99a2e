"""Runs of a folder, one row each: what was run, how long its steps take, and what to change first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.selection import Rows
from verl_profiler.render.text import align
from verl_profiler.render.visible import shown
from verl_profiler.units import seconds, share

# What a finding needs beside the columns.
_LEAST = 40
_TITLES = ("launched", "run", "model", "devices", "steps", "mean step", "useful", "first finding")


def list_text(rows: Rows, width: int) -> list[str]:
    """Return the rows of `cli.runs.run_row` as the lines of a table; where it is narrow, findings are below their runs."""
    lines = [_TITLES, *map(_cells, shown(rows))]
    columns = align([line[:-1] for line in lines], left=(0, 1, 2, 3), indent="").split("\n")
    if len(columns[0]) + _LEAST <= width:
        return align(lines, left=(0, 1, 2, 3, 7), indent="").split("\n")
    if max(map(len, columns)) > width:
        # Without model and devices.
        short = ((*line[:2], *line[4:-1]) for line in lines)
        columns = align(short, left=(0, 1), indent="").split("\n")
    return [
        part
        for pair in zip(columns, lines, strict=True)
        for part in (pair[0], f"    {pair[1][-1]}")
    ]


def list_page(folder: str, rows: Sequence[Mapping[str, Any]], *, made: str) -> str:
    """Return the page that lists runs.

    Args:
        folder: Its title.
        rows: Of `cli.runs.run_row`, each with `href`: its report's address, relative to the page; None for none.
        made: When and by which version, for the foot of the page.
    """
    # The list in a terminal needs no jinja2.
    from verl_profiler.render.html import digest, part, template, trusted

    style = part("report.css")
    return template("runs.html").render(
        title=folder,
        titles=_TITLES,
        rows=[(row["href"], _cells(each)) for row, each in zip(rows, shown(rows), strict=True)],
        made=made,
        style=trusted(style),
        policy=f"default-src 'none'; style-src '{digest(style)}'; img-src data:; base-uri 'none'",
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    gain = f"{row['gain']}: {row['finding']}" if row["finding"] else ""
    known = [each for each in (gain, row["problem"]) if each]
    return [
        row["launched"] or "-",
        row["run"],
        row["model"] or "-",
        row["devices"] or "-",
        "-" if row["steps"] is None else str(row["steps"]),
        seconds(row["step_mean_s"]),
        share(row["useful_share"]),
        " ".join(known) or "no single change is worth 3 % of a step",
    ]
