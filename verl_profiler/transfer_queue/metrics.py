"""`tq/*`: sums over all processes of the run, added once a step to what verl's loggers get.

Every process keeps running sums.  A thread of its own writes them to Ray's key-value store when they
have changed, one small entry a process, at most four times a second; nothing of this is on the path of a
traced call.  When verl logs a step, the trainer reads all entries and adds what has come since the
last time, so what arrives late is counted in the next step and nothing is lost or counted twice.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import socket
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from verl_profiler.events.json_values import is_object
from verl_profiler.recording import recorder

if TYPE_CHECKING:
    from verl_profiler.instrumentation.probe import Arguments

__all__ = ["add_function", "add_operation", "add_to_log", "start", "stop", "summary"]

_NAMESPACE = b"verl_profiler_tq"
_INTERVAL_S = 0.25
_MB = 2**20
_STAGES = ("get", "compute", "put")

_lock = threading.Lock()
_sums: dict[str, int] = {}
_run: str | None = None
_changes = 0
_stopped = threading.Event()
_publisher: threading.Thread | None = None
_complained = False


def start(run: str) -> None:
    """Keep sums in this process, under the run's name."""
    global _run, _complained
    _run, _complained = run, False
    _stopped.clear()


def stop() -> None:
    """Forget everything; for tests."""
    global _run, _publisher
    _run = None
    _stopped.set()
    if _publisher is not None:
        _publisher.join(timeout=5)
    _publisher = None
    _sums.clear()
    _Trainer.reset()


def _forked() -> None:
    global _lock, _stopped, _publisher
    _lock, _stopped, _publisher = threading.Lock(), threading.Event(), None
    _sums.clear()
    _Trainer.reset()


os.register_at_fork(after_in_child=_forked)


def add_function(
    total_ns: int, spent_ns: Mapping[str, int], counts: Mapping[str, int], *, failed: bool
) -> None:
    """Count one call of a traced function.

    Args:
        total_ns: Its time.
        spent_ns: Its time by stage, `GET`, `COMPUTE` and `PUT`.
        counts: 1 for the stages that it was in, else 0.
        failed: Whether an exception ended it.
    """
    _add(
        function_ns=total_ns,
        function_count=1,
        function_errors=int(failed),
        **{f"{stage.lower()}_ns": ns for stage, ns in spent_ns.items()},
        **{f"{stage.lower()}_count": count for stage, count in counts.items()},
    )


def add_operation(stage: str, duration_ns: int, size_bytes: int) -> None:
    """Count one `GET` or `PUT` of the client."""
    name = f"client_{stage.lower()}"
    _add(**{f"{name}_ns": duration_ns, f"{name}_bytes": size_bytes, f"{name}_count": 1})


def _add(**amounts: int) -> None:
    global _changes
    if _run is None:
        return
    with _lock:
        _changes += 1
        for name, amount in amounts.items():
            _sums[name] = _sums.get(name, 0) + amount
    if _publisher is None:
        _start_publisher()


def _start_publisher() -> None:
    global _publisher
    with _lock:
        if _publisher is not None or _run is None:
            return
        _publisher = threading.Thread(target=_publish, name="verl-profiler tq metrics", daemon=True)
    with contextlib.suppress(RuntimeError):
        _publisher.start()


def _publish() -> None:
    key = f"{_run}/{socket.gethostname()}/{os.getpid()}/{random.SystemRandom().randrange(16**8):x}"
    _Trainer.own_key = key.encode()
    written = 0
    while not _stopped.wait(_INTERVAL_S):
        if written == _changes:
            continue
        written = _changes
        try:
            _store(key)
        except Exception as error:  # noqa: BLE001  a fault here must not end the thread
            _complain(f"the sums of this process could not be shared: {error!r}")


def _store(key: str) -> None:
    ray_kv = _ray_kv()
    if ray_kv is None:
        return
    with _lock:
        value = msgspec.json.encode(_sums)
    ray_kv._internal_kv_put(key, value, namespace=_NAMESPACE)


def _ray_kv() -> Any:
    """Return Ray's key-value store, or None where Ray does not run."""
    module = sys.modules.get("ray.experimental.internal_kv")
    return module if module is not None and module._internal_kv_initialized() else None


def _complain(text: str) -> None:
    global _complained
    if not _complained:
        _complained = True
        recorder.announce(f"WARNING tq/* metrics: {text}. Training is not affected. (tq-metrics)")


