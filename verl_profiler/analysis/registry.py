"""The analyses that the summary and the report show, by name; kept beside the tables."""

from __future__ import annotations

import json
from collections.abc import Callable

from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.reading.progress import doing
from verl_profiler.reading.tables.tables import Tables

__all__ = ["EXPLANATIONS", "explanations", "summarized"]

# Explanations: why a step took as long as it did, and what would have helped.
EXPLANATIONS = ("critical_path", "bubble_ledger", "what_if", "stragglers", "straggler_requests")


def explanations(tables: Tables, steps: Steps = None) -> dict[str, Rows]:
    """Return what `explain.findings.explained` returns."""

    def make() -> dict[str, Rows]:
        # Imported here because most commands find their answer in the cache.
        from verl_profiler.analysis.explain.findings import explained

        return explained(tables, steps)

    return _kept(tables, "explanations", steps, make)


def summarized(tables: Tables, steps: Steps = None) -> dict[str, Rows]:
    """Return the rows of the analyses that the summary and the report show, by name, in reading order."""
    return _kept(tables, "summarized", steps, lambda: _summarized(tables, steps))


def _kept(
    tables: Tables, name: str, steps: Steps, make: Callable[[], dict[str, Rows]]
) -> dict[str, Rows]:
    if tables.table_cache is None:
        return make()
    processes = tables.rows("SELECT * FROM processes ORDER BY run, name")
    made_from = json.dumps([steps, tables.launches, processes], default=str)
    return tables.table_cache.document(name, [made_from], make)


def _summarized(tables: Tables, steps: Steps) -> dict[str, Rows]:
    # Imported here because most commands find their answer in the cache.
    from verl_profiler.analysis.engine import engine_times, replica_balance
    from verl_profiler.analysis.event_loop import loop_lags
    from verl_profiler.analysis.memory import memory_peaks
    from verl_profiler.analysis.profiler import profiler_cost
    from verl_profiler.analysis.requests import (
        request_parts,
        request_times,
        slowest_requests,
        turns_per_request,
    )
    from verl_profiler.analysis.rollout import step_tail
    from verl_profiler.analysis.steps import step_phases, step_times
    from verl_profiler.analysis.tools import tool_times
    from verl_profiler.analysis.transfers import transfer_totals, weight_sync
    from verl_profiler.analysis.workers import rank_balance, rollout_balance

    found: dict[str, Rows] = {}
    for analysis in (
        step_times,
        step_phases,
        step_tail,
        request_times,
        request_parts,
        turns_per_request,
        slowest_requests,
        tool_times,
        engine_times,
        replica_balance,
        rollout_balance,
        rank_balance,
        weight_sync,
        transfer_totals,
        loop_lags,
        memory_peaks,
        profiler_cost,
    ):
        with doing(f"analysis {analysis.__name__}"):
            found[analysis.__name__] = analysis(tables, steps)
    return found
