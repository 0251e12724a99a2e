"""Tables as text for a terminal."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence

from verl_profiler.render.visible import visible

# Between a number and its unit.
_UNIT = re.compile(r"(?<=\d) (?=(?:%|µs|ms|s|min|h|[KMGT]?i?B)(?!\w))")


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


def without(steps: Sequence[int]) -> str:
    """Return which steps a mean leaves out, to be appended: `, without step 1`; empty for none."""
    return f", without step {', '.join(map(str, steps))}" if steps else ""


def short(text: object, width: int) -> str:
    """Shorten a name that names no culprit."""
    name = visible(str(text))
    return name if len(name) <= width else name[: width - 1] + "…"


def clipped(text: str, width: int = 120) -> str:
    """Return a text as one line, where possible without the parts between commas, or the words, that do not fit."""
    text = visible(text)
    if len(text) <= width:
        return text
    kept = text[: width - 2]
    end = max(kept.rfind(", "), kept.rfind("; ")) + 1
    if end <= width // 2:
        end = kept.rfind(" ")
    return (kept[:end] if end > width // 2 else kept).rstrip(" ") + " …"


def unbroken(text: str) -> str:
    """Return a text in which no line can end between a number and its unit."""
    return _UNIT.sub("\xa0", text)


def wrapped(text: str, indent: int = 0, width: int = 120, most: int | None = 2) -> list[str]:
    """Return a text as at most so many lines, all but the first indented; what was cut off is marked."""
    lines = textwrap.wrap(
        unbroken(visible(text)), width, subsequent_indent=" " * indent, max_lines=most,
        placeholder=" …", break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace("\xa0", " ") for line in lines]
