"""How the config and the installed versions handle the engine's memory, as one object.

Every key is looked up where the installed verl has it; nothing here changes the config.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.launch.settings import MemorySaverSettings

__all__ = [
    "ROLLOUT",
    "SWITCHES",
    "TAGS",
    "WHERE",
    "Host",
    "Plan",
    "offload_paths",
    "runtime_variables",
    "value_at",
    "written",
]

WHERE = "profiler.memory_saver"

# What SGLang can release (sglang 0.5.12 constants.py).
TAGS = ("kv_cache", "weights", "cuda_graph")

ROLLOUT = "actor_rollout_ref.rollout"
_TRAINING_NODES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")

# Engine → its switch, which verl turns on by default.
SWITCHES = {
    "sglang": f"{ROLLOUT}.engine_kwargs.sglang.enable_memory_saver",
    "vllm": f"{ROLLOUT}.enable_sleep_mode",
    "trtllm": f"{ROLLOUT}.enable_sleep_mode",
}


@dataclass(frozen=True)
class Host:
    """Capabilities of the installed versions, read from their files; nothing is imported.

    Args:
        backs_up_hybrid_weights: verl keeps the weights of a hybrid engine in host memory
            (verl >= 0.9; before, only those of a colocated one).
        honors_multi_stage_wake_up: verl reads that setting (verl <= 0.6).
        has_memory_saver: `torch_memory_saver` is installed, which SGLang needs.
    """

    backs_up_hybrid_weights: bool
    honors_multi_stage_wake_up: bool
    has_memory_saver: bool

    @classmethod
    def installed(cls) -> Host:
        """Return the capabilities in this environment."""
        server = _source("workers/rollout/sglang_rollout/async_sglang_server.py")
        rule = re.search(r"enable_weights_cpu_backup = .*?args\[", server, re.DOTALL)
        return cls(
            "RolloutMode.HYBRID" in (rule.group() if rule else ""),
            "multi_stage_wake_up" in _source("workers/sharding_manager/fsdp_sglang.py"),
            importlib.util.find_spec("torch_memory_saver") is not None,
        )


class Plan:
    """The config, the requested settings, and what follows from both."""

    def __init__(self, config: Any, requested: MemorySaverSettings, host: Host) -> None:
        self.config = config
        self.requested = requested
        self.host = host
        self.engine = str(value_at(config, f"{ROLLOUT}.name"))
        self.on_device = str(value_at(config, "trainer.device") or "cuda") != "cpu"
        self.switch = SWITCHES.get(self.engine)

    @property
    def saves(self) -> bool:
        """Whether the engine is started with its memory saver."""
        return self.switch is not None and value_at(self.config, self.switch) is not False

    @property
    def releases(self) -> bool:
        """Whether verl releases the engine's memory between rollouts."""
        return bool(value_at(self.config, f"{ROLLOUT}.free_cache_engine"))

    def tags(self) -> tuple[str, ...] | None:
        """Return what verl releases (verl 0.9.1), or None if that changes during the run."""
        if value_at(self.config, "trainer.v1.trainer_mode") == "separate_async":
            return None
        if not self.releases:
            return ()
        model = "actor_rollout_ref.model"
        ranks = [value_at(self.config, f"{model}.{key}") for key in ("lora_rank", "lora.rank")]
        adapter = any(ranks) and not value_at(self.config, f"{model}.lora.merge")
        # vLLM's sleep unmaps the weights at every level.
        keeps = adapter and self.engine == "sglang"
        return ("kv_cache",) if keeps else ("kv_cache", "weights")


def offload_paths(config: Any, key: str) -> list[str]:
    """Return where the training models have `key`; node names differ by strategy and version."""
    found: list[str] = []
    for node in _TRAINING_NODES:
        below = value_at(config, node)
        for name in below or ():
            value: Any = below.get(name) if isinstance(name, str) else None
            if hasattr(value, "keys"):
                if key in value:
                    found.append(f"{node}.{name}.{key}")
                elif node == "critic" and "fsdp_config" in value and key in value["fsdp_config"]:
                    found.append(f"{node}.{name}.fsdp_config.{key}")
    return found


def runtime_variables(config: Any) -> dict[str, str]:
    """Return the environment variables of the workers that are set in the config."""
    variables = mapping_or_empty(value_at(config, "ray_kwargs.ray_init.runtime_env.env_vars"))
    return {str(name): str(value) for name, value in variables.items()}


def value_at(config: Any, path: str) -> Any:
    """Return the value at a dotted path, or None."""
    # `verl-profiler check` imports this module where OmegaConf may be missing.
    from omegaconf import OmegaConf

    return OmegaConf.select(config, path)


def written(value: Any) -> str:
    """Return a value as YAML has it."""
    return msgspec.json.encode(value).decode()


def _source(path: str) -> str:
    """Return a file of the installed verl, without importing it; empty if there is none."""
    spec = importlib.util.find_spec("verl")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / path
        if file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")
    return ""
