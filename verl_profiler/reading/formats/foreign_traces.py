"""Traces of other profilers, as a timeline takes them: spans, and where they were taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from verl_profiler.errors import ReadingError


@dataclass
class ForeignSpan:
    """A span of another profiler; an instant where begin and end are the same and `instant`.

    Args:
        fields: A JSON object.
    """

    begin_ns: int
    end_ns: int
    name: str
    category: str
    fields: str = "{}"
    instant: bool = False


@dataclass
class ForeignTrace:
    """A trace of another profiler.

    Args:
        title: What its folder is called.
        host: Where it was taken; None where the file does not state it.
        pids: The processes in it.
        threads: Spans by the name of their thread or stream.
        left_out: How many of its events were no events, or of impossible times.
    """

    title: str
    host: str | None = None
    pids: set[int] = field(default_factory=set[int])
    threads: dict[str, list[ForeignSpan]] = field(default_factory=dict[str, list[ForeignSpan]])
    left_out: int = 0


def unusable(path: Path, why: str) -> ReadingError:
    """Return the error of a file that is no trace, or cannot be placed in time."""
    return ReadingError(
        f"{path} {why}.\nGive a trace that torch.profiler exported, or what "
        "`nsys export --type sqlite` wrote",
        "bad-trace",
    )
