"""What Ray has on record of a job's actors and of calls that have not ended; in the trainer's process.

Ray is used only if the process has connected to a cluster.  Its state API queries the dashboard's server, and
the table of actors the control store; both may block, so a thread of its own calls this.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from typing import Any

from verl_profiler.recording.values import text

__all__ = ["ray_actors", "ray_calls"]

_ALIVE = "ALIVE"
_SHOWN = 20
_LIMIT = 1000
_NAME_LIMIT = 100
# The profiler's own actors, which end before the run does.
_OWN = "VerlProfiler"


def ray_actors() -> dict[str, Any]:
    """Return Ray's view of the job's actors; empty if the process is not connected to a cluster.

    Returns:
        `actors`: how many are in each state; `not_alive`: those that are not, at most 20, with `class`,
        `pid`, `state`, `restarts`, and `reason` if Ray has a known one.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    state: Any = importlib.import_module("ray._private.state")
    job = ray.get_runtime_context().get_job_id()
    rows: list[dict[str, Any]] = [
        row
        for row in state.actors().values()
        if row.get("JobID") == job and _OWN not in str(row.get("ActorClassName"))
    ]
    others = [row for row in rows if row.get("State") != _ALIVE]
    return {
        "actors": dict(Counter(str(row.get("State")) for row in rows).most_common()),
        "not_alive": [_actor(row) for row in others[:_SHOWN]],
    }


def ray_calls(timeout_s: int) -> dict[str, Any]:
    """Return the job's calls through Ray that have not ended; empty without a cluster.

    Args:
        timeout_s: Passed on to Ray's state API, which needs the dashboard's server (`ray[default]`).

    Returns:
        `calls`: how many calls of each `function` are in each `state`.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    return {"calls": _calls(ray.get_runtime_context().get_job_id(), timeout_s)}


def _actor(row: dict[str, Any]) -> dict[str, Any]:
    from verl_profiler.events.failure_texts import reason_in

    actor: dict[str, Any] = {
        "class": text(str(row.get("ActorClassName")), _NAME_LIMIT),
        "pid": row.get("Pid"),
        "state": str(row.get("State")),
        "restarts": row.get("NumRestarts"),
    }
    reason = reason_in(str(row.get("DeathCause"))[:10_000])
    return {**actor, "reason": reason} if reason is not None else actor


def _calls(job: str, timeout_s: int) -> list[dict[str, Any]]:
    module: Any = importlib.import_module("ray.util.state")

    tasks = module.list_tasks(
        filters=[("state", "!=", "FINISHED"), ("state", "!=", "FAILED"), ("job_id", "=", job)],
        limit=_LIMIT,
        timeout=timeout_s,
        raise_on_missing_output=False,
    )
    counts = Counter(
        (text(str(each.name), _NAME_LIMIT), str(each.state))
        for each in tasks
        if each.type != "DRIVER_TASK" and _OWN not in str(each.name)
    )
    return [
        {"function": name, "state": state, "calls": count}
        for (name, state), count in counts.most_common(_SHOWN)
    ]