class _Trainer:
    """The state of the process that logs: the entries read last, and what was logged of them."""

    own_key = b""
    entries: dict[bytes, dict[str, int]] = {}  # noqa: RUF012  one process, one trainer
    logged: dict[str, int] = {}  # noqa: RUF012
    step: Any = None
    reading: threading.Thread | None = None

    @classmethod
    def reset(cls) -> None:
        """Forget everything."""
        cls.entries, cls.logged, cls.step, cls.own_key = {}, {}, None, b""
        cls.reading = None

    @classmethod
    def read(cls) -> None:
        """Read the entries of all processes."""
        try:
            ray_kv = _ray_kv()
            if ray_kv is None:
                return
            for key in ray_kv._internal_kv_list(f"{_run}/", namespace=_NAMESPACE):
                value = ray_kv._internal_kv_get(key, namespace=_NAMESPACE)
                if value and key != cls.own_key:
                    cls.entries[key] = msgspec.json.decode(value, type=dict[str, int])
        except Exception as error:  # noqa: BLE001  see _complain
            _complain(f"the sums of the other processes could not be read: {error!r}")

    @classmethod
    def since_last(cls, patience_s: float = 0.5) -> tuple[dict[str, int], int]:
        """Return the sums since the last time, and how many processes have any.

        Args:
            patience_s: What a step may wait for the entries; after that the newest known ones are used.
        """
        # One that still waits for a store that does not answer is enough.
        if cls.reading is None or not cls.reading.is_alive():
            cls.reading = threading.Thread(
                target=cls.read, name="verl-profiler tq read", daemon=True
            )
            cls.reading.start()
        cls.reading.join(patience_s)
        entries = list(cls.entries.values())
        with _lock:
            if _sums:
                entries.append(dict(_sums))
        totals: dict[str, int] = {}
        for entry in entries:
            for name, amount in entry.items():
                totals[name] = totals.get(name, 0) + amount
        since = {name: amount - cls.logged.get(name, 0) for name, amount in totals.items()}
        cls.logged = totals
        return since, len(entries)


def summary(sums: Mapping[str, int], processes: int) -> dict[str, float]:
    """Return the metrics of one step.

    Args:
        sums: What was counted in the step; nanoseconds, bytes and counts.
        processes: How many processes have counted anything so far.
    """
    metrics: dict[str, float] = {}
    for stage in _STAGES:
        count = sums.get(f"{stage}_count", 0)
        if count:
            seconds = sums[f"{stage}_ns"] / 1e9
            metrics[f"tq/{stage}_time_total"] = seconds
            metrics[f"tq/{stage}_time_mean"] = seconds / count
            metrics[f"tq/{stage}_count"] = count
    if sums.get("function_count"):
        total_ns = sums["function_ns"]
        metrics["tq/total_time"] = total_ns / 1e9
        metrics["tq/function_count"] = sums["function_count"]
        metrics["tq/function_errors"] = sums["function_errors"]
        metrics["tq/overhead_share"] = (sums["get_ns"] + sums["put_ns"]) / max(total_ns, 1)
    size = 0.0
    for way in ("get", "put"):
        count = sums.get(f"client_{way}_count", 0)
        if count:
            seconds = sums[f"client_{way}_ns"] / 1e9
            megabytes = sums[f"client_{way}_bytes"] / _MB
            size += megabytes
            metrics[f"tq/client_{way}_count"] = count
            metrics[f"tq/client_{way}_time_total"] = seconds
            metrics[f"tq/{way}_size_mb_total"] = megabytes
            metrics[f"tq/{way}_throughput_mbps"] = megabytes / max(seconds, 1e-9)
    if metrics:
        metrics["tq/data_size_mb_total"] = size
        metrics["tq/processes"] = processes
    return metrics


def add_to_log(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Add `tq/*` to `data` of the first `Tracking.log(self, data, step)` of a step; verl's dict stays as it is."""
    try:
        named = {**dict(zip(("self", "data", "step"), args)), **kwargs}  # noqa: B905
        data, step = named.get("data"), named.get("step")
        if _run is None or not is_object(data) or step == _Trainer.step:
            return args, kwargs
        if _Trainer.step is None:
            atexit.register(_clear)
        _Trainer.step = step
        data = {**data, **summary(*_Trainer.since_last())}
        if "data" in kwargs:
            return args, {**kwargs, "data": data}
        return (args[0], data, *args[2:]), kwargs
    except Exception as error:  # noqa: BLE001  verl's own metrics must be logged
        _complain(f"{error!r}")
        return args, kwargs


def _clear() -> None:
    """Take the run's entries out of Ray's store when the trainer ends."""
    with contextlib.suppress(Exception):
        ray_kv = _ray_kv()
        if ray_kv is not None:
            ray_kv._internal_kv_del(f"{_run}/", del_by_prefix=True, namespace=_NAMESPACE)
