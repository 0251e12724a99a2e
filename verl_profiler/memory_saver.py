"""Translate `profiler.memory_saver` into the host's own settings, and find what would defeat it.

Each setting stands for keys that this verl really has; null leaves them alone, so profiling alone
changes no memory setting.  A trap that concerns a setting asked for here ends the command; one that
the host's own settings hold is a warning, and the run goes on as it would have.

What verl 0.5 to 0.9.1 and SGLang 0.4.6 to 0.5.23 make of each setting: docs/memory-saver.md.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.errors import ConfigError
from verl_profiler.settings import MemorySaverSettings

__all__ = ["TAGS", "VARIABLES", "Host", "apply", "expandable_segments", "facts"]

WHERE = "profiler.memory_saver"

# What SGLang can release (sglang 0.5.12 constants.py).
TAGS = ("kv_cache", "weights", "cuda_graph")

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
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_ROLLOUT = "actor_rollout_ref.rollout"
_TRAINING_NODES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")

# Engine → its switch, which verl turns on where nothing else is said.
_SWITCHES = {
    "sglang": f"{_ROLLOUT}.engine_kwargs.sglang.enable_memory_saver",
    "vllm": f"{_ROLLOUT}.enable_sleep_mode",
    "trtllm": f"{_ROLLOUT}.enable_sleep_mode",
}


@dataclass(frozen=True)
class Host:
    """What the installed versions do, read from their files; nothing is imported.

    Args:
        backs_up_hybrid_weights: verl keeps the weights of a hybrid engine in host memory
            (verl >= 0.9; before, only those of a colocated one).
        heeds_multi_stage_wake_up: verl reads that setting (verl <= 0.6).
        has_memory_saver: `torch_memory_saver` is installed, which SGLang needs.
    """

    backs_up_hybrid_weights: bool
    heeds_multi_stage_wake_up: bool
    has_memory_saver: bool

    @classmethod
    def installed(cls) -> Host:
        """Look at this environment."""
        server = _source("workers/rollout/sglang_rollout/async_sglang_server.py")
        rule = re.search(r"enable_weights_cpu_backup = .*?args\[", server, re.DOTALL)
        return cls(
            "RolloutMode.HYBRID" in (rule.group() if rule else ""),
            "multi_stage_wake_up" in _source("workers/sharding_manager/fsdp_sglang.py"),
            importlib.util.find_spec("torch_memory_saver") is not None,
        )


@dataclass(frozen=True)
class _Trap:
    """A setting that would not do what it says.

    Args:
        asked: It concerns a setting that was asked for under `profiler.memory_saver`.
        says: What would happen, and what to do.
    """

    asked: bool
    says: str


class _Plan:
    """The config, what was asked of it, and what comes of both together."""

    def __init__(self, config: Any, asked: MemorySaverSettings, host: Host) -> None:
        self.config = config
        self.asked = asked
        self.host = host
        self.engine = str(_get(config, f"{_ROLLOUT}.name"))
        self.on_device = str(_get(config, "trainer.device") or "cuda") != "cpu"
        self.switch = _SWITCHES.get(self.engine)

    @property
    def saves(self) -> bool:
        """Whether the engine is started with its memory saver."""
        return self.switch is not None and _get(self.config, self.switch) is not False

    @property
    def releases(self) -> bool:
        """Whether verl asks the engine for its memory between rollouts."""
        return bool(_get(self.config, f"{_ROLLOUT}.free_cache_engine"))

    def tags(self) -> tuple[str, ...] | None:
        """Return what verl releases (verl 0.9.1), or None where that changes during the run."""
        if _get(self.config, "trainer.v1.trainer_mode") == "separate_async":
            return None
        if not self.releases:
            return ()
        model = "actor_rollout_ref.model"
        ranks = [_get(self.config, f"{model}.{key}") for key in ("lora_rank", "lora.rank")]
        adapter = any(ranks) and not _get(self.config, f"{model}.lora.merge")
        return ("kv_cache",) if adapter else ("kv_cache", "weights")


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
    if _get(config, _ROLLOUT) is None:
        return []
    plan = _Plan(config, asked, host or Host.installed())
    warnings = [f"{notice} (memory-setting)" for notice in _translate(plan)]
    for trap in (*_engine_traps(plan), *_version_traps(plan), *_environment_traps(plan)):
        if trap.asked:
            raise ConfigError(trap.says, "memory-saver")
        warnings.append(f"{trap.says} (memory-saver)")
    return warnings


def facts(config: Any) -> dict[str, Any]:
    """Return for run.json how the engine's memory was to be handled."""
    if _get(config, _ROLLOUT) is None:
        return {}
    plan = _Plan(config, MemorySaverSettings(), Host(False, False, False))
    tags = plan.tags()
    return {
        "device": _get(config, "trainer.device"),
        "enable_memory_saver": plan.saves,
        "free_cache_engine": plan.releases,
        "tags": None if tags is None else list(tags),
        "gpu_memory_utilization": _get(config, f"{_ROLLOUT}.gpu_memory_utilization"),
        **{
            name: bool(_get(config, path))
            for name in ("param_offload", "optimizer_offload")
            for path in _offload_paths(config, name)[:1]
        },
    }


