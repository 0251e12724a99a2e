"""Devices of this process and of its host: readings of memory, and what NVML has of each device.

A reading must not change what it reads.  The process's own device is queried through torch only where the
process uses it already: torch's first question makes a context, which takes hundreds of megabytes.  An engine
server has no context of its own; there the driver is queried (NVML, from `nvidia-ml-py`, which SGLang brings),
none of whose calls creates a context.  What a device, a driver or a virtual machine does not support is left
out, never filled with zero.  Source: nvidia-ml-py 13.615 (`pynvml.py`).  AMD SMI and Ascend's npu-smi are not
read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

LIBRARY = "pynvml"

_ACCELERATORS = ("cuda", "npu")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Reasons for lower clocks, by bit (nvmlClocksEventReasons); without idle clocks and clocks that
# somebody set, which are no sign of trouble.
_NVML_REASONS = {
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}

_page_bytes = os.sysconf("SC_PAGE_SIZE")

# The torch device that a thread of the host had last, and the devices of a replica's engine as its
# environment names them.
_torch_device: int | None = None
_replica: tuple[dict[str, Any], ...] = ()


def memory_of_devices(replica_devices: Sequence[int] | None = None) -> dict[str, int]:
    """Return what is in use on this process's devices, by all processes together.

    Args:
        replica_devices: Where the driver is queried: which of the visible devices; None for all.

    Returns:
        `used_bytes` and `total_bytes`, and `devices` where they are sums over several; empty
        without a device that can be read.
    """
    try:
        torch = sys.modules.get("torch")
        for name in _ACCELERATORS:
            accelerator = getattr(torch, name, None)
            if accelerator is not None and accelerator.is_initialized():
                remember_device(accelerator)
                free, total = accelerator.mem_get_info()
                return {"used_bytes": int(total - free), "total_bytes": int(total)}
        nvml, handles = _find_handles(None if replica_devices is None else tuple(replica_devices))
        readings = [_memory_of(nvml, handle) for handle in handles]
    except Exception:  # noqa: BLE001  a device in trouble: the host will say so itself
        return {}
    if not readings:
        return {}
    used, total = map(sum, zip(*readings, strict=True))
    found = {"used_bytes": used, "total_bytes": total}
    return found if len(readings) == 1 else {**found, "devices": len(readings)}


def memory_of_host(*, whole: bool = False) -> dict[str, int]:
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
    words = _words_of(os.environ.get(_VISIBLE))
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


def _words_of(visible: str | None) -> list[str]:
    """Return the indices and UUIDs of a variable that names devices."""
    return [word.strip() for word in (visible or "").split(",") if word.strip()]


@functools.cache
def _find_handles(chosen: tuple[int, ...] | None) -> tuple[Any, list[Any]]:
    """Return NVML, and its handles of the visible devices; none without driver or package."""
    try:
        nvml = _initialized_nvml()
        if _VISIBLE in os.environ:
            words = _words_of(os.environ[_VISIBLE])
        else:
            words = [str(number) for number in range(nvml.nvmlDeviceGetCount())]
        if chosen is not None:
            words = [words[place] for place in chosen]
        return nvml, [
            nvml.nvmlDeviceGetHandleByIndex(int(word))
            if word.isdecimal()
            else nvml.nvmlDeviceGetHandleByUUID(word)
            for word in words
        ]
    except Exception:  # noqa: BLE001  no package, no driver, a device that may not be queried
        return None, []


def is_importable() -> bool:
    """Return whether NVML's library is installed; imports nothing."""
    try:
        return importlib.util.find_spec(LIBRARY) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _initialized_nvml() -> Any:
    nvml: Any = importlib.import_module(LIBRARY)
    nvml.nvmlInit()
    return nvml


