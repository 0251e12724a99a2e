"""What the host that `stuck` runs on shows of a run's processes and disk."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_profiler.events.json_values import mapping_or_empty

__all__ = [
    "free_bytes",
    "is_alive",
    "own_pid",
    "state_of",
]

STOPPED = "is stopped (SIGSTOP)"
GONE = "no longer exists"
ALIVE = "is alive but its profiler thread does not run"
_STATES = {
    b"T": STOPPED,
    b"t": "is held by a debugger",
    b"Z": "has died",
    b"X": "has died",
    b"D": "waits for a disk or a driver, in the kernel",
}


def own_pid(header: Mapping[str, Any]) -> int | None:
    """Return the process id if the process is, or was, of this host and boot."""
    boot = mapping_or_empty(header.get("clock")).get("boot_id")
    pid = header.get("pid")
    if header.get("host") != socket.gethostname() or not boot or type(pid) is not int:
        return None
    try:
        own = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return pid if own in boot else None


def state_of(header: Mapping[str, Any]) -> str | None:
    """Return what this host shows of a silent process; None of another host's.

    Args:
        header: Of the process.
    """
    pid = own_pid(header)
    if pid is None:
        return None
    if not os.path.exists(f"/proc/{pid}"):
        return GONE
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return _STATES.get(status[0] if status else b"", ALIVE)


def is_alive(header: Mapping[str, Any]) -> bool:
    """Whether the process is on this host and runs, or could run."""
    return state_of(header) not in (None, GONE, "has died")


def free_bytes(directory: Path) -> int | None:
    """Return what a process without privileges may still write there; None if that is not known."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
