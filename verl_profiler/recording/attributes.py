"""Keep what a caller puts into an event apart from the fields to which readers give a meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.events.fields import FIELDS, IDENTITY
from verl_profiler.recording.values import plain

__all__ = ["apart"]

_PREFIX = "user_"
# Of any event; `uid` selects requests in exports.
_RESERVED = frozenset({*IDENTITY, "uid"})
# The fields that readers hold as numbers or as text, whatever the event; others they leave as they are.
_COLUMNS = {
    name: str if field.type == "string" else float for name, field in FIELDS.items() if field.column
}
_MEANINGFUL = frozenset({*_RESERVED, *_COLUMNS})
# Readers take what is larger for damage.
_NUMBER_LIMIT = 1 << 53


def apart(fields: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's attributes, those that readers would misunderstand under `user_<name>`.

    These are reserved names, and columns of readers with a value of another kind.

    Args:
        fields: The caller's; returned as they are where no name is one of the profiler's.
        own: Reserved names that are what they are called where they have these values: the identity of the
            request that the event belongs to.
    """
    if _MEANINGFUL.isdisjoint(fields):
        return fields
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _RESERVED:
            exact = value if type(value) in (str, int) else plain(value)
            misread = type(exact) not in (str, int) or own.get(name) != exact
        else:
            misread = name in _COLUMNS and not _fits(value, _COLUMNS[name])
        while misread and (name in fields or name in kept):
            name = f"{_PREFIX}{name}"  # noqa: PLW2901
        kept[name] = value
    return kept


def _fits(value: Any, kind: type) -> bool:
    if type(value) not in (str, int, float):
        value = plain(value)
    if kind is str:
        return value is None or type(value) is str
    return value is None or (type(value) in (int, float) and abs(value) <= _NUMBER_LIMIT)
