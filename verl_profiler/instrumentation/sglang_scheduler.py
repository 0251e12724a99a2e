"""A hook inside SGLang's schedulers, which are processes of their own below an engine server.

SGLang >= 0.5.11 calls the entry points of its group `sglang.srt.plugins` in the engine's process and
in each scheduler, before anything runs there; that is the way in.

On a CPU engine with `profiler.events.engine_iterations`, the hook selects the clock of SGLang's
forward-pass metrics: sglang 0.5.12 always selects its device timer, whose CUDA events end a scheduler without
CUDA in its first forward pass.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from verl_profiler.environ import SETTINGS

__all__ = ["load"]

_DEVICE_TIMER = "forward_pass_device_timer"


def load() -> None:
    """Register the hook with SGLang, if this process should have it; never raises."""
    text = os.environ.get(SETTINGS)
    if not text or os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from verl_profiler.recording import recorder

    try:
        from verl_profiler.recording.worker_config import WorkerConfig

        if WorkerConfig.decode(text).events.engine_iterations:
            _register_clock()
    except Exception as error:  # noqa: BLE001  the engine serves with or without its iterations
        recorder.announce(f"WARNING SGLang's iterations are not timed: {error!r} (plugin-failed)")


def _register_clock() -> None:
    # Later versions (0.5.23) have their metrics elsewhere, and no clock to select.
    if importlib.util.find_spec("sglang.srt.observability.scheduler_metrics_mixin") is None:
        return
    from sglang.srt.plugins import hook_registry  # pyright: ignore[reportMissingTypeStubs]

    hooks: Any = hook_registry
    target = "sglang.srt.managers.scheduler.Scheduler._init_fpm"
    hooks.HookRegistry.register(target, _use_clock, hooks.HookType.AROUND)


def _use_clock(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Initialize the metrics without the device timer that they make, unless SGLang has one of its own."""
    had_timer = hasattr(scheduler, _DEVICE_TIMER)
    original(scheduler, *args, **kwargs)
    scheduler._fpm_uses_device_timer = False
    if not had_timer and hasattr(scheduler, _DEVICE_TIMER):
        delattr(scheduler, _DEVICE_TIMER)
