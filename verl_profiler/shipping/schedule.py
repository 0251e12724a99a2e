"""When the files of a run are shipped or uploaded: after so many seconds or steps."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from verl_profiler.events.vocabulary import step_of_folder

__all__ = ["Schedule", "newest_step"]

_LOOK_S = 5.0


def newest_step(run: Path) -> int:
    """Return the newest step that has a folder in a run directory; 0 where there is none."""
    newest = 0
    with contextlib.suppress(OSError), os.scandir(run) as entries:
        for entry in entries:
            newest = max(newest, step_of_folder(entry.name) or 0)
    return newest


class Schedule:
    """Decides when the next shipment is due.

    Args:
        run: The run directory.
        every_s: The longest interval between two.
        every_steps: A shipment is due earlier where so many steps have begun since the last one; None
            for no such limit.
    """

    def __init__(self, run: Path, every_s: float, every_steps: int | None = None) -> None:
        self._run = run
        self._every_s = every_s
        self._every_steps = every_steps
        self._last_s = time.monotonic()
        self._last_step = newest_step(run)

    @property
    def look_s(self) -> float:
        """How long to wait between two calls of `is_due`."""
        return self._every_s if self._every_steps is None else min(_LOOK_S, self._every_s)

    def is_due(self) -> bool:
        """Whether to ship now; the next interval begins then."""
        now_s = time.monotonic()
        # Timers may be early by a little.
        due = now_s - self._last_s > 0.99 * self._every_s
        if self._every_steps is not None:
            newest = newest_step(self._run)
            due = due or newest >= self._last_step + self._every_steps
            if due:
                self._last_step = newest
        if due:
            self._last_s = now_s
        return due
