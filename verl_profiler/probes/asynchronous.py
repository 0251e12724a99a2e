"""What becomes of samples and of replicas in the V1 trainers; in the trainer's process.

A sample is dispatched, gets ready in the replay buffer, and is consumed or dropped.  Replicas are
aborted, put to sleep, synced, resumed and switched between training and generating.  The reason is that
of the innermost of verl's hooks and methods around the call (verl 0.9.1 trainer_colocate_async.py,
trainer_separate_async.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from verl_profiler.instrumentation.probe import Probe
from verl_profiler.probes.values import plain, scalar
from verl_profiler.recording import context, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now

__all__ = ["PROBES", "consume"]

_V1 = "verl.trainer.ppo.v1"
_TRAINER = f"{_V1}.trainer_base:PPOTrainer"
_SYNC = f"{_V1}.trainer_sync:PPOTrainerSync"
_COLOCATE = f"{_V1}.trainer_colocate_async:PPOTrainerColocateAsync"
_SEPARATE = f"{_V1}.trainer_separate_async:PPOTrainerSeparateAsync"
_BUFFER = f"{_V1}.replay_buffer:ReplayBuffer"
_ASYNC_BUFFER = f"{_V1}.replay_buffer:ReplayBufferAsync"
_MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"

# Base class of the trainers in verl.experimental.
_SEPARATED = "SeparateRayPPOTrainer"

_TRAINING = "train"
_DROPPED = ("stale", "filtered", "failed")

_reason: ContextVar[str | None] = ContextVar("verl_profiler_reason", default=None)
_dispatch_reason: ContextVar[str | None] = ContextVar("verl_profiler_dispatch", default=None)
# The sets of uids that are about to be evicted, in the order of `_DROPPED`.
_evicted: ContextVar[Any] = ContextVar("verl_profiler_evicted", default=None)


class _Depth:
    """The replay buffer's prompts by state, as recorded last."""

    def __init__(self) -> None:
        self.states: dict[str, int] = {}

    def change(self, **states: int) -> None:
        states = {**self.states, **states}
        if states == self.states:
            return
        self.states = states
        extra = {"queue": "replay_buffer", **states}
        recorder.record("queue_depth", None, now(), extra, context.process.current_step())


_depth = _Depth()


def _instant(call: Call) -> None:
    call.begin_ns = None


def _because(reason: str, call: Call) -> None:
    call.bind(_reason, reason)


def _dispatching(reason: str, call: Call) -> None:
    # The warm-up adds prompts by the method that refills.
    call.bind(_dispatch_reason, _dispatch_reason.get() or reason)


def _end_dispatch(call: Call, result: Any) -> None:
    _instant(call)
    if not isinstance(result, int) or result <= 0:
        call.event = None
        return
    call.extra = {"prompts": result, "reason": _dispatch_reason.get() or "step"}
    if context.process.weight_version is not None:
        call.extra["weight_version"] = context.process.weight_version
    if _depth.states:
        _depth.change(pending=_depth.states["pending"] + result)


def _end_reissue(call: Call, result: Any) -> None:
    _end_dispatch(call, result)
    if call.event is not None and call.extra is not None:
        call.extra["reason"] = "reissue"


def _end_poll(call: Call, _result: Any) -> None:
    buffer = call.arguments["self"]
    _depth.change(
        pending=len(buffer.pending_keys.get(_TRAINING, ())),
        running=len(buffer.running_keys.get(_TRAINING, ())),
        ready=len(buffer.finished_keys.get(_TRAINING, ())),
        failed=len(buffer.failure_keys.get(_TRAINING, ())),
    )


def _begin_sampleable_wait(call: Call) -> None:
    call.extra = {"wanted": int(call.arguments["target_count"])}


