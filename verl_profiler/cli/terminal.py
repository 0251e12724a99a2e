"""Output streams that escape control characters, and signal handling that removes temporary files."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import visible, visible_lines

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_ERASE = "\r\x1b[K"
_WIDTH = 79


class _Guarded:
    """A text stream that escapes control characters and characters that its encoding lacks."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self.raw = stream
        self._name = name

    def write(self, text: str) -> int:
        with self._told():
            self.raw.write(_encodable(visible_lines(text), self.raw))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._told():
            self.raw.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    @contextlib.contextmanager
    def _told(self) -> Generator[None, None, None]:
        """Name the stream in write errors, such as a full disk."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            self.discard()
            raise ReadingError(
                f"{self._name} cannot be written: {error.strerror}.", "cannot-write"
            ) from error

    def discard(self) -> None:
        """Discard buffered output, which Python would report at exit."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.raw.fileno())
            os.close(null)


@contextlib.contextmanager
def guarded() -> Generator[None, None, None]:
    """Guard stdout and stderr, and flush them at the end.

    Raises:
        BrokenPipeError: The reader of the output has exited.
        ReadingError: Output cannot be written, for example because a disk is full.
    """
    with contextlib.ExitStack() as stack:
        # Closed streams are None.
        null = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        streams = [
            _Guarded(sys.stdout or null, "standard output"),
            _Guarded(sys.stderr or null, "standard error"),
        ]
        stack.enter_context(contextlib.redirect_stdout(cast("TextIO", streams[0])))
        stack.enter_context(contextlib.redirect_stderr(cast("TextIO", streams[1])))
        try:
            yield
            for stream in streams:
                stream.flush()
        except BrokenPipeError:
            for stream in streams:
                with contextlib.suppress(OSError):
                    stream.raw.flush()
                    continue
                stream.discard()
            raise


def control(text: str) -> None:
    """Write our own control sequences, and text that is already `visible`, bypassing the guard."""
    stream = getattr(sys.stdout, "raw", sys.stdout)
    stream.write(_encodable(text, stream))
    stream.flush()


def has_color() -> bool:
    """Return whether standard output shows ANSI colors: a terminal, unless NO_COLOR is set."""
    stream = getattr(sys.stdout, "raw", sys.stdout)
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _encodable(text: str, stream: TextIO) -> str:
    """Replace the characters that the stream's encoding lacks."""
    if text.isascii() or not stream.encoding:
        return text
    return text.encode(stream.encoding, "backslashreplace").decode(stream.encoding)


def print_error(*lines: str) -> None:
    """Print lines to stderr, with newlines inside them escaped."""
    print("\n".join(map(visible, lines)), file=sys.stderr)


def named(message: str, arguments: Iterable[str]) -> str:
    """Escape newlines in command-line arguments that occur in a multi-line message."""
    hidden = {
        form
        for argument in arguments
        for form in (argument, str(Path(argument)), argument.rpartition("@")[0])
        if "\n" in form
    }
    for form in sorted(hidden, key=len, reverse=True):
        message = message.replace(form, visible(form))
    return message


@contextlib.contextmanager
def tidy_ends() -> Generator[None, None, None]:
    """Turn SIGTERM and SIGHUP into an exception, so that temporary files are removed.

    A second signal kills the command.  Signals that are ignored, as under nohup, stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    number: int | None = None

    def end(received: int, _frame: FrameType | None) -> None:
        nonlocal number
        number = received
        signal.signal(received, signal.SIG_DFL)
        raise SystemExit(128 + received)

    taken = [each for each in _ENDING if signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        signal.signal(each, end)
    try:
        yield
    except (Exception, KeyboardInterrupt):
        # duckdb converts a signal during a query to its own error.
        if number is None:
            raise
        raise SystemExit(128 + number) from None
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


class Progress:
    """Shows on a terminal what a command reads that takes longer than this, in one line that is erased."""

    def __init__(self, quiet_s: float = 5.0) -> None:
        self._quiet_s = time.monotonic() + quiet_s
        self._is_shown = False

    def __call__(self, what: str | None) -> None:
        """Show what begins; None erases it, since what comes next may be the output."""
        # Without the guard of control characters.
        stream: TextIO = getattr(sys.stderr, "raw", sys.stderr)
        begins = what is not None and time.monotonic() >= self._quiet_s
        if stream.isatty() and (begins or (what is None and self._is_shown)):
            self._is_shown = begins
            stream.write(_ERASE + (visible(f"reading: {what}")[:_WIDTH] if begins else ""))
            stream.flush()
