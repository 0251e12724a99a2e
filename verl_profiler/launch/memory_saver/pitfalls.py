"""Settings of the engine's memory that would not do what they say, or that defeat the memory saver."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verl_profiler.launch.memory_saver.host_config import (
    ROLLOUT,
    TAGS,
    WHERE,
    Plan,
    offload_paths,
    runtime_variables,
    value_at,
    written,
)

__all__ = ["Trap", "expandable_segments", "traps"]

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True)
class Trap:
    """A setting that would not do what it says.

    Args:
        asked: It concerns a setting that was asked for under `profiler.memory_saver`.
        says: What would happen, and what to do.
    """

    asked: bool
    says: str


def traps(plan: Plan) -> Iterator[Trap]:
    """Find all of them, those of the engine first."""
    yield from _engine_traps(plan)
    yield from _version_traps(plan)
    yield from _environment_traps(plan)


def expandable_segments(variables: Mapping[str, str]) -> str | None:
    """Return the variable that tells torch to use expandable segments, or None."""
    for name in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in variables.get(name, "").lower():
            return name
    return None


def _engine_traps(plan: Plan) -> Iterator[Trap]:
    """Find switches that cancel each other, and engines that lack what is asked for."""
    asked, switch = plan.asked, plan.switch
    if not plan.on_device:
        if asked.enable_memory_saver:
            yield Trap(
                True,
                f"{WHERE}.enable_memory_saver is true on trainer.device=cpu: the saver needs CUDA, "
                "and the engine's processes would not start.\n"
                f"Rehearse with +profiler=memory_saver_rehearsal, or set {WHERE}.enable_memory_saver=false.",
            )
        return
    if switch is None:
        if asked.enable_memory_saver:
            yield Trap(
                True,
                f"{WHERE}.enable_memory_saver is true, but the engine {plan.engine!r} has no memory "
                f"saver.\nUse {ROLLOUT}.name=sglang, or set {WHERE}.enable_memory_saver=null.",
            )
        return
    if plan.releases and not plan.saves:
        yield Trap(
            asked.enable_memory_saver is False or asked.free_cache_engine is True,
            f"{ROLLOUT}.free_cache_engine is true, but {switch} is false: verl will release the "
            "engine's memory, the calls will succeed or fail, and nothing will be freed.\n"
            f"Leave {switch} out, or set {ROLLOUT}.free_cache_engine=false.",
        )
    if asked.enable_memory_saver and not plan.releases:
        yield Trap(
            True,
            f"{WHERE}.enable_memory_saver is true, but {ROLLOUT}.free_cache_engine is false: the "
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
        yield Trap(
            True,
            f"{WHERE}.tags is [{','.join(asked.tags)}], but {reason}.\n"
            f"Set {WHERE}.tags=[{','.join(tags)}], or null to check nothing.",
        )
    if plan.engine == "sglang" and plan.saves and not plan.host.has_memory_saver:
        # A warning, because the engines' nodes may have what the driver's has not.
        yield Trap(
            False,
            "SGLang is started with its memory saver, but torch_memory_saver is not installed here: "
            "without it the engine ends at its start. pip install torch-memory-saver",
        )


def _version_traps(plan: Plan) -> Iterator[Trap]:
    """Find settings that this verl ignores or overwrites."""
    asked, host, config = plan.asked, plan.host, plan.config
    backed_up = plan.engine == "sglang" and host.backs_up_hybrid_weights
    if asked.weights_cpu_backup is not None and asked.weights_cpu_backup != backed_up:
        yield Trap(
            True,
            f"{WHERE}.weights_cpu_backup is {written(asked.weights_cpu_backup)}, but verl sets it to "
            f"{written(backed_up)} for {plan.engine} and takes no other value.\n"
            f"Set {WHERE}.weights_cpu_backup=null.",
        )
    native = f"{ROLLOUT}.engine_kwargs.sglang.enable_weights_cpu_backup"
    given = value_at(config, native)
    if plan.engine == "sglang" and given is not None and given != backed_up:
        yield Trap(
            False,
            f"{native} is {written(given)}, but verl overwrites it with {written(backed_up)}. Leave it out.",
        )
    if value_at(config, f"{ROLLOUT}.multi_stage_wake_up") and not host.heeds_multi_stage_wake_up:
        yield Trap(
            False,
            f"{ROLLOUT}.multi_stage_wake_up is true, but this verl does not read it: since 0.7 it "
            "always takes the weights first and the cache after the sync. Leave it out.",
        )
    if asked.multi_stage_wake_up is False and not host.heeds_multi_stage_wake_up:
        yield Trap(
            True,
            f"{WHERE}.multi_stage_wake_up is false, but this verl always wakes up in stages.\n"
            f"Set {WHERE}.multi_stage_wake_up=null.",
        )
    for path in offload_paths(config, "offload_policy"):
        if value_at(config, path) and (asked.param_offload or asked.optimizer_offload):
            yield Trap(
                True,
                f"{path} is true, which turns param_offload and optimizer_offload off.\n"
                f"Set {path}=false, or {WHERE}.param_offload=null and {WHERE}.optimizer_offload=null.",
            )


def _environment_traps(plan: Plan) -> Iterator[Trap]:
    """Find variables that defeat the saver, or that have no effect under verl."""
    held = {**os.environ, **runtime_variables(plan.config)}
    name = expandable_segments(held)
    if name is not None and plan.on_device and plan.saves:
        yield Trap(
            bool(plan.asked.enable_memory_saver),
            f"{name} has expandable_segments:True, which the engine's memory saver cannot work "
            "with: SGLang ends at its start, or releases nothing.\n"
            f"Take it out of {name}; verl turns it on for the trainer by itself.",
        )
    if held.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").lower() in ("1", "true"):
        yield Trap(
            False,
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH is on, but verl never releases the tag cuda_graph: CUDA "
            "graphs stay in device memory, and NCCL needs NCCL_GRAPH_REGISTER=0. Unset it.",
        )
