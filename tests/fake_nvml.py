"""A fake `pynvml`: answers with the readings of a JSON feed, in the form of NVML (nvidia-ml-py 13.615).

As a module on the import path under the name `pynvml` (`install`), it takes the feed's path from
`FAKE_NVML_FEED`.  The feed has `devices` with their facts, and `readings` by device: lists of readings
in NVML's units, each held for `period_s` of the kernel's monotonic clock, again from the start after the
last one.  A reading's `error` is raised; a key that a reading lacks raises `NVML_ERROR_NOT_SUPPORTED`.
"""

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_TEMPERATURE_GPU = 0
nvmlMemory_v2 = 0x02000028
RESERVED = 480 << 20


class NVMLError(Exception):
    """What NVML raises."""


class _Feed:
    def __init__(self, feed):
        self.feed = feed
        self.began_s = None

    def reading(self, index, key):
        if self.began_s is None:
            self.began_s = time.monotonic()
        readings = self.feed["readings"][index % len(self.feed["readings"])]
        place = int((time.monotonic() - self.began_s) / self.feed["period_s"])
        reading = readings[place % len(readings)]
        if "error" in reading:
            raise NVMLError(reading["error"])
        if key not in reading:
            raise NVMLError("Not Supported")
        return reading[key]


_loaded = None
calls = 0


def load(feed):
    """Answer from this feed; None for that of the environment."""
    global _loaded
    _loaded = None if feed is None else _Feed(feed)


def install(folder, feed):
    """Put the fake onto an import path as `pynvml`.

    Returns:
        The variables that a process needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(__file__, folder / "pynvml.py")
    (folder / "feed.json").write_text(json.dumps(feed))
    return {"PYTHONPATH": str(folder), "FAKE_NVML_FEED": str(folder / "feed.json")}


def _read(handle, key):
    global calls
    calls += 1
    return _loaded.reading(handle, key)


def nvmlInit():
    """Load the feed; without one there is no driver."""
    if _loaded is None:
        path = os.environ.get("FAKE_NVML_FEED")
        if path is None:
            raise NVMLError("Driver Not Loaded")
        load(json.loads(Path(path).read_text()))


def nvmlDeviceGetCount():
    """As in NVML."""
    return len(_loaded.feed["devices"])


def nvmlDeviceGetHandleByIndex(index):
    """A handle is the index."""
    return index


def nvmlDeviceGetUUID(handle):
    """As in NVML."""
    return _loaded.feed["devices"][handle]["uuid"]


def nvmlDeviceGetPciInfo(handle):
    """As in NVML; of its fields, the bus id."""
    return SimpleNamespace(busId=_loaded.feed["devices"][handle]["busId"])


def nvmlDeviceGetName(handle):
    """As in NVML."""
    return _loaded.feed["devices"][handle]["name"]


def nvmlDeviceGetEnforcedPowerLimit(handle):
    """In milliwatts."""
    return _loaded.feed["devices"][handle]["powerLimit"]


def nvmlDeviceGetMemoryInfo(handle, version=None):
    """In bytes; the total is known also of a device that fails.

    Version 2 counts apart what the driver reserves: 480 MiB of an H100.
    """
    total, used = _loaded.feed["devices"][handle]["memoryTotal"], _read(handle, "memoryUsed")
    if version is None:
        return SimpleNamespace(total=total + RESERVED, used=used + RESERVED)
    assert version == nvmlMemory_v2
    return SimpleNamespace(total=total + RESERVED, used=used, reserved=RESERVED)


def nvmlDeviceGetUtilizationRates(handle):
    """In percent."""
    return SimpleNamespace(
        gpu=_read(handle, "utilizationGpu"), memory=_read(handle, "utilizationMemory")
    )


def nvmlDeviceGetPowerUsage(handle):
    """In milliwatts."""
    return _read(handle, "power")


def nvmlDeviceGetClockInfo(handle, kind):
    """In MHz."""
    return _read(handle, {NVML_CLOCK_SM: "clockSm", NVML_CLOCK_MEM: "clockMem"}[kind])


def nvmlDeviceGetTemperature(handle, sensor):
    """In °C."""
    assert sensor == NVML_TEMPERATURE_GPU
    return _read(handle, "temperature")


def nvmlDeviceGetCurrentClocksEventReasons(handle):
    """As a mask of bits."""
    return _read(handle, "clocksEventReasons")