def _end_sample(call: Call, result: Any) -> None:
    if result is None:
        return
    batch = result[0] if isinstance(result, tuple) else result
    keys = getattr(batch, "keys", None)
    if not isinstance(keys, (list, tuple)):
        return
    call.extra = {"samples": len(keys)}
    if call.arguments.get("partition_id") == _TRAINING:
        consume(keys, getattr(batch, "tags", None) or (), call.end_ns)


def consume(
    keys: Iterable[Any],
    tags: Iterable[dict[str, Any]],
    end_ns: int,
    trainer_version: int | None = None,
) -> None:
    """Record the samples that the trainer of this process takes.

    Args:
        keys: Their names: uid, session and number of the output, with `_` between.
        tags: Of each, as V1's samples have them: `global_steps` that dispatched it, and
            `min_global_steps` and `max_global_steps`.
        end_ns: When.
        trainer_version: The version that the trainer has; None for the one synced last.
    """
    trainer = context.process.trainer
    common: dict[str, Any] = {"consumed_step": context.process.current_step()}
    if trainer_version is None:
        trainer_version = context.process.weight_version
    if trainer_version is not None:
        common["trainer_version"] = trainer_version
    if any(getattr(trainer, f"{prefix}parameter_sync_step", 1) > 1 for prefix in ("", "trigger_")):
        common["mini_batch"] = int(getattr(trainer, "local_trigger_step", 0))
    uids = set()
    for key, tag in zip(keys, tags, strict=False):
        uid, session, output = [*str(key).rsplit("_", 2), "0", "0"][:3]
        uids.add(uid)
        extra: dict[str, Any] = {"session": int(session) if session.isdigit() else session}
        if output != "0":
            extra["output"] = int(output) if output.isdigit() else output
        extra |= {"uid": uid, **common, **_versions([tag])}
        recorder.record("sample_consumed", None, end_ns, extra, _step(tag.get("global_steps")))
    if _depth.states:
        _depth.change(ready=max(0, _depth.states["ready"] - len(uids)))


def _step(value: Any) -> int:
    """Return the step that dispatched a sample, which some loaders hand on as a tensor."""
    found = context.process.current_step() if value is None else scalar(value)
    return found if isinstance(found, int) else context.process.current_step()


