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

from verl_profiler.cli.terminal import control
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import visible

__all__ = ["follow"]

# The shortest time between two readings; each waits so many times the CPU time of the last one.
_INTERVAL_S = 2.0
_REST = 5
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
    followed = _Followed(path, once=once)
    if once:
        followed.read()
        print("\n".join(followed.lines()))
        return 0 if followed.text else 1
    try:
        control(_HIDE_CURSOR + _CLEAR)
        # The screen has no place for lines on progress.
        with watched(None):
            _refresh(followed)
    finally:
        control(f"{_SHOW_CURSOR}\n")
    return 0


class _Followed:
    """What was read of a run last.

    Attributes:
        heads: What it did then, and what is wrong with it; empty while there is none.
        text: Its summary; empty while there is none.
        has_ended: The trainer had ended.
    """

    def __init__(self, path: Path, *, once: bool) -> None:
        self._path, self._once = path, once
        # The files of the cache that the next reading replaces.
        self._made: set[str] = set()
        self._problem = "reading …"
        self.heads: list[str] = []
        self.text = ""
        self.has_ended = False

    def read(self) -> None:
        """Read the run.

        Raises:
            ReadingError: It cannot be read.
            OSError: Likewise.
        """
        from verl_profiler.cli.summary import write_summary
        from verl_profiler.live.open_processes import ProcessFiles
        from verl_profiler.live.present import present
        from verl_profiler.reading.discovery import run_directory
        from verl_profiler.reading.reader import load

        stream = io.StringIO()
        with load(self._path) as opened:
            try:
                now = present(ProcessFiles(run_directory(self._path, self._path)), opened.tables)
                empty = write_summary(opened, None, stream, as_json=False)
                self._problem = "; ".join(["nothing to report yet", *opened.problems]) * empty
            except BaseException:
                self._made |= opened.supersede(set())
                raise
            self._made = opened.supersede(self._made)
        read = "" if self._once else f"; read at {time.strftime('%H:%M:%S')}"
        self.heads = [now.line(time.time()) + read, now.alarm or ""]
        self.text, self.has_ended = stream.getvalue(), now.state == "ended"

    def try_to_read(self) -> None:
        """Read the run; while it does not exist yet, or changes too quickly, keep what was read before."""
        import duckdb

        try:
            self.read()
        except (ReadingError, OSError, duckdb.IOException) as error:
            what = "cannot be read now" if self.heads else "waiting for the run"
            self._problem = f"{what}: {error}".partition("\n")[0]
            self.has_ended = False

    def lines(self) -> list[str]:
        """Return the screen."""
        lines = [visible(line) for line in (*self.heads, self._problem) if line]
        return [*lines, "", *self.text.splitlines()] if self.text else lines


def _refresh(followed: _Followed) -> None:
    _draw(followed)
    while True:
        before, begin_s = followed.text, time.process_time()
        followed.try_to_read()
        spent_s = time.process_time() - begin_s
        _draw(followed)
        # What the last processes wrote is there when nothing changes any more.
        if followed.has_ended and followed.text == before:
            return
        time.sleep(max(_INTERVAL_S, _REST * spent_s))


def _draw(followed: _Followed) -> None:
    columns, rows = shutil.get_terminal_size((80, 24))
    # The last line stays empty, so that the terminal never scrolls.
    lines = [line[:columns] for line in followed.lines()[: rows - 1]]
    control(_HOME + f"{_END_OF_LINE}\r\n".join(lines) + _END_OF_LINE + _BELOW)
