"""What becomes of replicas in asynchronous trainers; in the trainer's process.

Replicas are aborted, put to sleep, synced, resumed and switched between training and generating.  The
reason is that of the innermost of verl's hooks and methods around the call (verl 0.9.1
trainer_colocate_async.py, trainer_separate_async.py; fully_async_policy/fully_async_trainer.py and
dynamic_schedule/dynamic_resource_controller.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from verl_profiler.instrumentation.probe import of_family
from verl_profiler.probes.asynchronous import instant
from verl_profiler.probes.values import plain
from verl_profiler.recording import context
from verl_profiler.recording.call import Call

_probe = of_family("trainer")
_weights_probe = of_family("weights")

_V1 = "verl.trainer.ppo.v1"
_SYNC = f"{_V1}.trainer_sync:PPOTrainerSync"
_COLOCATE = f"{_V1}.trainer_colocate_async:PPOTrainerColocateAsync"
_SEPARATE = f"{_V1}.trainer_separate_async:PPOTrainerSeparateAsync"
_MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"
_FULLY_ASYNC = "verl.experimental.fully_async_policy"
_TRAINER = f"{_FULLY_ASYNC}.fully_async_trainer:FullyAsyncTrainer"
_CONTROLLER = (
    f"{_FULLY_ASYNC}.dynamic_schedule.dynamic_resource_controller:DynamicResourceController"
)

# Base class of the trainers in verl.experimental.
_SEPARATED = "SeparateRayPPOTrainer"

_reason: ContextVar[str | None] = ContextVar("verl_profiler_reason", default=None)


def _because(reason: str, call: Call) -> None:
    call.bind(_reason, reason)


def _of_replicas(replicas: Iterable[Any]) -> dict[str, Any]:
    """Return the pool and the ranks of replicas."""
    replicas = list(replicas)
    found: dict[str, Any] = {"replicas": [int(replica.replica_rank) for replica in replicas]}
    mode = getattr(replicas[0], "rollout_mode", None) if replicas else None
    if mode is not None:
        found["pool"] = str(plain(getattr(mode, "value", mode)))
    return found


def _end_manager(call: Call, _result: Any) -> None:
    _note_pool(call, call.arguments["self"])


def _end_hybrid_setup(call: Call, _result: Any) -> None:
    """Note the pool of a manager that is made without its replicas."""
    _note_pool(call, call.arguments["self"].hybrid_checkpoint_manager)


def _note_pool(call: Call, manager: Any) -> None:
    instant(call)
    if manager is None or not context.process.is_trainer or not manager.replicas:
        call.event = None
        return
    call.extra = {
        **_of_replicas(manager.replicas),
        "devices": sum(int(replica.world_size) for replica in manager.replicas),
        # verl 0.8 names it otherwise.
        "trainer_devices": int((getattr(manager, "actor_wg", None) or manager.trainer).world_size),
    }


def _begin_manager_call(call: Call) -> None:
    manager = call.arguments["self"]
    if not manager.replicas:
        call.event = None
        return
    call.extra = _of_replicas(manager.replicas)
    if _reason.get() is not None:
        call.extra["reason"] = _reason.get()


def _begin_abort(call: Call) -> None:
    _begin_manager_call(call)
    if call.arguments.get("reject_request") and call.extra is not None:
        call.extra["reject"] = True


def _begin_weight_sync(call: Call) -> None:
    _begin_manager_call(call)
    call.bind(_reason, "weight_sync")
    manager = call.arguments["self"]
    call.extra = {**(call.extra or {}), "backend": str(plain(manager.backend))}
    version = call.arguments.get("global_steps")
    if isinstance(version, int):
        call.extra["weight_version"] = version
    if not _is_asynchronous(context.process.trainer):
        # `update_weights` of the trainer is the same.
        call.event = None


def _is_asynchronous(trainer: Any) -> bool:
    if any(each.__name__ == _SEPARATED for each in type(trainer).__mro__):
        return True
    return getattr(trainer, "trainer_mode", "sync") != "sync"


def _end_weight_sync(call: Call, _result: Any) -> None:
    version = call.arguments.get("global_steps")
    if call.error is None and isinstance(version, int):
        context.process.weight_version = version


def _begin_pool_move(call: Call) -> None:
    trainer = call.arguments["self"]
    if not getattr(trainer, "_enable_hybrid_replicas", True):
        call.event = None
        return
    call.extra = _of_replicas(trainer.llm_server_manager.rollout_replicas)
    if _reason.get() is not None:
        call.extra["reason"] = _reason.get()


def _begin_switch(to: str, call: Call) -> None:
    _begin_pool_move(call)
    if call.extra is not None:
        call.extra["to"] = to
    call.bind(_reason, f"switch_to_{to}")


def _begin_activation(to: str, call: Call) -> None:
    manager = call.arguments["self"].hybrid_checkpoint_manager
    if not manager.replicas:
        call.event = None
        return
    call.extra = {**_of_replicas(manager.replicas), "to": to}
    call.bind(_reason, f"switch_to_{to}")


# verl's hook or method → what it is the reason of.
_REASONS = {
    "on_init_end": "init_end",
    "on_validate_begin": "validate_begin",
    "on_step_begin": "step_begin",
    "on_sample_end": "sample_end",
    "on_step_end": "step_end",
    "_wait_for_sampleable_and_switch": "switch_wait",
}
_HOOKS = {
    _SYNC: ("on_init_end", "on_sample_end", "on_step_end"),
    _COLOCATE: ("on_init_end", "on_sample_end", "on_step_end"),
    _SEPARATE: (
        "on_init_end",
        "on_validate_begin",
        "on_step_begin",
        "on_step_end",
        "_wait_for_sampleable_and_switch",
    ),
}

PROBES = (
    *(
        _probe(
            None,
            f"{trainer}.{hook}",
            enter=functools.partial(_because, _REASONS[hook]),
            # verl 0.9.0 has no such wait.
            optional=hook == "_wait_for_sampleable_and_switch",
        )
        for trainer, hooks in _HOOKS.items()
        for hook in hooks
    ),
    _probe("replica_pool", f"{_MANAGER}.__init__", leave=_end_manager),
    _probe(
        "abort_replicas",
        # verl 0.9.1 added `reject_request`.
        f"{_MANAGER}.abort_replicas",
        enter=_begin_abort,
    ),
    *(
        _probe(event, f"{_MANAGER}.{method}", enter=_begin_manager_call)
        for event, method in (
            ("resume_replicas", "resume_generation_replicas"),
            ("sleep_replicas", "sleep_replicas"),
        )
    ),
    _weights_probe(
        "weight_sync",
        f"{_MANAGER}.update_weights",
        reads=("global_steps",),
        enter=_begin_weight_sync,
        leave=_end_weight_sync,
    ),
    _weights_probe("weight_group", f"{_MANAGER}.build_process_group"),
    *(
        _probe(
            "pool_switch", f"{_SEPARATE}.switch_to_{to}", enter=functools.partial(_begin_switch, to)
        )
        for to in ("rollout", "trainer")
    ),
    *(
        _probe(
            "pool_switch",
            f"{_CONTROLLER}.{method}_hybrid_replicas",
            enter=functools.partial(_begin_activation, to),
        )
        for method, to in (("activate", "rollout"), ("deactivate", "trainer"))
    ),
    _probe(
        None,
        f"{_CONTROLLER}.sync_hybrid_weights",
        enter=functools.partial(_because, "switch_to_rollout"),
    ),
    _probe(
        None,
        f"{_TRAINER}._trainer_side_validate",
        enter=functools.partial(_because, "validate_begin"),
    ),
    _probe("replica_pool", f"{_TRAINER}._setup_hybrid_checkpoint_manager", leave=_end_hybrid_setup),
    *(
        _probe(event, f"{_SEPARATE}.{method}", enter=_begin_pool_move)
        for event, method in (
            ("replicas_join", "add_replicas_to_balancer"),
            ("replicas_leave", "remove_replicas_from_balancer"),
        )
    ),
)
