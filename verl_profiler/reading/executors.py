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

__all__ = ["OnRay", "executor"]

T = TypeVar("T")
# Training may hold all CPUs: a task reserves none, and few run at once.
_TASKS_PER_NODE = 2
# Lower than the 15 that Ray gives its own worker processes.
_NICE = 19
# A busy node may take long to start a process.
_CHECK_S = 300.0
_CONNECT_S = 5.0
_AUTHENTICATION = "If it requires a token, set RAY_AUTH_MODE=token.  "
_JOIN_ATTEMPTS = 4
_LOST_SERVER = "Starting Ray client server failed"
_HOST_AND_PORT = re.compile(r"(?:ray://)?\[?([^\]/]+?)\]?:(\d{1,5})(?:/.*)?")


class OnRay:
    """Runs tasks on the Ray cluster that this process has joined.

    Each task has a worker process of its own with the lowest priority, and reserves neither accelerators
    nor CPUs, so that it is scheduled while training holds all of them.  A node has two at a time.

    Args:
        nice: The priority of tasks.
    """

    def __init__(self, nice: int = _NICE) -> None:
        import ray

        self._ray: Any = ray
        self._nice = nice
        self._nodes: dict[str, str] = {
            node["NodeID"]: node["NodeManagerHostname"] or node["NodeID"]
            for node in self._ray.nodes()
            if node["Alive"]
        }

    @property
    def nodes(self) -> int:
        """How many nodes are used."""
        return len(self._nodes)

    def leave_out(self, check: Callable[[Any], str | None], argument: Any) -> dict[str, str]:
        """Use only nodes on which `check` returns None within five minutes; all are checked at once.

        Args:
            check: Returns why its node cannot be used.
            argument: Of `check`.

        Returns:
            The reasons, by node.  If no node is left, `run` raises.
        """
        tasks = {node: self._start(_checked, node, check, argument) for node in self._nodes}
        done, _ = self._ray.wait(
            list(tasks.values()), num_returns=len(tasks), timeout=_CHECK_S, fetch_local=False
        )
        reasons: dict[str, str] = {}
        for node, task in tasks.items():
            reason: str | None = f"did not run a task within {_CHECK_S:.0f} s"
            if task in done:
                try:
                    reason = self._ray.get(task)
                except self._ray.exceptions.RayError as error:
                    reason = _reason_of(error)
            else:
                self._cancel(task)
            if reason is not None:
                reasons[f"{self._nodes[node]} ({node[:8]})"] = reason
                del self._nodes[node]
        return reasons

    def run(
        self, function: Callable[[Any, Any], T], shared: Any, arguments: Sequence[Any]
    ) -> Iterator[T]:
        """Call the function with `shared` and each argument, two at once on each node.

        What a node did when it died is done again by another one.

        Raises:
            ReadingError: A task failed, or no node is left.
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
                        task = self._start(_aside, node, self._nice, function, common, argument)
                        running[task] = node, argument
                if not running:
                    raise ReadingError(
                        "no node of the Ray cluster is left.\nOmit --on to read the run here",
                        "task-failed",
                    )
                (task, *_), _ = ray.wait([*running], num_returns=1)
                node, argument = running.pop(task)
                try:
                    result = ray.get(task)
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, ReadingError):
                        raise ReadingError(error.cause.message, error.cause.slug) from error
                    raise ReadingError(
                        f"a task on the Ray cluster failed: {_reason_of(error)}.\n"
                        "Omit --on to read the run here",
                        "task-failed",
                    ) from error
                except ray.exceptions.RayError:
                    # The node, or the process for want of memory.
                    self._nodes.pop(node, None)
                    waiting.append(argument)
                else:
                    yield result
        finally:
            for task in running:
                self._cancel(task)

    def _start(self, function: Callable[..., Any], node: str, *arguments: Any) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # `max_calls`: a process with a changed priority is not used again.
        options = {
            "num_cpus": 0,
            "num_gpus": 0,
            "max_calls": 1,
            "max_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        return self._ray.remote(**options)(function).remote(*arguments)

    def _cancel(self, task: Any) -> None:
        with contextlib.suppress(Exception):
            self._ray.cancel(task, force=True)


def _checked(check: Callable[[Any], str | None], argument: Any) -> str | None:
    return check(argument)


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
def executor(where: str) -> Generator[OnRay, None, None]:
    """Join a Ray cluster; leave it again.

    Args:
        where: `ray` for the cluster of this node or of RAY_ADDRESS, `ray://HOST:PORT` for a remote one.

    Raises:
        ReadingError: Ray is not installed, or the cluster cannot be joined.
    """
    try:
        import ray
    except ImportError as error:
        raise ReadingError(
            "--on ray needs ray, which is not installed.\npip install ray, or omit --on",
            "missing-extra",
        ) from error
    joined: Any = ray
    address = where if where.startswith("ray://") else os.environ.get("RAY_ADDRESS") or "auto"
    if joined.is_initialized():
        yield OnRay()
        return
    try:
        _check_port(address)
        _join(joined, address)
    except Exception as error:
        # A client that sends no token only sees that nothing answers.
        token = "" if not address.startswith("ray://") else _AUTHENTICATION
        raise ReadingError(
            f"there is no Ray cluster to join at {address}: {_reason_of(error)}\n"
            f"{token}Start one, set RAY_ADDRESS, give --on ray://HOST:10001, or omit --on",
            "no-ray-cluster",
        ) from error
    try:
        yield OnRay()
    finally:
        joined.shutdown()


def _join(ray: Any, address: str) -> None:
    """Join a cluster, again where Ray's proxy lost the server that it had just forked for this client.

    The fork meets threads inside gRPC now and then: https://github.com/ray-project/ray/issues/63202.
    """
    for attempt in range(_JOIN_ATTEMPTS):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            if attempt + 1 == _JOIN_ATTEMPTS or _LOST_SERVER not in str(error):
                raise
        else:
            return


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
