"""What is open for long: the folder and format of its files, and when a phase is taken to be stuck.

Both halves use it: the recorder announces a stuck phase, and the reader explains it.
"""

from __future__ import annotations

FOLDER = "open"
# In it a folder 1, 2, 3 for each hang; the trainer's process makes it, and all write into it.
EVIDENCE_FOLDER = "evidence"
FORMAT_VERSION = 1

# What stands for a phase in a process that has none: a rollouter that dispatches and finishes no sample.
# Both its usual and its longest length are the longest that it has ever been.
NO_PROGRESS = "no_progress"

_USUAL, _LONGEST, _UNKNOWN = 6, 2, 10


def stuck_after_s(usual_s: float | None, after_s: float, longest_s: float | None = None) -> float:
    """Return from how many seconds on an open phase is stuck.

    Args:
        usual_s: The median of its last lengths; None where it is not known, as in the first steps, of
            checkpoints and of compilation.
        after_s: `profiler.stuck.after`.
        longest_s: Of a wait for what others make in advance, which is usually over at once: how long it
            took at times. None for all others.
    """
    if usual_s is None:
        return _UNKNOWN * after_s
    if longest_s is None:
        return max(_USUAL * usual_s, after_s)
    return max(_USUAL * usual_s, _LONGEST * longest_s, _UNKNOWN * after_s)
