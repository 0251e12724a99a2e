"""Values of the host's as an event's fields: plain, short, and of no object that the host may free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LONGEST = 200
"""Characters of a text that are kept: names come from a model's output, ids from a user's code."""

# `type`, as checkers understand it.
_type_of: Callable[[Any], type[Any]] = type
_INTEGERS = range(-(2**63), 2**63)


def plain(value: Any) -> Any:
    """Return a value as a field of an event.

    Args:
        value: Anything; a number or text as it is, of all else what `str` returns.

    Returns:
        A plain number of at most 64 bits, a plain text of at most `LONGEST` characters, or None.
    """
    kind = _type_of(value)
    if kind is str:
        return value if len(value) <= LONGEST else _cut(value)
    if kind is float or kind is bool or value is None:
        return value
    if kind is int:
        # `str` refuses integers of more than 4,300 digits.
        return value if value in _INTEGERS else _cut(hex(value))
    if isinstance(value, int):
        return plain(int(value))
    if isinstance(value, float):
        return float(value)
    return _cut(str.__str__(value if isinstance(value, str) else str(value)))


def _cut(text: str) -> str:
    # A slice of all is the text itself, which may be of a subclass.
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def number(value: Any) -> float | None:
    """Return a number, or an array of one, as a plain one; None for anything else."""
    if not isinstance(value, (int, float)):
        if getattr(value, "size", 0) != 1:
            return None
        value = value.item()
    if isinstance(value, int) and value not in _INTEGERS:
        try:
            value = float(value)
        except OverflowError:
            return None
    found = plain(value)
    return found if isinstance(found, (int, float)) else None


def scalar(value: Any) -> int | str:
    """Return a sample's index or step as a plain int or str, whatever holds it."""
    value = getattr(value, "data", value) if type(value).__name__ == "NonTensorData" else value
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 1) == 1:
        value = item()
    found = plain(value)
    return found if isinstance(found, (int, str)) else str(found)
