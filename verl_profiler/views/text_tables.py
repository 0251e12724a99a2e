"""Rows of a table as text for a terminal, with the titles and units that the page has, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.selection import Rows
from verl_profiler.events.json_values import is_list, is_tuple
from verl_profiler.render.text import align
from verl_profiler.render.visible import visible
from verl_profiler.units import seconds, share, size
from verl_profiler.views.columns import format_of, heading

Row = Mapping[str, Any]

_BAR = 30
_WARNINGS = 40
_FORMATS = {"s": seconds, "q": seconds, "share": share, "bytes": size}


def table_text(
    title: str, rows: Rows, columns: Sequence[str], table: str = "", most: int = 40
) -> str:
    """Return rows as a table below its title; empty without rows.

    Args:
        title: Of the table.
        rows: Of an analysis, or sums of them.
        columns: To show; those without any value are left out.
        table: Whose titles the columns have, as in `columns.md`.
        most: Rows to show; what is left out is counted.
    """
    table, _ = fitting_table(rows[:most], columns, table)
    more = f"\n  and {len(rows) - most} more" if len(rows) > most else ""
    return f"{title}\n{table}{more}" if table else ""


def fitting_table(
    rows: Rows, columns: Sequence[str], table: str = "", width: int | None = None
) -> tuple[str, list[str]]:
    """Return a table without its last columns that do not fit, and the titles of those."""
    kept = [name for name in columns if any(cell(row, name) != "-" for row in rows)]
    left_out: list[str] = []
    while kept:
        left = [
            at
            for at, name in enumerate(kept)
            if any(isinstance(row[name], str | list | tuple) for row in rows)
        ]
        lines = [[heading(name, table) for name in kept]]
        text = align([*lines, *([cell(row, name) for name in kept] for row in rows)], left=left)
        if width is None or max(map(len, text.split("\n"))) <= width:
            return text, left_out
        left_out.insert(0, heading(kept.pop(), table))
    return "", left_out


def bar_table(title: str, parts: Sequence[tuple[str, float, str]], whole_s: float) -> str:
    """Return parts of a time below its title, with a bar for each.

    Args:
        title: Of the table.
        parts: Name, seconds and what it is.
        whole_s: Their sum.
    """
    longest = max(spent for _, spent, _ in parts) or 1.0
    lines = [
        [name, seconds(spent), share(spent / whole_s), "#" * round(_BAR * spent / longest), about]
        for name, spent, about in parts
    ]
    return f"{title}\n{align(lines, left=(0, 3, 4))}"


def facts(row: Row, columns: Sequence[str]) -> str:
    """Return values of a row in a line, each with its title; counts of nothing are left out."""
    return ", ".join(
        f"{heading(name)} {cell(row, name)}"
        for name in columns
        if cell(row, name) != "-" and (isinstance(row[name], float) or row[name] != 0)
    )


def cell(row: Row, name: str) -> str:
    """Return a value with the unit that its column's name has; `-` where there is none."""
    value, form = row[name], format_of(name)
    if name == "request_id":
        return (value or "(no id)")[:8]
    if value is None:
        return "too few" if form == "q" and row.get("max_s") is not None else "-"
    about = "≈ " if row.get("estimated") and name in ("calls", "total_s") else ""
    if form in _FORMATS:
        return about + _FORMATS[form](value)
    if is_list(value) or is_tuple(value):
        return ", ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    digits = 0 if isinstance(value, int) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return about + (str(value) if name == "step" else f"{value:,.{digits}f}")


def warnings(problems: Sequence[str]) -> str:
    """Return what is wrong with the data, a line each, of very many the first."""
    if not problems:
        return "No data-quality warnings."
    # A text that begins with a space goes on where the one before ends.
    lines = [visible(f"  {'' if each.startswith(' ') else '- '}{each}") for each in problems]
    if len(lines) > _WARNINGS:
        lines[_WARNINGS:] = [f"  - and {len(lines) - _WARNINGS} more; --json lists all"]
    return "\n".join(["Data-quality warnings", *lines])
