"""`summary --follow`: what `summary` prints, below a line with the present step and phase, again and again.

Reads the run again every few seconds: less often if reading takes long, so that it uses at most 20 % of
a core.  Waits for a run that does not exist yet, and ends with the run.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler.cli.terminal import control
from verl_profiler.errors import ReadingError

if TYPE_CHECKING:
    from verl_profiler.live.present import Present

__all__ = ["follow"]

# The shortest time between two readings; each waits so many times the CPU time of the last one.
_INTERVAL_S = 2.0
_REST = 5
_TICK_S = 1.0
# A reading that is older has its age on the screen.
_OLD_S = 5.0
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CLEAR, _HOME, _END_OF_LINE, _BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"


def follow(path: Path) -> int:
    """Show the run until it ends, or once where the output is no terminal.

    Returns:
        0, or 1 if there is nothing to show.

    Raises:
        ReadingError: The path cannot be used (exit code 2).
    """
    from verl_profiler.reading.progress import watched
    from verl_profiler.reading.remote import is_downloaded

    once = not sys.stdout.isatty()
    if (not os.path.isdir(path) and (once or os.path.lexists(path))) or is_downloaded(path):
        raise ReadingError(
            f"{path} is not a directory that a run writes; --follow needs the run directory itself.\n"
            "For example logs/my-run",
            "no-such-run",
        )
    reading = _Reading(path)
    if once:
        reading.read()
        print("\n".join(reading.lines()))
        return 0 if reading.text else 1
    try:
        control(_HIDE_CURSOR + _CLEAR)
        # The screen has no place for lines on progress.
        with watched(None):
            _refresh(reading)
    finally:
        control(f"{_SHOW_CURSOR}\n")
    return 0


class _Reading:
    """What was read of a run last.

    Attributes:
        text: Its summary; empty while there is none.
        present: What it did then.
        problem: Why the last reading failed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # The files of the cache that the next reading replaces.
        self._made: set[str] = set()
        self._read_s = time.time()
        self.text = ""
        self.present: Present | None = None
        self.problem: str | None = "reading …"

    @property
    def has_ended(self) -> bool:
        """Whether the trainer had ended."""
        ended = self.present is not None and self.present.state == "ended"
        return ended and self.problem is None

    def read(self) -> None:
        """Read the run.

        Raises:
            ReadingError: It cannot be read.
            OSError: Likewise.
        """
        from verl_profiler.cli.summary import write_summary
        from verl_profiler.live.present import present
        from verl_profiler.live.process_files import ProcessFiles
        from verl_profiler.reading.discovery import run_directory
        from verl_profiler.reading.reader import load

        stream = io.StringIO()
        with load(self._path) as opened:
            try:
                files = ProcessFiles(run_directory(self._path, self._path))
                shown = present(files, opened.tables)
                if write_summary(opened, None, stream, as_json=False):
                    self.problem = "; ".join(["nothing to report yet", *opened.problems])
                else:
                    self.problem = None
            except BaseException:
                self._made |= opened.supersede(set())
                raise
            self._made = opened.supersede(self._made)
        self.present, self.text, self._read_s = shown, stream.getvalue(), time.time()

    def try_to_read(self) -> None:
        """Read the run; while it does not exist yet, or changes too quickly, keep what was read before."""
        import duckdb

        try:
            self.read()
        except (ReadingError, OSError, duckdb.IOException) as error:
            what = "waiting for the run" if self.present is None else "cannot be read now"
            self.problem = f"{what}: {error}".partition("\n")[0]

    def lines(self) -> list[str]:
        """Return the screen."""
        from verl_profiler.render.visible import visible

        heads: list[str] = []
        if self.present is not None:
            age_s = time.time() - self._read_s
            old = f"; read {age_s:.0f} s ago" if age_s > _OLD_S else ""
            heads = [self.present.line(self._read_s) + old, self.present.alarm or ""]
        lines = [visible(line) for line in (*heads, self.problem) if line]
        return [*lines, "", *self.text.splitlines()] if self.text else lines


def _refresh(reading: _Reading) -> None:
    _draw(reading)
    while True:
        before, begin_s = reading.text, time.process_time()
        reading.try_to_read()
        spent_s = time.process_time() - begin_s
        _draw(reading)
        if reading.has_ended and reading.text == before:
            return
        until_s = time.monotonic() + max(_INTERVAL_S, _REST * spent_s)
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _TICK_S))
            _draw(reading)


def _draw(reading: _Reading) -> None:
    columns, rows = shutil.get_terminal_size((80, 24))
    # The last line stays empty, so that the terminal never scrolls.
    lines = [line[:columns] for line in reading.lines()[: rows - 1]]
    control(_HOME + f"{_END_OF_LINE}\r\n".join(lines) + _END_OF_LINE + _BELOW)
