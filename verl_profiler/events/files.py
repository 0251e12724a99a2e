"""Open the files of a run: the only place where the reading half does.

A run directory may come from anywhere.  What is opened is a regular file of bounded size, so that a
named pipe, a device, or 100,000 nested brackets cost a message and no time.
Links are followed: a directory may hold links to files elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import math
import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from verl_profiler.events.json_values import is_list, is_object
from verl_profiler.units import size

# Headers, run.json and lists of captures are a few kilobytes.
JSON_LIMIT_BYTES = 8 << 20
# json's own limit is the interpreter's stack; what a run writes is nested 6 deep.
_DEPTH_LIMIT = 60
# int64 has up to 19 digits and a sign.
_DIGITS = 20
_OWN_PIPES = Path("/dev/fd")
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


_REASON_SHOWN = 200


class UnusableFileError(OSError):
    """A file that is not read.  The message is the reason, without the file's name."""


def reason_of(error: BaseException) -> str:
    """Return why a file was not read, in a line without its name: `Permission denied`.

    duckdb's messages may hold the name.
    """
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    line = reason.splitlines()[0][:_REASON_SHOWN]
    return (
        f"{line}: its file server replaced it; run the command again" if is_stale(error) else line
    )


def is_stale(error: BaseException) -> bool:
    """Return whether an NFS server dropped a file that was open; duckdb has its text only."""
    return getattr(error, "errno", None) == errno.ESTALE or os.strerror(errno.ESTALE) in str(error)


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a regular file, or a link to one; never raises."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def status_of_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Return the status of a file that something else will open, such as duckdb.

    Raises:
        OSError: It is not there, or not a regular file on a disk (`UnusableFileError`).
    """
    try:
        status = os.stat(path)
    except ValueError as error:
        # A name with a NUL byte.
        raise UnusableFileError(str(error)) from None
    _check_kind(status)
    return status


def open_regular(path: str | os.PathLike[str], limit_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: The file; links are followed.
        limit_bytes: The largest size that is accepted; None for any.

    Raises:
        OSError: It cannot be opened, is not a regular file, or is too large (the last two as
            `UnusableFileError`).
    """
    try:
        # Before it is opened, because opening a device may do something.
        _check_kind(os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except ValueError as error:
        raise UnusableFileError(str(error)) from None
    try:
        status = os.fstat(descriptor)
        _check_kind(status)
        if limit_bytes is not None and status.st_size > limit_bytes:
            raise UnusableFileError(f"is larger than {size(limit_bytes)}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_log(path: Path) -> BinaryIO:
    """Open a log that a user named: a regular file, or a pipe that their shell made.

    Raises:
        OSError: As `open_regular`.
    """
    return path.open("rb") if is_own_pipe(path) else open_regular(path)


def is_own_pipe(path: Path) -> bool:
    """Return whether a path is `<(command)`: a pipe of this process, whose other end is open."""
    return path.parent == _OWN_PIPES


def read_bounded(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """Read a whole file of at most `limit_bytes`.

    Raises:
        OSError: As `open_regular`; also where it grew beyond the limit meanwhile.
    """
    with open_regular(path, limit_bytes) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise UnusableFileError(f"is larger than {size(limit_bytes)}")
    return content


def read_json(path: str | os.PathLike[str], limit_bytes: int = JSON_LIMIT_BYTES) -> Any:
    """Read a file of JSON; see `parse_json` for what comes out.

    Raises:
        OSError: As `read_bounded`.
        ValueError: It is not JSON, or nested too deeply.
    """
    return parse_json(read_bounded(path, limit_bytes))


def read_object(
    path: str | os.PathLike[str], limit_bytes: int = JSON_LIMIT_BYTES
) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        OSError: As `read_bounded`.
        ValueError: It is not an object of JSON, or nested too deeply.
    """
    content = read_json(path, limit_bytes)
    if not is_object(content):
        raise ValueError("is not a JSON object")
    return content


def parse_json(content: bytes | str, lost: list[str] | None = None) -> Any:
    """Parse JSON from a file that is not trusted.

    Args:
        content: The file's, or a line of it.
        lost: Takes the numbers that are read as None.

    Returns:
        Objects, lists, text that can be encoded, finite floats, and integers of at most 64 bits.
        Larger integers are floats; NaN, Infinity and what overflows is None.

    Raises:
        ValueError: It is not JSON, or nested too deeply.
    """
    if isinstance(content, bytes):
        content = content.decode("utf-8-sig", "replace")
    try:
        parsed = json.loads(
            content,
            parse_int=lambda digits: _noted(_whole(digits), digits, lost),
            parse_float=lambda digits: _noted(_finite(digits), digits, lost),
            parse_constant=lambda name: _noted(None, name, lost),
        )
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    return _cleaned(parsed, 0)


def cleaned_text(text: str) -> str:
    """Replace lone surrogates, which JSON may hold and UTF-8 may not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@contextlib.contextmanager
def expanded(file: IO[bytes]) -> Generator[IO[bytes], None, None]:
    """Give the content of an open file, decompressed if it is gzip's.

    Args:
        file: At its beginning; a buffered reader.

    Reading raises `OSError`, `EOFError` or `zlib.error` where the compressed data is damaged.
    """
    peek = getattr(file, "peek", None)
    packed = peek is not None and peek(2)[:2] == b"\x1f\x8b"
    yield cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if packed else file


def limited_lines(file: IO[bytes], limit_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """Give the lines of a file with their ends, and whether each was cut at `limit_bytes`."""
    while line := file.readline(limit_bytes):
        cut = len(line) >= limit_bytes and not line.endswith(b"\n")
        rest = line
        while cut and rest and not rest.endswith(b"\n"):
            rest = file.readline(limit_bytes)
        yield (line + b"\n" if cut and rest else line), cut


def _check_kind(status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
    raise UnusableFileError(f"is {kind}, not a regular file")


def _whole(digits: str) -> int | float | None:
    """Return an integer of at most 64 bits; a larger one as a float, or None as `finite`."""
    if len(digits) <= _DIGITS:
        number = int(digits)
        if -(1 << 63) <= number < 1 << 63:
            return number
    return _finite(digits)


def _finite(digits: str) -> float | None:
    """Return a float, or None where it overflows."""
    number = float(digits)
    return number if math.isfinite(number) else None


def _noted(number: float | None, digits: str, lost: list[str] | None) -> float | None:
    if number is None and lost is not None:
        lost.append(digits)
    return number


def _cleaned(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return cleaned_text(value)
    if depth >= _DEPTH_LIMIT and isinstance(value, (dict, list)):
        raise ValueError("is nested too deeply")
    if is_list(value):
        return [_cleaned(each, depth + 1) for each in value]
    if is_object(value):
        return {cleaned_text(key): _cleaned(each, depth + 1) for key, each in value.items()}
    return value
