"""The trainers of `verl.experimental`: one step off policy, and fully asynchronous (verl 0.9.1).

Of a fully asynchronous run the trainer, the rollouter and the queue between them are actors of their
own.  A step is one version of the weights: the trainer logs under it, and engines and rollouter count
by it.  `global_steps` counts batches in the trainer and samples in the rollouter.

The rollouter counts versions by the syncs that it is notified of.  The step that dispatched a sample goes
with it: to the agent loops in the prompts' `meta_info`, from where it is removed again, and to queue and
trainer as an attribute of the `RolloutSample`, which verl pickles.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from contextvars import ContextVar
from typing import Any

from verl_profiler.events.json_values import is_tuple
from verl_profiler.instrumentation.placing import is_probed
from verl_profiler.instrumentation.probe import of_family
from verl_profiler.probes.asynchronous import consume
from verl_profiler.probes.values import number, plain, scalar
from verl_profiler.recording import context, open_calls, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now

_probe = of_family("trainer")
_rollout_probe = of_family("rollout")

_FULLY_ASYNC = "verl.experimental.fully_async_policy"
_TRAINER = f"{_FULLY_ASYNC}.fully_async_trainer:FullyAsyncTrainer"
_ROLLOUTER = f"{_FULLY_ASYNC}.fully_async_rollouter:FullyAsyncRollouter"
_QUEUE = f"{_FULLY_ASYNC}.message_queue:MessageQueue"
_ONE_STEP_OFF = "verl.experimental.one_step_off_policy.ray_trainer:OneStepOffRayTrainer"
_LOOPS = "verl.experimental.agent_loop.agent_loop"

# The rollouter's coroutine of each sample, from its dispatch until it is in the queue.
_SAMPLE = "_process_single_sample_streaming"
# In the prompts' `meta_info`, from rollouter to agent-loop worker.
_STEP_KEY = "verl_profiler_step"
# verl's tag of the step that dispatched a sample.
_STEP_TAG = "global_steps"
# On a `RolloutSample`: step and uid, as one text that is found in its pickle.
_MARK = "_verl_profiler"
_MARK_TEXT = "verl-profiler-sample"
_MARKED = re.compile(rb"verl-profiler-sample:(-?\d+):([\w-]+);")


class _Rollouter:
    """What the process of the rollouter keeps."""

    def __init__(self) -> None:
        self.is_here = False
        # Begin, fields and step of the pause that is open.
        self.pause: tuple[int, dict[str, Any], int] | None = None
        self.running: tuple[int, int | None] | None = None
        # Whether it validates: samples of training may wait meanwhile.
        self.validates = False


class _OneStepOff:
    """What the process of the one-step-off trainer keeps."""

    def __init__(self) -> None:
        # Of batches that are generated and not yet consumed: keys and tags of their samples.
        self.ready: deque[tuple[list[str], list[dict[str, Any]]]] = deque()
        self.has_trained = False


_rollouter = _Rollouter()
_one_step_off = _OneStepOff()
# Step and uid of the samples in the message queue, of which this is the process; None for its end.
_queued: deque[tuple[int, str] | None] = deque()
_generated: ContextVar[list[Any] | None] = ContextVar("verl_profiler_generated", default=None)


# The trainer of a fully asynchronous run.


def _begin_fit_step(call: Call) -> None:
    trainer = call.arguments["self"]
    context.process.hold_trainer(trainer, counts_steps=False)
    context.process.step = int(trainer.current_param_version) + 1


def _end_collecting(call: Call, result: Any) -> None:
    batch = result[1] if is_tuple(result) and len(result) > 1 else None
    if batch is None:
        # There is no such step: the samples have ended.
        call.event = None
        context.process.step -= 1
    call.extra = {"samples": len(batch) if isinstance(batch, Sized) else 0}


def _begin_assembling(call: Call) -> None:
    for sample in call.arguments["rollout_samples"]:
        step, uid = _parsed(getattr(sample, _MARK, "").encode()) or (None, sample.sample_id)
        tags = list(_tags(sample.full_batch, step))
        keys = [f"{uid}_{session}_0" for session in range(len(tags))]
        consume(keys, tags, call.begin_ns or now())


def _tags(batch: Any, step: int | str | None) -> Iterator[dict[str, Any]]:
    """Give the versions of each row of a batch of agent loops, in order, as V1's samples have them."""
    columns = {
        name: batch.non_tensor_batch[name]
        for name in ("min_global_steps", "max_global_steps")
        if name in batch.non_tensor_batch
    }
    for row in range(len(batch)):
        tag = {name: number(values[row]) for name, values in columns.items()}
        yield {**tag, _STEP_TAG: step}


def _begin_validating(call: Call) -> None:
    """Record nothing if the trainer is not due to validate (verl 0.9.1 fully_async_trainer.py:841)."""
    trainer = call.arguments["self"]
    every, version = trainer.config.trainer.test_freq, trainer.current_param_version
    is_due = every > 0 and version > 0 and version % every == 0
    if trainer.local_trigger_step != 1 or not (is_due or call.arguments.get("val_before_train")):
        call.event = None