def expandable_segments(variables: Mapping[str, str]) -> str | None:
    """Return the variable that tells torch to use expandable segments, or None."""
    for name in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in variables.get(name, "").lower():
            return name
    return None


def _translate(plan: _Plan) -> Iterator[str]:
    """Set the host's keys; say which of ours give way to a key on the command line."""
    asked, config = plan.asked, plan.config
    places: dict[str, list[str]] = {
        name: [f"{_ROLLOUT}.{name}"]
        for name in ("free_cache_engine", "gpu_memory_utilization", "multi_stage_wake_up")
    }
    for name in ("param_offload", "optimizer_offload"):
        places[name] = _offload_paths(config, name)
    places["enable_memory_saver"] = [] if plan.switch is None else [plan.switch]
    said = _command_line(config)
    for name, paths in places.items():
        wanted = getattr(asked, name)
        if wanted is None:
            continue
        for path in paths:
            found = _get(config, path)
            if path not in said or found == wanted:
                _set(config, path, wanted)
            elif f"{WHERE}.{name}" in said:
                raise ConfigError(
                    f"{WHERE}.{name} is {_text(wanted)}, but {path} is {_text(found)}: both name "
                    "the same setting.\nKeep one of them.",
                    "memory-saver",
                )
            else:
                yield (
                    f"{WHERE}.{name}={_text(wanted)} of the option gives way to {path}="
                    f"{_text(found)} of the command"
                )
    for name, value in _variables(plan).items():
        os.environ[name] = value
        _set_variable(config, name, value)


def _variables(plan: _Plan) -> dict[str, str]:
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
        for held in (os.environ.get(name), _runtime_variables(plan.config).get(name)):
            if held is not None and str(held) != text:
                raise ConfigError(
                    f"{WHERE}.environment.{name} is {text}, but the environment has {held}.\n"
                    "Unset one of them.",
                    "memory-saver",
                )
        wanted[name] = text
    return wanted


def _engine_traps(plan: _Plan) -> Iterator[_Trap]:
    """Find switches that cancel each other, and engines that lack what is asked for."""
    asked, switch = plan.asked, plan.switch
    if switch is None:
        if asked.enable_memory_saver:
            yield _Trap(
                True,
                f"{WHERE}.enable_memory_saver is true, but the engine {plan.engine!r} has no memory "
                f"saver.\nUse {_ROLLOUT}.name=sglang, or set {WHERE}.enable_memory_saver=null.",
            )
        return
    if not plan.on_device:
        if asked.enable_memory_saver:
            yield _Trap(
                True,
                f"{WHERE}.enable_memory_saver is true on trainer.device=cpu: the saver needs CUDA, "
                "and the engine's processes would not start.\n"
                f"Rehearse with +profiler=memory_saver_rehearsal, or set {WHERE}.enable_memory_saver=false.",
            )
        return
    if plan.releases and not plan.saves:
        yield _Trap(
            asked.enable_memory_saver is False or asked.free_cache_engine is True,
            f"{_ROLLOUT}.free_cache_engine is true, but {switch} is false: verl will release the "
            "engine's memory, the calls will succeed or fail, and nothing will be freed.\n"
            f"Leave {switch} out, or set {_ROLLOUT}.free_cache_engine=false.",
        )
    if asked.enable_memory_saver and not plan.releases:
        yield _Trap(
            True,
            f"{WHERE}.enable_memory_saver is true, but {_ROLLOUT}.free_cache_engine is false: the "
            f"saver would run and verl would never use it.\nSet {WHERE}.free_cache_engine=true.",
        )
    tags = plan.tags()
    if asked.tags is not None and tags is not None and set(asked.tags) != set(tags):
        unknown = [tag for tag in asked.tags if tag not in TAGS]
        reason = (
            f"there is no {unknown[0]!r}; SGLang has {', '.join(TAGS)}"
            if unknown
            else f"this verl releases [{','.join(tags)}] with these settings, whatever is asked"
        )
        yield _Trap(
            True,
            f"{WHERE}.tags is [{','.join(asked.tags)}], but {reason}.\n"
            f"Set {WHERE}.tags=[{','.join(tags)}], or null to check nothing.",
        )
    if plan.engine == "sglang" and plan.saves and not plan.host.has_memory_saver:
        yield _Trap(
            bool(asked.enable_memory_saver),
            "SGLang is started with its memory saver, but torch_memory_saver is not installed here: "
            "the engine would end at its start.\npip install torch-memory-saver",
        )


