"""Lines of TransferQueue calls put together: which lines belong to the same call.

Lines with a call's id are of that call, in whatever order they come.  Those without one are paired by
their times: the end of a stage has its begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_profiler.reading.formats.console_tq import Seen
from verl_profiler.reading.tables.schemas import TQ_STAGES

__all__ = ["ENDS", "ORDER", "Lines", "Span", "micros", "paired"]

# The lines of a call and of a transfer, in the order in which they are written.
ORDER = (
    "FUNCTION_START",
    *(f"{stage.upper()}_{end}" for stage in TQ_STAGES for end in ("START", "END")),
    "FUNCTION_END",
)
ENDS = ("START", "END")
PLACES = {name: place for order in (ORDER, ENDS) for place, name in enumerate(order)}
# Calls without an end and without an id of their own: more than this are not kept open.
_OPEN = 512
_FAR = 1 << 60
# Each with its stage.
Lines = list[tuple[str, Seen]]


@dataclass(slots=True)
class Span:
    """A call or transfer while its lines come in."""

    first: Seen
    stage: str = ""
    last: Seen | None = None
    at_us: int | None = None
    # Times of the process's clock by stage, and the stages that ended: name, that line, length.
    marks: dict[str, int | None] = field(default_factory=dict[str, int | None])
    ended: list[tuple[str, Seen, int]] = field(default_factory=list[tuple[str, Seen, int]])
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    more: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, stage: str, seen: Seen) -> None:
        """Take one of its lines."""
        # Lines may be late: the last one is the one that a call writes last.
        if self.last is None or PLACES[stage] >= PLACES[self.stage]:
            self.stage, self.last = stage, seen
        self.at_us = seen.at_us if seen.at_us is not None else self.at_us
        self.marks[stage] = seen.at_us
        if "duration" in seen.fields:
            self.ended.append(
                (stage.removesuffix("_END").lower(), seen, micros(seen.fields["duration"]))
            )
        self.fields.update(seen.fields)
        self.more.update(seen.more)

    def spent_us(self, stage: str) -> int | None:
        """Return how long a stage took, all times together that it was entered."""
        lengths = [length for name, _, length in self.ended if name == stage]
        return sum(lengths) if lengths else None


def micros(seconds: float) -> int:
    """Return whole microseconds."""
    return round(seconds * 1e6)


def paired(found: Lines, order: Sequence[str]) -> list[Span]:
    """Put lines that share process, function and trace id together to calls."""
    if all(seen.at_us is not None for _, seen in found):
        found = sorted(found, key=lambda line: (line[1].at_us, PLACES[line[0]]))
    spans: list[Span] = []
    waiting: list[Span] = []
    for stage, seen in found:
        span = None if stage == order[0] else _matching(waiting, order, stage, seen)
        if span is None:
            span = Span(seen)
            spans.append(span)
            waiting.append(span)
            if len(waiting) > _OPEN:
                del waiting[0]
        span.add(stage, seen)
        if stage == order[-1]:
            waiting.remove(span)
    return spans


def _matching(waiting: list[Span], order: Sequence[str], stage: str, seen: Seen) -> Span | None:
    """Return the call that a line belongs to: by times where there are any, else the oldest.

    Several calls of one function may be under way in one process, with the same trace id.
    """
    place = PLACES[stage]
    at_us = seen.at_us
    duration = seen.fields.get("total_duration", seen.fields.get("duration"))
    began = order[0] if stage == order[-1] else stage.replace("_END", "_START")

    def distance(span: Span) -> tuple[int, int]:
        before = place - PLACES[span.stage]
        if at_us is None:
            return before, 0
        if duration is None:
            apart = abs(at_us - span.at_us) if span.at_us is not None else _FAR
            return (0 if before == 1 else 1), apart
        began_us = span.marks.get(began)
        if began_us is None:
            return _FAR, before
        return abs(at_us - round(duration * 1e6) - began_us), before

    earlier = [span for span in waiting if PLACES[span.stage] < place]
    return min(earlier, key=distance, default=None)
