"""Start the actors of a capture's plan under nsys, and all others without.

verl puts `runtime_env={"nsight": …}` on the TaskRunner and on its worker groups, for every rank and
on CUDA only.  Everything that the TaskRunner creates inherits it, so engines, agent loops and
queues run under nsys with the controller's options (ray 2.60).  `nsight: None` does not prevent that,
since Ray drops the key; an explicit `_nsight` of None does.  So the entry is set for each actor and
task where it is created.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_profiler.capture import tools
from verl_profiler.capture.plan import Plan, RoleCapture
from verl_profiler.environ import UNDER_NSYS
from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.recording.complaints import announce
from verl_profiler.recording.identity import of_actor

# Role, rank and a weak reference to the handle of each captured actor that this process created and
# still holds.
captured_actors: list[tuple[str, int | None, weakref.ref[Any]]] = []


@dataclass(frozen=True)
class _Decision:
    """What applies to new actors and tasks of this process."""

    plan: Plan
    before_trainer: Callable[[], None] | None


_decision: _Decision | None = None


def hook_creation(plan: Plan | None, before_trainer: Callable[[], None] | None = None) -> None:
    """Choose for every actor and task that this process creates whether nsys starts it.

    Args:
        plan: What is captured; None to choose no longer.
        before_trainer: Called before the TaskRunner is created; it raises if nothing can be captured.
    """
    global _decision
    captured_actors.clear()
    _decision = None if plan is None else _Decision(plan, before_trainer)
    if plan is None:
        return
    import ray.actor
    import ray.remote_function

    _wrap(ray.actor.ActorClass, _of_actor)
    _wrap(ray.remote_function.RemoteFunction, _of_task)


def _wrap(owner: Any, prepare: Callable[[_Decision, Any, dict[str, Any]], Any]) -> None:
    original: Any = owner._remote
    if getattr(original, "__verl_profiler__", False):
        return

    @functools.wraps(original)
    def _remote(self: Any, *args: Any, **options: Any) -> Any:
        decision = _decision
        identity = None if decision is None else prepare(decision, self, options)
        handle = original(self, *args, **options)
        if identity is not None:
            alive = [each for each in captured_actors if each[2]() is not None]
            captured_actors[:] = [*alive, (identity.role, identity.rank, weakref.ref(handle))]
        return handle

    marked: Any = _remote
    marked.__verl_profiler__ = True
    owner._remote = _remote


def _of_actor(decision: _Decision, actor: Any, options: dict[str, Any]) -> Any:
    plan, before_trainer = decision.plan, decision.before_trainer
    try:
        class_name = actor.__ray_metadata__.class_name
        given = mapping_or_empty(options.get("runtime_env"))
        identity = of_actor(
            options.get("name"), class_name, mapping_or_empty(given.get("env_vars"))
        )
    except Exception as error:  # noqa: BLE001  another Ray
        announce(f"WARNING an actor is not captured: {error!r}")
        return None
    if identity.role == "trainer" and before_trainer is not None:
        before_trainer()
    try:
        capture = plan.of(identity.role, identity.rank)
        options["runtime_env"] = runtime_env_for(plan, capture, options.get("runtime_env"))
    except Exception as error:  # noqa: BLE001  verl creates its actors in any case
        announce(f"WARNING {class_name} is not captured: {error!r}")
        return None
    return identity if capture is not None else None


def _of_task(decision: _Decision, _function: Any, options: dict[str, Any]) -> None:
    given = options.get("runtime_env")
    # A user's own task may request nsys itself.
    if mapping_or_empty(given).get("_nsight"):
        return
    try:
        made = runtime_env_for(decision.plan, None, given)
        if made is not given:
            from ray._private.utils import get_runtime_env_info

            # Ray has encoded it before, and reads only that.
            options["serialized_runtime_env_info"] = get_runtime_env_info(
                made, is_job_runtime_env=False, serialize=True
            )
    except Exception as error:  # noqa: BLE001  another Ray; the task runs as its parent does
        announce(f"WARNING a task may run under nsys: {error!r}")


def runtime_env_for(plan: Plan, capture: RoleCapture | None, runtime_env: Any) -> Any:
    """Return a runtime environment in which the plan decides about nsys.

    Args:
        plan: What is captured.
        capture: The capture of this process, or None.
        runtime_env: The requested one; a dict, a `RuntimeEnv` or None.

    Returns:
        A `RuntimeEnv`; the same object if nothing has to change.
    """
    from ray.runtime_env import RuntimeEnv

    given = mapping_or_empty(runtime_env)
    variables = dict(mapping_or_empty(given.get("env_vars")))
    tool = tools.find(plan.tool)
    nsight = None if capture is None or tool is None else tool.ray_nsight(capture.options)
    under_nsys = bool(os.environ.get(UNDER_NSYS)) and os.environ[UNDER_NSYS] != "0"
    if nsight is not None:
        variables[UNDER_NSYS] = "1"
        # Ray starts `nsys … python` by that bare name, whatever interpreter the driver has.  The
        # node inserts its own PATH, so an interpreter that is elsewhere there is still found.
        path = f"{os.path.dirname(sys.executable)}{os.pathsep}${{PATH}}"
        variables["PATH"] = variables.get("PATH", path)
    elif under_nsys:
        # Also keeps the environment from being empty, which Ray treats as none at all.
        variables[UNDER_NSYS] = "0"
    elif not given.get("_nsight"):
        return runtime_env
    made: Any = RuntimeEnv(**{k: v for k, v in given.items() if not k.startswith("_")})
    # `RuntimeEnv` itself refuses such keys.
    for key, value in given.items():
        if key.startswith("_"):
            dict[str, Any].__setitem__(made, key, value)
    if variables:
        made["env_vars"] = variables
    # The constructor drops None, and only None overrides the parent's entry.
    dict[str, Any].__setitem__(made, "_nsight", nsight)
    return made
