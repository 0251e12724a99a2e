"""Type guards for parsed JSON: objects have text keys, values may be anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

__all__ = ["is_list", "is_mapping", "is_object"]


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a parsed value is an object."""
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return whether a value has keys, of any type."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return whether a parsed value is a list."""
    return isinstance(value, list)
