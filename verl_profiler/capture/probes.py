"""Where captures start and stop: the trainer's own calls, and those of verl's profiler in workers.

The trainer starts the captures of its worker groups itself, and none for other roles.  So a probe of
its `_start_profiling` also starts captures in this process and in the actors of those roles.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from verl_profiler.capture import session
from verl_profiler.capture.actor_placement import captured_actors, hook_creation
from verl_profiler.capture.plan import ROLES, Plan, decoded_plan
from verl_profiler.instrumentation.placing import install as place
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.recording import recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now
from verl_profiler.recording.complaints import announce

_V1 = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_V0 = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
# verl 0.8 only.
_SYNC = "verl.trainer.main_ppo_sync:PPOTrainer"
_TIMEOUT_S = 60.0


def install(plan: Plan) -> None:
    """Install the probes, and hook the creation of actors, in this process."""
    place(PROBES)
    if "ray" in sys.modules:
        hook_creation(plan)


def _captured(call: Call) -> tuple[Plan, Any] | None:
    """Return the plan and the trainer if its step is captured."""
    active, trainer = recorder.active(), call.arguments["self"]
    plan = None if active is None else decoded_plan(active.config.capture_plan)
    return (plan, trainer) if plan is not None and trainer.global_steps in plan.steps else None


def _start(call: Call) -> None:
    captured = _captured(call)
    if captured is not None:
        call.state = call.begin_ns
        step = captured[1].global_steps
        session.start(step=step)
        _call_actors(session.start, step)


def _started(call: Call, _result: Any) -> None:
    if call.state is not None:
        recorder.record("start_profile", call.state, now())


def _stop(call: Call, _result: Any) -> None:
    captured = _captured(call)
    if captured is None:
        return
    plan, trainer = captured
    continuous = trainer.config.global_profiler.get("profile_continuous_steps", False)
    if not (continuous and trainer.global_steps + 1 in plan.steps):
        session.stop()
        _call_actors(session.stop)


def _stop_and_record(call: Call, result: Any) -> None:
    """Stop, and record the duration as verl's V0 trainer does; with nsys it takes seconds."""
    _stop(call, result)
    if _captured(call) is not None:
        recorder.record("stop_profile", call.begin_ns, now())


def _call_actors(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in every captured actor whose captures verl does not start itself."""
    ray: Any = importlib.import_module("ray")
    calls: dict[Any, tuple[str, int | None]] = {}
    for role, rank, reference in captured_actors:
        handle = reference()
        if role not in ROLES["workers"] and role != "trainer" and handle is not None:
            calls[handle.__ray_call__.remote(function, *arguments)] = (role, rank)
    late: list[Any] = []
    if calls:
        _, late = ray.wait(list(calls), num_returns=len(calls), timeout=_TIMEOUT_S)
    if late:
        names = sorted({f"{role} {rank}" for role, rank in (calls[call] for call in late)})
        announce(
            f"WARNING {', '.join(names)} did not {function.__name__} a capture within "
            f"{_TIMEOUT_S:.0f} s. Training continues. (capture-late)"
        )


def _note_step(call: Call) -> None:
    session.note_step(call.arguments.get("profile_step", call.arguments.get("global_step")))


def _note_task(call: Call) -> None:
    session.note_task(call.arguments.get("role") or call.arguments.get("message"))


def _host_started(_call: Call, _result: Any) -> None:
    process = session.current()
    if process is not None and not process.is_open:
        process.opened()


def _host_stopped(_call: Call, _result: Any) -> None:
    process = session.current()
    if process is not None and process.is_open:
        process.closed()


def _probe(*targets: str, **hooks: Any) -> Probe:
    return Probe(None, "nsight", targets, **hooks)


_NSIGHT = "verl.utils.profiler.nvtx_profile:NsightSystemsProfiler"

PROBES = (
    # The V0 trainer has timers around these calls.
    _probe(*(f"{each}._start_profiling" for each in (_V1, _SYNC)), enter=_start, leave=_started),
    _probe(*(f"{each}._stop_profiling" for each in (_V1, _SYNC)), leave=_stop_and_record),
    _probe(f"{_V0}._start_profiling", enter=_start),
    _probe(f"{_V0}._stop_profiling", leave=_stop),
    _probe("verl.utils.profiler.profile:DistProfiler.start", enter=_note_step),
    _probe(f"{_NSIGHT}.annotate", enter=_note_task),
    _probe("torch.cuda.profiler:start", leave=_host_started),
    _probe("torch.cuda.profiler:stop", leave=_host_stopped),
)
