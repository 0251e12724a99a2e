"""Compare the clocks of a cluster's nodes while a run goes on, from a thread of the driver.

On a cluster of several nodes, the driver keeps a small actor on each of them (no CPUs, no verl, not
recorded) and asks it for its monotonic time: over a connection of its own, since a call of Ray takes
ten times as long, or by calls of Ray where the actor cannot be connected to.  The answer was read
between the question and its arrival, whatever the network does with each half of the way; what all
answers of a burst say together is kept, in the driver's header.

A failure ends the exchange with that node, or all of it, and nothing else.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from verl_profiler import recorder
from verl_profiler.clock import boot_id, now

__all__ = ["account", "exchange", "start", "stop"]

_BURST = 48
# Bursts come closely at first, then at this distance.
_FIRST_S = (0.0, 2.0, 5.0, 10.0)
_EVERY_S = 30.0
_PATIENCE_S = 5.0
_CONNECT_S = 1.0
_KEPT = 128
_FAILURES = 3
# Two clocks drift apart by at most one nanosecond in so many: the limit of what a kernel corrects.
_DRIFT_NS = 2000
_TOKEN_BYTES = 16
_TIME_BYTES = 8

# By the other node's boot id: host and (own monotonic ns, other minus own ns, bound ns).
_samples: dict[str, dict[str, Any]] = {}
_thread: threading.Thread | None = None
_ended = threading.Event()


def exchange(ask: Callable[[], tuple[Any, int]], tries: int = _BURST) -> tuple[Any, list[int]]:
    """Ask another clock some times, and say what all answers together say.

    A quick question and a quick answer bound the difference from either side; they need not be of the
    same exchange.

    Args:
        ask: Returns who answered, and that clock's monotonic nanoseconds.
        tries: How often to ask.

    Returns:
        Who answered, and own monotonic ns, other minus own ns, bound of that difference's error ns.
    """
    taken = []
    for _ in range(tries):
        asked = now()
        who, told = ask()
        taken.append((asked, told, now()))
    asked, told, back = min(taken, key=lambda each: each[2] - each[0])
    at = (asked + back) // 2
    least, most = told - back, told - asked
    limits = [
        (told - back - drifted, told - asked + drifted)
        for asked, told, back in taken
        for drifted in [max(abs(at - asked), abs(back - at)) // _DRIFT_NS + 1]
    ]
    lower, upper = max(least, *(low for low, _ in limits)), min(most, *(up for _, up in limits))
    if lower <= upper:
        least, most = lower, upper
    # Half a nanosecond may be lost to rounding.
    return who, [at, (least + most) // 2, (most - least + 1) // 2 + 1]


def account() -> dict[str, Any]:
    """Return what the header says; empty where no clocks were compared."""
    if not _samples:
        return {}
    peers = [{"boot_id": boot, **about} for boot, about in sorted(_samples.items())]
    return {"clock_exchange": {"boot_id": boot_id(), "peers": peers}}


def start(ray: Any) -> None:
    """Begin to compare clocks, if Ray has more than one node; returns at once."""
    global _thread
    if _thread is not None and _thread.is_alive():
        return
    _ended.clear()
    recorder.before_stop(stop)
    _thread = threading.Thread(
        target=_run, args=(ray,), name="verl-profiler clock exchange", daemon=True
    )
    _thread.start()


def stop() -> None:
    """End the exchange; called before recording stops, while Ray still runs."""
    _ended.set()
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(timeout=_PATIENCE_S)


def _run(ray: Any) -> None:
    """Ask all nodes again and again; nodes may come and go."""
    peers: dict[str, _Peer] = {}
    failures: dict[str, int] = {}
    waits = iter(_FIRST_S)
    try:
        while not _ended.wait(next(waits, _EVERY_S)) and ray.is_initialized():
            nodes = [node for node in _as_connected(ray.nodes)() if node["Alive"]]
            if len(nodes) < 2:
                continue
            for node in nodes:
                key = node["NodeID"]
                if _ended.is_set() or failures.get(key, 0) >= _FAILURES:
                    continue
                try:
                    if key not in peers:
                        peers[key] = _Peer(ray, key, node["NodeManagerAddress"])
                    _compare(peers[key])
                except Exception:  # noqa: BLE001  a node that is gone or busy; others may answer
                    failures[key] = failures.get(key, 0) + 1
    except Exception:  # noqa: BLE001  Ray is gone; what was measured stays
        return
    finally:
        for peer in peers.values():
            with contextlib.suppress(Exception):
                peer.end()


def _compare(peer: Any) -> None:
    """Take one burst, unless the node has this one's kernel, and so its clock."""
    if peer.who[0] not in ("", boot_id()):
        _keep(*exchange(peer.ask))


