"""Numbers and tables as text for a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_profiler.render.visible import visible

__all__ = ["align", "counted", "quantile_texts", "seconds", "share", "size"]


def seconds(value: float | None) -> str:
    """Write a length of time with two or three digits: `0.4 ms`, `312 ms`, `6.7 s`, `12 min 5 s`."""
    if value is None:
        return "-"
    if abs(value) < 0.000_000_5:
        return "0 s"
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 0.001:
        return f"{value * 1e6:.0f} us"
    if value < 0.0095:
        return f"{value * 1e3:.1f} ms"
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 119.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def quantile_texts(row: Mapping[str, Any], *names: str) -> list[str]:
    """Write quantiles of lengths of time, `too few` where there are fewer than a quantile needs.

    Args:
        row: With columns such as `p50_s`, `p95_s` and `max_s`, in seconds.
        names: Of the columns, without `_s`; the maximum, which shows whether there are any, last.
    """
    some = row[f"{names[-1]}_s"] is not None
    return [
        "too few" if some and row[f"{name}_s"] is None else seconds(row[f"{name}_s"])
        for name in names
    ]


def share(value: float | None) -> str:
    """Write a share as percent: `61 %`, `0.3 %`, `<0.1 %`, `-12 %`, `>-0.1 %`."""
    if value is None:
        return "-"
    percent = value * 100
    if 0 < abs(percent) < 0.05:
        return "<0.1 %" if percent > 0 else ">-0.1 %"
    whole = abs(percent) >= 9.95 or percent == 0
    return f"{percent or 0.0:.0f} %" if whole else f"{percent:.1f} %"


def size(value: float | None) -> str:
    """Write a number of bytes: `512 B`, `1.4 GB`, in powers of 1000."""
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 9.95 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def counted(number: int, one: str, many: str | None = None) -> str:
    """Write a number of things: `1 call`, `2,300 calls`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def align(rows: Iterable[Sequence[str]], *, left: Iterable[int] = (0,), indent: str = "  ") -> str:
    """Lay cells out in columns, numbers to the right.

    Args:
        rows: Cells; rows may differ in length.
        left: Columns that are set to the left.
        indent: Put before every line.
    """
    cells = [[visible(cell) for cell in row] for row in rows]
    flush_left = set(left)
    widths = [
        max(_width(row[column]) for row in cells if column < len(row))
        for column in range(max((len(row) for row in cells), default=0))
    ]
    lines: list[str] = []
    for row in cells:
        laid = [
            cell + gap if column in flush_left else gap + cell
            for column, cell in enumerate(row)
            for gap in [" " * (widths[column] - _width(cell))]
        ]
        lines.append((indent + "  ".join(laid)).rstrip())
    return "\n".join(lines)


def _width(text: str) -> int:
    """Return how many columns a terminal gives the text: two for a Chinese character."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
