"""Tasks on a Ray cluster: a function is called with each of some arguments, on any of its nodes.

Functions and arguments are pickled; the files that they name must be on a disk that the nodes share.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

from verl_profiler.errors import ReadingError, extra_of

T = TypeVar("T")
# Training may hold all CPUs: a task reserves none, and few run at once.
_TASKS_PER_NODE = 2
# Lower than the 15 that Ray gives its own worker processes.
_NICE = 19
_CONNECT_S = 5.0
_HOST_AND_PORT = re.compile(r"(?:ray://)?\[?([^\]/]+?)\]?:(\d{1,5})(?:/.*)?")


class OnRay:
    """Runs tasks on the Ray cluster that this process has joined.

    Each task has a worker process of its own with the lowest priority, and reserves neither accelerators
    nor CPUs, so that it is scheduled while training holds all of them.  A node has two at a time.

    Args:
        nice: The priority of tasks.

    Attributes:
        left_out: Why other nodes are not used, by node.
    """

    def __init__(self, nice: int = _NICE) -> None:
        import ray

        self._ray: Any = ray
        self._nice = nice
        self.left_out: dict[str, str] = {}
        self._nodes: dict[str, str] = {
            node["NodeID"]: node["NodeManagerHostname"] or node["NodeID"]
            for node in self._ray.nodes()
            if node["Alive"]
        }

    @property
    def nodes(self) -> int:
        """How many nodes are used."""
        return len(self._nodes)

    def run(
        self, function: Callable[[Any, Any], T], shared: Any, arguments: Sequence[Any]
    ) -> Iterator[T]:
        """Call the function with `shared` and each argument, two at once on each node.

        A node that dies, or on which the function raises, is left out; others do again what it did.

        Raises:
            ReadingError: No node is left.
        """
        ray = self._ray
        common = ray.put(shared)
        waiting = list(reversed(arguments))
        running: dict[Any, tuple[str, Any]] = {}
        try:
            while waiting or running:
                for node in [*self._nodes] * _TASKS_PER_NODE:
                    busy = sum(other == node for other, _ in running.values())
                    if waiting and busy < _TASKS_PER_NODE:
                        argument = waiting.pop()
                        running[self._start(node, function, common, argument)] = node, argument
                if not running:
                    reasons = "".join(f"\n  {each}: {why}" for each, why in self.left_out.items())
                    raise ReadingError(
                        f"no node of the cluster can read the run:{reasons}\n"
                        "Copy the run to a disk that the nodes share, or omit --on to read it here",
                        "not-shared",
                    )
                (task, *_), _ = ray.wait([*running], num_returns=1)
                node, argument = running.pop(task)
                try:
                    result = ray.get(task)
                except ray.exceptions.RayError as error:
                    waiting.append(argument)
                    if node in self._nodes:
                        host = self._nodes.pop(node)
                        self.left_out[f"{host} ({node[:8]})"] = _reason_of(error)
                else:
                    yield result
        finally:
            for task in running:
                with contextlib.suppress(Exception):
                    ray.cancel(task, force=True)

    def _start(self, node: str, function: Callable[..., Any], *arguments: Any) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # `max_calls`: a process with a changed priority is not used again.
        options = {
            "num_cpus": 0,
            "num_gpus": 0,
            "max_calls": 1,
            "max_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        return self._ray.remote(**options)(_aside).remote(self._nice, function, *arguments)


def _aside(nice: int, function: Callable[[Any, Any], T], shared: Any, argument: Any) -> T:
    """Run a function in a worker process with this priority, if it may have it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    return function(shared, argument)


def _reason_of(error: Any) -> str:
    """Return why a task failed, in one line."""
    cause = getattr(error, "cause", None) or error
    if extra := extra_of(cause):
        return f"lacks {cause.name}: pip install 'verl-profiler[{extra}]'"
    lines = str(cause).strip().splitlines()
    return lines[-1] if lines else type(cause).__name__


@contextlib.contextmanager
def executor(option: str = "--on ray") -> Generator[OnRay, None, None]:
    """Join the Ray cluster of this node or of RAY_ADDRESS; leave it again.

    Args:
        option: What requested it, for messages.

    Raises:
        ReadingError: Ray is not installed, or the cluster cannot be joined.
    """
    try:
        import ray
    except ImportError as error:
        raise ReadingError(
            f"{option} needs ray, which is not installed.\npip install ray, or omit it",
            "missing-extra",
        ) from error
    joined: Any = ray
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if joined.is_initialized():
        yield OnRay()
        return
    try:
        _check_port(address)
        joined.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise ReadingError(
            f"there is no Ray cluster to join at {address}: {_reason_of(error)}\n"
            f"Start one, set RAY_ADDRESS (ray://HOST:10001 for a remote one), or omit {option}",
            "no-ray-cluster",
        ) from error
    try:
        yield OnRay()
    finally:
        joined.shutdown()


def _check_port(address: str) -> None:
    """Connect to the port of an address, where it has one: Ray takes a minute to give up.

    Raises:
        OSError: Nothing listens there.
        ValueError: It would start a cluster.
    """
    if address == "local":
        raise ValueError("RAY_ADDRESS is local")
    match = _HOST_AND_PORT.fullmatch(address)
    if match is not None:
        socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_S).close()
