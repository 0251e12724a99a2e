"""A folder of files made from a run, for all commands that read the run at once.

    <folder>/<kind>-<digest>.parquet    rows; the digest is of all that they are made from
    <folder>/<kind>-<digest>.json       a note on them, or a document
    <folder>/new-<random>.partial       being written

Nothing is locked: locks are unreliable on shared disks.  A file is written under a random name and
renamed when it is complete, so that two commands that make the same file both end with a good one.  A
reader opens a file once and reads it through that descriptor from then on: it may be removed meanwhile,
by hand or by another command.  A file that is no longer needed is removed after nobody has opened it for
`UNUSED_S` seconds, because on a shared disk a descriptor of another host does not keep it.

Only regular files of the same owner are used or removed, and no link is followed.

Caches that are not beside their run have a home, `VERL_PROFILER_CACHE_HOME`:

    <home>/runs/<name>-<digest>/        tables of a run whose directory cannot be written
    <home>/remote/<digest>/<name>/      what was downloaded of a run in object storage

What was not used for longest is removed there once all take more than `VERL_PROFILER_CACHE_GB`; never what was
used within six hours, which a command may have open.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import resource
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler.environ import CACHE_GB, CACHE_HOME
from verl_profiler.errors import ReadingError
from verl_profiler.events.vocabulary import FORMAT_VERSION
from verl_profiler.events.whole_files import replace_file

_FOLDER = f"events-{FORMAT_VERSION}"
UNUSED_S = 3600
# A command that was killed leaves its partial file; none writes one file for a day.
_ABANDONED_S = 86_400
_OWN = re.compile(r"([a-z_]+)-[0-9a-f]{16}\.(?:parquet|json)")
_PARTIAL = re.compile(r"new-[0-9a-f]{16}\.partial")
_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_HOME_GB = 20.0
_HOME_UNUSED_S = 6 * 3600.0
_NOT_IN_NAMES = re.compile(r"[^\w.-]")


@dataclass(frozen=True)
class Kept:
    """What a folder has under a name; it can be read until the folder is closed.

    Args:
        identity: Changes whenever the content does.
        path: The Parquet file that duckdb opens; None where there are no rows.
        note: What was stored with it; None for nothing.
    """

    identity: str
    path: Path | None
    note: Any = None


class CacheFolder:
    """A folder whose files are found, stored and retired by name.

    Args:
        path: The folder.

    Attributes:
        made: The files that this reader published.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made: set[str] = set()
        self._owner = path.stat().st_uid
        self._used: set[str] = set()
        self._open: list[int] = []
        self.close = weakref.finalize(self, _close, self._open)

    @classmethod
    def for_run(cls, run: Path) -> CacheFolder | None:
        """Open the cache of a run, beside it or in the home of all caches; None where there can be none.

        Raises:
            ReadingError: `VERL_PROFILER_CACHE_HOME` or `VERL_PROFILER_CACHE_GB` has a value that cannot be used.
        """
        return cls._inside(run, ".cache", _FOLDER) or cls._at_home(run)

    @classmethod
    def _at_home(cls, run: Path) -> CacheFolder | None:
        place = folder_of(run)
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            return None
        folder = cls._inside(place, _FOLDER)
        if folder is not None:
            evict()
        return folder

    @classmethod
    def _inside(cls, place: Path, *names: str) -> CacheFolder | None:
        """Open a folder below another one, made as needed; None if it is a link, or not this user's to write."""
        try:
            for name in names:
                place /= name
                place.mkdir(exist_ok=True)
                if place.is_symlink():
                    return None
            folder = cls(place)
            with folder.new() as draft:
                # A shared disk may show root's files as another user's.
                return folder if draft.stat().st_uid == folder._owner else None
        except OSError:
            return None

    def find(self, name: str) -> Kept | None:
        """Return what is kept under this name; None where there is nothing, or it cannot be read."""
        rows, note = f"{name}.parquet", f"{name}.json"
        found = Kept(name, None)
        with contextlib.suppress(OSError, ValueError, RecursionError):
            with os.fdopen(self._opened(note), "rb") as file:
                found = Kept(name, None, json.loads(file.read()))
            self._used.add(note)
        with contextlib.suppress(OSError):
            found = self._pinned(self._opened(rows), name, found.note)
            self._used.add(rows)
        return found if found.path is not None or found.note is not None else None

    @contextlib.contextmanager
    def new(self) -> Generator[Path, None, None]:
        """Make a file to write, under a name that nobody else has; unless it is published, it is removed.

        Raises:
            OSError: None can be made.
        """
        path = self.path / f"new-{secrets.token_hex(8)}.partial"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600))
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                path.unlink()

    def publish(self, draft: Path, name: str, note: Any = None) -> Kept:
        """Give a new file of rows its name.

        Args:
            draft: The file.
            name: Such as `requests-0123456789abcdef`.
            note: JSON to keep with it.

        Raises:
            OSError: It cannot be written.
        """
        os.rename(draft, self.path / f"{name}.parquet")
        self.made.add(f"{name}.parquet")
        if note is not None:
            self.keep(name, note)
        kept = self.find(name)
        if kept is None or kept.path is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return kept

    def keep(self, name: str, note: Any) -> None:
        """Store a note or a document under a name, as JSON.

        Raises:
            OSError: It cannot be written.
        """
        replace_file(self.path / f"{name}.json", json.dumps(note).encode())
        self._used.add(f"{name}.json")
        self.made.add(f"{name}.json")

    def check_room(self) -> None:
        """Try to write a page of bytes.

        Raises:
            OSError: There is no room for it, or nothing can be written.
        """
        with self.new() as draft, draft.open("wb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())

    def can_write(self) -> bool:
        """Whether `check_room` succeeds."""
        try:
            self.check_room()
        except OSError:
            return False
        return True

    def retire(self, kind: str) -> None:
        """Remove files of a kind that this reader did not use, and nobody for some time."""
        now = time.time()
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                own = _OWN.fullmatch(name)
                if own and own[1] == kind and name not in self._used:
                    self._remove(name, now - UNUSED_S)
                elif _PARTIAL.fullmatch(name):
                    self._remove(name, now - _ABANDONED_S)

    def supersede(self, made: Iterable[str]) -> None:
        """Remove what an earlier reader of this process made, and this one did not use.

        Otherwise, a command that reads a growing run again and again would leave a copy of its end each time.
        """
        for name in made:
            # What is not here is where the folder was before, or comes back with it.
            if name in self._used or not (self.path / name).exists():
                self.made.add(name)
            else:
                self._remove(name, math.inf)

    def _remove(self, name: str, unused_since_s: float) -> None:
        with contextlib.suppress(OSError):
            status = (self.path / name).lstat()
            used_s = max(status.st_atime, status.st_mtime)
            if self._is_ours(status) and used_s <= unused_since_s:
                (self.path / name).unlink()

    def _is_ours(self, status: os.stat_result) -> bool:
        return stat.S_ISREG(status.st_mode) and status.st_uid == self._owner

    def _opened(self, name: str) -> int:
        """Open one of our own files and note that it is used."""
        descriptor = os.open(self.path / name, os.O_RDONLY | _SAFE)
        status = os.fstat(descriptor)
        if not self._is_ours(status):
            os.close(descriptor)
            raise PermissionError(f"{name} is not a file of this user")
        with contextlib.suppress(OSError):
            os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))
        return descriptor

    def _pinned(self, descriptor: int, name: str, note: Any) -> Kept:
        """Describe an open Parquet file by a path that leads to it, whatever happens to its name."""
        status = os.fstat(descriptor)
        # A file that grows while it is converted gives other rows than its name is of.
        identity = f"{name}-{status.st_size:x}-{status.st_mtime_ns:x}"
        path = None
        # Other files are opened too; a soft limit of 1024 is usual.
        if len(self._open) < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3:
            path = _by_descriptor(descriptor)
        if path is None:
            os.close(descriptor)
        else:
            self._open.append(descriptor)
        return Kept(identity, path or self.path / f"{name}.parquet", note)


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