def _versions(tags: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the oldest and newest version of the weights that made samples."""
    versions = {}
    for choose, name in ((min, "min"), (max, "max")):
        known = [tag.get(f"{name}_global_steps") for tag in tags]
        known = [version for version in known if isinstance(version, int)]
        if known:
            versions[f"{name}_weight_version"] = choose(known)
    return versions


def _begin_evicting(call: Call) -> None:
    call.bind(_evicted, call.arguments["eviction_reasons"])


def _begin_clearing(call: Call) -> None:
    """Record the prompts whose samples are removed, before verl discards them."""
    arguments = call.arguments
    buffer, partition_id, uids = arguments["self"], arguments["partition_id"], arguments["uids"]
    if not uids or partition_id != _TRAINING:
        return
    tags: dict[str, list[dict[str, Any]]] = {uid: [] for uid in uids}
    for key, tag in buffer.partitions[partition_id].items():
        uid = key.split("_")[0]
        if uid in tags:
            tags[uid].append(tag)
    evicted = _evicted.get() or ()
    step = context.process.current_step()
    for uid, own in tags.items():
        reasons = (name for name, group in zip(_DROPPED, evicted, strict=False) if uid in group)
        extra = {
            "uid": str(plain(uid)),
            "reason": next(reasons, "surplus"),
            "dropped_step": step,
            "samples": len(own),
            "response_tokens": sum(int(tag.get("response_len") or 0) for tag in own),
            **_versions(own),
        }
        if context.process.weight_version is not None:
            extra["trainer_version"] = context.process.weight_version
        dispatched = buffer.prompt_global_steps[partition_id].get(uid)
        recorder.record("sample_dropped", None, now(), extra, _step(dispatched))


def _of_replicas(replicas: Iterable[Any]) -> dict[str, Any]:
    """Return the pool and the ranks of replicas."""
    replicas = list(replicas)
    found: dict[str, Any] = {"replicas": [int(replica.replica_rank) for replica in replicas]}
    mode = getattr(replicas[0], "rollout_mode", None) if replicas else None
    if mode is not None:
        found["pool"] = str(plain(getattr(mode, "value", mode)))
    return found


def _end_manager(call: Call, _result: Any) -> None:
    _instant(call)
    manager = call.arguments["self"]
    if not context.process.is_trainer or not manager.replicas:
        call.event = None
        return
    call.extra = {
        **_of_replicas(manager.replicas),
        "devices": sum(int(replica.world_size) for replica in manager.replicas),
        "trainer_devices": int(manager.actor_wg.world_size),
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
        Probe(
            None,
            "trainer",
            (f"{trainer}.{hook}",),
            enter=functools.partial(_because, _REASONS[hook]),
        )
        for trainer, hooks in _HOOKS.items()
        for hook in hooks
    ),
    Probe(
        None,
        "trainer",
        (f"{_TRAINER}._add_async_warmup_batches",),
        enter=functools.partial(_dispatching, "warm_up"),
    ),
    Probe(
        None,
        "trainer",
        (f"{_TRAINER}._add_prompts_to_generate",),
        enter=functools.partial(_dispatching, "refill"),
    ),
    Probe("dispatch", "trainer", (f"{_TRAINER}._submit_batch_to_rollout",), leave=_end_dispatch),
    Probe("dispatch", "trainer", (f"{_TRAINER}._reissue_inflight_prompts",), leave=_end_reissue),
    *(
        Probe("sample_wait", "trainer", (f"{buffer}.sample",), leave=_end_sample)
        for buffer in (_BUFFER, _ASYNC_BUFFER)
    ),
    Probe(
        "sampleable_wait",
        "trainer",
        (f"{_ASYNC_BUFFER}.wait_for_sampleable",),
        reads=("target_count",),
        enter=_begin_sampleable_wait,
    ),
    Probe(
        None,
        "trainer",
        (f"{_BUFFER}._sync_metadata_from_transfer_queue",),
        leave=_end_poll,
    ),
    Probe(
        None,
        "trainer",
        (f"{_BUFFER}._evict_terminal_groups",),
        reads=("eviction_reasons",),
        enter=_begin_evicting,
    ),
    Probe(
        None,
        "trainer",
        (f"{_BUFFER}._clear_groups",),
        reads=("partition_id", "uids"),
        enter=_begin_clearing,
    ),
    Probe("replica_pool", "trainer", (f"{_MANAGER}.__init__",), leave=_end_manager),
    Probe(
        "abort_replicas",
        "trainer",
        (f"{_MANAGER}.abort_replicas",),
        reads=("reject_request",),
        enter=_begin_abort,
    ),
    *(
        Probe(event, "trainer", (f"{_MANAGER}.{method}",), enter=_begin_manager_call)
        for event, method in (
            ("resume_replicas", "resume_generation_replicas"),
            ("sleep_replicas", "sleep_replicas"),
        )
    ),
    Probe(
        "weight_sync",
        "weights",
        (f"{_MANAGER}.update_weights",),
        reads=("global_steps",),
        enter=_begin_weight_sync,
        leave=_end_weight_sync,
    ),
    Probe("weight_group", "weights", (f"{_MANAGER}.build_process_group",)),
    *(
        Probe(
            "pool_switch",
            "trainer",
            (f"{_SEPARATE}.switch_to_{to}",),
            enter=functools.partial(_begin_switch, to),
        )
        for to in ("rollout", "trainer")
    ),
    *(
        Probe(event, "trainer", (f"{_SEPARATE}.{method}",), enter=_begin_pool_move)
        for event, method in (
            ("replicas_join", "add_replicas_to_balancer"),
            ("replicas_leave", "remove_replicas_from_balancer"),
        )
    ),
)
