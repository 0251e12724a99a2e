"""A CPU platform for verl.  Importing this imports verl and registers nothing.

Ray gets one fake GPU per rank, because verl's resource pools count only GPUs and NPUs
(`ResourcePoolManager._check_resource_available`).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Generator
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase

from verl_profiler.capture import session
from verl_profiler.rehearsal.device_module import DEVICE_MODULE

__all__ = ["CpuPlatform"]

_seed: Callable[[int], Any] = torch.manual_seed  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class CpuPlatform(PlatformBase):
    """verl's accelerator interface, implemented for a CPU."""

    @property
    def device_name(self) -> str:
        """`cpu`."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """`cpu`."""
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        """Stand-in for `torch.cuda`."""
        return DEVICE_MODULE

    def is_available(self) -> bool:
        """Always true: every machine has a CPU."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never detected automatically: only `VERL_PLATFORM=cpu` selects it."""
        return False

    def current_device(self) -> Any:
        """The device itself: a CPU has no index that torch accepts everywhere."""
        return "cpu"

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to select."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        _seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        _seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """There is no caching allocator."""

    def empty_cache(self) -> None:
        """There is no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Not applicable."""
        return (None, None)

    def communication_backend_name(self) -> str:
        """`gloo`."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """The variable that Ray sets for its fake GPUs."""
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """`GPU`: the only resource besides NPU that verl's pools count."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def is_ipc_supported(self) -> bool:
        """Tensors are not shared between devices."""
        return False

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Generator[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """No device profiler."""
        yield

    def profiler_start(self) -> None:
        """Start a capture where `cudaProfilerStart` would start one on a GPU."""
        session.start()

    def profiler_stop(self) -> None:
        """Stop that capture."""
        session.stop()

    def cudart(self) -> None:
        """No CUDA."""
