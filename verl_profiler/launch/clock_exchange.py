"""Compare the clocks of a cluster's nodes during a run, from a thread of the driver.

On a cluster of several nodes, the driver keeps a small actor on each of them (no CPUs, no verl, not
recorded) and requests its monotonic time: over a TCP connection, since a call of Ray takes ten times
as long, or by calls of Ray if the actor cannot be reached.  The remote clock was read between request
and reply, whatever the two delays were; the intersection of these intervals over a burst is kept in
the driver's header.

The actors of all nodes start at once, and may take minutes where the run's own processes start.  A node
that fails is polled less and less often; one that left the cluster is dropped.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Generator
from typing import Any

from verl_profiler.capture.connected_ray import actor_on_node, as_connected
from verl_profiler.recording import recorder
from verl_profiler.recording.clock import boot_id, now

__all__ = ["account", "exchange", "start", "stop"]

_BURST = 48
# The first bursts follow each other closely, later ones at this interval.
_FIRST_S = (0.0, 2.0, 5.0, 10.0)
_EVERY_S = 30.0
_TIMEOUT_S = 5.0
# An actor that has not started by then is given up.
_START_S = 300.0
_CONNECT_S = 1.0
_KEPT = 128
# Samples of a node that left.
_KEPT_AFTER_LEAVING = 16
# Nodes whose samples are kept; autoscaling clusters have new ones every hour.
_PEERS = 256
# After the k-th failure in a row, a node is skipped for 2^k rounds, at most for this many.
_ROUNDS = 32
# Two clocks drift apart by at most one nanosecond in this many: the limit of kernel corrections.
_DRIFT_NS = 2000
_TOKEN_BYTES = 16
_TIME_BYTES = 8

# By the other node's boot id: host and (own monotonic ns, other minus own ns, bound ns).
_samples: dict[str, dict[str, Any]] = {}
_thread: threading.Thread | None = None
_ended = threading.Event()


def exchange(ask: Callable[[], tuple[Any, int]], tries: int = _BURST) -> tuple[Any, list[int]]:
    """Sample another clock several times, and intersect the bounds of its offset.

    A fast request and a fast reply bound the offset from either side; they need not belong to the
    same sample.

    Args:
        ask: Returns who replied, and that clock's monotonic nanoseconds.
        tries: How many samples to take.

    Returns:
        Who replied, and own monotonic ns, other minus own ns, bound of that difference's error ns.
    """
    who = None
    samples: list[tuple[int, int, int]] = []
    for _ in range(tries):
        sent = now()
        who, remote = ask()
        samples.append((sent, remote, now()))
    sent, remote, received = min(samples, key=lambda each: each[2] - each[0])
    at = (sent + received) // 2
    least, most = remote - received, remote - sent
    limits = [
        (remote - received - drift, remote - sent + drift)
        for sent, remote, received in samples
        for drift in [max(abs(at - sent), abs(received - at)) // _DRIFT_NS + 1]
    ]
    lower, upper = max(least, *(low for low, _ in limits)), min(most, *(up for _, up in limits))
    if lower <= upper:
        least, most = lower, upper
    # Half a nanosecond may be lost to rounding.
    return who, [at, (least + most) // 2, (most - least + 1) // 2 + 1]


def account() -> dict[str, Any]:
    """Return the header's part; empty if no clocks were compared."""
    if not _samples:
        return {}
    peers = [{"boot_id": boot, **about} for boot, about in sorted(_samples.items())]
    return {"clock_exchange": {"boot_id": boot_id(), "peers": peers}}


def start(ray: Any) -> None:
    """Start to compare clocks if Ray has more than one node; returns at once."""
    global _thread, _ended
    if _thread is not None and _thread.is_alive() and not _ended.is_set():
        return
    # A new event: an old thread that still waits for Ray must not continue later.
    _ended = threading.Event()
    _samples.clear()
    recorder.before_stop(stop)
    _thread = threading.Thread(
        target=_run, args=(ray, _ended), name="verl-profiler clock exchange", daemon=True
    )
    _thread.start()


def stop() -> None:
    """End the exchange; called before recording stops, while Ray still runs."""
    _ended.set()
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(timeout=_TIMEOUT_S)


def _run(ray: Any, ended: threading.Event) -> None:
    """Poll all nodes until the end; nodes may join and leave."""
    nodes = _Nodes(ray, ended)
    waits = iter(_FIRST_S)
    try:
        while not ended.wait(next(waits, _EVERY_S)) and ray.is_initialized():
            # The head may be restarting.
            with contextlib.suppress(Exception):
                nodes.poll([node for node in as_connected(ray.nodes)() if node["Alive"]])
    finally:
        nodes.poll([])


