"""A folder of Parquet files made from a run, for all commands that read the run at once.

    <folder>/<name>-<size>-<crc32>.parquet     never changed once it has this name
    <folder>/<name>.json                       which of them is current, and a note on it
    <folder>/new-<random>.partial              being written

Nothing is locked: locks are unreliable on shared disks.  A file is written under a random name and
renamed when it is complete, so that two commands that make the same file both end with a good one.
A reader opens a file once, compares its checksum, and reads it through that descriptor from then on:
it may be removed meanwhile, by hand or by another command.  A file that is no longer needed is
removed after nobody has opened it for `_UNUSED_S`, because on a shared disk a descriptor of another
host does not keep it.

Only regular files of the same owner are used or removed, and no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import resource
import secrets
import stat
import time
import weakref
import zlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler.errors import ReadingError
from verl_profiler.events.files import JSON_LIMIT_BYTES, parse_json
from verl_profiler.events.json_values import is_object
from verl_profiler.events.vocabulary import FORMAT_VERSION
from verl_profiler.reading import cache_home

__all__ = ["CacheFolder", "Draft", "Kept", "unwritable"]

_FOLDER = f"events-{FORMAT_VERSION}"
# Not those of a full disk, where what is there can still be read.
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_UNUSED_S = 3600
# A command that was killed leaves its partial file; none writes one file for a day.
_ABANDONED_S = 86_400
_OWN = re.compile(r"([a-z_]+)-[0-9a-f]{16}(?:-[0-9a-f]+-[0-9a-f]{8})?\.(?:parquet|json)")
_PARTIAL = re.compile(r"new-[0-9a-f]{16}\.partial")
_CHUNK_BYTES = 1 << 20
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class Kept:
    """A Parquet file that can be read until its folder is closed.

    Args:
        identity: Changes whenever the content does.
        path: What duckdb opens; None where there are no rows.
        note: What was stored with it.
    """

    identity: str
    path: Path | None
    note: dict[str, Any]


class CacheFolder:
    """A folder that is opened once; its files are found, stored and retired by name.

    Args:
        descriptor: The open folder; `close` closes it.
        path: Its path, for messages.
        owner: Files of other users are not used.
    """

    def __init__(self, descriptor: int, path: Path, owner: int) -> None:
        self.path = path
        self._folder = descriptor
        self._owner = owner
        self._used: set[str] = set()
        # Of those, what this reader published.
        self.made: set[str] = set()
        self._is_read_only = False
        self._open: list[int] = [descriptor]
        self.close = weakref.finalize(self, _close, self._open)

    @classmethod
    def for_run(cls, run: Path) -> CacheFolder | None:
        """Open the cache of a run, where `VERL_PROFILER_CACHE` has it; None where there can be none.

        Raises:
            ReadingError: The variable has a value that cannot be used.
        """
        chosen = cache_home.choice()
        if chosen == cache_home.OFF:
            return None
        if chosen == cache_home.BESIDE:
            folder = cls.beside(run)
            if folder is not None and not folder._is_read_only:
                return folder
            if folder is not None:
                folder.close()
        return cls.at_home(run)

    @classmethod
    def beside(cls, run: Path) -> CacheFolder | None:
        """Open the cache of a run directory; None where it cannot be used.

        That is the case where it is a link or another user's, or where there is none and none can
        be made.
        """
        return cls._inside(run, (".cache", _FOLDER))

    @classmethod
    def at_home(cls, run: Path) -> CacheFolder | None:
        """Open the cache of a run in the home of all caches; None where that cannot be used."""
        place = cache_home.folder_of(run)
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            return None
        locked = cache_home.lock(place)
        folder = None if locked is None else cls._inside(place, (_FOLDER,))
        if locked is not None and folder is None:
            os.close(locked)
        elif locked is not None and folder is not None:
            folder._open.append(locked)
            cache_home.evict()
        return folder

    @classmethod
    def _inside(cls, outermost: Path, names: tuple[str, ...]) -> CacheFolder | None:
        """Open a folder in another one, through folders that are made as needed."""
        place = outermost
        descriptor = None
        try:
            descriptor = os.open(outermost, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for name in names:
                with contextlib.suppress(OSError):
                    os.mkdir(name, dir_fd=descriptor)
                outer = descriptor
                descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=outer)
                os.close(outer)
                place /= name
        except OSError:
            if descriptor is not None:
                os.close(descriptor)
            return None
        folder = cls(descriptor, place, os.geteuid())
        # A shared disk may show root's files as another user's.
        try:
            with folder.new() as draft:
                folder._owner = draft.status().st_uid
        except OSError as error:
            folder._is_read_only = error.errno in _READ_ONLY
        if os.fstat(descriptor).st_uid != folder._owner:
            folder.close()
            return None
        return folder

    @classmethod
    def of(cls, path: Path) -> CacheFolder:
        """Open a folder of the caller's own."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return cls(descriptor, path, os.fstat(descriptor).st_uid)

    def find(self, name: str) -> Kept | None:
        """Return the file of this name; None where there is none, or it is damaged."""
        try:
            entry = _entry(self._read(f"{name}.json"), name)
            if entry is None:
                return None
            file, note = entry
            path = None if file is None else self._verified(file)
        except OSError:
            return None
        if file is not None and path is None:
            return None
        self._used.update(filter(None, (f"{name}.json", file)))
        return Kept(file or name, path, note)

    @contextlib.contextmanager
    def new(self) -> Generator[Draft, None, None]:
        """Make a file to write; unless it is published, it is removed.

        Raises:
            OSError: None can be made.
        """
        name = f"new-{secrets.token_hex(8)}.partial"
        descriptor = os.open(
            name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o600, dir_fd=self._folder
        )
        draft = Draft(self, name, descriptor)
        try:
            yield draft
        finally:
            if not draft.published:
                os.close(descriptor)
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._folder)

    def can_write(self) -> bool:
        """Try to write a page of bytes."""
        try:
            with self.new() as draft:
                draft.write(b"\0" * 4096)
        except OSError:
            return False
        return True

    def has(self, name: str, content: bytes) -> bool:
        """Whether a file in this folder has this content, as on the disk where it was written."""
        try:
            return self._read(name) == content
        except OSError:
            return False

    def retire(self, kind: str) -> None:
        """Remove files of a kind that this reader did not use, and nobody for some time."""
        now = time.time()
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                own = _OWN.fullmatch(name)
                if own and own[1] == kind and name not in self._used:
                    self._remove(name, now - _UNUSED_S)
                elif _PARTIAL.fullmatch(name):
                    self._remove(name, now - _ABANDONED_S)

    def supersede(self, made: Iterable[str]) -> None:
        """Remove what an earlier reader of this process made, and this one did not use.

        Otherwise, a command that reads a growing run again and again would leave a copy of its end each time.
        """
        for name in made:
            if name in self._used:
                self.made.add(name)
            else:
                self._remove(name, math.inf)

    def _remove(self, name: str, unused_since_s: float) -> None:
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
            used_s = max(status.st_atime, status.st_mtime)
            if self._is_ours(status) and used_s <= unused_since_s:
                os.unlink(name, dir_fd=self._folder)

    def _is_ours(self, status: os.stat_result) -> bool:
        return stat.S_ISREG(status.st_mode) and status.st_uid == self._owner

    def _opened(self, name: str) -> tuple[int, os.stat_result]:
        """Open one of our own files and note that it is used."""
        descriptor = os.open(name, os.O_RDONLY | _SAFE, dir_fd=self._folder)
        status = os.fstat(descriptor)
        if not self._is_ours(status):
            os.close(descriptor)
            raise PermissionError(f"{name} is not a file of this user")
        with contextlib.suppress(OSError):
            os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))
        return descriptor, status

    def _read(self, name: str) -> bytes:
        descriptor, status = self._opened(name)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(min(status.st_size, JSON_LIMIT_BYTES))

    def _verified(self, file: str) -> Path | None:
        """Return what duckdb reads of a file whose content is what its name states."""
        descriptor, _ = self._opened(file)
        if not file.endswith(f"-{_checksum(descriptor)}.parquet"):
            os.close(descriptor)
            return None
        return self._pin(descriptor, file)

    def _pin(self, descriptor: int, file: str) -> Path:
        """Return a path that leads to an open file, whatever happens to its name."""
        # Other files are opened too; a soft limit of 1024 is usual.
        if len(self._open) < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3:
            path = _by_descriptor(descriptor)
            if path is not None:
                self._open.append(descriptor)
                return path
        os.close(descriptor)
        return self.path / file