# The rollouter.


def _begin_rollouter(_call: Call) -> None:
    _rollouter.is_here = True


def _end_loading(call: Call, _result: Any) -> None:
    """Take the version from the number of samples before it; 0 in a run that resumes none."""
    rollouter = call.arguments["self"]
    each = rollouter.required_samples * rollouter.config.async_training.trigger_parameter_sync_step
    context.process.step = (rollouter.global_steps - 1) // each


def _end_sync(call: Call, _result: Any) -> None:
    if call.error is None:
        context.process.step += 1


def _begin_validation(_call: Call) -> None:
    # The trainer validates a version once the rollouter is at the next step.
    context.process.step -= 1
    _rollouter.validates = True
    open_calls.idle_ns = None


def _end_validation(_call: Call, _result: Any) -> None:
    context.process.step += 1
    _rollouter.validates = False


def _begin_sample(call: Call) -> None:
    _expect_progress(call.arguments["self"], now(), made=True)
    sample = call.arguments["rollout_sample"]
    step, uid = context.process.step, f"uid_{plain(sample.sample_id)}"
    setattr(sample, _MARK, f"{_MARK_TEXT}:{step}:{uid};")
    extra = {"uid": uid, "prompts": 1, "weight_version": step - 1}
    recorder.record("dispatch", None, now(), extra, step)


def _end_sample(call: Call, _result: Any) -> None:
    # What is cancelled when the run ends is no progress.
    if call.error is None:
        _expect_progress(call.arguments["self"], call.end_ns, made=True)


def _end_count(call: Call, _result: Any) -> None:
    """Record how many samples run; verl 0.8 does not count them."""
    rollouter = call.arguments["self"]
    _expect_progress(rollouter, now(), made=True)
    state = len(rollouter.active_tasks), rollouter.max_concurrent_samples
    if state == _rollouter.running:
        return
    _rollouter.running = state
    extra = {"queue": "rollouter", "running": state[0]}
    if state[1] is not None:
        extra["capacity"] = int(state[1])
    recorder.record("queue_depth", None, now(), extra, context.process.step)


def _expect_progress(rollouter: Any, at_ns: int, *, made: bool = False) -> None:
    """Note whether a sample should get dispatched or finished, and whether one did.

    At a limit none is dispatched, but those in flight should get finished.  Without a probe of samples,
    progress is unknown, and no sample is expected.
    """
    open_calls.in_flight = len(rollouter.active_tasks)
    if _rollouter.validates or (_rollouter.pause is not None and not open_calls.in_flight):
        open_calls.idle_ns = None
    elif made or (open_calls.idle_ns is None and is_probed(rollouter, _SAMPLE)):
        open_calls.note_progress(at_ns)


def _end_limit_check(call: Call, result: Any) -> None:
    """Open a pause when verl finds a limit reached, and close it when it finds none."""
    rollouter = call.arguments["self"]
    if not result:
        _close_pause(call.end_ns)
    elif call.error is None and _rollouter.pause is None:
        made, limit = rollouter.staleness_samples, rollouter.max_required_samples
        extra = {
            "reason": "staleness_limit" if made >= limit else "queue_full",
            "staleness_samples": int(made),
            "max_required_samples": int(limit),
        }
        _rollouter.pause = call.end_ns, extra, context.process.step
    _expect_progress(rollouter, call.end_ns)


def _close_pause(end_ns: int) -> None:
    if _rollouter.pause is not None:
        begin_ns, extra, step = _rollouter.pause
        _rollouter.pause = None
        recorder.record("dispatch_pause", begin_ns, end_ns, extra, step)


def _end_rollouter(call: Call, _result: Any) -> None:
    _close_pause(call.end_ns)
    open_calls.idle_ns = None


# The message queue.


def _parsed(pickled: bytes) -> tuple[int, str] | None:
    """Return step and uid of a pickled sample."""
    found = _MARKED.match(pickled, max(pickled.rfind(_MARK_TEXT.encode()), 0))
    return (int(found[1]), found[2].decode()) if found else None


def _end_put(call: Call, result: Any) -> None:
    if call.error is not None:
        return
    sample = call.arguments["sample"]
    mark = _parsed(sample) if isinstance(sample, bytes) else None
    if mark is not None:
        # The queue is notified of no sync.
        context.process.step = max(context.process.step, mark[0])
    _queued.append(mark)
    if result is False:
        _record_overflow(_queued.popleft())
    _record_depth(call)


def _record_overflow(dropped: tuple[int, str] | None) -> None:
    if dropped is not None:
        step, uid = dropped
        extra = {"uid": uid, "reason": "queue_full", "dropped_step": context.process.step}
        recorder.record("sample_dropped", None, now(), extra, step)


def _end_get(call: Call, result: Any) -> None:
    if result is not None and _queued:
        _queued.popleft()
        _record_depth(call)


def _record_depth(call: Call) -> None:
    queue = call.arguments["self"]
    extra = {
        "queue": "message_queue",
        "ready": len(queue.queue),
        "capacity": int(queue.max_queue_size),
    }
    recorder.record("queue_depth", None, call.end_ns, extra, context.process.step)


