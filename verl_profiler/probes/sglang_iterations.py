"""The iterations of an SGLang engine, if requested; read in its server's process.

With `enable_forward_pass_metrics` (sglang 0.5.12 and 0.5.23) each scheduler publishes one ZMQ message per
iteration, msgpack of `ForwardPassMetrics`.  The endpoint must be chosen before the schedulers start: otherwise
each chooses a name of its own, which the server does not learn.  A thread subscribes and sums the iterations
to rows of at least 100 ms per data-parallel rank; in captured steps each iteration is a row.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import weakref
from collections import Counter
from typing import Any

import msgspec

from verl_profiler.recording import context, recorder
from verl_profiler.recording.clock import now
from verl_profiler.recording.complaints import announce

_PREFIX = "verl-profiler-"
_LONG = 60
# verl's key of SGLang's options, and fields of SGLang's `ServerArgs`.
_ENGINE = "sglang"
_PUBLISH = "enable_forward_pass_metrics"
_ENDPOINT = "forward_pass_metrics_ipc_name"
_ROW_NS = 100_000_000
_POLL_MS = 500
# Messages that the subscriber holds at most; ZMQ drops further ones.
_HELD = 10_000
# A gap between two messages that is longer than this is idle time, not an iteration: twice the device's
# time, and what a scheduler may need between two forward passes.
_BETWEEN_NS = 20_000_000


class _Scheduled(msgspec.Struct, frozen=True, gc=False):
    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0


class _Queued(msgspec.Struct, frozen=True, gc=False):
    num_prefill_requests: int = 0
    num_decode_requests: int = 0


class _Pass(msgspec.Struct, frozen=True, gc=False):
    """The fields of SGLang's `ForwardPassMetrics` that are read; others are skipped.

    Requests in the queue that have output tokens were retracted.
    """

    dp_rank: int = 0
    wall_time: float = 0.0
    scheduled_requests: _Scheduled = _Scheduled()
    queued_requests: _Queued = _Queued()


class Sums:
    """Sums the iterations of one scheduler, and records a row when 100 ms are over or it idles.

    In captured steps a row is one iteration.
    """

    def __init__(self) -> None:
        # Of the last message; None while the engine idles.
        self.last_ns: int | None = None
        # Of the last iteration: what ran, and what waits.
        self.batch: dict[str, int] = {}
        self.begin_ns = self.busy_ns = 0
        self.device_s = 0.0
        self.sums: Counter[str] = Counter()

    def add(self, at_ns: int, each: _Pass) -> None:
        """Add the message of an iteration that arrived at this time; a heartbeat ends the row."""
        device_ns = round(each.wall_time * 1e9)
        if device_ns <= 0:
            self.end(each.dp_rank)
            self.last_ns = None
            return
        gap_ns = device_ns if self.last_ns is None else at_ns - self.last_ns
        if gap_ns > 2 * device_ns + _BETWEEN_NS:
            self.end(each.dp_rank)
            gap_ns = device_ns
        if not self.sums:
            self.begin_ns = at_ns - gap_ns
        self.last_ns = at_ns
        self.busy_ns += gap_ns
        self.device_s += each.wall_time
        ran, queued = each.scheduled_requests, each.queued_requests
        sums = self.sums
        sums["iterations"] += 1
        sums["prefill_requests"] += ran.num_prefill_requests
        sums["prefill_tokens"] += ran.sum_prefill_tokens
        sums["decode_requests"] += ran.num_decode_requests
        sums["context_tokens"] += ran.sum_decode_kv_tokens
        self.batch = {
            "running_requests": ran.num_prefill_requests + ran.num_decode_requests,
            "waiting_requests": queued.num_prefill_requests + queued.num_decode_requests,
            "retracted_requests": queued.num_decode_requests,
        }
        if at_ns - self.begin_ns >= _ROW_NS or recorder.in_captured_step():
            self.end(each.dp_rank)

    def end(self, dp_rank: int) -> None:
        """Record the row, if there is anything in it."""
        if not self.sums or self.last_ns is None:
            return
        extra = {
            "dp_rank": dp_rank,
            "busy_s": round(self.busy_ns / 1e9, 6),
            "device_s": round(self.device_s, 6),
            **self.sums,
            **self.batch,
        }
        step = context.process.current_step()
        recorder.record("engine_iterations", self.begin_ns, self.last_ns, extra, step)
        self.begin_ns, self.busy_ns, self.device_s = self.last_ns, 0, 0.0
        self.sums.clear()


class _Subscriber:
    """A thread that reads the messages of a server's schedulers, until the server or recording ends."""

    def __init__(self, endpoints: list[str], manager: Any) -> None:
        self.endpoints = endpoints
        self.manager = weakref.ref(manager)
        self.sums: dict[int, Sums] = {}
        self.thread = threading.Thread(
            target=self._run, name="verl-profiler-iterations", daemon=True
        )
        self.thread.start()

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # noqa: BLE001  the engine serves with or without being read
            announce(
                "WARNING the engine's iterations are no longer recorded: "
                f"{error!r} (engine-iterations-failed)"
            )

    def _read(self) -> None:
        import zmq

        decoder = msgspec.msgpack.Decoder(_Pass)
        with zmq.Context() as zmq_context:
            socket: Any = zmq_context.socket(zmq.SUB)
            socket.linger = 0
            socket.rcvhwm = _HELD
            socket.subscribe(b"")
            for endpoint in self.endpoints:
                socket.connect(endpoint)
            try:
                while recorder.active() is not None and self.manager() is not None:
                    if not socket.poll(_POLL_MS):
                        self._end_rows()
                        continue
                    payload = socket.recv_multipart()[-1]
                    each = decoder.decode(payload)
                    self.sums.setdefault(each.dp_rank, Sums()).add(now(), each)
                self._end_rows()
            finally:
                socket.close()

    def _end_rows(self) -> None:
        for rank, sums in self.sums.items():
            sums.end(rank)
            sums.last_ns = None


