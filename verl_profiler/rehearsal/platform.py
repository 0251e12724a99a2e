"""A CPU platform for verl.  Importing this imports verl and registers nothing.

Ray gets one fake GPU per rank, because verl's resource pools count only GPUs and NPUs
(`ResourcePoolManager._check_resource_available`).
"""

# pyright: basic
# It answers with constants where verl declares methods.

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase

from verl_profiler.capture import session
from verl_profiler.rehearsal.device_module import DEVICE_MODULE


def _always(answer: Any) -> Callable[..., Any]:
    """Return a method that returns this, whatever it is called with."""

    def method(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        return answer

    return method


class CpuPlatform(PlatformBase):
    """verl's accelerator interface, implemented for a CPU.

    A CPU has no index that torch accepts everywhere, so its device is named.  Nothing is selected,
    synchronized, cached or shared between devices.
    """

    device_name = vendor_name = property(_always("cpu"))
    device_module = property(_always(DEVICE_MODULE))
    current_device = _always("cpu")
    device_count = _always(1)
    is_available = _always(True)
    # Never detected automatically: only `VERL_PLATFORM=cpu` selects it.
    is_platform_available = _always(False)
    is_ipc_supported = _always(False)
    set_device = synchronize = set_allocator_settings = empty_cache = cudart = _always(None)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    # What Ray sets for its fake GPUs, the only resource besides NPU that verl's pools count.
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _always("GPU")
    ray_noset_envvars = _always([])

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def nvtx_range(self, msg: str) -> Any:
        """No device profiler."""
        return contextlib.nullcontext()

    def profiler_start(self) -> None:
        """Start a capture where `cudaProfilerStart` would start one on a GPU."""
        session.start()

    def profiler_stop(self) -> None:
        """Stop that capture."""
        session.stop()