def _keep(who: tuple[str, str], sample: list[int]) -> None:
    boot, host = who
    about = _samples.setdefault(boot, {"host": host, "samples": []})
    # A list of its own, since the writer thread may be encoding the old one.
    kept = [*about["samples"], sample]
    about["samples"] = kept if len(kept) <= _KEPT else [kept[0], *kept[1:-1:2], kept[-1]]


def _as_connected(function: Any) -> Any:
    """Return a function of Ray that fails, instead of connecting anew, after `ray.shutdown`.

    Ray 2.60 wraps what is public in a call of `ray.init`.
    """
    return getattr(function, "__wrapped__", function)


class _Peer:
    """The actor on one node; `who` is that node's boot id and host name."""

    def __init__(self, ray: Any, node_id: str, address: str) -> None:
        self._ray = ray
        self._actor = _actor(ray, node_id)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self.who, port = self._called("listen", address, token)
        self._connection: socket.socket | None = None
        with contextlib.suppress(OSError):
            self._connection = _connected(address, port, token)

    def ask(self) -> tuple[tuple[str, str], int]:
        """Return who it is, and its monotonic time."""
        if self._connection is not None:
            try:
                self._connection.sendall(b"?")
                told = self._connection.recv(_TIME_BYTES)
                if len(told) == _TIME_BYTES:
                    return self.who, int.from_bytes(told, "big")
            except OSError:
                pass
            self._connection.close()
            self._connection = None
        return self.who, self._called("read")

    def end(self) -> None:
        """Close the connection and let the actor go."""
        if self._connection is not None:
            self._connection.close()
        _as_connected(self._ray.kill)(self._actor)

    def _called(self, method: str, *arguments: Any) -> Any:
        answer = getattr(self._actor, method).remote(*arguments)
        return _as_connected(self._ray.get)(answer, timeout=_PATIENCE_S)


def _connected(host: str, port: int | None, token: bytes) -> socket.socket | None:
    """Return a connection to a node's actor; None where the actor could not open a port."""
    if port is None:
        return None
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    connection.settimeout(_PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token)
    return connection


def _actor(ray: Any, node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from verl_profiler.settings import ENVIRONMENT_VARIABLE

    # A class that is made here travels by value: the node need not have this package.
    class VerlProfilerClock:
        """Says what time it is on its node."""

        def read(self) -> int:
            import time

            return time.perf_counter_ns()

        def listen(self, address: str, token: bytes) -> tuple[tuple[str, str], int | None]:
            """Take connections that begin with the token; say who this is, and at which port."""
            import socket
            import threading

            boot, port = "", None
            with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
            with contextlib.suppress(OSError):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                server = socket.create_server((address, 0), family=family)
                port = server.getsockname()[1]
                threading.Thread(target=self.accept, args=(server, token), daemon=True).start()
            return (boot, socket.gethostname()), port

        def accept(self, server: Any, token: bytes) -> None:
            """Wait for connections as long as this process lives."""
            import threading

            while True:
                connection, _ = server.accept()
                threading.Thread(target=self.answer, args=(connection, token), daemon=True).start()

        def answer(self, connection: Any, token: bytes) -> None:
            """Tell the time for every byte that comes after the token."""
            import hmac
            import socket
            import time

            with contextlib.suppress(OSError), connection:
                connection.settimeout(5)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                given = b""
                while len(given) < len(token) and (
                    more := connection.recv(len(token) - len(given))
                ):
                    given += more
                if hmac.compare_digest(given, token):
                    connection.settimeout(None)
                    while connection.recv(1):
                        connection.sendall(time.perf_counter_ns().to_bytes(8, "big"))

    return (
        ray.remote(VerlProfilerClock)
        .options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            # Not one of the run's processes.
            runtime_env={"env_vars": {ENVIRONMENT_VARIABLE: ""}},
        )
        .remote()
    )
