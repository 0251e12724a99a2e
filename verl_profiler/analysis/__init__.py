"""Questions to the tables of a run: each function takes `Tables` and returns rows.

A function is named after the table that it returns.  It reads no files, draws nothing and keeps
nothing; rows come in a fixed order whatever the order of the events.
"""

from __future__ import annotations

from verl_profiler.analysis.captures import gpu_idle, range_times, span_kernels, top_kernels
from verl_profiler.analysis.cost import profiler_cost
from verl_profiler.analysis.critical_path import critical_path
from verl_profiler.analysis.engines import engine_times, replica_balance
from verl_profiler.analysis.event_loop import loop_lags
from verl_profiler.analysis.memory import memory_peaks
from verl_profiler.analysis.requests import (
    request_parts,
    request_times,
    slowest_requests,
    turns_per_request,
)
from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.analysis.steps import step_phases, step_tail, step_times
from verl_profiler.analysis.stragglers import straggler_requests, stragglers
from verl_profiler.analysis.tools import tool_times
from verl_profiler.analysis.transfers import transfer_totals
from verl_profiler.analysis.weights import weight_sync
from verl_profiler.analysis.what_if import what_if
from verl_profiler.analysis.workers import rank_balance, rollout_balance

__all__ = [
    "ANALYSES",
    "Rows",
    "Steps",
    "critical_path",
    "engine_times",
    "gpu_idle",
    "loop_lags",
    "memory_peaks",
    "profiler_cost",
    "range_times",
    "rank_balance",
    "replica_balance",
    "request_parts",
    "request_times",
    "rollout_balance",
    "slowest_requests",
    "span_kernels",
    "step_phases",
    "step_tail",
    "step_times",
    "straggler_requests",
    "stragglers",
    "tool_times",
    "top_kernels",
    "transfer_totals",
    "turns_per_request",
    "weight_sync",
    "what_if",
]

# Every analysis that needs no more than tables and steps, in reading order.
ANALYSES = {
    analysis.__name__: analysis
    for analysis in (
        step_times,
        step_phases,
        step_tail,
        critical_path,
        what_if,
        stragglers,
        straggler_requests,
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
