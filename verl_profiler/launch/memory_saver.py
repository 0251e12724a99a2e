"""Translate `profiler.memory_saver` into the host's own settings, and report pitfalls.

Each setting stands for keys that the installed verl has; null leaves them alone, so profiling alone
changes no memory setting.  A pitfall of a setting requested here ends the command; one of the host's
own settings is a warning, and the run continues unchanged.

What verl 0.5 to 0.9.1 and SGLang 0.4.6 to 0.5.23 do with each setting: docs/memory-saver.md.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from verl_profiler.errors import ConfigError
from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.launch.settings import MemorySaverSettings

_WHERE = "profiler.memory_saver"
_ROLLOUT = "actor_rollout_ref.rollout"
_TRAINING_NODES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Engine → its switch, which verl turns on by default.
_SWITCHES = {
    "sglang": f"{_ROLLOUT}.engine_kwargs.sglang.enable_memory_saver",
    "vllm": f"{_ROLLOUT}.enable_sleep_mode",
    "trtllm": f"{_ROLLOUT}.enable_sleep_mode",
}
# Setting → those that depend on it.
_FOLLOWS = {
    "enable_memory_saver": ("free_cache_engine",),
    "free_cache_engine": ("enable_memory_saver",),
}


class _Engine:
    """How a config handles the engine's memory; every key is looked up where the installed verl has it."""

    def __init__(self, config: Any) -> None:
        self.name = str(_value_at(config, f"{_ROLLOUT}.name"))
        self.on_device = str(_value_at(config, "trainer.device") or "cuda") != "cpu"
        self.switch = _SWITCHES.get(self.name)
        # Whether it is started with its memory saver, and whether verl releases its memory.
        self.saves = self.switch is not None and _value_at(config, self.switch) is not False
        self.releases = bool(_value_at(config, f"{_ROLLOUT}.free_cache_engine"))


class _Pitfall(NamedTuple):
    """What would not have its effect, and what to do; and whether `profiler.memory_saver` requests it."""

    requested: bool
    text: str


def apply(config: Any, requested: MemorySaverSettings) -> list[str]:
    """Put the requested settings into `config` and check the result.

    Args:
        config: verl's config; changed in place if a setting is requested.
        requested: The checked settings.

    Returns:
        Warnings, each with a slug.

    Raises:
        ConfigError: For a requested setting that would not have its effect.
    """
    if _value_at(config, _ROLLOUT) is None:
        return []
    _refuse_in_one_step_off(config, requested)
    overridden = list(_translate(config, requested))
    warnings = [f"{notice} (memory-setting)" for _, notice in overridden]
    # What the command line decided is no request of the profiler's settings.
    moot = {other for name, _ in overridden for other in (name, *_FOLLOWS.get(name, ()))}
    requested = msgspec.structs.replace(requested, **dict.fromkeys(moot))
    for pitfall in _pitfalls(config, requested):
        if pitfall.requested:
            raise ConfigError(pitfall.text, "memory-saver")
        warnings.append(f"{pitfall.text} (memory-saver)")
    return warnings


def facts(config: Any) -> dict[str, Any]:
    """Return how the engine's memory is configured, for run.json."""
    if _value_at(config, _ROLLOUT) is None:
        return {}
    engine = _Engine(config)
    return {
        "device": _value_at(config, "trainer.device"),
        "enable_memory_saver": engine.saves,
        "free_cache_engine": engine.releases,
        "tags": _released_tags(config, engine),
        "gpu_memory_utilization": _value_at(config, f"{_ROLLOUT}.gpu_memory_utilization"),
        **{
            name: bool(_value_at(config, path))
            for name in ("param_offload", "optimizer_offload")
            for path in _offload_paths(config, name)[:1]
        },
    }


def expandable_segments(variables: Mapping[str, str]) -> str | None:
    """Return the variable that makes torch use expandable segments, or None."""
    for name in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in variables.get(name, "").lower():
            return name
    return None


def _released_tags(config: Any, engine: _Engine) -> list[str] | None:
    """Return what verl releases (verl 0.9.1), or None if that changes during the run."""
    if _value_at(config, "trainer.v1.trainer_mode") == "separate_async":
        return None
    if not engine.releases:
        return []
    model = "actor_rollout_ref.model"
    ranks = [_value_at(config, f"{model}.{key}") for key in ("lora_rank", "lora.rank")]
    adapter = any(ranks) and not _value_at(config, f"{model}.lora.merge")
    # vLLM's sleep unmaps the weights at every level.
    keeps = adapter and engine.name == "sglang"
    return ["kv_cache"] if keeps else ["kv_cache", "weights"]


def _refuse_in_one_step_off(config: Any, requested: MemorySaverSettings) -> None:
    """Refuse a release of the engine's memory where the one-step-off trainer cannot work with it.

    Only its config and that of the fully asynchronous trainer have a `rollout` node at the top.
    """
    separate = _value_at(config, "rollout.nnodes") is not None
    asked = requested.free_cache_engine and f"{_ROLLOUT}.free_cache_engine" not in _command_line(
        config
    )
    if asked and separate and _value_at(config, "async_training") is None:
        raise ConfigError(
            f"{_WHERE}.free_cache_engine is true, but in verl's one_step_off_policy it must be false: "
            "otherwise weights cannot be synchronized (its one_step_off_ppo_trainer.yaml). Its engines "
            "have devices of their own, so there is nothing to release.\n"
            "Use +profiler=multiturn, which changes no memory setting.",
            "memory-saver",
        )


