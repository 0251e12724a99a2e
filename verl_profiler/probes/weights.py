"""Weight sync, and the engines' memory release and resume per tag."""

from __future__ import annotations

from typing import Any

from verl_profiler import context
from verl_profiler.probes import Call, Probe

__all__ = ["PROBES"]

_ADAPTERS = (
    "verl.workers.rollout.sglang_rollout.sglang_rollout:ServerAdapter",
    "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter",
    "verl.workers.rollout.trtllm_rollout.trtllm_rollout:ServerAdapter",
    "verl_profiler.rehearsal.standin:StandinAdapter",
)
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"


def _begin_sync(call: Call) -> None:
    step = call.arguments.get("global_steps")
    if isinstance(step, int):
        context.process.step = step
        context.process.next_step = None
        context.process.step_known = True
        call.step = step
        call.extra = {"weight_version": step}


def _end_sync(call: Call, _result: Any) -> None:
    if call.step is not None:
        context.process.next_step = call.step + 1


def _begin_transfer(call: Call) -> None:
    step = call.arguments.get("global_steps")
    if isinstance(step, int):
        call.extra = {"weight_version": step}


def _begin_resume(call: Call) -> None:
    call.extra = {"tags": list(call.arguments.get("tags") or ["all"])}


def _begin_engine_memory(call: Call) -> None:
    tags = getattr(call.arguments["obj"], "tags", None)
    call.extra = {"tags": list(tags) if tags else ["all"]}


PROBES = (
    Probe(
        "update_weights",
        "weights",
        ("verl.workers.engine_workers:ActorRolloutRefWorker.update_weights",),
        reads=("global_steps",),
        enter=_begin_sync,
        leave=_end_sync,
    ),
    Probe(
        "weight_transfer",
        "weights",
        tuple(f"{adapter}.update_weights" for adapter in _ADAPTERS),
        enter=_begin_transfer,
    ),
    Probe(
        "memory_resume",
        "weights",
        tuple(f"{adapter}.resume" for adapter in _ADAPTERS),
        reads=("tags",),
        enter=_begin_resume,
    ),
    Probe("memory_release", "weights", tuple(f"{adapter}.release" for adapter in _ADAPTERS)),
    Probe(
        "memory_resume",
        "weights",
        (f"{_TOKENIZER_MANAGER}.resume_memory_occupation",),
        reads=("obj",),
        enter=_begin_engine_memory,
    ),
    Probe(
        "memory_release",
        "weights",
        (f"{_TOKENIZER_MANAGER}.release_memory_occupation",),
        reads=("obj",),
        enter=_begin_engine_memory,
    ),
)
