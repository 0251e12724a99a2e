"""What is traced: probes whose hook `trace` begins a function's call, a stage of it or a client operation.

Where the profiler also measures a target, one probe does both (`with_tracing`).  Hooks do nothing where
tracing is off, as in a process that got a class by value, or after `calls.stop`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.instrumentation.probe import EndTrace, Probe
from verl_profiler.instrumentation.wrapping import wrap
from verl_profiler.probes.batch_sizes import size_of
from verl_profiler.probes.transfer_queue import end_get
from verl_profiler.recording.call import Call
from verl_profiler.transfer_queue import calls
from verl_profiler.transfer_queue.calls import ClientCall, FunctionCall
from verl_profiler.transfer_queue.trace_ids import Origin, find_meta, of_batch, origin_of


def with_tracing(probes: Iterable[Probe]) -> list[Probe]:
    """Return the probes and those of tracing; of two for the same targets, one that does both."""
    tracing = {probe.targets: probe for probe in PROBES}
    joined = [_joined(probe, tracing.pop(probe.targets, None)) for probe in probes]
    return joined + list(tracing.values())


def _joined(probe: Probe, tracing: Probe | None) -> Probe:
    if tracing is None:
        return probe
    leave = _LEAVES_WITH_IDS.get(probe.name, probe.leave)
    return msgspec.structs.replace(probe, trace=tracing.trace, leave=leave)


def _leave_get(call: Call, result: Any) -> None:
    end_get(call, result)
    _add_ids(call, result)


def _add_ids(call: Call, _result: Any) -> None:
    client = calls.current_client.get()
    if client is not None:
        call.extra = {**(call.extra or {}), **client.ids()}


_LEAVES_WITH_IDS = {"tq_get": _leave_get, "tq_put": _add_ids}


def begin_function(
    name: str, bridged: bool, waits: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> EndTrace | None:
    """Begin a call of a function that works on a batch; one without metadata is not traced.

    Args:
        name: The function's name.
        bridged: See `FunctionCall`.
        waits: See `FunctionCall`.
        args: What it is called with.
        kwargs: What it is called with by name.
    """
    meta = find_meta((*args, *kwargs.values())) if calls.is_on else None
    if meta is None:
        return None
    return FunctionCall(name, origin_of(meta), bridged=bridged, waits=waits).begin().end


def begin_rollout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> EndTrace | None:
    """Begin a sample's rollout, whose data the trajectory names.

    The other agent-loop workers hand their samples back by Ray (verl 0.9's V0 trainer, 0.8's
    main_ppo), or put them from a bridged `generate_sequences` (0.6, 0.7.0).
    """
    if not calls.is_on or not any(k.__name__ == "AgentLoopWorkerTQ" for k in type(args[0]).__mro__):
        return None
    trajectory = mapping_or_empty(kwargs.get("trajectory", args[2] if len(args) > 2 else None))
    step = kwargs.get("global_steps", trajectory.get("step"))
    # As verl's agent_loop_tq.py files them (verl 0.9.1).
    partition = "val" if trajectory.get("validate") else "train"
    step = None if step is None else int(step)
    ids = () if step is None else (of_batch(partition, step),)
    origin = Origin(ids, step, 1)
    return FunctionCall("_run_agent_loop", origin, bridged=False, waits=False).begin().end


def begin_compute(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> EndTrace | None:
    """Begin a bridged function's own code."""
    function = calls.current.get() if calls.is_on else None
    return function.end_compute if function is not None and function.begin_compute() else None


