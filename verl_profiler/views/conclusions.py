"""What an engine or a family of events that was off leaves unknown, as data of the report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.events.json_values import is_list
from verl_profiler.events.vocabulary import FAMILIES

__all__ = ["engine_notes", "families_off"]

Rows = Sequence[Mapping[str, Any]]


def families_off(settings: Mapping[str, Any]) -> list[str]:
    """Return which families of events a run did not record, in a sentence; empty if it had all.

    Args:
        settings: `profiler.events` of the run.
    """
    excluded = settings.get("exclude")
    off = [each for each in FAMILIES if is_list(excluded) and each in excluded]
    return [f"Not recorded: profiler.events.exclude had {', '.join(off)}."] if off else []


def engine_notes(
    found: Mapping[str, Rows], recorded: Mapping[str, int], settings: Mapping[str, Any]
) -> list[str]:
    """Return which parts of engine calls are unknown, and how to record them.

    Args:
        found: The rows of the analyses, by name.
        recorded: Number of events by name.
        settings: `profiler.events` of the run.
    """
    times = found["engine_times"]
    if not times:
        return []
    if not recorded.get("engine_request"):
        return ["The engine servers were not recorded: engine calls have no components."]
    absent = [
        name
        for name in ("queue", "prefill", "decode")
        if all(r[f"{name}_s"] is None for r in times)
    ]
    if not absent:
        return []
    listed = f"{', '.join(absent[:-1])} and {absent[-1]}" if len(absent) > 1 else absent[0]
    text = f"The engine did not report {listed} times"
    if settings.get("engine_timing") is False:
        return [f"{text}; set profiler.events.engine_timing=true."]
    return [f"{text}."]
