"""Follow a running training in the terminal.

    verl-profiler watch logs/my-run
    verl-profiler watch logs/my-run --once

Reads what is appended to the run's files, each byte once, and writes nothing.  Works over ssh and with
80 columns by 24 lines.  q or Ctrl-C stops it without affecting the run.  --once prints one screen, also
for a finished run; so does output to a file or pipe.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.terminal import control
from verl_profiler.errors import ReadingError

if TYPE_CHECKING:
    from verl_profiler.live.follow import Run
    from verl_profiler.live.state import Live

__all__ = ["add_arguments", "run"]

_HEADERS_EVERY_S = 5.0
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_CLEAR, _HOME, _END_OF_LINE, _BELOW = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("run_directory", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--once", action="store_true", help="print one screen and exit")
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=float,
        default=1.0,
        help="refresh interval (default: 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Show the run until interrupted; return 0, or 1 if there is nothing to show.

    Raises:
        ReadingError: The path or the arguments cannot be used (exit code 2).
    """
    from verl_profiler.live.follow import Run
    from verl_profiler.live.state import Live
    from verl_profiler.reading.discovery import run_directory

    if not args.interval > 0:
        raise ReadingError(
            f"--interval {args.interval:g} is not a positive number of seconds.\nFor example --interval 2",
            "option-value",
        )
    if not os.path.isdir(args.run_directory):
        raise ReadingError(
            f"{args.run_directory} is not a directory; watch needs the run directory itself.\n"
            "For example logs/my-run",
            "no-such-run",
        )
    followed = Run(run_directory(args.run_directory, args.run_directory))
    live = Live()
    if args.once or not sys.stdout.isatty():
        _read(followed, live)
        while followed.behind_bytes:
            _read(followed, live)
        print("\n".join(_lines(followed, live, followed.headers())))
        return 0 if live.steps else 1
    try:
        control(_HIDE_CURSOR + _CLEAR)
        with _keys() as quits:
            _follow(followed, live, args.interval, quits)
    except KeyboardInterrupt:
        pass
    finally:
        control(f"{_SHOW_CURSOR}\n")
    return 0


@contextlib.contextmanager
def _keys() -> Generator[Callable[[float], bool], None, None]:
    """Give a function that waits some seconds and returns True at once when q is pressed."""
    if not sys.stdin.isatty():

        def sleep(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield sleep
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while select.select([keyboard], [], [], max(until - time.monotonic(), 0))[0]:
            typed = os.read(keyboard, 64)
            if not typed or b"q" in typed:
                return True
        return False

    try:
        # Keys arrive one by one and are not echoed; Ctrl-C stays a signal.
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _follow(followed: Run, live: Live, interval_s: float, quits: Callable[[float], bool]) -> None:
    headers, read_s = followed.headers(), time.monotonic()
    while True:
        _read(followed, live)
        if time.monotonic() - read_s > _HEADERS_EVERY_S:
            headers, read_s = followed.headers(), time.monotonic()
        lines = _lines(followed, live, headers)
        control(_HOME + f"{_END_OF_LINE}\r\n".join(lines) + _END_OF_LINE + _BELOW)
        if quits(0.0 if followed.behind_bytes else interval_s):
            return


def _read(followed: Run, live: Live) -> None:
    for name, step, line in followed.poll():
        live.take(name, step, line)


def _lines(followed: Run, live: Live, headers: Mapping[str, dict[str, Any]]) -> list[str]:
    from verl_profiler.events.files import cleaned_text
    from verl_profiler.live.screen import frame
    from verl_profiler.live.stuck_lines import pointer
    from verl_profiler.units import size

    columns, rows = shutil.get_terminal_size((80, 24))
    stuck = pointer(followed, brief=True)
    problems = [] if stuck is None else [stuck]
    if followed.behind_bytes:
        problems.append(f"reading existing events: {size(followed.behind_bytes)} left")
    if followed.unreadable:
        problems.append(f"{followed.unreadable} lines cannot be read")
    problems += followed.damaged
    return frame(
        live,
        followed.launch(),
        headers,
        title=cleaned_text(followed.directory.absolute().name),
        now_s=time.time(),
        problems=problems,
        width=columns,
        # The last line stays empty, so that the terminal never scrolls.
        height=rows - 1,
    )
