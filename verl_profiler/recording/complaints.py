"""What the profiler prints in a training process: each kind of problem once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

__all__ = ["Complaints", "say"]

# Printed of one complaint, in characters; an error may quote a path of thousands.
_LONGEST = 1000


def say(text: str) -> None:
    """Print one line to stderr, marked as ours."""
    with contextlib.suppress(Exception):
        # `print` writes the line's end by itself: lines of processes that share a terminal would mix.
        sys.stderr.write(f"[verl-profiler] {text}\n")
        sys.stderr.flush()


class Complaints:
    """Prints the first problem of each kind.

    Attributes:
        name: The process's name, once it is known.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._made: set[str] = set()

    def make(self, kind: str, problem: str) -> None:
        """Print a problem unless one of its kind was printed before."""
        if kind in self._made:
            return
        self._made.add(kind)
        if len(problem) > _LONGEST:
            half = _LONGEST // 2
            problem = f"{problem[:half]} … {problem[-half:]}"
        say(f"WARNING {self.name or 'process'}: {problem}")

    def forget(self, kinds: Iterable[str]) -> None:
        """Print problems of these kinds again: what caused them is over."""
        self._made.difference_update(kinds)
