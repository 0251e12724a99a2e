"""Weight sync, the engines' memory release and resume per tag, and device and host memory.

The difference between two readings is what a release really freed: with the saver off or ineffective
the calls succeed and free nothing (sglang 0.5.12 torch_memory_saver_adapter.py).

Memory is also read at verl's own checkpoints, on every rank: verl calls `log_gpu_memory_usage` around each
offload and resume, and prints on rank 0 only.  With a memory saver, torch's own counters stay high while
pages are unmapped; `used_bytes` comes from the driver and shows the release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.instrumentation.probe import Probe, of_family
from verl_profiler.probes import weight_transfers
from verl_profiler.probes.values import plain
from verl_profiler.recording import context, devices
from verl_profiler.recording.call import Call

_probe = of_family("weights")
_memory_probe = of_family("memory")

_ADAPTERS = (
    "verl.workers.rollout.sglang_rollout.sglang_rollout:ServerAdapter",
    "verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter",
    "verl.workers.rollout.trtllm_rollout.trtllm_rollout:ServerAdapter",
    "verl_profiler.rehearsal.standin:StandinAdapter",
)
# SGLang and vLLM are not among them: they say themselves what is released.
_SLEEPING_SERVERS = (
    "verl.workers.rollout.trtllm_rollout.trtllm_async_server:TRTLLMHttpServer",
    "verl_profiler.rehearsal.standin:StandinServer",
)
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"


# Its trainers may sync at the begin of a step, under that step's number.
_DETACHED = "DetachActorWorker"


def _begin_sync(call: Call) -> None:
    step = call.arguments.get("global_steps")
    if isinstance(step, int):
        host = call.arguments.get("self")
        if step == context.process.next_step and any(
            each.__name__ == _DETACHED for each in type(host).__mro__
        ):
            # The rank has not worked since the last sync.
            context.process.sync_leads = True
        context.process.step = step
        context.process.next_step = None
        context.process.step_known = True
        call.step = step
        call.extra = {"weight_version": step}


def _end_sync(call: Call, _result: Any) -> None:
    if call.step is not None and not context.process.sync_leads:
        context.process.next_step = call.step + 1


def _begin_transfer(call: Call) -> None:
    step = call.arguments.get("global_steps")
    if isinstance(step, int):
        call.extra = {"weight_version": step}
    weight_transfers.begin_loading(call)


def _begin_move(call: Call) -> None:
    """Read memory before an engine gives it back or takes it again."""
    server = call.arguments.get("self")
    if not _asks_engine(server):
        call.event = None
        return
    chosen = _replica_devices(getattr(server, "server_args", None))
    devices.remember_replica(chosen)
    call.extra = {"tags": _tags(call.arguments)}
    call.state = chosen
    _read(call, "before")


def _end_move(call: Call, _result: Any) -> None:
    if call.event is not None:
        _read(call, "after")


def _asks_engine(adapter: Any) -> bool:
    """Whether this rank calls its replica's engine; the others return at once (verl 0.9.1)."""
    leads = getattr(adapter, "_is_server_tp_leader", None)
    if leads is not None:
        return bool(leads())
    rank = getattr(adapter, "rollout_rank", 0)
    return not isinstance(rank, int) or rank == 0


def _read(call: Call, when: str) -> None:
    readings = {**devices.memory_of_devices(call.state), **devices.memory_of_host(whole=True)}
    extra = call.extra or {}
    for name, value in readings.items():
        stem = name.removesuffix("_bytes")
        extra[name if stem in ("total", "devices") else f"{stem}_{when}_bytes"] = value


def _tags(arguments: Mapping[str, Any]) -> list[Any]:
    """Return what is moved; verl names it in the call, or in the request object for SGLang."""
    tags = arguments.get("tags") or getattr(arguments.get("obj"), "tags", None)
    return [plain(tag) for tag in tags] if tags else ["all"]


def _replica_devices(server_args: Any) -> tuple[int, ...] | None:
    """Return which of the visible devices an SGLang server uses (sglang 0.5.12 server_args.py)."""
    first, step = (getattr(server_args, name, None) for name in ("base_gpu_id", "gpu_id_step"))
    ranks, nodes = (getattr(server_args, name, None) for name in ("tp_size", "nnodes"))
    if not isinstance(first, int) or not isinstance(ranks, int):
        return None
    return tuple(range(first, first + max(1, ranks // (nodes or 1)) * (step or 1), step or 1))


def _moves(event: str, *targets: str, reads: tuple[str, ...] = ()) -> Probe:
    return _probe(event, *targets, reads=reads, enter=_begin_move, leave=_end_move)


def _begin_receive(call: Call) -> None:
    _begin_sync(call)
    weight_transfers.begin_receiving(call)


def _end_receive(call: Call, _result: Any) -> None:
    weight_transfers.end_receiving(call)
    _end_sync(call, None)


def _read_memory(call: Call) -> None:
    from verl.utils.device import get_torch_device  # the probed function's own import

    device = get_torch_device()
    extra: dict[str, Any] = {"at": plain(call.arguments["head"])}
    for field, reading in (
        ("allocated_bytes", "memory_allocated"),
        ("reserved_bytes", "memory_reserved"),
    ):
        read = getattr(device, reading, None)
        if read is not None:
            extra[field] = int(read())
    if getattr(device, "mem_get_info", None) is not None:
        free, total = device.mem_get_info()
        extra["used_bytes"] = int(total - free)
        extra["total_bytes"] = int(total)
    extra.update(devices.memory_of_host())
    call.extra = extra


def _make_instant(call: Call, _result: Any) -> None:
    call.begin_ns = None


PROBES = (
    _probe(
        "weight_receive",
        "verl.checkpoint_engine.base:CheckpointEngineWorker.update_weights",
        reads=("global_steps",),
        enter=_begin_receive,
        leave=_end_receive,
    ),
    _probe(
        "update_weights",
        "verl.workers.engine_workers:ActorRolloutRefWorker.update_weights",
        reads=("global_steps",),
        enter=_begin_sync,
        leave=_end_sync,
    ),
    _probe(
        "weight_transfer",
        *(f"{adapter}.update_weights" for adapter in _ADAPTERS),
        enter=_begin_transfer,
        leave=weight_transfers.end_loading,
    ),
    _moves("memory_resume", *(f"{adapter}.resume" for adapter in _ADAPTERS), reads=("tags",)),
    _moves("memory_release", *(f"{adapter}.release" for adapter in _ADAPTERS)),
    _moves("memory_resume", f"{_TOKENIZER_MANAGER}.resume_memory_occupation", reads=("obj",)),
    _moves("memory_release", f"{_TOKENIZER_MANAGER}.release_memory_occupation", reads=("obj",)),
    _moves("memory_resume", f"{_ASYNC_LLM}.wake_up", reads=("tags",)),
    _moves("memory_release", f"{_ASYNC_LLM}.sleep"),
    _moves("memory_release", *(f"{server}.sleep" for server in _SLEEPING_SERVERS)),
    _moves("memory_resume", *(f"{server}.wake_up" for server in _SLEEPING_SERVERS)),
    _memory_probe(
        "memory",
        "verl.utils.profiler.performance:log_gpu_memory_usage",
        reads=("head",),
        enter=_read_memory,
        leave=_make_instant,
    ),
)
