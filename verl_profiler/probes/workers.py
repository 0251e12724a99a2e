"""What one rank of actor, critic or reference does, with whatever engine it trains.

Tokens of each batch are counted where sequences are not padded (nested tensors), since anything else would
read a tensor on the device; FLOPs are as verl's own counter estimates them.  verl 0.9.1 estimates FLOPs in
`TrainingWorker._postprocess_output` only if it has the lengths of all ranks' sequences: for updates.  Its
counter's estimate is of a forward and a backward pass; of a forward pass alone verl takes a third.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextvars import ContextVar
from numbers import Real
from typing import Any

from verl_profiler.events.json_values import is_object, is_tuple
from verl_profiler.instrumentation import placing
from verl_profiler.instrumentation.probe import Probe, of_family
from verl_profiler.recording import context, device_timing, recorder
from verl_profiler.recording.call import Call

_probe = of_family("workers")

_HYBRID = "verl.workers.engine_workers:ActorRolloutRefWorker"
_TRAINING = "verl.workers.engine_workers:TrainingWorker"
_ENGINES = "verl.workers.engine.base"

_is_moving: ContextVar[bool] = ContextVar("verl_profiler_moving", default=False)
# The worker's call that gives its batch to an engine; a critic's has TransferQueue's metadata, and gets
# the batch inside.
_of_batch: ContextVar[Call | None] = ContextVar("verl_profiler_of_batch", default=None)


# Whether the running `_postprocess_output` is of a forward pass; one thread trains.
_forward_only = False


def _learn_step(call: Call) -> None:
    """Take the step from the samples' tags where no weight sync has named it (critics)."""
    context.process.begin_work()
    if context.process.step_known:
        return
    data = call.arguments.get("data")
    # verl 0.8's main_ppo_sync passes TransferQueue's own kind, and names no step with its weights.
    tags = getattr(data, "tags", None) or getattr(data, "custom_meta", None)
    if not tags:
        return
    steps = [tag.get("global_steps") for tag in tags if is_object(tag)]
    known = [step for step in steps if isinstance(step, int)]
    if known:
        context.process.step = max(known)


def _begin_batch(call: Call) -> None:
    _learn_step(call)
    call.bind(_of_batch, call)


def _begin_inference(call: Call) -> None:
    _begin_batch(call)
    _begin_timed(call)


def _begin_timed(call: Call) -> None:
    call.state = device_timing.begin()


def _end_timed(call: Call, _result: Any) -> None:
    device_timing.end(call, call.state)


def _begin_forward(call: Call) -> None:
    arguments = call.arguments
    call.extra = {"forward_only": bool(arguments.get("forward_only", False))}
    _begin_timed(call)
    outer = _of_batch.get()
    if outer is not None:
        outer.extra = _batch_size(arguments.get("self"), arguments.get("data")) or None


def _begin_move(call: Call) -> None:
    arguments = call.arguments
    model = bool(arguments.get("model", True))
    optimizer = bool(arguments.get("optimizer", True))
    if not model and not optimizer:
        # Offloading is off; verl calls all the same (verl 0.9.1 engine/fsdp/transformer_impl.py).
        call.event = None
        return
    if _is_moving.get():
        # An engine that calls its base class, which is probed as another engine's.
        call.event = None
        return
    call.bind(_is_moving, True)
    call.event = "offload" if str(arguments.get("device")) == "cpu" else "load"
    call.extra = {"model": model, "optimizer": optimizer}


def _body(event: str, target: str, enter: Callable[[Call], None] = _learn_step) -> Probe:
    return _probe(event, target, reads=("data",), enter=enter)


def _inside(event: str, method: str, **hooks: Any) -> Probe:
    target = f"{_ENGINES}:BaseEngine.{method}"
    return _probe(event, target, of_subclasses=True, **hooks)


def _probe_engine(engine: Any) -> Any:
    """Probe the class of the engine that a worker is about to make."""
    if recorder.active() is not None:
        placing.place_on(_IN_ENGINES, engine)
    return engine


_IN_ENGINES = (
    _inside("forward_backward", "forward_backward_batch", enter=_begin_forward, leave=_end_timed),
    _inside("optimizer_step", "optimizer_step", enter=_begin_timed, leave=_end_timed),
    _inside("load", "to", reads=("device",), enter=_begin_move),
)


def _batch_size(engine: Any, data: Any) -> dict[str, Any]:
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
    _body("update_actor", f"{_HYBRID}.update_actor"),
    _body("compute_log_prob", f"{_HYBRID}.compute_log_prob"),
    _body("compute_ref_log_prob", f"{_HYBRID}.compute_ref_log_prob"),
    _body("train_mini_batch", f"{_TRAINING}.train_mini_batch"),
    _body("train_batch", f"{_TRAINING}.train_batch", _begin_batch),
    _probe(
        "infer_batch",
        f"{_TRAINING}.infer_batch",
        reads=("data",),
        enter=_begin_inference,
        leave=_end_timed,
    ),
    # The hybrid worker's methods call these, of each of its models.
    _probe("save_checkpoint", f"{_TRAINING}.save_checkpoint"),
    _probe("load_checkpoint", f"{_TRAINING}.load_checkpoint"),
    _probe(None, f"{_ENGINES}:EngineRegistry.get_engine_cls", result=_probe_engine),
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
    *_IN_ENGINES,
)
