"""The profiler's own actor on a node: it reads the node's clock and the files of a run, and checks the node.

It takes no CPUs, has a low priority, never imports verl, and nothing is recorded in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from verl_profiler.environ import SETTINGS

_TIMEOUT_S = 30.0


def as_connected(function: Any) -> Any:
    """Return a function of Ray that fails after `ray.shutdown` instead of starting a cluster.

    Ray 2.60 wraps its public functions in a call of `ray.init`; the wrapped function is called instead.
    """
    return getattr(function, "__wrapped__", function)


class NodeActor:
    """The actor on one node; its class is pickled by value, and its clock needs no package there.

    Args:
        ray: The module, connected.
        node_id: Ray's id of the node.
    """

    def __init__(self, ray: Any, node_id: str) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = ray
        self._handle = (
            ray.remote(_actor_class())
            .options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                runtime_env={"env_vars": {SETTINGS: ""}},
            )
            .remote()
        )

    def start(self, method: str, *arguments: Any) -> Callable[[float], Any]:
        """Call a method there.

        Returns:
            What waits for the result so many seconds, and returns it.  Raises what Ray raises: the node left,
            or did not answer in time.
        """
        answer = getattr(self._handle, method).remote(*arguments)
        return lambda timeout_s: as_connected(self._ray.get)(answer, timeout=timeout_s)

    def call(self, method: str, *arguments: Any, timeout_s: float = _TIMEOUT_S) -> Any:
        """Call a method there, and return its result; raises what Ray raises."""
        return self.start(method, *arguments)(timeout_s)

    def end(self) -> None:
        """End the actor, if it is still there."""
        with contextlib.suppress(Exception):
            as_connected(self._ray.kill)(self._handle)


def _actor_class() -> type:
    class VerlProfilerNode:
        """Reads the clock and the files of its node."""

        def who(self) -> str:
            """Return the boot id; empty where there is none."""
            with contextlib.suppress(OSError):
                os.nice(10)
            with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
                return file.read().strip()
            return ""

        def read(self) -> int:
            """Return the monotonic time in nanoseconds."""
            import time

            return time.perf_counter_ns()

        def files(self, name: str, *arguments: Any) -> Any:
            """Return what a function of files.py returns; False without the package."""
            try:
                from verl_profiler.nodes import files
            except ImportError:
                return False
            return getattr(files, name)(*arguments)

        def run(self, function: Any, *arguments: Any) -> Any:
            """Return what a function returns on this node."""
            return function(*arguments)

    return VerlProfilerNode
