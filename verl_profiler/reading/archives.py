"""Unpack archives of runs: `.tar`, compressed with gzip, bzip2 or zstd or not at all.

What an archive may cost is bounded before and while it is read: the bytes that come out of it, the
number and the names of its files, and the share of the disk that they take.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import importlib
import io
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from verl_profiler.errors import ReadingError
from verl_profiler.events.files import (
    EXPANSION_FROM_BYTES,
    Expanded,
    UnusableFileError,
    expanded,
    open_regular,
    reason_of,
    status_of_regular,
)
from verl_profiler.reading.formats.registry import suffixes

__all__ = ["unpack"]

# Events, and the headers of a run.
_WANTED = (".json", *suffixes("events", "parquet"))
# Made by whoever read the run, and not to be believed.
_CACHE = ".cache"
# What the files may take of the disk that they are unpacked to.
_DISK_SHARE = 0.5
# A file of a run takes more than so many bytes of a compressed archive.
_MEMBERS_FROM, _BYTES_PER_MEMBER = 100_000, 100
_HEADER_LIMIT_BYTES = 1 << 20
_PATH_LIMIT, _PARTS_LIMIT = 1_024, 20
_TAR_BZ2 = b"BZh"
_TAR_ZST = b"\x28\xb5\x2f\xfd"


class _Member(tarfile.TarInfo):
    """A header of an archive; long names and extended headers are read into memory whole."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        inner = self.type in (
            tarfile.XHDTYPE,
            tarfile.XGLTYPE,
            tarfile.SOLARIS_XHDTYPE,
            tarfile.GNUTYPE_LONGNAME,
            tarfile.GNUTYPE_LONGLINK,
        )
        if self.size < 0 or (inner and self.size > _HEADER_LIMIT_BYTES):
            raise tarfile.ReadError("a header of it is too large")
        return super()._proc_member(tar)  # type: ignore[misc]


def unpack(archive: Path, target: Path, problems: list[str]) -> None:
    """Unpack what belongs to runs: regular files of `_WANTED`, but caches.

    Args:
        archive: The archive.
        target: A folder to make.
        problems: Takes sentences about what was left out, and where the archive breaks off.

    Raises:
        ReadingError: It is no regular file, needs more room than it may take, or holds too much.
    """
    try:
        size = status_of_regular(archive).st_size
    except OSError as error:
        raise ReadingError(f"{archive} cannot be read: {reason_of(error)}", "unreadable") from error
    target.mkdir(parents=True)
    most = _MEMBERS_FROM + size // _BYTES_PER_MEMBER
    room = int(shutil.disk_usage(target).free * _DISK_SHARE)
    skipped = 0
    try:
        with _stream(archive) as stream, _opened(stream) as tar:
            for number, member in enumerate(tar):
                # tarfile keeps every header.
                tar.members = []  # type: ignore[attr-defined]
                if number >= most:
                    raise _too_much(archive, f"holds more than {most} files")
                if member.isdir() or _CACHE in PurePosixPath(member.name).parts:
                    continue
                if not _is_safe(member):
                    skipped += 1
                elif member.name.endswith(_WANTED):
                    room -= member.size
                    if room < 0:
                        raise _too_much(archive, "needs more than half of the free disk space")
                    skipped += not _write(tar, member, target)
    except UnusableFileError as error:
        raise _too_much(archive, reason_of(error)) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _too_much(archive, f"does not fit: {error.strerror}") from error
        problems.append(_breaks_off(archive, error))
    except (
        tarfile.TarError,
        EOFError,
        ValueError,
        zlib.error,
        RecursionError,
        OverflowError,
    ) as error:
        problems.append(_breaks_off(archive, error))
    except Exception as error:
        # Each module for zstd has an error class of its own.
        if type(error).__name__ != "ZstdError":
            raise
        problems.append(_breaks_off(archive, error))
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
        and 0 < len(path.parts) <= _PARTS_LIMIT
        and len(member.name) <= _PATH_LIMIT
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
        while content is not None and (block := content.read(1 << 20)):
            file.write(block)
    return True


def _breaks_off(archive: Path, error: BaseException) -> str:
    return f"{archive.name} breaks off ({reason_of(error)}); the readable part is used"


def _too_much(archive: Path, why: str) -> ReadingError:
    return ReadingError(
        f"{archive} {why}.\nUnpack it yourself where there is room, and name the run directory",
        "archive-too-large",
    )


def _opened(stream: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member)


@contextlib.contextmanager
def _stream(archive: Path) -> Generator[IO[bytes], None, None]:
    """Give the archive without its compression, as much as `Expanded` allows."""
    with open_regular(archive) as file:
        begin = cast("Any", file).peek(4)[:4]
        if begin[:3] == _TAR_BZ2:
            yield _buffered(bz2.BZ2File(file), file)
        elif begin == _TAR_ZST or archive.name.endswith(".zst"):
            with _zstd_stream(file, archive) as stream:
                yield _buffered(stream, file)
        else:
            with expanded(file, EXPANSION_FROM_BYTES) as stream:
                yield stream


def _buffered(stream: Any, file: IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(Expanded(stream, file, EXPANSION_FROM_BYTES), 1 << 18)


def _zstd_stream(file: IO[bytes], archive: Path) -> Any:
    for name in ("compression.zstd", "zstandard", "backports.zstd"):
        with contextlib.suppress(ImportError):
            zstd: Any = importlib.import_module(name)
            if name == "zstandard":
                return zstd.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            return zstd.ZstdFile(file)
    if program := shutil.which("zstd"):
        return _output_of([program, "--decompress", "--stdout", "--quiet"], file)
    raise ReadingError(
        f"{archive} is compressed with zstd, and neither a Python module nor a program for it is "
        "installed.\npip install zstandard",
        "no-zstd",
    )


@contextlib.contextmanager
def _output_of(command: list[str], file: IO[bytes]) -> Generator[IO[bytes], None, None]:
    # What was looked at is in the reader's buffer; the program moves the file's own position.
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    with subprocess.Popen(  # noqa: S603
        command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield cast("IO[bytes]", process.stdout)
        finally:
            process.kill()