def _version_traps(plan: _Plan) -> Iterator[_Trap]:
    """Find settings that this verl ignores or overwrites."""
    asked, host, config = plan.asked, plan.host, plan.config
    backed_up = plan.engine == "sglang" and host.backs_up_hybrid_weights
    if asked.weights_cpu_backup is not None and asked.weights_cpu_backup != backed_up:
        yield _Trap(
            True,
            f"{WHERE}.weights_cpu_backup is {_text(asked.weights_cpu_backup)}, but verl sets it to "
            f"{_text(backed_up)} for {plan.engine} and takes no other value.\n"
            f"Set {WHERE}.weights_cpu_backup=null.",
        )
    native = f"{_ROLLOUT}.engine_kwargs.sglang.enable_weights_cpu_backup"
    given = _get(config, native)
    if plan.engine == "sglang" and given is not None and given != backed_up:
        yield _Trap(
            False,
            f"{native} is {_text(given)}, but verl overwrites it with {_text(backed_up)}. Leave it out.",
        )
    if _get(config, f"{_ROLLOUT}.multi_stage_wake_up") and not host.heeds_multi_stage_wake_up:
        yield _Trap(
            False,
            f"{_ROLLOUT}.multi_stage_wake_up is true, but this verl does not read it: since 0.7 it "
            "always takes the weights first and the cache after the sync. Leave it out.",
        )
    if asked.multi_stage_wake_up is False and not host.heeds_multi_stage_wake_up:
        yield _Trap(
            True,
            f"{WHERE}.multi_stage_wake_up is false, but this verl always wakes up in stages.\n"
            f"Set {WHERE}.multi_stage_wake_up=null.",
        )
    for path in _offload_paths(config, "offload_policy"):
        if _get(config, path) and (asked.param_offload or asked.optimizer_offload):
            yield _Trap(
                True,
                f"{path} is true, which turns param_offload and optimizer_offload off.\n"
                f"Set {path}=false, or {WHERE}.param_offload=null and {WHERE}.optimizer_offload=null.",
            )


def _environment_traps(plan: _Plan) -> Iterator[_Trap]:
    """Find variables that defeat the saver, or that have no effect under verl."""
    held = {**os.environ, **_runtime_variables(plan.config)}
    name = expandable_segments(held)
    if name is not None and plan.on_device and plan.saves:
        yield _Trap(
            bool(plan.asked.enable_memory_saver),
            f"{name} has expandable_segments:True, which the engine's memory saver cannot work "
            "with: SGLang ends at its start, or releases nothing.\n"
            f"Take it out of {name}; verl turns it on for the trainer by itself.",
        )
    if held.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").lower() in ("1", "true"):
        yield _Trap(
            False,
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH is on, but verl never releases the tag cuda_graph: CUDA "
            "graphs stay in device memory, and NCCL needs NCCL_GRAPH_REGISTER=0. Unset it.",
        )


def _offload_paths(config: Any, key: str) -> list[str]:
    """Return where the training models have `key`; the node's name differs by strategy and version."""
    found = []
    for node in _TRAINING_NODES:
        below = _get(config, node)
        for name in below or ():
            value = below.get(name) if isinstance(name, str) else None
            if isinstance(value, Mapping) or hasattr(value, "keys"):
                if key in value:
                    found.append(f"{node}.{name}.{key}")
                elif node == "critic" and "fsdp_config" in value and key in value["fsdp_config"]:
                    found.append(f"{node}.{name}.fsdp_config.{key}")
    return found


def _command_line(config: Any) -> set[str]:
    """Return the keys that the command line sets."""
    task = _get(config, "hydra.overrides.task") or ()
    return {str(word).partition("=")[0].lstrip("+~") for word in task}


def _runtime_variables(config: Any) -> dict[str, str]:
    variables = _get(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    return {str(name): str(value) for name, value in variables.items()}


def _set_variable(config: Any, name: str, value: str) -> None:
    """Put a variable where Ray hands it to the workers of all nodes."""
    node = config
    for key in ("ray_kwargs", "ray_init", "runtime_env", "env_vars"):
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
    node[name] = value


def _get(config: Any, path: str) -> Any:
    node = config
    for key in path.split("."):
        node = node.get(key) if node is not None and hasattr(node, "get") else None
    return node


def _set(config: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    node = config
    for key in parents:
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
    node[last] = value


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _source(path: str) -> str:
    """Read a file of the installed verl, without importing it; empty where there is none."""
    spec = importlib.util.find_spec("verl")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / path
        if file.is_file():
            return file.read_text(encoding="utf-8", errors="replace")
    return ""
