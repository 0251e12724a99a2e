"""What the event lines of a step add up to, before `keep_steps` deletes them (`retention`)."""

from __future__ import annotations

from typing import Any

import msgspec

from verl_profiler.events.json_values import is_object
from verl_profiler.events.vocabulary import EVENTS

__all__ = ["Line", "Totals", "decode_line", "is_timer"]

# The trainer's timers are phases; these are no timers.
_NO_TIMERS = frozenset({"transfer_queue", "event_loop", "memory", "devices", "profiler"})


class Line(msgspec.Struct):
    """An event line, as far as totals need it."""

    timestamp: str = ""
    event: str = ""
    duration_sec: float | None = None
    extra: Any = None
    step: int | None = None


decode_line = msgspec.json.Decoder(Line).decode


def is_timer(line: Line) -> bool:
    """Return whether a line of the trainer's is one of its timers, or verl's metrics."""
    if line.event == "metrics":
        return True
    event = EVENTS.get(line.event)
    return line.duration_sec is not None and (event is None or event.family not in _NO_TIMERS)


class Totals:
    """What the lines of one step add up to."""

    def __init__(self) -> None:
        self.at = ""
        self._lines = 0
        self._events: dict[str, list[int]] = {}
        self._counts: dict[str, int] = {}
        # Tokens of generate calls by request; requests that ended, which may come before these.
        self._called: dict[Any, int] = {}
        self._ended: list[dict[str, Any]] = []

    def add(self, line: Line) -> None:
        """Add a line; sampled details count as often as they stand for."""
        self.at = max(self.at, line.timestamp)
        self._lines += 1
        extra: dict[str, Any] = line.extra if is_object(line.extra) else {}
        totals = self._events.setdefault(line.event, [0, 0])
        weight = _whole(extra, "sampled") or 1
        totals[0] += weight
        totals[1] += weight * round((line.duration_sec or 0) * 1e6)
        if extra.get("validate") is True:
            self._count("validation", int(line.event == "request"))
        elif line.event == "request":
            self._ended.append(extra)
        elif line.event == "request_start":
            self._count("unfinished", 1)
        elif line.event == "engine_call":
            key = extra.get("request_id")
            self._called[key] = self._called.get(key, 0) + (_whole(extra, "response_tokens") or 0)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the `step_pruned` line; counts that are 0 are left out."""
        for extra in self._ended:
            self._add_request(extra)
        fields: dict[str, Any] = {"lines": self._lines}
        requests = {name: count for name, count in self._counts.items() if count > 0}
        if requests:
            fields["requests"] = requests
        totals = sorted(self._events.items())
        fields["totals"] = {name: [count, us / 1e6] for name, (count, us) in totals}
        return fields

    def _add_request(self, extra: dict[str, Any]) -> None:
        self._count("finished", 1)
        self._count("unfinished", -1)
        self._count("failed", int("status" in extra))
        for name in ("turns", "prompt_tokens", "response_tokens"):
            self._count(name, _whole(extra, name) or 0)
        # As the reader has them, where a line lacks them.
        generated = _whole(extra, "generated_tokens")
        if generated is None:
            generated = self._called.get(extra.get("request_id"))
        if generated is None:
            return
        self._count("generated_tokens", generated)
        tools = _whole(extra, "tool_tokens")
        if tools is None:
            tools = max((_whole(extra, "response_tokens") or 0) - generated, 0)
        self._count("tool_tokens", tools)

    def _count(self, name: str, more: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + more


def _whole(extra: dict[str, Any], name: str) -> int | None:
    value = extra.get(name)
    return value if type(value) is int else None