class Draft:
    """A file that is being written, under a name that nobody else has.

    Attributes:
        path: Where duckdb writes it; it may be written and read several times.
        name: Its name in the folder until it is published.
        published: It has got its name.
    """

    def __init__(self, folder: CacheFolder, name: str, descriptor: int) -> None:
        self.path = _by_descriptor(descriptor) or folder.path / name
        self.name = name
        self.published = False
        self._folder = folder
        self._descriptor = descriptor

    def status(self) -> os.stat_result:
        """Return the file's status."""
        return os.fstat(self._descriptor)

    def write(self, content: bytes) -> None:
        """Write all of the content.

        Raises:
            OSError: There is no room for it.
        """
        while content:
            content = content[os.write(self._descriptor, content) :]

    def try_to_write(self) -> None:
        """Find out whether the disk has room, whatever is in the file.

        Raises:
            OSError: It has none.
        """
        self.write(b"\0" * 4096)
        os.fsync(self._descriptor)

    def publish(self, name: str, note: dict[str, Any], *, empty: bool = False) -> Kept:
        """Give the file its name, and make it the current one of that name.

        Args:
            name: Such as `requests-0123456789abcdef`.
            note: JSON to keep with it.
            empty: There are no rows, and therefore no file.

        Raises:
            OSError: That cannot be written.
        """
        folder = self._folder
        file = path = None
        if not empty:
            file = f"{name}-{_checksum(self._descriptor)}.parquet"
            self._rename(file)
            self.published = True
            path = folder._pin(self._descriptor, file)  # pyright: ignore[reportPrivateUsage]
        own = [each for each in (f"{name}.json", file) if each]
        folder._used.update(own)  # pyright: ignore[reportPrivateUsage]
        folder.made.update(own)
        body = json.dumps({"file": file, "note": note}).encode()
        with folder.new() as entry:
            entry.write(body + f"\n{zlib.crc32(body):08x}\n".encode())
            entry._rename(f"{name}.json")
            entry.published = True
            os.close(entry._descriptor)
        return Kept(file or name, path, note)

    def _rename(self, name: str) -> None:
        folder = self._folder._folder  # pyright: ignore[reportPrivateUsage]
        os.rename(self.name, name, src_dir_fd=folder, dst_dir_fd=folder)