def home() -> Path:
    """Return the directory of the caches, which may not be there yet.

    Raises:
        ReadingError: `VERL_PROFILER_CACHE_HOME` is a relative path.
    """
    named = os.environ.get(CACHE_HOME, "")
    if named:
        path = Path(os.path.expanduser(named))
        if not path.is_absolute():
            raise ReadingError(
                f"{CACHE_HOME} is {named!r}.\nSet it to an absolute directory", "cache-place"
            )
        return path
    # The specification ignores a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "verl-profiler"


def limit_bytes() -> int:
    """Return how much all caches may take.

    Raises:
        ReadingError: `VERL_PROFILER_CACHE_GB` is not a number.
    """
    text = os.environ.get(CACHE_GB, "")
    try:
        value = float(text) if text else _HOME_GB
        return int(max(value, 0.0) * 1e9)
    except (ValueError, OverflowError):
        raise ReadingError(
            f"{CACHE_GB} is {text!r}, not a number.\nSet it to gigabytes, such as 20", "cache-place"
        ) from None


def folder_of(run: Path) -> Path:
    """Return the folder of a run's tables in the home of the caches."""
    real = os.path.realpath(run)
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    name = _NOT_IN_NAMES.sub("_", os.path.basename(real))[:60]
    return home() / "runs" / f"{name}-{digest}"


def evict(limit: int | None = None) -> list[Path]:
    """Remove what was not used for longest, until all caches together are within the limit.

    Args:
        limit: Bytes; None for what the environment states.

    Returns:
        What was removed.  Whatever cannot be removed stays.
    """
    limit = limit_bytes() if limit is None else limit
    found = [(*_use_of(folder), folder) for folder in _folders(home())]
    total = sum(size for _, size, _ in found)
    removed: list[Path] = []
    for used_s, size, folder in sorted(found, key=lambda each: each[0]):
        if total <= limit or time.time() - used_s < _HOME_UNUSED_S:
            break
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
        total -= size
    return removed


def _folders(place: Path) -> Iterator[Path]:
    for kind in ("runs", "remote"):
        with contextlib.suppress(OSError), os.scandir(place / kind) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)


def _use_of(folder: Path) -> tuple[float, int]:
    """Return when a folder was used last, and its size on the disk."""
    used_s, size = 0.0, 0
    for path, _, names in os.walk(folder):
        # A command that has just made a folder has no file in it yet.
        for name in ("", *names):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(path, name))
                used_s = max(used_s, status.st_mtime)
                if name:
                    size += status.st_blocks * 512
                if stat.S_ISREG(status.st_mode):
                    used_s = max(used_s, status.st_atime)
    return used_s, size
