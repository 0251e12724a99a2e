"""The libraries of device drivers, behind one interface: NVML and AMD SMI.

A library is imported only if it is installed, in the one process per host that samples.  None of its
calls creates a CUDA or HIP context.  What a device, a driver or a virtual machine does not support is
left out, never filled with zero.  Sources: nvidia-ml-py 13.615 (`pynvml.py`), amdsmi 7.0.2
(`amdsmi_interface.py`).  Ascend's npu-smi has no Python library (its DCMI is a C library).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["LIBRARIES", "Device", "is_importable", "open_devices", "visible_words"]

# Module names, in the order in which they are tried.
LIBRARIES = ("pynvml", "amdsmi")

# Variables that limit the devices of a process, by library.
_VISIBLE = {
    "pynvml": ("CUDA_VISIBLE_DEVICES",),
    "amdsmi": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}

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
        facts: What does not change: `uuid`, `bus_id`, `model`, `total_bytes`, `power_limit_w`, as far
            as the library has them.
        getters: What returns fields of a reading; each returns a mapping.
    """

    def __init__(self, index: int, facts: Mapping[str, Any], getters: list[_Getter]) -> None:
        self.index = index
        self.facts: dict[str, Any] = {"device": index, **facts}
        self._getters = getters
        self._read_before = False

    def read(self) -> dict[str, Any]:
        """Return the fields that can be read now.

        What fails at the first reading is not supported and not tried again.

        Raises:
            Exception: The library's own, if nothing can be read.
        """
        found: dict[str, Any] = {}
        failed: list[_Getter] = []
        problem: Exception | None = None
        for getter in self._getters:
            try:
                found.update(_known(getter()))
            except Exception as error:  # noqa: BLE001  any error of any library
                problem = error
                failed.append(getter)
        if not found and problem is not None:
            raise problem
        if not self._read_before:
            self._read_before = True
            self._getters = [each for each in self._getters if each not in failed]
        return found


def is_importable() -> bool:
    """Return whether a library is installed; imports nothing."""
    for name in LIBRARIES:
        try:
            if importlib.util.find_spec(name) is not None:
                return True
        except (ImportError, ValueError, AttributeError):
            continue
    return False


def open_devices(visible: Callable[[tuple[str, ...]], str | None]) -> tuple[str, list[Device]]:
    """Return the first library that shows devices, and its devices; ("", []) without one.

    Args:
        visible: Returns the value of the first of these variables that is set for the run, or None.
    """
    for name, opened in (("pynvml", _nvml_devices), ("amdsmi", _amd_devices)):
        try:
            devices = list(opened(importlib.import_module(name)))
        except Exception:  # noqa: BLE001, S112  not installed, no driver, no device
            continue
        if devices:
            return name, _chosen(devices, visible(_VISIBLE[name]))
    return "", []


def visible_words(names: tuple[str, ...]) -> str | None:
    """Return a variable of this process's parent, which is Ray's raylet or what it starts.

    Ray narrows the variables of a worker to the worker's own devices, and overwrites the environment
    that the kernel shows of it by its title; the raylet has what the run was given on this host.
    """
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            pairs = [each.partition(b"=") for each in file.read().split(b"\0")]
    except OSError:
        return None
    words = {name: value for name, _, value in pairs}
    values = (words.get(name.encode()) for name in names)
    return next((each.decode(errors="replace") for each in values if each is not None), None)


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


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a library marks as unknown."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None and value not in ("N/A", "")
    }


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _bus_id(value: Any) -> str:
    """Return `domain:bus:device.function` with four digits of the domain; NVML writes eight."""
    return _text(value).lower()[-12:]


def _facts(getters: Mapping[str, _Getter]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, getter in getters.items():
        try:
            found[name] = getter()
        except Exception:  # noqa: BLE001, S112  not supported
            continue
    return _known(found)


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
        return {"slowed_by": names or None}

    return Device(
        index,
        _facts(
            {
                "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(handle)),
                "bus_id": lambda: _bus_id(nvml.nvmlDeviceGetPciInfo(handle).busId),
                "model": lambda: _text(nvml.nvmlDeviceGetName(handle)),
                "total_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                "power_limit_w": lambda: round(nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
            }
        ),
        [
            used,
            lambda: {"used_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).used)},
            # From milliwatts and millijoules.
            lambda: {"power_w": round(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)},
            lambda: {"energy_j": round(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, 1)},
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


def _amd_devices(smi: Any) -> Iterator[Device]:
    smi.amdsmi_init()
    for index, handle in enumerate(smi.amdsmi_get_processor_handles()):
        yield _amd_device(smi, index, handle)


def _amd_device(smi: Any, index: int, handle: Any) -> Device:
    memory = smi.AmdSmiMemoryType.VRAM

    def used() -> dict[str, Any]:
        activity = smi.amdsmi_get_gpu_activity(handle)
        return {
            "utilization": activity.get("gfx_activity"),
            "memory_utilization": activity.get("umc_activity"),
        }

    def power() -> dict[str, Any]:
        found = smi.amdsmi_get_power_info(handle)
        values = (
            found.get(name)
            for name in ("socket_power", "current_socket_power", "average_socket_power")
        )
        watts = next((each for each in values if isinstance(each, int) and each > 0), None)
        return {"power_w": watts}

    def energy() -> dict[str, Any]:
        found = smi.amdsmi_get_energy_count(handle)
        # Microjoules per count.
        joules = found["energy_accumulator"] * found["counter_resolution"] / 1e6
        return {"energy_j": round(joules, 1)}

    def clock(kind: str) -> Any:
        return smi.amdsmi_get_clock_info(handle, getattr(smi.AmdSmiClkType, kind)).get("clk")

    return Device(
        index,
        _facts(
            {
                "uuid": lambda: _text(smi.amdsmi_get_gpu_device_uuid(handle)),
                "bus_id": lambda: _bus_id(smi.amdsmi_get_gpu_device_bdf(handle)),
                "model": lambda: smi.amdsmi_get_gpu_asic_info(handle).get("market_name"),
                "total_bytes": lambda: int(smi.amdsmi_get_gpu_memory_total(handle, memory)),
            }
        ),
        [
            used,
            lambda: {"used_bytes": int(smi.amdsmi_get_gpu_memory_usage(handle, memory))},
            power,
            energy,
            lambda: {"sm_mhz": clock("GFX")},
            lambda: {"memory_mhz": clock("MEM")},
            lambda: {
                "temperature_c": int(
                    smi.amdsmi_get_temp_metric(
                        handle,
                        smi.AmdSmiTemperatureType.HOTSPOT,
                        smi.AmdSmiTemperatureMetric.CURRENT,
                    )
                )
            },
        ],
    )