def _translate(config: Any, requested: MemorySaverSettings) -> Iterator[tuple[str, str]]:
    """Set the host's keys; yield which settings are overridden by verl's own key, and a notice."""
    from omegaconf import OmegaConf

    switch = _Engine(config).switch
    places: dict[str, list[str]] = {
        "free_cache_engine": [f"{_ROLLOUT}.free_cache_engine"],
        "gpu_memory_utilization": [f"{_ROLLOUT}.gpu_memory_utilization"],
        "param_offload": _offload_paths(config, "param_offload"),
        "optimizer_offload": _offload_paths(config, "optimizer_offload"),
        "enable_memory_saver": [] if switch is None else [switch],
    }
    overridden = _command_line(config)
    for name, paths in places.items():
        wanted = getattr(requested, name)
        if wanted is None:
            continue
        for path in paths:
            found = _value_at(config, path)
            if path not in overridden or found == wanted:
                OmegaConf.update(config, path, wanted, force_add=True)
            else:
                notice = f"{_WHERE}.{name}={_yaml(wanted)} is overridden by {path}={_yaml(found)}"
                yield name, f"{notice} on the command line, which takes precedence"


def _pitfalls(config: Any, requested: MemorySaverSettings) -> Iterator[_Pitfall]:
    """Yield switches that cancel each other, and what is incompatible with the saver."""
    for path in _offload_paths(config, "offload_policy"):
        if _value_at(config, path) and (requested.param_offload or requested.optimizer_offload):
            yield _Pitfall(
                True,
                f"{path} is true, which turns param_offload and optimizer_offload off.\n"
                f"Set {path}=false, or {_WHERE}.param_offload=null and {_WHERE}.optimizer_offload=null.",
            )
    engine = _Engine(config)
    if not engine.on_device:
        if requested.enable_memory_saver:
            yield _Pitfall(
                True,
                f"{_WHERE}.enable_memory_saver is true on trainer.device=cpu: the saver needs CUDA, "
                "and the engine's processes would not start.\n"
                f"Rehearse with +profiler=memory_saver_rehearsal, or set {_WHERE}.enable_memory_saver=false.",
            )
        return
    if engine.switch is None:
        if requested.enable_memory_saver:
            yield _Pitfall(
                True,
                f"{_WHERE}.enable_memory_saver is true, but the engine {engine.name!r} has no memory "
                f"saver.\nUse {_ROLLOUT}.name=sglang, or set {_WHERE}.enable_memory_saver=null.",
            )
        return
    if engine.releases and not engine.saves:
        yield _Pitfall(
            requested.enable_memory_saver is False or requested.free_cache_engine is True,
            f"{_ROLLOUT}.free_cache_engine is true, but {engine.switch} is false: verl will release the "
            "engine's memory, the calls will succeed or fail, and nothing will be freed.\n"
            f"Remove {engine.switch}, or set {_ROLLOUT}.free_cache_engine=false.",
        )
    if requested.enable_memory_saver and not engine.releases:
        yield _Pitfall(
            True,
            f"{_WHERE}.enable_memory_saver is true, but {_ROLLOUT}.free_cache_engine is false: the "
            f"saver would run, and verl would never use it.\nSet {_WHERE}.free_cache_engine=true.",
        )
    if not engine.saves:
        return
    if engine.name == "sglang" and importlib.util.find_spec("torch_memory_saver") is None:
        # A warning, because the engines' nodes may have packages that the driver's lacks.
        yield _Pitfall(
            False,
            "SGLang is started with its memory saver, but torch_memory_saver is not installed here: "
            "without it the engine exits at startup. Run: pip install torch-memory-saver",
        )
    workers = mapping_or_empty(_value_at(config, "ray_kwargs.ray_init.runtime_env.env_vars"))
    name = expandable_segments(os.environ | {key: str(value) for key, value in workers.items()})
    if name is not None:
        yield _Pitfall(
            bool(requested.enable_memory_saver),
            f"{name} has expandable_segments:True, which is incompatible with the engine's "
            "memory saver: SGLang exits at startup, or releases nothing.\n"
            f"Remove it from {name}; verl turns it on for the trainer by itself.",
        )


def _offload_paths(config: Any, key: str) -> list[str]:
    """Return where the training models have `key`; node names differ by strategy and version."""
    found: list[str] = []
    for node in _TRAINING_NODES:
        below = _value_at(config, node)
        for name in below or ():
            value: Any = below.get(name) if isinstance(name, str) else None
            if hasattr(value, "keys"):
                if key in value:
                    found.append(f"{node}.{name}.{key}")
                elif node == "critic" and "fsdp_config" in value and key in value["fsdp_config"]:
                    found.append(f"{node}.{name}.fsdp_config.{key}")
    return found


def _command_line(config: Any) -> set[str]:
    """Return the keys that the command line sets."""
    task = _value_at(config, "hydra.overrides.task") or ()
    return {str(word).partition("=")[0].lstrip("+~") for word in task}


def _value_at(config: Any, path: str) -> Any:
    """Return the value at a dotted path, or None."""
    # `verl-profiler check` imports this module where OmegaConf may be missing.
    from omegaconf import OmegaConf

    return OmegaConf.select(config, path)


def _yaml(value: Any) -> str:
    """Return a value as YAML has it."""
    return msgspec.json.encode(value).decode()
