"""Type guards for parsed JSON: objects have text keys, values may be anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a parsed value is an object."""
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return whether a value has keys, of any type."""
    return isinstance(value, Mapping)


def mapping_or_empty(value: object) -> Mapping[Any, Any]:
    """Return a value that has keys as it is, and an empty mapping for any other."""
    return value if is_mapping(value) else {}


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return whether a parsed value is a list."""
    return isinstance(value, list)


def shallow(value: Any, levels: int = 16) -> Any:
    """Return a parsed value in which `…` stands for what is nested deeper than so many levels."""
    if is_object(value):
        return {key: shallow(each, levels - 1) for key, each in value.items()} if levels else "…"
    if is_list(value):
        return [shallow(each, levels - 1) for each in value] if levels else "…"
    return value


def is_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    """Return whether a value is a tuple."""
    return isinstance(value, tuple)