def _memory_of(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return the bytes in use and in total, as torch and nvidia-smi count them.

    NVML's first structure counts what the driver reserves as in use: 480 MiB of an H100.
    """
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version)
            return int(memory.used), int(memory.total) - int(memory.reserved)
        except Exception:  # noqa: BLE001  a driver before 510
            pass
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.used), int(memory.total)


def open_devices() -> list[Device]:
    """Return the devices that the run was given on this host; none without library, driver or device."""
    try:
        nvml = _initialized_nvml()
        devices = [Device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # noqa: BLE001  not installed, no driver, no device
        return []
    wanted = _words_of(visible_words())
    # A variable that names none of them is not about them.
    return [each for each in devices if any(map(each.is_named, wanted))] or devices


def visible_words() -> str | None:
    """Return CUDA_VISIBLE_DEVICES of this process's parent, which is Ray's raylet or what it starts.

    Ray narrows the variable of a worker to the worker's own devices, and overwrites the environment that
    the kernel shows of it by its title; the raylet has what the run was given on this host.
    """
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            pairs = [each.partition(b"=") for each in file.read().split(b"\0")]
    except OSError:
        return None
    words = {name: value.decode(errors="replace") for name, _, value in pairs}
    return words.get(_VISIBLE.encode())


class Device:
    """One device of the host.

    Args:
        nvml: The library, initialized.
        index: The device's place in its list.

    Attributes:
        facts: What does not change: `uuid`, `bus_id`, `model`, `total_bytes`, `power_limit_w`.
    """

    def __init__(self, nvml: Any, index: int) -> None:
        self.index = index
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._getters: Sequence[Callable[[], dict[str, Any]]] = (
            self._utilization,
            lambda: {"used_bytes": self._memory()[0]},
            # From milliwatts.  The counter of energy is left out: an H100 takes 2 to 16 ms for it, and
            # power over time is the same to 1 %.
            lambda: {"power_w": round(self._get("PowerUsage") / 1e3)},
            lambda: {"sm_mhz": int(self._get("ClockInfo", nvml.NVML_CLOCK_SM))},
            lambda: {"memory_mhz": int(self._get("ClockInfo", nvml.NVML_CLOCK_MEM))},
            lambda: {"temperature_c": int(self._get("Temperature", nvml.NVML_TEMPERATURE_GPU))},
            self._slowdowns,
        )
        self._read_before = False
        self.facts: dict[str, Any] = {"device": index}
        for name, get in (
            ("uuid", lambda: _text(self._get("UUID"))),
            # With four digits of the domain; NVML writes eight.
            ("bus_id", lambda: _text(self._get("PciInfo").busId).lower()[-12:]),
            ("model", lambda: _text(self._get("Name"))),
            ("total_bytes", lambda: self._memory()[1]),
            ("power_limit_w", lambda: round(self._get("EnforcedPowerLimit") / 1e3)),
        ):
            with contextlib.suppress(Exception):
                self.facts[name] = get()

    def _get(self, what: str, *arguments: Any) -> Any:
        return getattr(self._nvml, f"nvmlDeviceGet{what}")(self._handle, *arguments)

    def _memory(self) -> tuple[int, int]:
        return _memory_of(self._nvml, self._handle)

    def _utilization(self) -> dict[str, Any]:
        rates = self._get("UtilizationRates")
        return {"utilization": int(rates.gpu), "memory_utilization": int(rates.memory)}

    def _slowdowns(self) -> dict[str, Any]:
        is_new = hasattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons")
        mask = int(self._get(f"CurrentClocks{'Event' if is_new else 'Throttle'}Reasons"))
        return {"slowed_by": [name for bit, name in _NVML_REASONS.items() if mask & bit]}

    def is_named(self, word: str) -> bool:
        """Whether a word of CUDA_VISIBLE_DEVICES, an index or UUID, names it."""
        if word.isdecimal():
            return self.index == int(word)
        return str(self.facts.get("uuid", "")).startswith(word)

    def read(self) -> dict[str, Any]:
        """Return the fields that can be read now.

        What fails at the first reading is not supported and not tried again.

        Raises:
            Exception: The library's own, if nothing can be read.
        """
        found: dict[str, Any] = {}
        supported: list[Callable[[], dict[str, Any]]] = []
        problem: Exception | None = None
        for getter in self._getters:
            try:
                found.update(getter())
                supported.append(getter)
            except Exception as error:  # noqa: BLE001  any error of the library
                problem = error
        if not found and problem is not None:
            raise problem
        if not self._read_before:
            self._read_before, self._getters = True, supported
        return found


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