class _Nodes:
    """The peers by node, and for how many rounds each failed one is skipped."""

    def __init__(self, ray: Any, ended: threading.Event) -> None:
        self._ray = ray
        self._ended = ended
        self._peers: dict[str, _Peer] = {}
        self._failures: dict[str, int] = {}
        self._skips: dict[str, int] = {}

    def poll(self, nodes: list[dict[str, Any]]) -> None:
        """Take a burst of each of these nodes, if there are several, and drop the others."""
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if len(nodes) > 1}
        for left in [node for node in self._peers if node not in alive]:
            if self._peers[left].starting is None:
                _thin(self._peers[left].who[0])
            self._drop(left)
        for left in [node for node in self._failures if node not in alive]:
            del self._failures[left], self._skips[left]
        for node in [node for node in alive if self._skips.get(node)]:
            self._skips[node] -= 1
            del alive[node]
        for node, address in alive.items():
            if node not in self._peers:
                with self._failing(node):
                    self._peers[node] = _Peer(self._ray, node, address)
        self._await_starts()
        for node in alive:
            if self._ended.is_set():
                return
            if node in self._peers:
                with self._failing(node):
                    self._compare(node)

    def _await_starts(self) -> None:
        """Wait for the actors that have not started, all at once; those that take longer go on."""
        starting = [peer.starting for peer in self._peers.values() if peer.starting is not None]
        if starting:
            with contextlib.suppress(Exception):
                as_connected(self._ray.wait)(
                    starting, num_returns=len(starting), timeout=_TIMEOUT_S
                )

    def _compare(self, node: str) -> None:
        peer = self._peers[node]
        if peer.has_started():
            _compare(peer)
            self._failures.pop(node, None)
            self._skips.pop(node, None)

    @contextlib.contextmanager
    def _failing(self, node: str) -> Generator[None, None, None]:
        """Drop a node that fails and poll it less often: it left or is busy, and others may reply."""
        try:
            yield
        except Exception:  # noqa: BLE001  whatever Ray and networks raise
            self._drop(node)
            failures = self._failures.get(node, 0) + 1
            self._failures[node] = failures
            self._skips[node] = min(2 ** min(failures, 10), _ROUNDS) - 1

    def _drop(self, node: str) -> None:
        peer = self._peers.pop(node, None)
        with contextlib.suppress(Exception):
            if peer is not None:
                peer.end()


def _compare(peer: Any) -> None:
    """Take one burst, unless the node shares this one's kernel and so its clock."""
    if peer.who[0] not in ("", boot_id()):
        peer.connect()
        _keep(*exchange(peer.ask))


def _keep(who: tuple[str, str], sample: list[int]) -> None:
    boot, host = who
    about = _samples.setdefault(boot, {"host": host, "samples": []})
    # A new list, since the writer thread may be encoding the old one.
    kept = [*about["samples"], sample]
    about["samples"] = kept if len(kept) <= _KEPT else [kept[0], *kept[1:-1:2], kept[-1]]
    if len(_samples) > _PEERS:
        del _samples[min(_samples, key=lambda each: _samples[each]["samples"][-1][0])]


