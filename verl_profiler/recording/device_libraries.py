"""Devices of the host, as NVML reads them.

NVML is imported only if it is installed, in the one process per host that samples.  None of its calls
creates a CUDA context.  What a device, a driver or a virtual machine does not support is left out, never
filled with zero.  Source: nvidia-ml-py 13.615 (`pynvml.py`).  AMD SMI and Ascend's npu-smi are not read.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["LIBRARY", "Device", "is_importable", "open_devices", "read_memory", "visible_words"]

LIBRARY = "pynvml"

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

_Getter = Callable[[], Any]


class Device:
    """One device of the host.

    Args:
        index: Its place in the library's list.
        facts: What does not change: getters of `uuid`, `bus_id`, `model`, `total_bytes`, `power_limit_w`.
        getters: What returns fields of a reading; each getter returns a mapping.
    """

    def __init__(self, index: int, facts: list[_Getter], getters: list[_Getter]) -> None:
        self.index = index
        self._getters, self._read_before = facts, True
        self.facts: dict[str, Any] = {"device": index}
        # Of one that has none, the first reading fails.
        with contextlib.suppress(Exception):
            self.facts |= self.read()
        self._getters, self._read_before = getters, False

    def read(self) -> dict[str, Any]:
        """Return the fields that can be read now.

        What fails at the first reading is not supported and not tried again.

        Raises:
            Exception: The library's own, if nothing can be read.
        """
        found: dict[str, Any] = {}
        supported: list[_Getter] = []
        problem: Exception | None = None
        for getter in self._getters:
            try:
                found.update(getter())
                supported.append(getter)
            except Exception as error:  # noqa: BLE001  any error of any library
                problem = error
        if not found and problem is not None:
            raise problem
        if not self._read_before:
            self._read_before, self._getters = True, supported
        return found


def is_importable() -> bool:
    """Return whether a library is installed; imports nothing."""
    try:
        return importlib.util.find_spec(LIBRARY) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def open_devices() -> list[Device]:
    """Return the devices of the run on this host; none without library, driver or device."""
    try:
        devices = list(_nvml_devices(importlib.import_module(LIBRARY)))
    except Exception:  # noqa: BLE001  not installed, no driver, no device
        return []
    return _chosen(devices, visible_words())


def read_memory(nvml: Any, handle: Any) -> tuple[int, int]:
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
    return words.get(b"CUDA_VISIBLE_DEVICES")


def _chosen(devices: list[Device], words: str | None) -> list[Device]:
    """Return the devices that a variable names by index or UUID; all if it names none of them."""
    wanted = [word.strip() for word in (words or "").split(",") if word.strip()]
    chosen = [
        device
        for device in devices
        if any(
            device.index == int(word)
            if word.isdecimal()
            else str(device.facts.get("uuid", "")).startswith(word)
            for word in wanted
        )
    ]
    return chosen or devices


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _bus_id(value: Any) -> str:
    """Return `domain:bus:device.function` with four digits of the domain; NVML writes eight."""
    return _text(value).lower()[-12:]


def _nvml_devices(nvml: Any) -> Iterator[Device]:
    nvml.nvmlInit()
    for index in range(nvml.nvmlDeviceGetCount()):
        yield _nvml_device(nvml, index)


def _nvml_device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    reasons: Any = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
        nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
    )

    def used() -> dict[str, Any]:
        rates = nvml.nvmlDeviceGetUtilizationRates(handle)
        return {"utilization": int(rates.gpu), "memory_utilization": int(rates.memory)}

    def slowed() -> dict[str, Any]:
        mask = int(reasons(handle))
        names = [name for bit, name in _NVML_REASONS.items() if mask & bit]
        return {"slowed_by": names}

    return Device(
        index,
        [
            lambda: {"uuid": _text(nvml.nvmlDeviceGetUUID(handle))},
            lambda: {"bus_id": _bus_id(nvml.nvmlDeviceGetPciInfo(handle).busId)},
            lambda: {"model": _text(nvml.nvmlDeviceGetName(handle))},
            lambda: {"total_bytes": read_memory(nvml, handle)[1]},
            lambda: {"power_limit_w": round(nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)},
        ],
        [
            used,
            lambda: {"used_bytes": read_memory(nvml, handle)[0]},
            # From milliwatts.  The counter of energy is left out: an H100 takes 2 to 16 ms for it, and
            # power over time is the same to 1 %.
            lambda: {"power_w": round(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)},
            lambda: {"sm_mhz": int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))},
            lambda: {"memory_mhz": int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))},
            lambda: {
                "temperature_c": int(
                    nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
                )
            },
            *([slowed] if reasons is not None else []),
        ],
    )
