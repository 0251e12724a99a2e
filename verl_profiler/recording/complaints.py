"""What the profiler prints in a training process: each kind of problem once."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterable

# A path of the user's may hold what a terminal obeys.
_UNSEEN = (
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)
# Printed of one complaint, in characters; an error may quote a path of thousands.
_LONGEST = 1000


@functools.cache
def _unseen() -> re.Pattern[str]:
    return re.compile(_UNSEEN)


def announce(text: str) -> None:
    """Print to stderr, marked as ours, without passwords of URLs; control characters are escaped."""
    with contextlib.suppress(Exception):
        # Its patterns take a while to compile, and most processes have nothing to print.
        from verl_profiler.events.redaction import without_url_secrets

        text = _unseen().sub(lambda match: repr(match[0])[1:-1], without_url_secrets(text))
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
        problem = problem.replace("\n", "\\n")
        if len(problem) > _LONGEST:
            half = _LONGEST // 2
            problem = f"{problem[:half]} … {problem[-half:]}"
        announce(f"WARNING {self.name or 'process'}: {problem}")

    def forget(self, kinds: Iterable[str]) -> None:
        """Print problems of these kinds again: what caused them is over."""
        self._made.difference_update(kinds)
