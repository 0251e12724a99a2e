"""Read the memory of this process's devices and of its host, now.

A reading must not change what it reads.  A device is queried through torch only where the process
uses it already: torch's first question makes a context, which takes hundreds of megabytes.  An
engine server has no context of its own; there the driver is queried (NVML, from `nvidia-ml-py`, which
SGLang brings).  What cannot be read is left out, never filled with zero.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from verl_profiler.recording import device_libraries

__all__ = [
    "device",
    "forget",
    "host",
    "remember_device",
    "remember_replica",
    "used_devices",
]

_ACCELERATORS = ("cuda", "npu")

_page_bytes = os.sysconf("SC_PAGE_SIZE")

# The torch device that a thread of the host had last, and the devices of a replica's engine as its
# environment names them.
_torch_device: int | None = None
_replica: tuple[dict[str, Any], ...] = ()


def device(replica_devices: Sequence[int] | None = None) -> dict[str, int]:
    """Return what is in use on this process's devices, by all processes together.

    Args:
        replica_devices: Where the driver is queried: which of the visible devices; None for all.

    Returns:
        `used_bytes` and `total_bytes`, and `devices` where they are sums over several; empty
        without a device that can be read.
    """
    try:
        accelerator = _initialized()
        if accelerator is not None:
            remember_device(accelerator)
            free, total = accelerator.mem_get_info()
            return {"used_bytes": int(total - free), "total_bytes": int(total)}
        return _from_driver(None if replica_devices is None else tuple(replica_devices))
    except Exception:  # noqa: BLE001  a device in trouble: the host will say so itself
        return {}


def host(*, whole: bool = False) -> dict[str, int]:
    """Return this process's resident memory, and with `whole` what is in use on the machine.

    Returns:
        `rss_bytes`, and `host_used_bytes` (what could not be had without swapping); empty where
        there is no /proc.
    """
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/statm", "rb") as file:
            found["rss_bytes"] = int(file.read().split()[1]) * _page_bytes
        if whole:
            # MemTotal, MemFree and MemAvailable are the first three lines, in kibibytes.
            with open("/proc/meminfo", "rb") as file:
                total, _, available = (int(file.readline().split()[1]) for _ in range(3))
            found["host_used_bytes"] = (total - available) * 1024
    return found


def remember_device(accelerator: Any) -> int:
    """Return the calling thread's device, which must be one of the host's, and keep it for the header."""
    global _torch_device
    _torch_device = int(accelerator.current_device())
    return _torch_device


def remember_replica(chosen: Sequence[int] | None) -> None:
    """Keep which devices this engine server's replica has, for the header.

    Args:
        chosen: Which of the visible devices; None for all.
    """
    global _replica
    words = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    words = [word for word in words if word]
    if chosen is not None:
        words = [words[place] for place in chosen if place < len(words)]
    _replica = tuple(
        {"device": int(word)} if word.isdecimal() else {"uuid": word} for word in words
    )


def forget() -> None:
    """Forget all devices: a forked child must not use its parent's."""
    global _torch_device, _replica
    _torch_device, _replica = None, ()
    _find_handles.cache_clear()


os.register_at_fork(after_in_child=forget)


def used_devices() -> list[dict[str, Any]]:
    """Return what identifies the devices of this process, as far as that is known without a context.

    Returns:
        Of each device `uuid` and `bus_id` where torch uses it, or its number on the host.
    """
    try:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return list(_replica)
        index = _torch_device
        if index is None:
            if cuda.device_count() != 1:
                return list(_replica)
            index = 0
        # Properties are read from the driver: torch makes no context for them.
        facts = cuda.get_device_properties(index)
        uuid = getattr(facts, "uuid", None)
        bus = [getattr(facts, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        found: dict[str, Any] = {} if uuid is None else {"uuid": _with_prefix(str(uuid))}
        if None not in bus:
            found["bus_id"] = "{:04x}:{:02x}:{:02x}.0".format(*bus)
    except Exception:  # noqa: BLE001  a device in trouble: the host will say so itself
        return []
    return [found] if found else []


def _with_prefix(uuid: str) -> str:
    """Return a UUID as NVML writes it; torch leaves out the prefix."""
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _initialized() -> Any:
    torch = sys.modules.get("torch")
    for name in _ACCELERATORS:
        module = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            return module
    return None


def _from_driver(chosen: tuple[int, ...] | None) -> dict[str, int]:
    handles = _find_handles(chosen)
    if not handles:
        return {}
    import pynvml  # pyright: ignore[reportMissingImports]

    nvml: Any = pynvml
    readings = [device_libraries.read_memory(nvml, handle) for handle in handles]
    found = {
        "used_bytes": sum(used for used, _ in readings),
        "total_bytes": sum(total for _, total in readings),
    }
    return found if len(readings) == 1 else {**found, "devices": len(readings)}


@functools.cache
def _find_handles(chosen: tuple[int, ...] | None) -> list[Any]:
    """Return the driver's handles of the visible devices; none without driver or package."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        nvml: Any = pynvml
        nvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            words = [str(number) for number in range(nvml.nvmlDeviceGetCount())]
        else:
            words = [word.strip() for word in visible.split(",") if word.strip()]
        if chosen is not None:
            words = [words[place] for place in chosen]
        return [
            nvml.nvmlDeviceGetHandleByIndex(int(word))
            if word.isdecimal()
            else nvml.nvmlDeviceGetHandleByUUID(word)
            for word in words
        ]
    except Exception:  # noqa: BLE001  no package, no driver, a device that may not be queried
        return []
