"""Deliberate faults of a rehearsal, whose cost can be compared with a prediction.

    verl-profiler rehearse --engine standin '+faults.rank_delay_s=[0,0.8]' +faults.weight_sync_s=2

in an environment of `with_faults`, which lets verl import `load_faults` in each process.  The driver puts
the `+faults.NAME=VALUE` of its command line into a variable, which the processes that Ray starts inherit.
"""

import asyncio
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import wrapt

VARIABLE = "VERL_PROFILER_FAULTS"

# Every fault, and its default (none).
DEFAULTS: dict[str, Any] = {
    # A file: while it holds the name of a place, whoever comes there waits (rehearsal_hangs.py).
    "hang": None,
    # At the "end" of the rank's work, or at the "begin", where the other ranks wait in collectives.
    "rank_delay_at": "end",
    # Seconds, for each rank in each of its phases, as a list.
    "rank_delay_s": None,
    # Seconds, for each replica in each of its forward passes, as a list (stand-in only).
    "replica_delay_s": None,
    # Factor on the tokens of each generate call: filler before its end, or its begin if scripted (stand-in only).
    "response_factor": 1.0,
    # "fewest": each generate call goes to the replica with the fewest; "uneven": three of four requests
    # go to the first replica.
    "routing": "sticky",
    # The same work in each run: responses and their times follow from the prompt, without the model, and
    # tools take always the same (stand-in only).
    "scripted": False,
    # Factor on the latencies of the rehearsal's own tools, or {tool: factor}.
    "tool_latency": 1.0,
    # Seconds that each weight sync takes longer.
    "weight_sync_s": 0.0,
    # Seconds for which each agent-loop worker blocks its event loop at each turn, as a list.
    "worker_delay_s": None,
}
# `routing=uneven` sends this many of four requests to the first replica.
_UNEVEN = 3
_WORD = "+faults."


def with_faults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which `+faults.NAME=VALUE` has an effect."""
    folders = [str(Path(__file__).parent), environment.get("PYTHONPATH")]
    modules = [environment.get("VERL_USE_EXTERNAL_MODULES"), "load_faults"]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "VERL_USE_EXTERNAL_MODULES": ",".join(filter(None, modules)),
    }


def given(words: Sequence[str]) -> dict[str, Any]:
    """Return the faults of a command line; a name that is none ends the process."""
    words = [word for word in words if word.startswith(_WORD)]
    if not words:
        return {}
    parser: Any = importlib.import_module("hydra.core.override_parser.overrides_parser")
    parsed = parser.OverridesParser.create().parse_overrides(words)
    faults = {each.key_or_group.partition(".")[2]: each.value() for each in parsed}
    if unknown := faults.keys() - DEFAULTS:
        sys.exit(f"no fault {', '.join(unknown)}: there are {', '.join(DEFAULTS)}")
    return faults


def setting(name: str) -> Any:
    """Return a setting in a process of the rehearsal, or its default."""
    return json.loads(os.environ.get(VARIABLE) or "{}").get(name, DEFAULTS[name])


def install() -> None:
    """Register all faults; the driver takes them from its command line."""
    if faults := given(sys.argv):
        os.environ[VARIABLE] = json.dumps(faults)
    for name, fault in FAULTS:
        wrapt.register_post_import_hook(fault, name)


def _wrapped(owner: Any, method: str, wrap: Callable[[Any], Callable[..., Any]]) -> None:
    """Wrap a method, keeping its attributes, which verl reads."""
    original = getattr(owner, method)
    setattr(owner, method, functools.wraps(original)(wrap(original)))


def _slow_ranks(module: Any) -> None:
    """Delay ranks in each of their phases by `rank_delay_s`.

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
    """Delay each weight sync by `weight_sync_s`."""
    seconds = setting("weight_sync_s")

    def wrap(original: Any) -> Callable[..., Any]:
        async def synchronize(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(seconds)
            return await original(*args, **kwargs)

        return synchronize

    if seconds:
        _wrapped(module.ActorRolloutRefWorker, "update_weights", wrap)


def _routing(module: Any) -> None:
    """Make the load balancer route requests by `routing`."""
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
    """Block the event loop of agent-loop workers at each turn, by `worker_delay_s`."""
    delays = setting("worker_delay_s")

    def wrap(original: Any) -> Callable[..., Any]:
        async def generate(*args: Any, **kwargs: Any) -> Any:
            time.sleep(delays[_worker_number()])
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


def _slow_tools(module: Any) -> None:
    """Multiply the latencies of the rehearsal's tools by `tool_latency`."""
    factor = setting("tool_latency")

    def wrap(original: Any) -> Callable[..., Any]:
        def latency_s(*args: Any, tool: str = "", **kwargs: Any) -> float:
            if setting("scripted"):
                return 0.06
            own = factor.get(tool, 1.0) if isinstance(factor, dict) else factor
            return original(*args, tool=tool, **kwargs) * own

        return latency_s

    _wrapped(module, "latency_s", wrap)


def _faulty_standin(module: Any) -> None:
    """Start the stand-in's servers with faults."""

    def wrap(original: Any) -> Callable[..., Any]:
        async def launch(self: Any) -> None:
            # It imports the module that this is a hook of.
            module.StandinServer = importlib.import_module("faulty_standin").FaultyServer
            await original(self)

        return launch

    _wrapped(module.StandinReplica, "launch_servers", wrap)


FAULTS: tuple[tuple[str, Callable[[Any], None]], ...] = (
    ("verl.workers.engine_workers", _slow_ranks),
    ("verl.workers.engine_workers", _slow_sync),
    ("verl.workers.rollout.router", _routing),
    ("verl.experimental.agent_loop.tool_agent_loop", _slow_workers),
    ("verl_profiler.rehearsal.latency", _slow_tools),
    ("verl_profiler.rehearsal.standin", _faulty_standin),
)
