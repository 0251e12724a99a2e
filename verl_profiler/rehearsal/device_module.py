"""What verl calls on `torch.cuda`, on a CPU."""

from __future__ import annotations

import types
from typing import Any

import torch


class _DeviceModule(types.ModuleType):
    """`torch.cpu`, with the functions that verl calls on `torch.cuda`; memory statistics are zero."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        # verl's FLOPs counter looks this name up, so it must be a string.
        answers: dict[str, Any] = {"get_device_name": "CPU", "mem_get_info": (0, 1)}
        if name.startswith(("memory_", "max_memory_")):
            answers[name] = 0
        answer = answers.get(name)

        def function(*_args: Any, **_kwargs: Any) -> Any:
            return answer

        return function


DEVICE_MODULE = _DeviceModule("verl_profiler_rehearsal_cpu")
