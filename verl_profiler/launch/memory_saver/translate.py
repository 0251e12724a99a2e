"""Translate `profiler.memory_saver` into the host's own settings, and report pitfalls.

Each setting stands for keys that the installed verl has; null leaves them alone, so profiling alone
changes no memory setting.  A pitfall of a setting requested here ends the command; one of the host's
own settings is a warning, and the run continues unchanged.

What verl 0.5 to 0.9.1 and SGLang 0.4.6 to 0.5.23 do with each setting: docs/memory-saver.md.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from typing import Any

import msgspec
from omegaconf import OmegaConf

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
from verl_profiler.launch.memory_saver.pitfalls import pitfalls
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


def apply(config: Any, requested: MemorySaverSettings, host: Host | None = None) -> list[str]:
    """Put the requested settings into `config` and check the result.

    Args:
        config: verl's config; changed in place if a setting is requested.
        requested: The checked settings.
        host: The installed versions; looked up if None.

    Returns:
        Warnings, each with a slug.

    Raises:
        ConfigError: For a requested setting that would not have its effect.
    """
    if value_at(config, ROLLOUT) is None:
        return []
    host = host or Host.installed()
    _refuse_in_one_step_off(config, requested)
    overridden = list(_translate(Plan(config, requested, host)))
    warnings = [f"{notice} (memory-setting)" for _, notice in overridden]
    # What the command line decided is no request of the profiler's settings.
    moot = {other for name, _ in overridden for other in (name, *_FOLLOWS.get(name, ()))}
    requested = msgspec.structs.replace(requested, **dict.fromkeys(moot))
    for pitfall in pitfalls(Plan(config, requested, host)):
        if pitfall.requested:
            raise ConfigError(pitfall.text, "memory-saver")
        warnings.append(f"{pitfall.text} (memory-saver)")
    return warnings


def facts(config: Any) -> dict[str, Any]:
    """Return how the engine's memory is configured, for run.json."""
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


# Setting → those that depend on it.
_FOLLOWS = {
    "enable_memory_saver": ("free_cache_engine", "tags"),
    "free_cache_engine": ("enable_memory_saver", "tags"),
}


def _refuse_in_one_step_off(config: Any, requested: MemorySaverSettings) -> None:
    """Refuse a release of the engine's memory where the one-step-off trainer cannot work with it.

    Only its config and that of the fully asynchronous trainer have a `rollout` node at the top.
    """
    separate = value_at(config, "rollout.nnodes") is not None
    asked = requested.free_cache_engine and f"{ROLLOUT}.free_cache_engine" not in _command_line(
        config
    )
    if asked and separate and value_at(config, "async_training") is None:
        raise ConfigError(
            f"{WHERE}.free_cache_engine is true, but in verl's one_step_off_policy it must be false: "
            "otherwise weights cannot be synchronized (its one_step_off_ppo_trainer.yaml). Its engines "
            "have devices of their own, so there is nothing to release.\n"
            "Use +profiler=multiturn, which changes no memory setting.",
            "memory-saver",
        )


def _translate(plan: Plan) -> Iterator[tuple[str, str]]:
    """Set the host's keys; yield which settings are overridden by verl's own key, and a notice."""
    config = plan.config
    places: dict[str, list[str]] = {
        name: [f"{ROLLOUT}.{name}"]
        for name in ("free_cache_engine", "gpu_memory_utilization", "multi_stage_wake_up")
    }
    for name in ("param_offload", "optimizer_offload"):
        places[name] = offload_paths(config, name)
    places["enable_memory_saver"] = [] if plan.switch is None else [plan.switch]
    overridden = _command_line(config)
    for name, paths in places.items():
        wanted = getattr(plan.requested, name)
        if wanted is None:
            continue
        for path in paths:
            found = value_at(config, path)
            if path not in overridden or found == wanted:
                OmegaConf.update(config, path, wanted, force_add=True)
            else:
                notice = (
                    f"{WHERE}.{name}={written(wanted)} is overridden by {path}={written(found)}"
                )
                yield name, f"{notice} of the command line, the more specific one"
    for name, value in _variables(plan).items():
        os.environ[name] = value
        # From there Ray passes it to the workers of all nodes.
        path = f"ray_kwargs.ray_init.runtime_env.env_vars.{name}"
        OmegaConf.update(config, path, value, force_add=True)


def _variables(plan: Plan) -> dict[str, str]:
    """Return the requested variables as text; a flag is 1 or 0."""
    wanted: dict[str, Any] = {}
    for name, value in (plan.requested.environment or {}).items():
        if name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}?" if near else f"It accepts {', '.join(VARIABLES)}."
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
