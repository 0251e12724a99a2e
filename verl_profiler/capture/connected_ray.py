"""Call Ray without starting a cluster where none is connected, and start the profiler's own actors.

Ray 2.60 wraps its public functions in a call of `ray.init`; the wrapped function fails instead.
"""

from __future__ import annotations

from typing import Any

from verl_profiler.environ import SETTINGS

__all__ = ["actor_on_node", "as_connected"]


def as_connected(function: Any) -> Any:
    """Return a function of Ray that fails after `ray.shutdown` instead of connecting again."""
    return getattr(function, "__wrapped__", function)


def actor_on_node(ray: Any, actor: type, node_id: str) -> Any:
    """Start an actor on a node that is none of the run's processes; return its handle.

    Args:
        ray: The module, connected.
        actor: A class that is defined in a function is pickled by value: the node need not have this
            package.
        node_id: Ray's id of the node.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(actor)
        .options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            # Nothing is recorded in it.
            runtime_env={"env_vars": {SETTINGS: ""}},
        )
        .remote()
    )
