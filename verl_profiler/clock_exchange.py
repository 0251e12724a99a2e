"""Compare the clocks of a cluster's nodes while a run goes on, from a thread of the driver.

On a cluster of several nodes, the driver keeps a small actor on each of them (no CPUs, no verl, not
recorded) and asks it for its monotonic time.  The answer was read between the question and its
arrival, so half of the way there and back bounds the error, whatever the network does with each
half.  Of each burst the quickest exchange is kept, in the driver's header.

A failure ends the exchange with that node, or all of it, and nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from verl_profiler import recorder
from verl_profiler.clock import boot_id, now

__all__ = ["account", "exchange", "start", "stop"]

_BURST = 24
# Bursts come closely at first, then at this distance.
_FIRST_S = (0.0, 2.0, 5.0, 10.0)
_EVERY_S = 30.0
_PATIENCE_S = 5.0
_KEPT = 128
_FAILURES = 3

# By the other node's boot id: host and (own monotonic ns, other minus own ns, bound ns).
_samples: dict[str, dict[str, Any]] = {}
_thread: threading.Thread | None = None
_ended = threading.Event()


def exchange(ask: Callable[[], tuple[Any, int]], tries: int = _BURST) -> tuple[Any, list[int]]:
    """Ask another clock some times and keep the quickest answer.

    Args:
        ask: Returns who answered, and that clock's monotonic nanoseconds.
        tries: How often to ask.

    Returns:
        Who answered, and own monotonic ns, other minus own ns, bound of that difference's error ns.
    """
    best: tuple[int, Any, list[int]] | None = None
    for _ in range(tries):
        asked = now()
        who, told = ask()
        back = now()
        if best is None or back - asked < best[0]:
            middle = (asked + back) // 2
            # Half a nanosecond may be lost to rounding.
            best = (back - asked, who, [middle, told - middle, (back - asked + 1) // 2 + 1])
    return best[1:]  # type: ignore[index]


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
    peers: dict[str, Any] = {}
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
                        peers[key] = _peer(ray, key)
                    _keep(*exchange(lambda key=key: _asked(ray, peers[key])))
                except Exception:  # noqa: BLE001  a node that is gone or busy; others may answer
                    failures[key] = failures.get(key, 0) + 1
    except Exception:  # noqa: BLE001  Ray is gone; what was measured stays
        return
    finally:
        for peer in peers.values():
            with contextlib.suppress(Exception):
                _as_connected(ray.kill)(peer)


def _keep(who: tuple[str, str], sample: list[int]) -> None:
    boot, host = who
    if not boot or boot == boot_id():
        # Same kernel, same clock.
        return
    about = _samples.setdefault(boot, {"host": host, "samples": []})
    # A list of its own, since the writer thread may be encoding the old one.
    kept = [*about["samples"], sample]
    about["samples"] = kept if len(kept) <= _KEPT else [kept[0], *kept[1:-1:2], kept[-1]]


def _asked(ray: Any, peer: Any) -> tuple[Any, int]:
    return _as_connected(ray.get)(peer.read.remote(), timeout=_PATIENCE_S)


def _as_connected(function: Any) -> Any:
    """Return a function of Ray that fails, instead of connecting anew, after `ray.shutdown`.

    Ray 2.60 wraps what is public in a call of `ray.init`.
    """
    return getattr(function, "__wrapped__", function)


def _peer(ray: Any, node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from verl_profiler.settings import ENVIRONMENT_VARIABLE

    # A class that is made here travels by value: the node need not have this package.
    class VerlProfilerClock:
        """Says what time it is on its node."""

        def read(self) -> tuple[tuple[str, str], int]:
            import socket
            import time

            boot = ""
            with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
            return (boot, socket.gethostname()), time.perf_counter_ns()

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
