"""The load of a vLLM engine over time, if enabled; in its server's process.

vLLM gives each of its stat loggers the counts of every iteration (`StatLoggerBase.record`).  Ours is added to
the plugins that `AsyncLLM` loads, and only if readings are enabled: the entry point
`vllm.stat_logger_plugins` would switch on the statistics of every vLLM in the environment.
"""

from __future__ import annotations

import sys
from typing import Any

from verl_profiler.instrumentation.probe import of_family
from verl_profiler.probes.values import plain
from verl_profiler.recording import context, evidence, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now

__all__ = ["PROBES"]

_probe = of_family("engine")

_PERIOD_NS = 500_000_000
_LOGGERS = "vllm.v1.metrics.loggers"
_ASYNC_LLM = "vllm.v1.engine.async_llm"

_added = False
# The counts recorded last, with their time on the clock of `clock.now()`, by engine core.
_recorded: dict[int, tuple[int, dict[str, Any]]] = {}


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
        except Exception as error:  # noqa: BLE001  the engine serves with or without being read
            self.failed = True
            recorder.announce(
                f"WARNING the engine's load is no longer recorded: {error!r} (engine-state-failed)"
            )

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


def _asked() -> bool:
    active = recorder.active()
    return active is not None and active.config.events.engine_state


def _with_readings(factories: Any) -> Any:
    """Return vLLM's factories of stat loggers with ours behind them, if readings are enabled."""
    global _added
    base = getattr(sys.modules.get(_LOGGERS), "StatLoggerBase", None)
    if not _asked() or base is None:
        return factories
    _added = True
    recorder.before_stop(_forget)
    return [*factories, type("VerlProfilerReadings", (_Readings, base), {})]


def _forget() -> None:
    global _added
    _added = False
    _recorded.clear()


def _last_loads() -> dict[str, Any]:
    """Return the counts of each engine core's last iteration, with its age, if they are recorded."""
    loads = [
        {**fields, "age_s": round((now() - at_ns) / 1e9, 3)} for at_ns, fields in _recorded.values()
    ]
    return {"loads": loads} if loads else {}


def _current_load(engine: Any) -> dict[str, Any]:
    """Return the requests that the server holds, when the run is stuck.

    What the engine core has of them, it only sends with its answers: its last ones, if they are recorded.
    """
    output = getattr(engine, "output_processor", None)
    count: Any = getattr(output, "get_num_unfinished_requests", None)
    return {**({"requests": plain(count())} if callable(count) else {}), **_last_loads()}


def _end_init(call: Call, _result: Any) -> None:
    evidence.add_source_of("engine", call.arguments["self"], _current_load)
    if _asked() and not _added:
        recorder.announce(
            "WARNING profiler.events.engine_state: this engine does not report its load "
            "(engine-state-missing)"
        )


PROBES = (
    _probe(
        None,
        f"{_ASYNC_LLM}:load_stat_logger_plugin_factories",
        result=_with_readings,
        optional=True,
    ),
    _probe(None, f"{_ASYNC_LLM}:AsyncLLM.__init__", leave=_end_init, optional=True),
)