# Agent loops, of both.


def _begin_handing_over(call: Call) -> None:
    """Pass the step with the prompts of a rollouter, or note what a one-step-off trainer dispatches."""
    prompts = call.arguments["prompts"]
    if _rollouter.is_here:
        prompts.meta_info[_STEP_KEY] = context.process.step
    elif _generated.get() is not None:
        call.state = [str(uid) for uid in prompts.non_tensor_batch["uid"]]
        version = context.process.weight_version
        common = {} if version is None else {"weight_version": version}
        for uid in dict.fromkeys(call.state):
            extra = {"uid": uid, "prompts": 1, "reason": "step", **common}
            recorder.record("dispatch", None, now(), extra, context.process.current_step())


def _end_handing_over(call: Call, result: Any) -> None:
    call.arguments["prompts"].meta_info.pop(_STEP_KEY, None)
    generated = _generated.get()
    if call.state is not None and result is not None and generated is not None:
        # In the order of the prompts; verl sorts the rows for its ranks afterwards.
        step = scalar(call.arguments["prompts"].meta_info.get(_STEP_TAG))
        generated += [list(_keys(call.state)), list(_tags(result, step))]


def _keys(uids: Iterable[str]) -> Iterator[str]:
    """Give the names of the samples of prompts: the sessions of one follow each other."""
    counts: dict[str, int] = {}
    for uid in uids:
        counts[uid] = counts.get(uid, -1) + 1
        yield f"{uid}_{counts[uid]}_0"


def _begin_agent_loops(call: Call) -> None:
    step = call.arguments["batch"].meta_info.pop(_STEP_KEY, None)
    if step is not None:
        call.bind(context.dispatching_step, int(step))


# The one-step-off trainer.


def _begin_next_batch(call: Call) -> None:
    call.state = []
    call.bind(_generated, call.state)


def _end_next_batch(call: Call, result: Any) -> None:
    if result is not None and len(call.state) == 2:
        _one_step_off.ready.append((call.state[0], call.state[1]))


def _begin_taking_batch(call: Call) -> None:
    # The trainer's own weights: those of the last sync, and of the update that has followed it.
    version = context.process.weight_version
    call.state = None if version is None else version + _one_step_off.has_trained


def _end_taking_batch(call: Call, _result: Any) -> None:
    _one_step_off.has_trained = True
    if call.error is None and _one_step_off.ready:
        keys, tags = _one_step_off.ready.popleft()
        consume(keys, tags, call.end_ns, call.state)


PROBES = (
    _probe(None, f"{_TRAINER}.fit_step", enter=_begin_fit_step),
    _probe("sample_wait", f"{_TRAINER}._get_samples_from_queue", leave=_end_collecting),
    _probe(
        None,
        f"{_FULLY_ASYNC}.detach_utils:assemble_batch_from_rollout_samples",
        reads=("rollout_samples",),
        enter=_begin_assembling,
    ),
    _probe("testing", f"{_TRAINER}._fit_validate", enter=_begin_validating),
    _probe(None, f"{_ROLLOUTER}.init_workers", enter=_begin_rollouter),
    _probe(None, f"{_ROLLOUTER}.load_checkpoint", leave=_end_loading),
    _probe(None, f"{_ROLLOUTER}.reset_staleness", leave=_end_sync),
    _probe(None, f"{_ROLLOUTER}.do_validate", enter=_begin_validation, leave=_end_validation),
    _probe(
        None,
        f"{_ROLLOUTER}.{_SAMPLE}",
        reads=("rollout_sample",),
        enter=_begin_sample,
        leave=_end_sample,
        lost="whether samples are dispatched and finished",
    ),
    _probe(None, f"{_ROLLOUTER}._record_active_count", leave=_end_count),
    _probe(None, f"{_ROLLOUTER}._should_pause_generation", leave=_end_limit_check),
    _probe(None, f"{_ROLLOUTER}.fit", leave=_end_rollouter),
    _probe(None, f"{_QUEUE}.put_sample", reads=("sample",), leave=_end_put),
    _probe(None, f"{_QUEUE}.get_sample", leave=_end_get),
    _probe(
        None,
        f"{_LOOPS}:AgentLoopManager.generate_sequences",
        f"{_FULLY_ASYNC}.fully_async_rollouter:FullyAsyncAgentLoopManager.generate_sequences_single",
        reads=("prompts",),
        enter=_begin_handing_over,
        leave=_end_handing_over,
    ),
    _rollout_probe(
        None,
        f"{_LOOPS}:AgentLoopWorker.generate_sequences",
        reads=("batch",),
        enter=_begin_agent_loops,
    ),
    _probe(
        None,
        f"{_ONE_STEP_OFF}._async_gen_next_batch",
        enter=_begin_next_batch,
        leave=_end_next_batch,
    ),
    _probe(
        None, f"{_ONE_STEP_OFF}._fit_generate", enter=_begin_taking_batch, leave=_end_taking_batch
    ),
)
