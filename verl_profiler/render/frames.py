"""Rows as the page gets them: names of columns once, short texts, numbers without noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.events.json_values import is_list, is_tuple

_TEXT = 240


def frame(rows: Sequence[Mapping[str, Any]], drop: Sequence[str] = ()) -> dict[str, Any]:
    """Write rows as columns' names and lists of values, numbers with 6 significant digits."""
    if not rows:
        return {"columns": [], "rows": []}
    columns = [column for column in rows[0] if column not in drop]
    return {
        "columns": columns,
        "rows": [[_value(row.get(column)) for column in columns] for row in rows],
    }


def short_text(text: str, limit: int = _TEXT) -> str:
    """Cut a long text and say how long it was."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def rounded(value: Any) -> Any:
    """Return a value; a float with 6 significant digits, or None if it is not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return short_text(value)
    if is_list(value) or is_tuple(value):
        return [_value(each) for each in value]
    return rounded(value)
