"""What is open for long: the folder and format of its files, and when a phase is taken to be stuck.

Both halves use it: the recorder announces a stuck phase, and the reader explains it.
"""

from __future__ import annotations

__all__ = ["EVIDENCE_FOLDER", "FOLDER", "FORMAT_VERSION", "NO_PROGRESS", "is_over", "stuck_after_s"]

FOLDER = "open"
# In it a folder 1, 2, 3 for each hang; the trainer's process makes it, and all write into it.
EVIDENCE_FOLDER = "evidence"
FORMAT_VERSION = 1

# What stands for a phase in a process that has none: a rollouter that dispatches and finishes no sample.
NO_PROGRESS = "no_progress"

_USUAL, _UNKNOWN = 6, 10


def stuck_after_s(usual_s: float | None, after_s: float) -> float:
    """Return from how many seconds on an open phase is stuck.

    Args:
        usual_s: The median of its last lengths; None where it is not known, as in the first steps, of
            checkpoints and of compilation.
        after_s: `profiler.stuck.after`.
    """
    return _UNKNOWN * after_s if usual_s is None else max(_USUAL * usual_s, after_s)


def is_over(event: str, open_s: float, usual_s: float | None, after_s: float) -> bool:
    """Whether an open phase is stuck.

    Args:
        event: Its name; a rollouter's `NO_PROGRESS` has the longest that it has ever been for its usual
            length, and is never stuck before a phase whose length is not known.
        open_s: How long it is open.
        usual_s: The median of its last lengths.
        after_s: `profiler.stuck.after`.
    """
    limit_s = stuck_after_s(usual_s, after_s)
    if event == NO_PROGRESS:
        limit_s = max(limit_s, stuck_after_s(None, after_s))
    return open_s > limit_s
