"""Settings of one run: checked in the driver, and frozen; `recording.carried` has what travels.

The YAML of `configs/profiler/` is the form that users see; its comments say what each key does.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from verl_profiler.capture.plan import NsightSettings
from verl_profiler.errors import ConfigError
from verl_profiler.recording.carried import EventSettings
from verl_profiler.transfer_queue.switches import Switches

__all__ = [
    "MemorySaverSettings",
    "Settings",
    "parse",
]

# Setting, lowest and highest value.
_EVENT_RANGES = (
    ("flush_interval_s", 0.01, 60),
    ("max_pending", 1000, 50_000_000),
    ("lag_threshold_s", 0.001, 60),
)
_MEMORY_SAVER_RANGES = (
    ("gpu_memory_utilization", 0.01, 1),
    ("sample_interval_s", 0.05, 3600),
)


class MemorySaverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`profiler.memory_saver`: what `verl_profiler.launch.memory_saver.translate` does with the host's own settings.

    None leaves the host's setting as it is.

    Args:
        enable_memory_saver: Start the engine so that its memory can be released.
        free_cache_engine: Release it between rollouts.
        tags: What must be released; checked, since verl decides.
        weights_cpu_backup: Keep released weights in host memory; checked, since verl decides.
        gpu_memory_utilization: Share of the device for the engine.
        param_offload: Keep the training models in host memory while they are not in use.
        optimizer_offload: Keep the optimizers there.
        multi_stage_wake_up: Take the weights before the cache; older verl only.
        environment: Variables of the memory saver, for all processes.
        sample_interval_s: Read memory this often; None for the host's own checkpoints only.
    """

    enable_memory_saver: bool | None = None
    free_cache_engine: bool | None = None
    tags: tuple[str, ...] | None = None
    weights_cpu_backup: bool | None = None
    gpu_memory_utilization: float | None = None
    param_offload: bool | None = None
    optimizer_offload: bool | None = None
    multi_stage_wake_up: bool | None = None
    environment: dict[str, bool | int | str] | None = None
    sample_interval_s: float | None = None


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The top-level `profiler:` node.

    Args:
        output_dir: Where the run directory is made.
        record_command: Write the command line, its directory, host, paths and variables to run.json.
    """

    output_dir: str
    record_command: bool = True
    events: EventSettings = EventSettings()
    nsight: NsightSettings = NsightSettings()
    memory_saver: MemorySaverSettings = MemorySaverSettings()
    transfer_queue: Switches = Switches()


def parse(node: Any, where: str = "profiler") -> Settings:
    """Check the resolved `profiler:` node.

    Args:
        node: The node as plain Python containers.
        where: Its place in the config, for messages.

    Raises:
        ConfigError: For an unknown key, a wrong type or a value out of range.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(
            f"{where} is {node!r}, not a group of settings: Hydra did not find verl-profiler's "
            "configs.\nInstall verl-profiler into the environment that runs main_ppo, or add "
            f"hydra.searchpath=[pkg://verl_profiler.configs] next to +{where}=multiturn.",
            "config-group-not-found",
        )
    _reject_unknown(node, Settings, where)
    try:
        settings = msgspec.convert(dict(node), Settings)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        path = where + place.rstrip("`")
        raise ConfigError(
            f"{path}: {problem}.\nSee configs/profiler/multiturn.yaml for what it may be.",
            "config-value",
        ) from None
    _check_ranges(settings.events, f"{where}.events", _EVENT_RANGES)
    _check_ranges(settings.memory_saver, f"{where}.memory_saver", _MEMORY_SAVER_RANGES)
    _check_steps(settings.events.steps, f"{where}.events.steps")
    settings.transfer_queue.check(f"{where}.transfer_queue")
    return settings


def _reject_unknown(node: Mapping[str, Any], struct: type[msgspec.Struct], where: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in node.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = (
                f"Did you mean {where}.{near[0]}?"
                if near
                else f"{where} has: {', '.join(sorted(fields))}."
            )
            raise ConfigError(
                f"{where}.{key} is not a setting of verl-profiler.\n{hint}", "unknown-key"
            )
        kind = fields[key]
        if (
            isinstance(value, Mapping)
            and isinstance(kind, type)
            and issubclass(kind, msgspec.Struct)
        ):
            _reject_unknown(value, kind, f"{where}.{key}")


def _check_ranges(
    settings: msgspec.Struct, where: str, ranges: tuple[tuple[str, float, float], ...]
) -> None:
    for name, low, high in ranges:
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(
                f"{where}.{name} is {value}; it must lie between {low} and {high}.", "config-value"
            )


def _check_steps(steps: tuple[int, ...] | None, where: str) -> None:
    if steps is not None and any(step < 0 for step in steps):
        raise ConfigError(
            f"{where} is {list(steps)}; steps are counted from 1 (0 is before the first).\n"
            "Use null to record all of them.",
            "config-value",
        )
