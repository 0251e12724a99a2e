"""Lines of a training console, cleaned: colors, Ray's prefixes and its repeat counts set apart.

    problems = []
    for line in console_lines(Path("verl_demo.log"), problems):
        print(line.number, line.process, line.text)

Reads plain and gzip-compressed files, and `-` for standard input.  No text is an error: bytes that
are not UTF-8 are replaced, and a line without a prefix has no process.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import gzip
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Generator, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from verl_profiler.errors import ReadingError
from verl_profiler.events.files import (
    expanded,
    is_own_pipe,
    limited_lines,
    open_log,
    reason_of,
)

# The name under which a run directory keeps its console, if it does.
CONSOLE = "console.log"
STDIN = Path("-")
# What pipes gave, by their device and inode.
_KEPT: dict[tuple[int, int], BinaryIO] = {}
# Step lines of runs with thousands of metrics have some 100 KB.
LINE_LIMIT_BYTES = 1 << 20

# Escape sequences, also where the escape byte was lost or written out: `cat -v`, syslog, JSON.
_ANSI = re.compile(
    r"(?:\x1b|\u241b|\^\[|#033|\\x1b|\\u001b|\\033)\[[0-9;:?]*[ -/]*[@-~]"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_]"
    r"|\[(?:0|1|2|4|7|22|39|[349][0-7]|10[0-7])(?:;\d{1,3}){0,4}m(?!\])"
)
_MAYBE_ANSI = re.compile(r"[\x1b\u241b]|\[[0-9;:?]*[A-Za-z]")

# `(TaskRunner pid=7)`, `(WorkerDict pid=7, ip=10.0.0.2)`, `(Worker(rank=0) pid=7)`; `(pid=7)` at the
# beginning only: verl writes `Task compute_log_prob (pid=7) is getting` within its lines.
_PREFIX = re.compile(
    r"\((?:(?P<process>[\w.:<>-]+(?:\([^()\n]{0,80}\))?) |(?<=^\())pid=(?P<pid>\d{1,10})"
    r"(?:, ip=(?P<ip>[\w.:-]+))?\)[ \t]?"
)
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?")
_REPEATED = re.compile(
    r"\[repeated (?P<times>\d{1,9})x across (?:the )?cluster\]"
    r"(?:\s*\(Ray deduplicates logs by default\.[^)]*\))?"
)


class ConsoleLine(NamedTuple):
    """What one process printed as one line.

    Args:
        text: The line without colors, prefix, repeat count and line end.
        number: Of the physical line in its file, from 1.
        process: The name in Ray's prefix; None without one.
        pid: The process id in Ray's prefix.
        ip: The node in Ray's prefix; None on the driver's own node.
        repeated: How many processes printed it, by Ray's count; 1 without one.
        before: What stands before the first prefix of the physical line: a quotation mark, a
            scheduler's timestamp, or another process's line that was not ended.
        whole: False for the last line of a file that has no line end.
    """

    text: str
    number: int
    process: str | None = None
    pid: int | None = None
    ip: str | None = None
    repeated: int = 1
    before: str = ""
    whole: bool = True


def console_lines(path: Path, problems: list[str]) -> Iterator[ConsoleLine]:
    """Read a console log.

    Args:
        path: A text or gzip file; `-` for standard input.
        problems: Takes a sentence when the end of a compressed file is missing.

    Raises:
        ReadingError: The file cannot be read.
    """
    for number, raw in file_lines(path, problems):
        yield from lines_of(raw, number)


def file_lines(path: Path, problems: list[str]) -> Iterator[tuple[int, str]]:
    """Read the physical lines of a file, numbered from 1, as they are, with their line ends.

    Args:
        path: A text or gzip file; `-` for standard input.
        problems: Takes a sentence when the end of a compressed file is missing.

    Raises:
        ReadingError: The file cannot be read.
    """
    number = long = 0
    try:
        with _opened(path) as file:
            for number, (line, cut) in enumerate(limited_lines(file, LINE_LIMIT_BYTES), 1):
                long += cut
                yield number, line.decode("utf-8", "replace")
        if long:
            problems.append(
                f"{path}: {long} line{'s are' if long > 1 else ' is'} longer than "
                f"{LINE_LIMIT_BYTES >> 20} MiB; what follows in them is not read."
            )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problems.append(
            f"{path} is compressed and cannot be read after line {number} "
            f"({error or 'its end is missing'}); what follows is not shown."
        )
    except OSError as error:
        raise ReadingError(
            f"{path} cannot be read: {reason_of(error)}.\n"
            "Name the file that the console was written to, or - to read it from a pipe",
            "log-unreadable",
        ) from error


def lines_of(raw: str, number: int) -> Iterator[ConsoleLine]:
    """Clean one physical line.

    It gives several lines where the output of several processes runs together in it, or where a
    progress bar went back to its beginning.
    """
    whole = raw.endswith("\n")
    text = clean(raw.rstrip("\r\n"))
    for part in text.split("\r"):
        yield from _by_process(part, number, whole=whole)


def clean(text: str) -> str:
    """Take out the escape sequences of a terminal, what is left of broken ones, and NUL bytes."""
    if "\0" in text:
        text = text.replace("\0", "")
    return _ANSI.sub("", text) if _MAYBE_ANSI.search(text) else text


def stamps_us(text: str) -> list[int]:
    """Return the times that loggers put into a text, in microseconds since 1970, as if they were UTC."""
    found: list[int] = []
    for stamp in _STAMP.finditer(text):
        # No such day or hour.
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(stamp[1]).replace(tzinfo=timezone.utc)
            fraction = (stamp[2] or "")[:6].ljust(6, "0")
            found.append(round(moment.timestamp()) * 1_000_000 + int(fraction))
    return found


@contextlib.contextmanager
def _opened(path: Path) -> Generator[BinaryIO, None, None]:
    with contextlib.ExitStack() as stack:
        file = sys.stdin.buffer if path == STDIN else stack.enter_context(open_log(path))
        if file.seekable():
            file.seek(0)
        else:
            file = _kept(file)
        content = stack.enter_context(expanded(file))
        yield _utf8(cast("BinaryIO", content))


def _kept(pipe: BinaryIO) -> BinaryIO:
    """Return the beginning of what a pipe gave: its log is read several times, the pipe only once."""
    status = os.fstat(pipe.fileno())
    key = status.st_dev, status.st_ino
    if key not in _KEPT:
        _KEPT[key] = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115  for the whole process
        atexit.register(_KEPT[key].close)
        shutil.copyfileobj(pipe, _KEPT[key])
    _KEPT[key].seek(0)
    return _KEPT[key]


def is_log_file(path: Path) -> bool:
    """Return whether a path is standard input, a pipe that the shell made, or a file."""
    return path == STDIN or is_own_pipe(path) or os.path.isfile(path)


def _utf8(content: BinaryIO) -> BinaryIO:
    """Transcode UTF-16, which PowerShell writes; anything else stays as it is."""
    peek = getattr(content, "peek", None)
    if peek is None or peek(2)[:2] not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return content
    return cast("BinaryIO", codecs.EncodedFile(content, "utf-8", "utf-16", "replace"))


def _by_process(text: str, number: int, *, whole: bool) -> Iterator[ConsoleLine]:
    found = list(_prefixes(text)) if "pid=" in text else []
    if not found:
        text, repeated = _counted(text)
        yield ConsoleLine(text, number, repeated=repeated, whole=whole)
        return
    before = text[: found[0].start()]
    ends = [match.start() for match in found[1:]]
    for match, end in zip(found, [*ends, None], strict=True):
        part, repeated = _counted(text[match.end() : end])
        yield ConsoleLine(
            text=part,
            number=number,
            process=match["process"],
            pid=int(match["pid"]),
            ip=match["ip"],
            repeated=repeated,
            before=before,
            whole=whole or end is not None,
        )
        before = ""


def _prefixes(text: str) -> Iterator[re.Match[str]]:
    """Find Ray's prefixes, not the processes that a text mentions.

    A prefix without a name stands at the beginning only, and behind another prefix it directly
    follows the text: `Task x (pid=7) is reading` is verl's own.
    """
    first = True
    for match in _PREFIX.finditer(text):
        # One without a name matches at the beginning only.
        if first or text[match.start() - 1].strip():
            first = False
            yield match


def _counted(text: str) -> tuple[str, int]:
    """Separate Ray's repeat count from a line."""
    match = _REPEATED.search(text) if "[repeated " in text else None
    if match is None:
        return text, 1
    return text[: match.start()].rstrip() + text[match.end() :], int(match["times"])
