"""Which files processes of this machine have open for writing, from `/proc`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["being_written"]


def being_written(folder: Path) -> set[str]:
    """Return the files under a folder, relative to it, that a process has open for writing."""
    prefix = os.path.realpath(folder) + os.sep
    found: set[str] = set()
    for pid in _process_ids():
        with contextlib.suppress(OSError):
            for link in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(link.path)
                    # The link's own permissions are how the file was opened.
                    if target.startswith(prefix) and os.lstat(link.path).st_mode & 0o200:
                        found.add(target.removeprefix(prefix))
    return found


def _process_ids() -> list[int]:
    """Return the processes of this machine; none without `/proc`, for example on a Mac."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