_subscriber: _Subscriber | None = None
_base: str | None = None


def begin_launch(server: Any) -> None:
    """Let the server's schedulers publish their iterations, if requested and the engine can."""
    global _base
    active = recorder.active()
    if active is None or not active.config.events.engine_iterations or _subscriber is not None:
        return
    import dataclasses

    launcher: Any = sys.modules.get(type(server).__module__)
    arguments = getattr(launcher, "ServerArgs", None)
    names: set[str] = set()
    if dataclasses.is_dataclass(arguments):
        names = {field.name for field in dataclasses.fields(arguments)}
    if not {_PUBLISH, _ENDPOINT} <= names:
        announce(
            "WARNING profiler.events.engine_iterations: this SGLang has no forward-pass metrics "
            "(engine-iterations-missing)"
        )
        return
    # verl reads it from there (0.9.1), after this hook; the process has a copy of its own.
    kwargs = server.config.engine_kwargs
    options: dict[str, Any] | None = kwargs.get(_ENGINE)
    if options is None:
        kwargs[_ENGINE] = options = {}
    endpoint = options.get(_ENDPOINT) or f"ipc://{_folder()}/iterations"
    options[_ENDPOINT] = _base = endpoint
    recorder.before_stop(_forget)
    recorder.after_fork(_forget)
    options[_PUBLISH] = True


def _folder() -> str:
    """Make a folder for the sockets; the path of one has at most 107 bytes on Linux."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) >= _LONG:
        folder = "/tmp"  # noqa: S108  `mkdtemp` makes a folder of its own there, for this user only
    return tempfile.mkdtemp(prefix=_PREFIX, dir=folder)


def end_launch(manager: Any) -> None:
    """Subscribe to the iterations of the schedulers that were launched."""
    global _subscriber
    if _base is None or _subscriber is not None or manager is None:
        return
    ranks = int(getattr(getattr(manager, "server_args", None), "dp_size", 1) or 1)
    _subscriber = _Subscriber([f"{_base}.{rank}" for rank in range(ranks)], manager)


def _forget() -> None:
    global _subscriber, _base
    _subscriber = _base = None
