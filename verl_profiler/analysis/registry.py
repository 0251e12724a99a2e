"""The analyses that the summary and the report show, by name; kept beside the tables."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.reading.progress import doing
from verl_profiler.reading.tables.tables import Tables

if TYPE_CHECKING:
    from verl_profiler.analysis.explain.what_if import Cycle

_T = TypeVar("_T")

# Explanations: why a step took as long as it did, and what would have helped.
EXPLANATIONS = ("critical_path", "bubble_ledger", "stragglers", "straggler_requests")


def explained(tables: Tables, steps: Steps = None, **known: Any) -> dict[str, Rows]:
    """Return what `explain.findings.explained` returns of these arguments."""

    def make() -> dict[str, Rows]:
        # Imported here because most commands find their answer in the cache.
        from verl_profiler.analysis.explain import findings

        return findings.explained(tables, steps, **known)

    return _kept(tables, "explained", _made_from(tables, steps), make)


def explanations(tables: Tables, steps: Steps = None) -> dict[str, Rows]:
    """Return what `explained` returns, and `what_if`: most of its replays no finding needs."""
    known: Mapping[str, Cycle] | None = None

    def make() -> dict[str, Rows]:
        from verl_profiler.analysis.explain.what_if import cycles, what_if

        nonlocal known
        known = cycles(tables, steps)
        return {"what_if": what_if(tables, steps, known)}

    replays = _kept(tables, "what_if", _made_from(tables, steps), make)
    return explained(tables, steps, replays=replays["what_if"], known=known) | replays


def summarized(
    tables: Tables, steps: Steps = None, names: Collection[str] | None = None
) -> dict[str, Rows]:
    """Return the rows of the analyses that the summary and the report show, or of these, by name, in reading order."""
    return _rows_of(_SUMMARIZED, tables, steps, names)


def reported(tables: Tables, steps: Steps = None) -> dict[str, Rows]:
    """Return the rows of the analyses that the report shows besides, by name."""
    return _rows_of(_REPORTED, tables, steps)


def _rows_of(
    listed: Mapping[str, Sequence[str]],
    tables: Tables,
    steps: Steps,
    names: Collection[str] | None = None,
) -> dict[str, Rows]:
    made_from = _made_from(tables, steps)
    return {
        analysis: _kept(
            tables, analysis, made_from, partial(_rows, module, analysis, tables, steps)
        )
        for module, analyses in listed.items()
        for analysis in analyses
        if names is None or analysis in names
    }


def _rows(module: str, analysis: str, tables: Tables, steps: Steps) -> Rows:
    # Imported here because most commands find their answer in the cache.
    imported = importlib.import_module(f"verl_profiler.analysis.{module}")
    with doing(f"analysis {analysis}"):
        return getattr(imported, analysis)(tables, steps)


def _made_from(tables: Tables, steps: Steps) -> list[str]:
    """Return what decides the rows of an analysis, besides the events."""
    if tables.table_cache is None:
        return []
    processes = tables.rows("SELECT * FROM processes ORDER BY run, name")
    return [json.dumps([steps, tables.launches, processes], default=str)]


def _kept(tables: Tables, name: str, made_from: list[str], make: Callable[[], _T]) -> _T:
    files = tables.table_cache
    return make() if files is None else files.document(name, made_from, make)


# Those of the summary by their modules, in reading order.
_SUMMARIZED = {
    "steps": ("step_times", "step_phases", "step_tail"),
    "requests": ("request_times", "request_parts", "turns_per_request", "slowest_requests"),
    "tools": ("tool_times",),
    "engine": ("engine_times", "replica_balance"),
    "workers": ("rollout_balance", "rank_balance"),
    "transfers": ("weight_sync", "transfer_totals"),
    "event_loop": ("loop_lags",),
    "memory": ("memory_peaks",),
    "profiler": ("profiler_cost",),
}
# Those of the report besides.
_REPORTED = {
    "memory": ("memory_timeline", "sleep_times", "release_effects"),
    "steps": ("validation_times", "rollout_tail"),
    "time_tree": ("time_tree",),
    "captures": ("captures", "range_times", "top_kernels", "gpu_idle"),
    "device_use": ("device_times",),
    "tools": ("reward_times",),
    "overview": ("own_spans",),
    "engine": ("routes", "engine_load", "token_rates", "request_token_rates"),
    "tq": ("tq_functions",),
    "transfers": ("weight_transfers",),
}
