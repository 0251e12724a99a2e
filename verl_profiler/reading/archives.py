"""Unpack archives of runs: `.tar`, compressed with gzip or zstd or not at all.

Only regular files of a run come out, below the folder that they are unpacked to, and together they take at
most half of the free disk space.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import shutil
import tarfile
import zlib
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from verl_profiler.errors import ReadingError
from verl_profiler.events.files import expanded, open_regular, reason_of
from verl_profiler.reading.formats.registry import EVENTS, PARQUET

# Events, and the headers of a run.
_WANTED = (".json", *EVENTS, *PARQUET)
# Made by whoever read the run, and not to be believed.
_CACHE = ".cache"
# What the files may take of the disk that they are unpacked to.
_DISK_SHARE = 0.5
_ZSTD = b"\x28\xb5\x2f\xfd"


def unpack(archive: Path, target: Path, problems: list[str]) -> None:
    """Unpack what belongs to runs: regular files of `_WANTED`, but caches.

    Args:
        archive: The archive.
        target: A folder to make.
        problems: Takes sentences about what was left out, and where the archive breaks off.

    Raises:
        ReadingError: It is no regular file, or needs more room than it may take.
    """
    target.mkdir(parents=True)
    room = int(shutil.disk_usage(target).free * _DISK_SHARE)
    skipped = 0
    try:
        with _stream(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                # tarfile keeps every header.
                tar.members = []  # type: ignore[attr-defined]
                if member.isdir() or _CACHE in PurePosixPath(member.name).parts:
                    continue
                if not _is_safe(member):
                    skipped += 1
                elif member.name.endswith(_WANTED):
                    room -= member.size
                    if room < 0:
                        raise _too_much(archive, "needs more than half of the free disk space")
                    skipped += not _write(tar, member, target)
    except (tarfile.TarError, EOFError, ValueError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _too_much(archive, f"does not fit: {error.strerror}") from error
        problems.append(
            f"{archive.name} is truncated ({reason_of(error)}); the readable part is used"
        )
    if skipped:
        problems.append(f"{archive.name}: {skipped} links or unsafe paths were left out")


def _is_safe(member: tarfile.TarInfo) -> bool:
    path = PurePosixPath(member.name)
    return (
        member.isfile()
        and not member.issparse()
        and not path.is_absolute()
        and ".." not in path.parts
        and "\0" not in member.name
    )


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> bool:
    """Write one file; return False where its name cannot be one, or is taken by a folder."""
    content = tar.extractfile(member)
    path = target.joinpath(*PurePosixPath(member.name).parts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False
    with file:
        shutil.copyfileobj(cast("IO[bytes]", content), file, 1 << 20)
    return True


def _too_much(archive: Path, why: str) -> ReadingError:
    return ReadingError(
        f"{archive} {why}.\nUnpack it yourself where there is room, and name the run directory",
        "archive-too-large",
    )


@contextlib.contextmanager
def _stream(archive: Path) -> Generator[IO[bytes], None, None]:
    """Give the archive without its compression.

    Raises:
        ReadingError: It cannot be opened, or the module for its compression is not installed.
    """
    try:
        opened = open_regular(archive)
    except OSError as error:
        raise ReadingError(f"{archive} cannot be read: {reason_of(error)}", "unreadable") from error
    with opened as file:
        if cast("Any", file).peek(4)[:4] != _ZSTD:
            with expanded(file) as stream:
                yield stream
            return
        try:
            zstandard: Any = importlib.import_module("zstandard")
        except ImportError as error:
            raise ReadingError(
                f"{archive} is compressed with zstd, and the module for it is not installed.\n"
                "pip install zstandard",
                "no-zstd",
            ) from error
        try:
            yield zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        except zstandard.ZstdError as error:
            raise EOFError(error) from error
