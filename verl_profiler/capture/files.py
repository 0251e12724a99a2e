"""The umask of captures' files, which nsys has cleared."""

from __future__ import annotations

import contextlib
import os

from verl_profiler.environ import UNDER_NSYS

__all__ = ["restore_umask", "restrict", "umask"]


def umask() -> int:
    """Return the umask of this process."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    # Other threads may create files meanwhile; those are then for the owner alone.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def restore_umask(mask: int) -> None:
    """Set the umask of this process if nsys, which starts programs without one, cleared it."""
    if os.environ.get(UNDER_NSYS) == "1" and umask() == 0:
        os.umask(mask)


def restrict(path: str | os.PathLike[str]) -> None:
    """Apply the umask to a file that a tool wrote; files of other users stay as they are."""
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode & 0o7777
        if mode & umask():
            os.chmod(path, mode & ~umask())