def unwritable(what: str, folder: CacheFolder, error: Exception) -> ReadingError:
    """Return the error of a file that could not be written, with its reason."""
    reason = str(error).splitlines()[0]
    if folder.can_write() and "No space left" not in reason:
        return ReadingError(f"{what} cannot be written to {folder.path}: {reason}", "unwritable")
    return ReadingError(
        f"no room for {what} in {folder.path}: {reason}\n"
        "Free some space, or set TMPDIR to a larger disk",
        "no-space",
    )


def _entry(content: bytes, name: str) -> tuple[str | None, dict[str, Any]] | None:
    """Return file and note that are stored under a name; None when they are damaged."""
    body, _, check = content.partition(b"\n")
    if check != f"{zlib.crc32(body):08x}\n".encode():
        return None
    try:
        entry = parse_json(body)
    except ValueError:
        return None
    if not is_object(entry):
        return None
    file, note = entry.get("file"), entry.get("note")
    if not is_object(note):
        return None
    named = isinstance(file, str) and _OWN.fullmatch(file) and file.startswith(f"{name}-")
    return (file, note) if named or file is None else None


def _checksum(descriptor: int) -> str:
    """Return size and CRC-32 of a file."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    size = check = 0
    while count := os.preadv(descriptor, [buffer], size):
        check = zlib.crc32(buffer[:count], check)
        size += count
    return f"{size:x}-{check:08x}"


def _by_descriptor(descriptor: int) -> Path | None:
    """Return a path that opens the same file again; None where the system has none."""
    path = Path(f"/proc/self/fd/{descriptor}")
    try:
        same = os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return None
    return path if same else None


def _close(descriptors: list[int]) -> None:
    while descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptors.pop())
