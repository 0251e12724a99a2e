"""Device and host memory at verl's own checkpoints, on every rank.

verl calls `log_gpu_memory_usage` around each offload and resume, and prints on rank 0 only.
With a memory saver, torch's own counters stay high while pages are unmapped; `used_bytes` comes
from the driver and shows the release.
"""

from __future__ import annotations

from typing import Any

from verl_profiler.instrumentation.probe import Probe
from verl_profiler.probes.values import plain
from verl_profiler.recording import device_memory
from verl_profiler.recording.call import Call

__all__ = ["PROBES"]


def _read_memory(call: Call) -> None:
    from verl.utils.device import get_torch_device  # the probed function's own import

    device = get_torch_device()
    extra: dict[str, Any] = {"at": plain(call.arguments["head"])}
    for field, reading in (
        ("allocated_bytes", "memory_allocated"),
        ("reserved_bytes", "memory_reserved"),
    ):
        read = getattr(device, reading, None)
        if read is not None:
            extra[field] = int(read())
    if getattr(device, "mem_get_info", None) is not None:
        free, total = device.mem_get_info()
        extra["used_bytes"] = int(total - free)
        extra["total_bytes"] = int(total)
    extra.update(device_memory.host())
    call.extra = extra


def _make_instant(call: Call, _result: Any) -> None:
    call.begin_ns = None


PROBES = (
    Probe(
        "memory",
        "memory",
        ("verl.utils.profiler.performance:log_gpu_memory_usage",),
        reads=("head",),
        enter=_read_memory,
        leave=_make_instant,
    ),
)
