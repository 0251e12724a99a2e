"""Where the time of a verl RL step goes: requests, turns, tools, workers and transfers.

Importing this package has no effects.  `+profiler=multiturn` on the main_ppo command records a
run; in your own tools and reward functions, `span` and `log_manager.log` add events to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_profiler.launch.prepare import prepare
    from verl_profiler.recording.api import log_manager, span, start, stop

    __version__: str

__all__ = ["__version__", "log_manager", "prepare", "span", "start", "stop"]

_HOMES = {
    "log_manager": "recording.api",
    "prepare": "launch.prepare",
    "span": "recording.api",
    "start": "recording.api",
    "stop": "recording.api",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        return version("verl-profiler")
    if name in _HOMES:
        return getattr(importlib.import_module(f"verl_profiler.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
