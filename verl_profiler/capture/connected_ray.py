"""Ray's calls without the habit of starting a cluster where none is connected.

Ray 2.60 wraps what is public in a call of `ray.init`; beneath the wrapper a call fails instead.
"""

from __future__ import annotations

from typing import Any

__all__ = ["as_connected"]


def as_connected(function: Any) -> Any:
    """Return a function of Ray that fails, instead of connecting anew, after `ray.shutdown`."""
    return getattr(function, "__wrapped__", function)
