"""Translate `profiler.memory_saver` into the host's own settings, and find what would defeat it.

Each setting stands for keys that this verl really has; null leaves them alone, so profiling alone
changes no memory setting.  A trap that concerns a setting asked for here ends the command; one that
the host's own settings hold is a warning, and the run goes on as it would have.

What verl 0.5 to 0.9.1 and SGLang 0.4.6 to 0.5.23 make of each setting: docs/memory-saver.md.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from typing import Any

from verl_profiler.errors import ConfigError
from verl_profiler.launch.memory_saver.host_config import (
    ROLLOUT,
    WHERE,
    Host,
    Plan,
    offload_paths,
    runtime_variables,
    value_at,
    written,
)
from verl_profiler.launch.memory_saver.pitfalls import traps
from verl_profiler.launch.settings import MemorySaverSettings

__all__ = ["VARIABLES", "apply", "facts"]

# Variables of the memory saver and of SGLang around it.
VARIABLES = (
    "NCCL_GRAPH_REGISTER",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH",
    "TMS_DISK_BACKUP_CHUNK_MB",
    "TMS_DISK_BACKUP_DIR",
    "TMS_INIT_CPU_BACKUP_BACKEND",
    "TMS_INIT_ENABLE",
    "TMS_INIT_ENABLE_CPU_BACKUP",
    "TMS_INIT_ENABLE_DISK_BACKUP",
    "TMS_RETAIN_CPU_BACKUP",
)


def apply(config: Any, asked: MemorySaverSettings, host: Host | None = None) -> list[str]:
    """Put what was asked for into `config` and check what comes of it.

    Args:
        config: verl's config; changed in place where something is asked for, else left alone.
        asked: The checked settings.
        host: The installed versions; looked up when None.

    Returns:
        Warnings, each with a slug.

    Raises:
        ConfigError: For a setting asked for here that would not do what it says.
    """
    if value_at(config, ROLLOUT) is None:
        return []
    plan = Plan(config, asked, host or Host.installed())
    warnings = [f"{notice} (memory-setting)" for notice in _translate(plan)]
    for trap in traps(plan):
        if trap.asked:
            raise ConfigError(trap.says, "memory-saver")
        warnings.append(f"{trap.says} (memory-saver)")
    return warnings


def facts(config: Any) -> dict[str, Any]:
    """Return for run.json how the engine's memory was to be handled."""
    if value_at(config, ROLLOUT) is None:
        return {}
    plan = Plan(config, MemorySaverSettings(), Host(False, False, False))
    tags = plan.tags()
    return {
        "device": value_at(config, "trainer.device"),
        "enable_memory_saver": plan.saves,
        "free_cache_engine": plan.releases,
        "tags": None if tags is None else list(tags),
        "gpu_memory_utilization": value_at(config, f"{ROLLOUT}.gpu_memory_utilization"),
        **{
            name: bool(value_at(config, path))
            for name in ("param_offload", "optimizer_offload")
            for path in offload_paths(config, name)[:1]
        },
    }


def _translate(plan: Plan) -> Iterator[str]:
    """Set the host's keys; say which of ours give way to a key on the command line."""
    asked, config = plan.asked, plan.config
    places: dict[str, list[str]] = {
        name: [f"{ROLLOUT}.{name}"]
        for name in ("free_cache_engine", "gpu_memory_utilization", "multi_stage_wake_up")
    }
    for name in ("param_offload", "optimizer_offload"):
        places[name] = offload_paths(config, name)
    places["enable_memory_saver"] = [] if plan.switch is None else [plan.switch]
    said = _command_line(config)
    for name, paths in places.items():
        wanted = getattr(asked, name)
        if wanted is None:
            continue
        for path in paths:
            found = value_at(config, path)
            if path not in said or found == wanted:
                _set(config, path, wanted)
            elif f"{WHERE}.{name}" in said:
                raise ConfigError(
                    f"{WHERE}.{name} is {written(wanted)}, but {path} is {written(found)}: both name "
                    "the same setting.\nKeep one of them.",
                    "memory-saver",
                )
            else:
                yield (
                    f"{WHERE}.{name}={written(wanted)} of the option gives way to {path}="
                    f"{written(found)} of the command"
                )
    for name, value in _variables(plan).items():
        os.environ[name] = value
        # From there Ray hands it to the workers of all nodes.
        _set(config, f"ray_kwargs.ray_init.runtime_env.env_vars.{name}", value)


def _variables(plan: Plan) -> dict[str, str]:
    """Return the variables asked for, as text; a flag is 1 or 0."""
    wanted = {}
    for name, value in (plan.asked.environment or {}).items():
        if name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}?" if near else f"It takes {', '.join(VARIABLES)}."
            raise ConfigError(
                f"{WHERE}.environment.{name} is not a variable of the memory saver.\n{hint}",
                "unknown-key",
            )
        text = str(int(value)) if isinstance(value, bool) else str(value)
        for held in (os.environ.get(name), runtime_variables(plan.config).get(name)):
            if held is not None and str(held) != text:
                raise ConfigError(
                    f"{WHERE}.environment.{name} is {text}, but the environment has {held}.\n"
                    "Unset one of them.",
                    "memory-saver",
                )
        wanted[name] = text
    return wanted


def _command_line(config: Any) -> set[str]:
    """Return the keys that the command line sets."""
    task = value_at(config, "hydra.overrides.task") or ()
    return {str(word).partition("=")[0].lstrip("+~") for word in task}


def _set(config: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    node = config
    for key in parents:
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
    node[last] = value
