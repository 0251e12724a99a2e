"""What becomes of samples in the V1 trainers; in the trainer's process.

A sample is dispatched, gets ready in the replay buffer, and is consumed or dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from verl_profiler.events.json_values import is_list, is_tuple
from verl_profiler.instrumentation.probe import of_family
from verl_profiler.probes.values import plain, scalar
from verl_profiler.recording import context, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now

_probe = of_family("trainer")

_V1 = "verl.trainer.ppo.v1"
_TRAINER = f"{_V1}.trainer_base:PPOTrainer"
_BUFFER = f"{_V1}.replay_buffer:ReplayBuffer"
_ASYNC_BUFFER = f"{_V1}.replay_buffer:ReplayBufferAsync"
# verl 0.8 only.
_SYNC_BUFFER = "verl.trainer.main_ppo_sync:ReplayBuffer"

_TRAINING = "train"
_WARM_UP = "warm_up"
_DROPPED = ("stale", "filtered", "failed")

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


def instant(call: Call) -> None:
    """Make an instant of a call."""
    call.begin_ns = None


def _dispatching(reason: str, call: Call) -> None:
    # The warm-up adds prompts by the method that refills.
    call.bind(_dispatch_reason, _dispatch_reason.get() or reason)


def _begin_preparing(call: Call) -> None:
    if _dispatch_reason.get() == _WARM_UP:
        # verl 0.9.0 calls it there too.
        call.event = None


def _end_dispatch(call: Call, result: Any) -> None:
    instant(call)
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
    batch = result[0] if is_tuple(result) else result
    keys = getattr(batch, "keys", None)
    if not is_list(keys) and not is_tuple(keys):
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
    uids: set[str] = set()
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
    versions: dict[str, Any] = {}
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


PROBES = (
    _probe(
        None,
        f"{_TRAINER}._add_async_warmup_batches",
        # All that verl before 0.9.1 does in it.
        f"{_V1}.trainer_colocate_async:PPOTrainerColocateAsync.on_train_begin",
        f"{_V1}.trainer_separate_async:PPOTrainerSeparateAsync.on_train_begin",
        enter=functools.partial(_dispatching, _WARM_UP),
        optional=True,
    ),
    # Not among verl's timers; the agent loops make themselves ready in the first one.
    _probe(
        "prepare_step",
        # verl 0.9.0 has only what the other one calls.
        f"{_TRAINER}.prepare_step",
        f"{_TRAINER}._add_batch_to_generate",
        enter=_begin_preparing,
    ),
    _probe(
        None,
        f"{_TRAINER}._add_prompts_to_generate",
        enter=functools.partial(_dispatching, "refill"),
    ),
    _probe("dispatch", f"{_TRAINER}._submit_batch_to_rollout", leave=_end_dispatch),
    _probe("dispatch", f"{_TRAINER}._reissue_inflight_prompts", leave=_end_reissue),
    *(
        _probe("sample_wait", *targets, leave=_end_sample)
        for targets in (
            (f"{_BUFFER}.sample", f"{_SYNC_BUFFER}.sample"),
            (f"{_ASYNC_BUFFER}.sample",),
        )
    ),
    _probe(
        "sampleable_wait",
        f"{_ASYNC_BUFFER}.wait_for_sampleable",
        reads=("target_count",),
        enter=_begin_sampleable_wait,
        # verl 0.9.0 has no such wait.
        optional=True,
    ),
    _probe(None, f"{_BUFFER}._sync_metadata_from_transfer_queue", leave=_end_poll),
    _probe(
        None,
        f"{_BUFFER}._evict_terminal_groups",
        reads=("eviction_reasons",),
        enter=_begin_evicting,
    ),
    _probe(None, f"{_BUFFER}._clear_groups", reads=("partition_id", "uids"), enter=_begin_clearing),
)
