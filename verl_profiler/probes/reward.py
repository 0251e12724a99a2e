"""The reward function, in the reward workers."""

from __future__ import annotations

from typing import Any

from verl_profiler import context
from verl_profiler.probes import Call, Probe
from verl_profiler.probes.values import scalar

__all__ = ["PROBES"]


def _begin_score(call: Call) -> None:
    sample = getattr(call.arguments["data"], "non_tensor_batch", {})

    def first(key: str) -> Any:
        values = sample.get(key)
        return None if values is None or len(values) == 0 else scalar(values[0])

    extra = {
        name: value
        for name, value in (
            ("sample", first("index")),
            ("session", first("session_id")),
            ("uid", first("uid")),
        )
        if value is not None
    }
    call.extra = extra
    step = first("global_steps")
    if isinstance(step, int):
        call.step = context.process.step = step


def _end_score(call: Call, result: Any) -> None:
    if isinstance(result, dict) and "reward_score" in result:
        call.extra = {**(call.extra or {}), "score": float(result["reward_score"])}


PROBES = (
    Probe(
        "reward_score",
        "reward",
        ("verl.experimental.reward_loop.reward_loop:RewardLoopWorker.compute_score",),
        reads=("data",),
        enter=_begin_score,
        leave=_end_score,
    ),
)
