"""The directory of all caches that are not beside their run: where it is, and how it stays small.

    <home>/runs/<name>-<digest>/        tables of a run whose directory cannot be written
    <home>/remote/<digest>/<name>/      what was downloaded of a run in object storage

`VERL_PROFILER_CACHE_HOME` is where.  What was not used for longest is removed once all take more than
`VERL_PROFILER_CACHE_GB`; never what was used within six hours, which a command may have open.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from verl_profiler.environ import CACHE_GB, CACHE_HOME
from verl_profiler.errors import ReadingError

_LIMIT_GB = 20.0
_UNUSED_S = 6 * 3600.0
_NOT_IN_NAMES = re.compile(r"[^\w.-]")


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
        value = float(text) if text else _LIMIT_GB
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
        if total <= limit or time.time() - used_s < _UNUSED_S:
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
