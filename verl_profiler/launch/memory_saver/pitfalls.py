"""Settings of the engine's memory without effect, or incompatible with the memory saver."""

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

__all__ = ["Pitfall", "expandable_segments", "pitfalls"]

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True)
class Pitfall:
    """A setting that would not have its effect.

    Args:
        requested: Whether it concerns a setting requested under `profiler.memory_saver`.
        text: What would happen, and what to do.
    """

    requested: bool
    text: str


def pitfalls(plan: Plan) -> Iterator[Pitfall]:
    """Yield all of them, those of the engine first."""
    yield from _engine_pitfalls(plan)
    yield from _version_pitfalls(plan)
    yield from _environment_pitfalls(plan)


def expandable_segments(variables: Mapping[str, str]) -> str | None:
    """Return the variable that makes torch use expandable segments, or None."""
    for name in _ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in variables.get(name, "").lower():
            return name
    return None


def _engine_pitfalls(plan: Plan) -> Iterator[Pitfall]:
    """Yield switches that cancel each other, and requests that the engine cannot fulfill."""
    requested, switch = plan.requested, plan.switch
    if not plan.on_device:
        if requested.enable_memory_saver:
            yield Pitfall(
                True,
                f"{WHERE}.enable_memory_saver is true on trainer.device=cpu: the saver needs CUDA, "
                "and the engine's processes would not start.\n"
                f"Rehearse with +profiler=memory_saver_rehearsal, or set {WHERE}.enable_memory_saver=false.",
            )
        return
    if switch is None:
        if requested.enable_memory_saver:
            yield Pitfall(
                True,
                f"{WHERE}.enable_memory_saver is true, but the engine {plan.engine!r} has no memory "
                f"saver.\nUse {ROLLOUT}.name=sglang, or set {WHERE}.enable_memory_saver=null.",
            )
        return
    if plan.releases and not plan.saves:
        yield Pitfall(
            requested.enable_memory_saver is False or requested.free_cache_engine is True,
            f"{ROLLOUT}.free_cache_engine is true, but {switch} is false: verl will release the "
            "engine's memory, the calls will succeed or fail, and nothing will be freed.\n"
            f"Remove {switch}, or set {ROLLOUT}.free_cache_engine=false.",
        )
    if requested.enable_memory_saver and not plan.releases:
        yield Pitfall(
            True,
            f"{WHERE}.enable_memory_saver is true, but {ROLLOUT}.free_cache_engine is false: the "
            f"saver would run, and verl would never use it.\nSet {WHERE}.free_cache_engine=true.",
        )
    tags = plan.tags()
    if requested.tags is not None and tags is not None and set(requested.tags) != set(tags):
        unknown = [tag for tag in requested.tags if tag not in TAGS]
        reason = (
            f"there is no {unknown[0]!r}; SGLang has {', '.join(TAGS)}"
            if unknown
            else f"this verl releases [{','.join(tags)}] with these settings, whatever is requested"
        )
        yield Pitfall(
            True,
            f"{WHERE}.tags is [{','.join(requested.tags)}], but {reason}.\n"
            f"Set {WHERE}.tags=[{','.join(tags)}], or null to skip the check.",
        )
    if plan.engine == "sglang" and plan.saves and not plan.host.has_memory_saver:
        # A warning, because the engines' nodes may have packages that the driver's lacks.
        yield Pitfall(
            False,
            "SGLang is started with its memory saver, but torch_memory_saver is not installed here: "
            "without it the engine exits at startup. Run: pip install torch-memory-saver",
        )


def _version_pitfalls(plan: Plan) -> Iterator[Pitfall]:
    """Yield settings that this verl ignores or overwrites."""
    requested, host, config = plan.requested, plan.host, plan.config
    backed_up = plan.engine == "sglang" and host.backs_up_hybrid_weights
    if requested.weights_cpu_backup is not None and requested.weights_cpu_backup != backed_up:
        yield Pitfall(
            True,
            f"{WHERE}.weights_cpu_backup is {written(requested.weights_cpu_backup)}, but verl sets it to "
            f"{written(backed_up)} for {plan.engine} and accepts no other value.\n"
            f"Set {WHERE}.weights_cpu_backup=null.",
        )
    native = f"{ROLLOUT}.engine_kwargs.sglang.enable_weights_cpu_backup"
    given = value_at(config, native)
    if plan.engine == "sglang" and given is not None and given != backed_up:
        yield Pitfall(
            False,
            f"{native} is {written(given)}, but verl overwrites it with {written(backed_up)}. Remove it.",
        )
    if value_at(config, f"{ROLLOUT}.multi_stage_wake_up") and not host.honors_multi_stage_wake_up:
        yield Pitfall(
            False,
            f"{ROLLOUT}.multi_stage_wake_up is true, but this verl does not read it: since 0.7 it "
            "always resumes the weights first and the cache after the sync. Remove it.",
        )
    if requested.multi_stage_wake_up is False and not host.honors_multi_stage_wake_up:
        yield Pitfall(
            True,
            f"{WHERE}.multi_stage_wake_up is false, but this verl always wakes up in stages.\n"
            f"Set {WHERE}.multi_stage_wake_up=null.",
        )
    for path in offload_paths(config, "offload_policy"):
        if value_at(config, path) and (requested.param_offload or requested.optimizer_offload):
            yield Pitfall(
                True,
                f"{path} is true, which turns param_offload and optimizer_offload off.\n"
                f"Set {path}=false, or {WHERE}.param_offload=null and {WHERE}.optimizer_offload=null.",
            )


def _environment_pitfalls(plan: Plan) -> Iterator[Pitfall]:
    """Yield variables incompatible with the saver, or without effect under verl."""
    variables = {**os.environ, **runtime_variables(plan.config)}
    name = expandable_segments(variables)
    if name is not None and plan.on_device and plan.saves:
        yield Pitfall(
            bool(plan.requested.enable_memory_saver),
            f"{name} has expandable_segments:True, which is incompatible with the engine's "
            "memory saver: SGLang ends at startup, or releases nothing.\n"
            f"Remove it from {name}; verl turns it on for the trainer by itself.",
        )
    if variables.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").lower() in ("1", "true"):
        yield Pitfall(
            False,
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH is on, but verl never releases the tag cuda_graph: CUDA "
            "graphs stay in device memory, and NCCL needs NCCL_GRAPH_REGISTER=0. Unset it.",
        )
