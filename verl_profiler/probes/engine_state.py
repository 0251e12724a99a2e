"""The load of an SGLang engine over time, if enabled; in its server's process.

`TokenizerManager.get_loads` queries each scheduler for its counts (sglang 0.5.12 and 0.5.23), which answers between two
iterations; the answers come in the server's event loop.  An engine without it is left alone.  Hit rate,
paused and retracted requests of the answer are not taken: they are of the last batch that SGLang logged, and
only with `enable_metrics`.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from typing import Any

from verl_profiler.events.json_values import is_mapping
from verl_profiler.instrumentation.probe import of_family
from verl_profiler.probes import sglang_iterations
from verl_profiler.probes.values import plain
from verl_profiler.recording import context, evidence, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now

__all__ = ["PROBES"]

_probe = of_family("engine")

_PERIOD_S = 0.5
# An engine whose load does not change gets a line this often, so that a reader can tell it from one
# that does not answer.
_LONGEST_NS = 10_000_000_000
# SGLang's names of an event's fields.
_LOAD = {
    "running_requests": "num_running_reqs",
    "waiting_requests": "num_waiting_reqs",
    "kv_used_tokens": "num_used_tokens",
    "kv_capacity_tokens": "max_total_num_tokens",
    "running_limit": "max_running_requests",
}

_reader: _Reader | None = None


class _Reader:
    """Asks for the loads again and again, as long as the process records and the engine is there."""

    def __init__(self, manager: Any, loop: Any) -> None:
        self.manager = weakref.ref(manager)
        self.loop = loop
        # By data-parallel rank: the fields last recorded, and when.
        self.recorded: dict[Any, tuple[dict[str, Any], int]] = {}
        # A timer and a task keep the context they are made in: not that of the launch.
        self.context = contextvars.Context()
        # A loop holds its tasks by weak references only.
        self.task: Any = None

    def arm(self) -> None:
        self.loop.call_later(_PERIOD_S, self._begin, context=self.context)

    def _begin(self) -> None:
        if recorder.active() is not None and self.manager() is not None:
            self.task = self.loop.create_task(self._ask())

    async def _ask(self) -> None:
        manager = self.manager()
        if manager is None:
            return
        try:
            loads = await manager.get_loads()
            for load in loads:
                self._record(load)
        except Exception as error:  # noqa: BLE001  the engine serves in any case
            recorder.announce(
                f"WARNING the engine's load is no longer recorded: {error!r} (engine-state-failed)"
            )
            return
        finally:
            self.task = None
        self.arm()

    def _record(self, load: Any) -> None:
        extra = _fields_of(load)
        rank, at_ns = extra.get("dp_rank"), now()
        last, last_ns = self.recorded.get(rank, ({}, 0))
        if extra == last and at_ns - last_ns < _LONGEST_NS:
            return
        self.recorded[rank] = extra, at_ns
        recorder.record("engine_state", None, at_ns, extra, context.process.current_step())


def _current_load(manager: Any, loop: Any) -> dict[str, Any]:
    """Return the requests that the server holds, and what each scheduler answers.

    Returns:
        `requests`; `paused`, of the server; `loads`, a dict with an event's fields for each data-parallel
        rank; `unanswered`: `event loop` or `scheduler`, whichever does not answer.
    """
    found: dict[str, Any] = {}
    held: Any = getattr(manager, "rid_to_state", None)
    if is_mapping(held):
        found["requests"] = len(held)
    paused = getattr(manager, "is_pause", None)
    if isinstance(paused, bool):
        found["paused"] = paused
    if not callable(getattr(manager, "get_loads", None)):
        return found
    try:
        loads = evidence.on_loop(loop, manager.get_loads)
    except TimeoutError as error:
        who = "event loop" if str(error) == "the event loop" else "scheduler"
        return {**found, "unanswered": who}
    return {**found, "loads": [_fields_of(load) for load in loads]}


def _fields_of(load: Any) -> dict[str, Any]:
    fields = {"dp_rank": plain(getattr(load, "dp_rank", None))}
    fields |= {name: plain(getattr(load, theirs, None)) for name, theirs in _LOAD.items()}
    return {name: value for name, value in fields.items() if value is not None}


def _begin_launch(call: Call) -> None:
    sglang_iterations.begin_launch(call.arguments["self"])


def _end_launch(call: Call, _result: Any) -> None:
    global _reader
    active = recorder.active()
    manager = getattr(call.arguments["self"], "tokenizer_manager", None)
    sglang_iterations.end_launch(manager)
    if active is None:
        return
    if manager is not None:
        loop = asyncio.get_running_loop()
        evidence.add_source_of("engine", manager, lambda found: _current_load(found, loop))
    if not active.config.events.engine_state or _reader is not None:
        return
    if not callable(getattr(manager, "get_loads", None)):
        recorder.announce(
            "WARNING profiler.events.engine_state: this engine does not report its load "
            "(engine-state-missing)"
        )
        return
    _reader = _Reader(manager, asyncio.get_running_loop())
    recorder.before_stop(_forget)
    recorder.after_fork(_forget)
    _reader.arm()


def _forget() -> None:
    global _reader
    _reader = None


PROBES = (
    _probe(
        None,
        "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer.launch_server",
        enter=_begin_launch,
        leave=_end_launch,
        optional=True,
    ),
)
