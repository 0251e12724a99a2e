"""Deliberate perturbations of a rehearsal, whose cost can be compared with a prediction.

They are set by `rehearsal.NAME` in Hydra; the driver validates them and passes them in one environment
variable, which the processes that Ray starts inherit.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from verl_profiler.events.json_values import mapping_or_empty

__all__ = ["ADJUSTMENTS", "DEFAULTS", "VARIABLE", "checked", "setting"]

VARIABLE = "VERL_PROFILER_REHEARSAL"

# Every setting, and its default (no perturbation).
DEFAULTS: dict[str, Any] = {
    "hang": None,
    "poll_interval_s": None,
    "rank_delay_at": "end",
    "rank_delay_s": None,
    "replica_delay_s": None,
    "response_factor": 1.0,
    "routing": "sticky",
    "tool_latency": 1.0,
    "weight_sync_s": 0.0,
    "worker_delay_s": None,
}
# `rehearsal.routing=uneven` sends this many of four requests to the first replica.
_UNEVEN = 3
# Lists with a delay in seconds for each of these.
_DELAYS = {"rank_delay_s": "rank", "replica_delay_s": "replica", "worker_delay_s": "worker"}
_STANDIN_ONLY = ("replica_delay_s", "response_factor")
# The rehearsal's own tools.
_TOOLS = ("calculate", "check_answer")
_CHOICES = {"rank_delay_at": ("begin", "end"), "routing": ("sticky", "fewest", "uneven")}


def checked(
    settings: Mapping[str, Any],
    *,
    ranks: int,
    replicas: int | None = None,
    workers: int | None = None,
    engine: str = "standin",
) -> dict[str, Any]:
    """Return the validated settings, with defaults filled in.

    Args:
        settings: The config node `rehearsal`.
        ranks: Number of trainer ranks.
        replicas: Number of replicas; None for as many as ranks.
        workers: Number of agent-loop workers; None for as many as ranks.
        engine: verl's name of the engine.

    Raises:
        ValueError: An invalid value; the message names it and the valid ones.
    """
    given = {name: settings.get(name, default) for name, default in DEFAULTS.items()}
    for name, choices in _CHOICES.items():
        if given[name] not in choices:
            raise ValueError(f"rehearsal.{name}={given[name]}: must be one of {', '.join(choices)}")
    counts = {"rank": ranks, "replica": replicas or ranks, "worker": workers or ranks}
    for name, each in _DELAYS.items():
        if given[name] is None:
            continue
        delays = [_seconds(name, delay) for delay in given[name]]
        if len(delays) != (count := counts[each]):
            raise ValueError(
                f"rehearsal.{name} has {len(delays)} values for {count} {each}s: "
                f"give one number of seconds per {each}, for example [{', '.join(['0.5'] * count)}]"
            )
        given[name] = delays
    for name in _STANDIN_ONLY:
        if given[name] != DEFAULTS[name] and engine != "standin":
            raise ValueError(f"rehearsal.{name} needs the stand-in engine: use --engine standin")
    for name in ("poll_interval_s", "response_factor", "tool_latency", "weight_sync_s"):
        value = given[name]
        if name == "tool_latency" and (factors := mapping_or_empty(value)):
            if unknown := factors.keys() - _TOOLS:
                raise ValueError(
                    f"rehearsal.tool_latency: the rehearsal has no tool {', '.join(map(str, unknown))}; "
                    f"it has {', '.join(_TOOLS)}"
                )
            given[name] = {tool: _seconds(name, factor) for tool, factor in factors.items()}
        elif value is not None:
            given[name] = _seconds(name, value)
    if given["response_factor"] < 1:
        raise ValueError(
            f"rehearsal.response_factor={given['response_factor']:g}: must be at least 1"
        )
    return given


def _seconds(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ValueError(f"rehearsal.{name}={value}: must be a number of at least 0")
    return number


def setting(name: str) -> Any:
    """Return a setting in a process of the rehearsal, or its default."""
    return json.loads(os.environ.get(VARIABLE) or "{}").get(name, DEFAULTS[name])


def _wrapped(owner: Any, method: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
    """Wrap a method, keeping its attributes, which verl reads."""
    original = getattr(owner, method)
    setattr(owner, method, functools.wraps(original)(wrap(original)))


def _poll_interval(module: Any) -> None:
    """Make the replay buffer poll for finished samples every `rehearsal.poll_interval_s`."""
    seconds = setting("poll_interval_s")

    def wrap(original: Any) -> Callable[..., Any]:
        def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.poll_interval = seconds

        return initialize

    if seconds is not None:
        _wrapped(module.ReplayBuffer, "__init__", wrap)


def _slow_ranks(module: Any) -> None:
    """Delay ranks in each of their phases by `rehearsal.rank_delay_s`.

    After a delay at the end, only the trainer waits for them; after one at the begin, the other ranks
    wait too, in collectives.
    """
    delays = setting("rank_delay_s")
    before = setting("rank_delay_at") == "begin"

    def wrap(original: Any) -> Callable[..., Any]:
        def delayed(*args: Any, **kwargs: Any) -> Any:
            delay = delays[int(os.environ["RANK"])]
            if before:
                time.sleep(delay)
            result = original(*args, **kwargs)
            if not before:
                time.sleep(delay)
            return result

        return delayed

    if delays is not None:
        for method in ("infer_batch", "train_mini_batch"):
            _wrapped(module.TrainingWorker, method, wrap)


def _slow_sync(module: Any) -> None:
    """Delay each weight sync by `rehearsal.weight_sync_s`."""
    seconds = setting("weight_sync_s")

    def wrap(original: Any) -> Callable[..., Any]:
        async def synchronize(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(seconds)
            return await original(*args, **kwargs)

        return synchronize

    if seconds:
        _wrapped(module.ActorRolloutRefWorker, "update_weights", wrap)


def _routing(module: Any) -> None:
    """Make the load balancer route requests by `rehearsal.routing`."""
    routing = setting("routing")

    def wrap(original: Any) -> Callable[..., Any]:
        def acquire(self: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
            chosen = self._request_id_to_server
            if routing == "fewest":
                # Without sticky routing, it takes the replica with the fewest calls.
                chosen.pop(request_id, None)
            elif request_id not in chosen:
                servers = sorted(self._servers)
                self.requests_seen = getattr(self, "requests_seen", -1) + 1
                chosen[request_id] = servers[0 if self.requests_seen % 4 < _UNEVEN else -1]
            return original(self, request_id, *args, **kwargs)

        return acquire

    if routing != DEFAULTS["routing"]:
        _wrapped(module.GlobalRequestLoadBalancer, "acquire_server", wrap)


def _slow_workers(module: Any) -> None:
    """Block the event loop of agent-loop workers at each turn, by `rehearsal.worker_delay_s`."""
    delays = setting("worker_delay_s")

    def wrap(original: Any) -> Callable[..., Any]:
        async def generate(*args: Any, **kwargs: Any) -> Any:
            time.sleep(delays[_worker_number()])  # noqa: ASYNC251  a blocked loop is the purpose
            return await original(*args, **kwargs)

        return generate

    if delays is not None:
        _wrapped(module.ToolAgentLoop, "_handle_generating_state", wrap)


@functools.cache
def _worker_number() -> int:
    """Return the number in this actor's name: `agent_loop_worker_NUMBER_…`."""
    import ray

    name: Any = ray.get_runtime_context().get_actor_name()
    return int(name.split("_")[3])


ADJUSTMENTS: tuple[tuple[str, Callable[[Any], None]], ...] = (
    ("verl.trainer.ppo.v1.replay_buffer", _poll_interval),
    ("verl.workers.engine_workers", _slow_ranks),
    ("verl.workers.engine_workers", _slow_sync),
    ("verl.workers.rollout.router", _routing),
    ("verl.experimental.agent_loop.tool_agent_loop", _slow_workers),
)
