"""Hooks inside SGLang's schedulers, which are processes of their own below an engine server: NVTX ranges.

SGLang >= 0.5.11 calls the entry points of its group `sglang.srt.plugins` in the engine's process and
in each scheduler, before anything runs there; that is the way in.  Ranges are opened where those of
the engine server are: where a tool has put its NVTX library into the process.  Elsewhere the scheduler's
functions are the original objects.

On a CPU engine with `profiler.events.engine_iterations`, one more hook selects the clock of SGLang's
forward-pass metrics: sglang 0.5.12 always selects its device timer, whose CUDA events end a scheduler without
CUDA in its first forward pass.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from verl_profiler.environ import SETTINGS

_CATEGORY = "scheduler"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_DEVICE_TIMER = "forward_pass_device_timer"


def load() -> None:
    """Register the ranges with SGLang, if this process should have them; never raises."""
    text = os.environ.get(SETTINGS)
    if not text:
        return
    from verl_profiler.recording.complaints import announce

    try:
        from verl_profiler.instrumentation.nvtx_ranges import tool_attached
        from verl_profiler.recording.worker_config import WorkerConfig

        config = WorkerConfig.decode(text)
        if tool_attached():
            _register()
        if config.events.engine_iterations and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
            _register_clock()
    except Exception as error:  # noqa: BLE001  the engine runs with or without ranges
        announce(f"WARNING SGLang's schedulers open no NVTX ranges: {error!r} (plugin-failed)")


def _register() -> None:
    import nvtx  # pyright: ignore[reportMissingImports]
    from sglang.srt.plugins import hook_registry  # pyright: ignore[reportMissingTypeStubs]

    hooks: Any = hook_registry
    for method, name_of in (("run_batch", _forward), ("process_batch_result", _result)):
        around = hooks.HookType.AROUND
        hooks.HookRegistry.register(f"{_SCHEDULER}.{method}", _in_range(nvtx, name_of), around)


def _register_clock() -> None:
    # Later versions (0.5.23) have their metrics elsewhere, and no clock to select.
    if importlib.util.find_spec("sglang.srt.observability.scheduler_metrics_mixin") is None:
        return
    from sglang.srt.plugins import hook_registry  # pyright: ignore[reportMissingTypeStubs]

    hooks: Any = hook_registry
    hooks.HookRegistry.register(f"{_SCHEDULER}._init_fpm", _use_clock, hooks.HookType.AROUND)


def _use_clock(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Initialize the metrics without the device timer that they make, unless SGLang has one of its own."""
    had_timer = hasattr(scheduler, _DEVICE_TIMER)
    original(scheduler, *args, **kwargs)
    scheduler._fpm_uses_device_timer = False
    if not had_timer and hasattr(scheduler, _DEVICE_TIMER):
        delattr(scheduler, _DEVICE_TIMER)


def _in_range(nvtx: Any, name_of: Callable[[Any], str]) -> Callable[..., Any]:
    """Return a hook that opens a range around a method whose first argument is a batch."""
    from verl_profiler.events.vocabulary import NVTX_DOMAIN

    push, pop = nvtx.push_range, nvtx.pop_range

    def around(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        pushed = False
        try:
            batch = args[0] if args else kwargs["batch"]
            push(name_of(batch), None, NVTX_DOMAIN, _CATEGORY, len(batch.reqs))
            pushed = True
        except Exception:  # noqa: BLE001  a batch of another kind; the forward pass goes on
            pass
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            if pushed:
                pop(NVTX_DOMAIN)

    return around


def _forward(batch: Any) -> str:
    """Name a forward pass by its kind, for example `forward_extend` or `forward_decode`."""
    return f"forward_{batch.forward_mode.name.lower()}"


def _result(_batch: Any) -> str:
    return "batch_result"