def begin_operation(stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EndTrace | None:
    """Begin a `GET` or `PUT` of the key-value interface in a traced function."""
    function = calls.current.get() if calls.is_on else None
    if function is None:
        return None
    # A put of tags alone moves no data.
    if stage == "PUT" and kwargs.get("fields", args[2] if len(args) > 2 else None) is None:
        return None
    return function.end_operation if function.begin_operation(stage) else None


# The same in all releases of TransferQueue up to 0.1.11; further ones are not read.
_PARAMETERS = {"GET": ("self", "metadata"), "PUT": ("self", "data", "metadata")}


def begin_client_call(stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EndTrace | None:
    """Begin a `GET` or `PUT` of the client; the data's origin is that of the function around it."""
    if not calls.is_on:
        return None
    arguments = {**dict(zip(_PARAMETERS[stage], args)), **kwargs}  # noqa: B905
    metadata = arguments.get("metadata")
    function = calls.current.get()
    origin = function.origin if function is not None else Origin()
    if not origin.ids and metadata is not None:
        origin = origin_of(metadata)
    if stage == "GET":
        return ClientCall(stage, function, origin, str(getattr(metadata, "size", 0)), 0).end
    data = arguments["data"]
    shape = str(getattr(data, "batch_size", "torch.Size([])"))
    return ClientCall(stage, function, origin, shape, size_of(data).total).end


def traced(name: str, begin: Callable[..., EndTrace | None], *first: Any) -> Probe:
    """Return a probe for a function that the host makes; `begin` gets the arguments after `first`."""
    return Probe(None, "transfer_queue", (name,), trace=functools.partial(begin, *first))


def _trace_decorator(decorate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the decorator that `tqbridge` makes, with what it gets and what it returns traced."""

    def decorator(function: Any) -> Any:
        name = getattr(function, "__name__", str(function))
        bridged = decorate(wrap(traced(name, begin_compute), function))
        return wrap(traced(name, begin_function, name, True, False), bridged)

    return decorator


def _probe(*targets: str, **hooks: Any) -> Probe:
    return Probe(None, "transfer_queue", targets, **hooks)


_CLIENT = "transfer_queue.client:AsyncTransferQueueClient"
_SYNC_TRAINER = "verl.trainer.main_ppo_sync:PPOTrainer"  # verl 0.8
_TRAINERS = ("verl.trainer.ppo.v1.trainer_base:PPOTrainer", _SYNC_TRAINER)
# What the trainers do themselves, and whether it waits for workers.
_DIRECT = {
    "_compute_reward_colocate": True,
    "_balance_batch": False,
    "_compute_old_log_prob": True,
    "_compute_ref_log_prob": True,
    "_compute_values": True,
    "_compute_advantage": False,
    "_compute_metrics": False,
    "_log_rollout_data": False,
}
_INTERFACE = {
    "kv_batch_get": "GET",
    "kv_batch_get_by_meta": "GET",
    "kv_batch_put": "PUT",
    "kv_put": "PUT",
}

PROBES = (
    # Every method with `@register` whose argument is metadata: compute_log_prob, update_actor, …
    _probe("verl.utils.transferqueue_utils:tqbridge", result=_trace_decorator),
    _probe(
        "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
        trace=begin_rollout,
    ),
    *(
        _probe(
            *(f"{trainer}.{name}" for trainer in _TRAINERS),
            trace=functools.partial(begin_function, name, False, waits),
            optional=True,
        )
        for name, waits in _DIRECT.items()
    ),
    _probe(
        f"{_SYNC_TRAINER}._add_remax_reward_baselines",
        trace=functools.partial(begin_function, "_add_remax_reward_baselines", False, False),
        optional=True,
    ),
    # The package re-exports them under its own name.
    *(
        _probe(
            *(
                f"{module}:{prefix}{name}"
                for module in ("transfer_queue.interface", "transfer_queue")
            ),
            trace=functools.partial(begin_operation, stage),
            optional=True,
        )
        for prefix in ("async_", "")
        for name, stage in _INTERFACE.items()
    ),
    _probe(f"{_CLIENT}.async_get_data", trace=functools.partial(begin_client_call, "GET")),
    _probe(f"{_CLIENT}.async_put", trace=functools.partial(begin_client_call, "PUT")),
)
