"""Rollouters of fully asynchronous runs: what keeps one from making the samples that the trainer waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_profiler.events.open_files import NO_PROGRESS
from verl_profiler.live.open_processes import Process, most_frequent_stack, place, since
from verl_profiler.units import seconds

__all__ = ["Standstill", "standstill", "waits_for_queue"]

# The module of verl's queue between rollouter and trainer, in the name of a function.
_QUEUE = ".message_queue:"


@dataclass
class Standstill:
    """A rollouter that makes no samples.

    Args:
        process: It.
        what: What is open: an event loop that is blocked, or the wait for a sample.
        open_s: For how long.
        at: The function that it stands in; None where that is not on record.
        culprit: A sentence on it.
        confidence: `high` or `medium`.
        stack: The functions that it is in, the innermost last.
    """

    process: str
    what: str
    open_s: float
    at: str | None
    culprit: str
    confidence: str
    stack: list[str] = field(default_factory=list[str])


def waits_for_queue(row: Mapping[str, Any]) -> bool:
    """Whether a call of the trainer waits for a sample of the queue."""
    return _QUEUE in str(row.get("at"))


def standstill(processes: Sequence[Process], last_s: float) -> Standstill | None:
    """Return what keeps a rollouter from making samples, the longest; None if nothing does.

    Args:
        processes: All of the run.
        last_s: The run's last sign of life, or the present; seconds since 1970.
    """
    members = [each for each in processes if each.role == "rollouter"]
    blocked = [(each, row) for each in members for row in each.rows("blocked_loops")]
    if blocked:
        each, row = min(blocked, key=lambda pair: since(pair[1], last_s))
        at = place(row)
        return Standstill(
            each.name,
            "blocked event loop",
            last_s - since(row, last_s),
            at,
            f"{at} blocks the event loop of {each.name}, which makes the samples",
            "high",
            row.get("stack") or [],
        )
    idle = [
        (each, row)
        for each in members
        for row in each.rows("phases")
        if row.get("event") == NO_PROGRESS
        and last_s - since(row, last_s) >= (each.open.get("after_s") or 0.0)
    ]
    if not idle:
        return None
    each, row = min(idle, key=lambda pair: since(pair[1], last_s))
    open_s = last_s - since(row, last_s)
    flying = f"{row['in_flight']} in flight" if row.get("in_flight") else ""
    stack = most_frequent_stack(each.evidence)
    at = stack[-1] if stack else None
    culprit = (
        f"{each.name}, which has neither dispatched nor finished a sample for {seconds(open_s)}"
    )
    culprit += f", with {flying}" if flying else ""
    culprit += f"; most of its tasks are in {at}" if at else ""
    what = f"no sample, {flying}" if flying else "no sample"
    confidence = "high" if flying and at else "medium"
    return Standstill(each.name, what, open_s, at, culprit, confidence, stack)
