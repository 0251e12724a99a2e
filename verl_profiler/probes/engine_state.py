"""The load of an engine over time, if enabled; in its server's process.

SGLang: `TokenizerManager.get_loads` queries each scheduler for its counts (sglang 0.5.12 and 0.5.23), which
answers between two iterations; the answers come in the server's event loop.  An engine without it is left
alone.  Hit rate, paused and retracted requests of the answer are not taken: they are of the last batch that
SGLang logged, and only with `enable_metrics`.

vLLM gives each of its stat loggers the counts of every iteration (`StatLoggerBase.record`).  Ours is added to
the plugins that `AsyncLLM` loads, and only if readings are enabled: the entry point
`vllm.stat_logger_plugins` would switch on the statistics of every vLLM in the environment.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import weakref
from typing import Any

from verl_profiler.events.json_values import is_mapping
from verl_profiler.instrumentation.probe import of_family
from verl_profiler.probes import sglang_iterations
from verl_profiler.probes.values import plain
from verl_profiler.recording import context, evidence, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now
from verl_profiler.recording.complaints import announce

_probe = of_family("engine")

_PERIOD_S = 0.5
_PERIOD_NS = 500_000_000
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

_LOGGERS = "vllm.v1.metrics.loggers"
_ASYNC_LLM = "vllm.v1.engine.async_llm"

_reader: _Reader | None = None
# Of vLLM: whether its readings were added, and the counts recorded last, with their time on the clock of
# `clock.now()`, by engine core.
_added = False
_recorded: dict[int, tuple[int, dict[str, Any]]] = {}


def _is_asked_for() -> bool:
    active = recorder.active()
    return active is not None and active.config.events.engine_state


def _report_failure(error: Exception) -> None:
    """Report that readings end; the engine serves in any case."""
    announce(f"WARNING the engine's load is no longer recorded: {error!r} (engine-state-failed)")


def _report_missing() -> None:
    announce(
        "WARNING profiler.events.engine_state: this engine does not report its load "
        "(engine-state-missing)"
    )


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
        except Exception as error:  # noqa: BLE001  of whatever version
            _report_failure(error)
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
    manager = getattr(call.arguments["self"], "tokenizer_manager", None)
    sglang_iterations.end_launch(manager)
    if recorder.active() is None:
        return
    if manager is not None:
        loop = asyncio.get_running_loop()
        evidence.add_source_of("engine", manager, lambda found: _current_load(found, loop))
    if not _is_asked_for() or _reader is not None:
        return
    if not callable(getattr(manager, "get_loads", None)):
        _report_missing()
        return
    _reader = _Reader(manager, asyncio.get_running_loop())
    recorder.before_stop(_forget)
    recorder.after_fork(_forget)
    _reader.arm()


def _forget() -> None:
    global _reader, _added
    _reader, _added = None, False
    _recorded.clear()


class _Readings:
    """Sums what the iterations of one engine core report, and records it twice a second.

    In captured steps each iteration is recorded.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.config = vllm_config
        self.rank = engine_index
        self.recorded_ns = 0
        self.sums: dict[str, int] = {}
        self.failed = False

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, *_others: Any, **_named: Any
    ) -> None:
        """Take the counts of an iteration; `scheduler_stats` is None where the core sent none."""
        if self.failed or scheduler_stats is None or recorder.active() is None:
            return
        try:
            self._add(scheduler_stats, iteration_stats)
        except Exception as error:  # noqa: BLE001  of whatever version
            self.failed = True
            _report_failure(error)

    def log_engine_initialized(self) -> None:
        """Log nothing: vLLM's own loggers do."""

    def _add(self, scheduler: Any, iteration: Any) -> None:
        prompts = getattr(iteration, "prompt_token_stats", None)
        prefix = getattr(scheduler, "prefix_cache_stats", None)
        drafts = getattr(scheduler, "spec_decoding_stats", None)
        for name, value in (
            ("iterations", 1),
            ("prefill_tokens", getattr(prompts, "computed", None)),
            ("decode_tokens", getattr(iteration, "num_generation_tokens", None)),
            ("retractions", getattr(iteration, "num_preempted_reqs", None)),
            ("prefix_queried_tokens", getattr(prefix, "queries", None)),
            ("prefix_hit_tokens", getattr(prefix, "hits", None)),
            ("draft_tokens", getattr(drafts, "num_draft_tokens", None)),
            ("accepted_draft_tokens", getattr(drafts, "num_accepted_tokens", None)),
        ):
            if value is not None:
                self.sums[name] = self.sums.get(name, 0) + value
        running, waiting = scheduler.num_running_reqs, scheduler.num_waiting_reqs
        at_ns = now()
        # vLLM sends nothing while it is idle, so the last iteration is recorded at once.
        recent = (running or waiting) and at_ns - self.recorded_ns < _PERIOD_NS
        if recent and not recorder.in_captured_step():
            return
        self.recorded_ns = at_ns
        blocks = plain(self.config.cache_config.num_gpu_blocks)
        size = plain(self.config.cache_config.block_size)
        capacity = blocks * size if blocks and size else None
        used = None if capacity is None else round(scheduler.kv_cache_usage * capacity)
        extra = {
            "dp_rank": self.rank,
            "running_requests": running,
            "waiting_requests": waiting,
            "running_limit": plain(self.config.scheduler_config.max_num_seqs),
            "kv_used_tokens": used,
            "kv_capacity_tokens": capacity,
            **self.sums,
        }
        self.sums = {}
        extra = {name: value for name, value in extra.items() if value is not None}
        _recorded[self.rank] = at_ns, extra
        recorder.record("engine_state", None, at_ns, extra, context.process.current_step())


def _with_readings(factories: Any) -> Any:
    """Return vLLM's factories of stat loggers with ours behind them, if readings are enabled."""
    global _added
    base = getattr(sys.modules.get(_LOGGERS), "StatLoggerBase", None)
    if not _is_asked_for() or base is None:
        return factories
    _added = True
    recorder.before_stop(_forget)
    return [*factories, type("VerlProfilerReadings", (_Readings, base), {})]


def _last_loads() -> dict[str, Any]:
    """Return the counts of each engine core's last iteration, with its age, if they are recorded."""
    loads = [
        {**fields, "age_s": round((now() - at_ns) / 1e9, 3)} for at_ns, fields in _recorded.values()
    ]
    return {"loads": loads} if loads else {}


def _current_load_of_vllm(engine: Any) -> dict[str, Any]:
    """Return the requests that the server holds, when the run is stuck.

    What the engine core has of them, it only sends with its answers: its last ones, if they are recorded.
    """
    output = getattr(engine, "output_processor", None)
    count: Any = getattr(output, "get_num_unfinished_requests", None)
    return {**({"requests": plain(count())} if callable(count) else {}), **_last_loads()}


def _end_init(call: Call, _result: Any) -> None:
    evidence.add_source_of("engine", call.arguments["self"], _current_load_of_vllm)
    if _is_asked_for() and not _added:
        _report_missing()


PROBES = (
    _probe(
        None,
        "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer.launch_server",
        enter=_begin_launch,
        leave=_end_launch,
        optional=True,
    ),
    _probe(
        None,
        f"{_ASYNC_LLM}:load_stat_logger_plugin_factories",
        result=_with_readings,
        optional=True,
    ),
    _probe(None, f"{_ASYNC_LLM}:AsyncLLM.__init__", leave=_end_init, optional=True),
)
