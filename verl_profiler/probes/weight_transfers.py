"""What a weight sync moves: in ranks that send and receive through a checkpoint engine, and to engines.

All of verl's paths iterate over the weights by `ensure_async_iterator` (verl 0.9.1), where their number
and size are counted.  Buckets have lines in the checkpoint engines of NCCL and HCCL, and where SGLang's
adapter passes them to its engine.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl_profiler.events.json_values import is_list, is_tuple
from verl_profiler.instrumentation.probe import of_family
from verl_profiler.recording import context, recorder
from verl_profiler.recording.call import Call

_probe = of_family("weights")

# Buckets of one sync that get a line each; the others of the sync share one.
LIMIT = 64


class _Counted:
    """Weights that one process has passed on in one sync so far."""

    def __init__(self) -> None:
        self.tensors = self.size_bytes = 0
        # The call whose items are counted: quantizing adapters iterate twice, over each other.
        self.iterator: Call | None = None


class _Buckets:
    """The buckets of the sync that runs, of one kind of event."""

    def __init__(self, event: str) -> None:
        self.event = event
        self.begin_sync()

    def begin_sync(self) -> None:
        self.count = self.busy_ns = self.size_bytes = 0
        self.begin_ns: int | None = None
        self.end_ns = 0
        self.extra: dict[str, Any] = {}

    def end_one(self, call: Call, size: object, **extra: Any) -> None:
        """Give a bucket its line, or add it to those that share one."""
        self.count += 1
        if not isinstance(size, int):
            size = None
        if self.count <= LIMIT:
            call.extra = extra if size is None else {**extra, "size_bytes": size}
            return
        call.event = None
        begin_ns = call.end_ns if call.begin_ns is None else call.begin_ns
        self.begin_ns = begin_ns if self.begin_ns is None else self.begin_ns
        self.end_ns = call.end_ns
        self.busy_ns += call.end_ns - begin_ns
        self.size_bytes += size or 0
        self.extra = extra

    def end_sync(self, step: int | None) -> None:
        """Write the line that the buckets after the first ones share."""
        if self.begin_ns is not None:
            extra = {
                **self.extra,
                "buckets": self.count - LIMIT,
                "transfer_s": self.busy_ns / 1e9,
            }
            if self.size_bytes:
                extra["size_bytes"] = self.size_bytes
            if step is None:
                step = context.process.current_step()
            recorder.record(self.event, self.begin_ns, self.end_ns, extra, step)
        self.begin_sync()


_counted: ContextVar[_Counted | None] = ContextVar("verl_profiler_weights", default=None)
# A process sends or receives; whichever engine it has moves one bucket at a time.
_moved = _Buckets("weight_bucket")
_loaded = _Buckets("weight_load")


def _begin_counting(call: Call) -> None:
    """Count the weights that are iterated over in a call, unless a call around it does."""
    call.state = _counted.get()
    if call.state is None:
        call.state = _Counted()
        call.bind(_counted, call.state)


def _begin_iterating(call: Call) -> None:
    found = _counted.get()
    if found is not None and found.iterator is None:
        found.iterator = call
        call.state = found


def _count(call: Call, item: Any) -> None:
    found: _Counted | None = call.state
    if found is None or not is_tuple(item):
        return
    # A name and a tensor; or, of a delta, such pairs and whether they are the last.
    for _, tensor in item[0] if is_list(item[0]) else (item,):
        found.tensors += 1
        found.size_bytes += int(tensor.nbytes)


def _end_iterating(call: Call, _result: Any) -> None:
    if call.state is not None and call.state.iterator is call:
        call.state.iterator = None


def _begin_send(call: Call) -> None:
    _moved.begin_sync()
    _begin_counting(call)
    step = call.arguments.get("global_steps")
    if isinstance(step, int):
        call.extra = {"weight_version": step}


def _end_send(call: Call, _result: Any) -> None:
    # Ranks below 0 only take part in gathering the weights, those above 0 relay them.
    if getattr(call.arguments["self"], "rank", None) == 0:
        _end_sync(call, _moved)
    else:
        _moved.end_sync(call.step)


def begin_receiving(call: Call) -> None:
    """Begin a receiver's sync."""
    _moved.begin_sync()
    _begin_counting(call)


