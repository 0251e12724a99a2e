"""Call Ray without starting a cluster where none is connected.

Ray 2.60 wraps its public functions in a call of `ray.init`; the wrapped function fails instead.
"""

from __future__ import annotations

from typing import Any

__all__ = ["as_connected"]


def as_connected(function: Any) -> Any:
    """Return a function of Ray that fails after `ray.shutdown` instead of connecting again."""
    return getattr(function, "__wrapped__", function)
