"""Tokens of each batch, and its FLOPs as verl's own counter estimates them; in the trainer's workers.

verl 0.9.1 estimates FLOPs in `TrainingWorker._postprocess_output` only if it has the lengths of all
ranks' sequences: for updates.  Its counter's estimate is of a forward and a backward pass; of a forward
pass alone verl takes a third.  Tokens are counted where sequences are not padded (nested tensors), since
anything else would read a tensor on the device.
"""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import Any

from verl_profiler.events.json_values import is_tuple
from verl_profiler.instrumentation.probe import of_family
from verl_profiler.recording.call import Call

__all__ = ["PROBES", "batch_size"]

_probe = of_family("workers")

# Whether the running `_postprocess_output` is of a forward pass; one thread trains.
_forward_only = False


def batch_size(engine: Any, data: Any) -> dict[str, Any]:
    """Return `tokens` and `sequences` of an engine's batch, if this rank is the one that counts for its group.

    Ranks that share a batch (tensor, sequence and pipeline parallelism) have one that returns outputs.
    """
    counts = getattr(engine, "is_mp_src_rank_with_outputs", None)
    if not callable(counts) or not counts():
        return {}
    ids = data.get("input_ids", None)
    if ids is None or not getattr(ids, "is_nested", False):
        return {}
    return {"tokens": int(ids.values().shape[0]), "sequences": int(ids.shape[0])}


def _begin_output(call: Call) -> None:
    global _forward_only
    _forward_only = bool(call.arguments.get("forward_only"))


def _end_output(_call: Call, _result: Any) -> None:
    global _forward_only
    _forward_only = False


def _begin_estimate(call: Call) -> None:
    lengths = call.arguments["batch_seqlens"]
    call.extra = {
        "tokens": int(sum(lengths)),
        "sequences": len(lengths),
        "compute_s": float(call.arguments["delta_time"]),
        "forward_only": _forward_only,
        "ranks": _ranks(),
    }


def _end_estimate(call: Call, result: Any) -> None:
    # An instant: the batch is over.
    call.begin_ns = None
    if call.extra is None or not is_tuple(result):
        return
    numbers = [float(each) for each in result if isinstance(each, Real)]
    if len(numbers) != 2:
        return
    estimated, promised = numbers
    # verl estimates 0 for models that it does not know, and promises infinity for devices.
    if 0 < estimated < math.inf:
        call.extra["tflops"] = estimated
    if 0 < promised < math.inf:
        call.extra["promised_tflops"] = promised


def _ranks() -> int:
    """Return the number of ranks of the process group, by which verl divides."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


PROBES = (
    _probe(
        None,
        "verl.workers.engine_workers:TrainingWorker._postprocess_output",
        reads=("forward_only",),
        enter=_begin_output,
        leave=_end_output,
        optional=True,
    ),
    _probe(
        "batch_flops",
        "verl.utils.flops_counter:FlopsCounter.estimate_flops",
        reads=("batch_seqlens", "delta_time"),
        enter=_begin_estimate,
        leave=_end_estimate,
        optional=True,
    ),
)