def begin_loading(call: Call) -> None:
    """Begin to pass the weights of a sync to an engine."""
    _loaded.begin_sync()
    _begin_counting(call)


def end_receiving(call: Call) -> None:
    """End a receiver's sync."""
    _end_sync(call, _moved)


def end_loading(call: Call, _result: Any) -> None:
    """End passing the weights of a sync to an engine."""
    _end_sync(call, _loaded)


def _end_sync(call: Call, buckets: _Buckets) -> None:
    found: _Counted = call.state
    extra = dict(call.extra or {})
    if found.tensors:
        extra |= {"tensors": found.tensors, "size_bytes": found.size_bytes}
    if buckets.count:
        extra["buckets"] = buckets.count
    call.extra = extra
    buckets.end_sync(call.step)


def _end_operation(call: Call, _result: Any) -> None:
    """Take the size of a bucket of verl's engines from its description."""
    operation: Any = call.arguments["self"]
    metadata: Any = operation.metadata or {}
    _moved.end_one(call, metadata.get("length"), sender=operation.rank == 0)


def _end_own_send(call: Call, _result: Any) -> None:
    _moved.end_one(call, int(call.arguments["bucket"].nbytes), sender=True)


def _end_own_receive(call: Call, result: Any) -> None:
    _moved.end_one(call, getattr(result[-1], "nbytes", None) if result else None, sender=False)


def _end_load(call: Call, _result: Any) -> None:
    batch = call.arguments["params_batch"]
    size = sum(int(tensor.nbytes) for _, tensor in batch)
    _loaded.end_one(call, size, tensors=len(batch))


_CHECKPOINT_ENGINES = (
    "verl.checkpoint_engine.nccl_checkpoint_engine:NCCLCheckpointEngine",
    "verl.checkpoint_engine.hccl_checkpoint_engine:HCCLCheckpointEngine",
    "verl.checkpoint_engine.nixl_checkpoint_engine:NIXLCheckpointEngine",
    "verl.checkpoint_engine.mooncake_checkpoint_engine:MooncakeCheckpointEngine",
    "verl.checkpoint_engine.kimi_checkpoint_engine:KIMICheckpointEngine",
    "verl.checkpoint_engine.delta_checkpoint_engine:DeltaShardedCheckpointEngine",
)
_OWN = "verl_profiler.rehearsal.gloo_checkpoint_engine:GlooCheckpointEngine"

PROBES = (
    _probe(
        None,
        "verl.workers.rollout.utils:ensure_async_iterator",
        enter=_begin_iterating,
        item=_count,
        leave=_end_iterating,
    ),
    _probe(
        "weight_send",
        *(f"{engine}.send_weights" for engine in (_OWN, *_CHECKPOINT_ENGINES)),
        reads=("global_steps",),
        enter=_begin_send,
        leave=_end_send,
    ),
    _probe(
        "weight_bucket",
        *(
            f"verl.checkpoint_engine.{name}_checkpoint_engine:BroadcastOperation._run"
            for name in ("nccl", "hccl")
        ),
        leave=_end_operation,
        # Their modules need the accelerator's libraries.
        optional=True,
    ),
    _probe("weight_bucket", f"{_OWN}.send_bucket", leave=_end_own_send),
    _probe("weight_bucket", f"{_OWN}.receive_bucket", leave=_end_own_receive),
    _probe(
        "weight_load",
        "verl.workers.rollout.sglang_rollout.sglang_rollout:sgl_update_weights",
        leave=_end_load,
        # verl before 0.9 names it differently, or has no buckets.
        optional=True,
    ),
)