def _thin(boot: str) -> None:
    """Keep a few samples of a node that left, which place its events."""
    about = _samples.get(boot)
    if about is not None:
        samples = about["samples"]
        about["samples"] = samples[:: max(1, -(-len(samples) // _KEPT_AFTER_LEAVING))]


class _Peer:
    """The actor on one node.

    Attributes:
        who: The node's boot id and host name, once the actor has started.
        starting: What Ray will have the actor's first answer in; None once that is there.
    """

    def __init__(self, ray: Any, node_id: str, address: str) -> None:
        self.who = "", ""
        self._ray = ray
        self._address = address
        self._port: int | None = None
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._connection: socket.socket | None = None
        self._begin_ns = now()
        self._actor = _actor(ray, node_id)
        self.starting = self._actor.listen.remote(address, self._token)

    def has_started(self) -> bool:
        """Take the actor's first answer if it is there.

        Raises:
            Exception: The actor could not start, or has not within `_START_S`.
        """
        if self.starting is not None:
            answers = as_connected(self._ray.wait)([self.starting], num_returns=1, timeout=0)[0]
            if not answers:
                if (now() - self._begin_ns) / 1e9 < _START_S:
                    return False
                raise TimeoutError("the actor has not started")
            self.who, self._port = as_connected(self._ray.get)(self.starting, timeout=_TIMEOUT_S)
            self.starting = None
            self.connect()
        return True

    def connect(self) -> None:
        """Connect to the actor, if that is possible and there is no connection."""
        if self._connection is None:
            with contextlib.suppress(OSError):
                self._connection = _connected(self._address, self._port, self._token)

    def ask(self) -> tuple[tuple[str, str], int]:
        """Return the identity of the peer, and its monotonic time."""
        if self._connection is not None:
            try:
                self._connection.sendall(b"?")
                reply = self._connection.recv(_TIME_BYTES)
                if len(reply) == _TIME_BYTES:
                    return self.who, int.from_bytes(reply, "big")
            except OSError:
                pass
            self._connection.close()
            self._connection = None
        return self.who, self._called("read")

    def end(self) -> None:
        """Close the connection and end the actor."""
        if self._connection is not None:
            self._connection.close()
        as_connected(self._ray.kill)(self._actor)

    def _called(self, method: str, *arguments: Any) -> Any:
        answer = getattr(self._actor, method).remote(*arguments)
        return as_connected(self._ray.get)(answer, timeout=_TIMEOUT_S)


def _connected(host: str, port: int | None, token: bytes) -> socket.socket | None:
    """Return a connection to a node's actor; None if the actor could not open a port."""
    if port is None:
        return None
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    connection.settimeout(_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token)
    return connection


def _actor(ray: Any, node_id: str) -> Any:
    # A class that is defined here is pickled by value: the node need not have this package.
    class VerlProfilerClock:
        """Reports the time of its node."""

        def read(self) -> int:
            import time

            return time.perf_counter_ns()

        def listen(self, address: str, token: bytes) -> tuple[tuple[str, str], int | None]:
            """Accept connections that begin with the token; return boot id and host, and the port."""
            import socket
            import threading

            boot, port = "", None
            with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
            with contextlib.suppress(OSError):
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                server = socket.create_server((address, 0), family=family)
                server.setblocking(False)
                port = server.getsockname()[1]
                threading.Thread(target=self.serve, args=(server, token), daemon=True).start()
            return (boot, socket.gethostname()), port

        def serve(self, server: Any, token: bytes) -> None:
            """Reply as long as this process lives, in one thread for all connections."""
            import selectors
            import time

            selector = selectors.DefaultSelector()
            selector.register(server, selectors.EVENT_READ)
            # Connection → deadline for its token, and what it has sent; the oldest first.
            pending: dict[Any, tuple[float, bytes]] = {}
            accepted: list[Any] = []
            paused_until = None

            def close(connection: Any) -> None:
                pending.pop(connection, None)
                if connection in accepted:
                    accepted.remove(connection)
                selector.unregister(connection)
                connection.close()

            while True:
                waits = bool(pending) or paused_until is not None
                ready = selector.select(0.2 if waits else None)
                at = time.monotonic()
                if paused_until is not None and at >= paused_until:
                    selector.register(server, selectors.EVENT_READ)
                    paused_until = None
                for key, _ in ready:
                    if key.fileobj is not server:
                        with contextlib.suppress(BlockingIOError):
                            if not self.answer(key.fileobj, token, pending, accepted):
                                close(key.fileobj)
                        continue
                    try:
                        connection = server.accept()[0]
                    except OSError:
                        # Out of descriptors, while the server stays ready: this would be a busy loop.
                        selector.unregister(server)
                        paused_until = at + 0.2
                        continue
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ)
                    pending[connection] = (at + 5, b"")
                late = [each for each, (until, _) in pending.items() if at >= until]
                for connection in [*late, *list(pending)[:-8], *accepted[:-4]]:
                    if connection in pending or connection in accepted:
                        close(connection)

        def answer(
            self, connection: Any, token: bytes, pending: dict[Any, Any], accepted: list[Any]
        ) -> bool:
            """Send the time for every byte after the token; return whether the connection stays."""
            import hmac
            import socket
            import time

            try:
                if connection in accepted:
                    requests = connection.recv(64)
                    for _ in requests:
                        if connection.send(time.perf_counter_ns().to_bytes(8, "big")) < 8:
                            return False
                    return bool(requests)
                until, given = pending[connection]
                more = connection.recv(len(token) - len(given))
                pending[connection] = (until, given + more)
                if len(given + more) == len(token):
                    del pending[connection]
                    if not hmac.compare_digest(given + more, token):
                        return False
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    accepted.append(connection)
            except BlockingIOError:
                raise
            except OSError:
                return False
            return bool(more)

    return actor_on_node(ray, VerlProfilerClock, node_id)
