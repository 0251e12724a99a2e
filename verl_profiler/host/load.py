"""Load, memory and disks of the host that a process runs on, from /proc and the cgroup's files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["host_load", "kernel_log", "kills_for_memory"]

_KMSG_BYTES = 4 << 20
_KILLED = re.compile(
    r"(?:Out of memory|Memory cgroup out of memory): Killed process [0-9]+ \([^)\n]{1,60}\)"
)
_SHOWN = 5
# cgroup v2 and v1, as a container sees its own.
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_CGROUP = Path("/sys/fs/cgroup")
# A limit that is none, in cgroup v1.
_NO_LIMIT = 1 << 60


def host_load(directories: Mapping[str, str]) -> dict[str, Any]:
    """Return what the host shows; keys that it does not show are missing.

    Args:
        directories: Whose file systems matter, by name. One that does not answer blocks the caller.

    Returns:
        `load`: of 1, 5 and 15 minutes; `cores`; `memory_bytes`, `memory_available_bytes`;
        `swap_used_bytes`; `cgroup_limit_bytes`, `cgroup_used_bytes`; `pressure`: share of the last 10 s
        in which all or some waited, `full`/`some` by resource, percent; `oom_kills`: of the cgroup,
        since it began; `killed`: lines of the kernel's log; `free_bytes`: by name.
    """
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        found["load"] = [round(each, 2) for each in os.getloadavg()]
    with contextlib.suppress(AttributeError, OSError):
        found["cores"] = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError, KeyError):
        meminfo = _meminfo()
        found["memory_bytes"] = meminfo["MemTotal"]
        found["memory_available_bytes"] = meminfo["MemAvailable"]
        found["swap_used_bytes"] = meminfo["SwapTotal"] - meminfo["SwapFree"]
    for limit, used in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            limit_bytes = int((_CGROUP / limit).read_text())
            if limit_bytes < _NO_LIMIT:
                found["cgroup_limit_bytes"] = limit_bytes
                found["cgroup_used_bytes"] = int((_CGROUP / used).read_text())
            break
    with contextlib.suppress(OSError, ValueError):
        events = dict(line.split() for line in (_CGROUP / "memory.events").read_text().splitlines())
        found["oom_kills"] = int(events.get("oom_kill", 0))
    pressure = {name: each for name in ("cpu", "io", "memory") if (each := _pressure(name))}
    if pressure:
        found["pressure"] = pressure
    killed = kills_for_memory()
    if killed:
        found["killed"] = killed
    found["free_bytes"] = {name: _free_bytes(each) for name, each in directories.items()}
    return found


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in lines)
    }


def _pressure(resource: str) -> dict[str, float]:
    """Return `some` and `full` of the last 10 s, percent."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/pressure/{resource}").read_text().splitlines()
        return {line.split()[0]: float(line.split()[1].removeprefix("avg10=")) for line in lines}
    return {}


def kernel_log() -> str:
    """Return the last 4 MiB of the kernel's log; empty if it may not be read."""
    read = b""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        while len(read) < _KMSG_BYTES:
            try:
                read += os.read(log, 8192)
            except BrokenPipeError:
                # Overwritten meanwhile; the next read has the oldest record that is left.
                continue
    except OSError:
        # All has been read.
        pass
    finally:
        os.close(log)
    return read.decode("utf-8", "replace")


def kills_for_memory() -> list[str]:
    """Return the kernel's last messages about kills for lack of memory."""
    return [found[0] for found in _KILLED.finditer(kernel_log())][-_SHOWN:]


def _free_bytes(directory: str) -> int | None:
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
