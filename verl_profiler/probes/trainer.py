"""Steps and their phases, under verl's own timing names; in the TaskRunner's process."""

from __future__ import annotations

import time
from typing import Any

from verl_profiler.instrumentation.probe import EndTrace, of_family
from verl_profiler.probes.values import number, plain
from verl_profiler.recording import context, open_calls, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now
from verl_profiler.recording.open_calls import begin_phase, end_phase

_probe = of_family("trainer")

_V1 = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_V0 = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
# verl 0.8 only.
_SYNC = "verl.trainer.main_ppo_sync:PPOTrainer"

# Trainers of verl.experimental, which override `init_workers` and `fit` without calling those of V0.
_SEPARATED = "verl.experimental.separation.ray_trainer:SeparateRayPPOTrainer"
_ONE_STEP_OFF = "verl.experimental.one_step_off_policy.ray_trainer:OneStepOffRayTrainer"
_FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_trainer:FullyAsyncTrainer"
# It validates too, but its `global_steps` counts samples; the trainer's counts batches.
_ROLLOUTER, _BATCH_COUNTER = "FullyAsyncRollouter", "FullyAsyncTrainer"

# With it the fully asynchronous trainer leaves the step that it begins after the last one.
_NO_MORE_SAMPLES = "TrainingStopException"

_START_UP_STEP = 0

# Beyond the interval between two flushes, for the flush itself.
_FLUSH_S = 0.1
_LONGEST_WAIT_S = 1.0


def _hold_trainer(call: Call) -> None:
    trainer = call.arguments["self"]
    names = {each.__name__ for each in type(trainer).__mro__}
    if _ROLLOUTER not in names:
        context.process.hold_trainer(trainer, counts_steps=_BATCH_COUNTER not in names)


def _trace_fit(_arguments: tuple[Any, ...], _named: dict[str, Any]) -> EndTrace:
    return _await_flush


def _await_flush(_result: Any, error: BaseException | None) -> None:
    """Let every process write its last events: when `fit` has returned, verl kills the actors."""
    active = recorder.active()
    if active is not None and (error is None or isinstance(error, Exception)):
        begin_ns = now()
        events = active.config.events
        wait_s = min(active.config.flush_interval_s + _FLUSH_S, _LONGEST_WAIT_S)
        if events.holds_details():
            from verl_profiler.recording.details import QUIET_NS

            # So long they hold details of the slowest requests of the last step.
            wait_s += QUIET_NS / 1e9
        time.sleep(wait_s)
        # Reported costs are those of steps, and this is behind the last one.
        active.wrapper_ns -= now() - begin_ns


def _begin_init(call: Call) -> None:
    _hold_trainer(call)
    call.step = _START_UP_STEP


def _times_phases() -> bool:
    """Whether verl's timer, which serves every process, times a phase of a step here."""
    return context.process.is_trainer and context.current_request.get() is None


def _begin_timer(call: Call) -> None:
    # verl 0.9.1 fully_async_trainer.py:743 writes the prefix that belongs to its metrics.
    call.event = str(plain(call.arguments["name"])).removeprefix("timing_s/")
    # The counter may move on before the timer ends; a phase belongs to the step it began in.
    call.step = context.process.current_step()
    begin_phase(call)


def _end_timer(call: Call, _result: Any) -> None:
    if type(call.error).__name__ == _NO_MORE_SAMPLES:
        call.event = None
    end_phase(call)


def _begin_validation(call: Call) -> None:
    _hold_trainer(call)
    call.step = context.process.current_step()
    context.process.validate = True


def _end_validation(call: Call, _result: Any) -> None:
    # The event itself is marked: `leave` hooks run before the flag is read.
    call.extra = {"validate": True}
    context.process.validate = False
    _keep_failure(call, _result)


def _keep_failure(call: Call, _result: Any) -> None:
    """Start-up, and the validation before the first step, are in no timer of verl: `stuck` names their failure."""
    if call.error is not None and open_calls.failed is None:
        begin_phase(call)
        end_phase(call)


def _log_metrics(call: Call) -> None:
    metrics = {str(plain(key)): number(value) for key, value in call.arguments["data"].items()}
    call.extra = {"metrics": {name: value for name, value in metrics.items() if value is not None}}
    call.step = int(call.arguments["step"])


def _end_log_metrics(call: Call, _result: Any) -> None:
    # An instant: verl's loggers may take long, and that is not what the line is about.
    call.begin_ns = None


PROBES = (
    _probe(
        "init",
        f"{_V1}.init",
        *(f"{trainer}.init_workers" for trainer in (_V0, _SYNC, _SEPARATED, _FULLY_ASYNC)),
        enter=_begin_init,
        leave=_keep_failure,
    ),
    _probe(
        None,
        *(f"{each}.fit" for each in (_V1, _V0, _SYNC, _SEPARATED, _ONE_STEP_OFF, _FULLY_ASYNC)),
        enter=_hold_trainer,
        trace=_trace_fit,
    ),
    _probe(
        "timer",
        "verl.utils.profiler.performance:_timer",
        reads=("name",),
        applies=_times_phases,
        enter=_begin_timer,
        leave=_end_timer,
    ),
    _probe(
        "validation",
        *(f"{trainer}._validate" for trainer in (_V1, _V0, _SYNC)),
        enter=_begin_validation,
        leave=_end_validation,
    ),
    _probe(
        "metrics",
        "verl.utils.tracking:Tracking.log",
        reads=("data", "step"),
        enter=_log_metrics,
        leave=_end_log_metrics,
    ),
)
