"""The analyses that the summary and the report show, by name."""

from __future__ import annotations

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
from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.analysis.steps import step_phases, step_times
from verl_profiler.analysis.tools import tool_times
from verl_profiler.analysis.transfers import transfer_totals, weight_sync
from verl_profiler.analysis.workers import rank_balance, rollout_balance
from verl_profiler.reading.progress import doing
from verl_profiler.reading.tables.tables import Tables

__all__ = ["EXPLANATIONS", "SUMMARY", "summarized"]

# Explanations: why a step took as long as it did, and what would have helped.
EXPLANATIONS = ("critical_path", "bubble_ledger", "what_if", "stragglers", "straggler_requests")

# Those that the summary and the report show, in reading order.
SUMMARY = {
    analysis.__name__: analysis
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
    )
}


def summarized(tables: Tables, steps: Steps = None) -> dict[str, Rows]:
    """Return the rows of `SUMMARY`, by name."""
    found: dict[str, Rows] = {}
    for name, analysis in SUMMARY.items():
        with doing(f"analysis {name}"):
            found[name] = analysis(tables, steps)
    return found
