"""Every analysis by name, and those that the summary shows."""

from __future__ import annotations

from verl_profiler.analysis.captures import gpu_idle, range_times, span_kernels, top_kernels
from verl_profiler.analysis.compare.step_metrics import step_metrics
from verl_profiler.analysis.device_use import (
    device_times,
    device_use,
    device_use_over_time,
    phase_intervals,
)
from verl_profiler.analysis.engine import (
    engine_times,
    replica_balance,
    replica_token_rates,
    request_token_rates,
    token_rates,
)
from verl_profiler.analysis.engine_lanes import engine_lanes
from verl_profiler.analysis.engine_state import engine_load, engine_load_over_time
from verl_profiler.analysis.engine_time import request_engine_time
from verl_profiler.analysis.event_loop import longest_lags, loop_lags, loop_suspects
from verl_profiler.analysis.explain.critical_cycle import critical_cycle
from verl_profiler.analysis.explain.critical_path import critical_path, critical_segments
from verl_profiler.analysis.explain.ledger import bubble_ledger
from verl_profiler.analysis.explain.stragglers import straggler_requests, stragglers
from verl_profiler.analysis.explain.what_if import asynchronous_what_if, step_replays, what_if
from verl_profiler.analysis.memory import (
    memory_findings,
    memory_over_time,
    memory_peaks,
    memory_timeline,
    phase_spans,
    release_effects,
    sleep_times,
)
from verl_profiler.analysis.overview import own_spans, request_totals
from verl_profiler.analysis.phase_efficiency import phase_efficiency
from verl_profiler.analysis.pools import pools_over_time
from verl_profiler.analysis.profiler import clock_agreement, profiler_cost
from verl_profiler.analysis.requests import (
    request_breakdown,
    request_duration_cdf,
    request_parts,
    request_percentiles,
    request_times,
    slowest_requests,
    step_turn_times,
    turn_times,
    turns_per_request,
)
from verl_profiler.analysis.rollout import requests_in_flight, rollout_tail, step_tail
from verl_profiler.analysis.routing import routes
from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.analysis.staleness import staleness
from verl_profiler.analysis.staleness_causes import staleness_causes
from verl_profiler.analysis.steps import (
    step_durations,
    step_phases,
    step_times,
    step_trend,
    validation_times,
)
from verl_profiler.analysis.time_tree import time_tree
from verl_profiler.analysis.tools import reward_times, rewards, tool_latencies, tool_times
from verl_profiler.analysis.tq import tq_functions, tq_over_time, tq_steps, tq_throughput, tq_wall
from verl_profiler.analysis.tq_findings import tq_findings
from verl_profiler.analysis.tq_traces import (
    tq_call_stages,
    tq_calls,
    tq_paths,
    tq_trace_counts,
    tq_traces,
    tq_transfers,
)
from verl_profiler.analysis.transfers import (
    transfer_totals,
    weight_sync,
    weight_transfers,
)
from verl_profiler.analysis.workers import (
    rank_balance,
    rollout_balance,
    worker_balance,
    worker_phases,
)
from verl_profiler.reading.progress import doing
from verl_profiler.reading.tables.tables import Tables

__all__ = ["ANALYSES", "EXPLANATIONS", "SUMMARY", "summarized"]

# Every analysis that needs no more than tables and steps, in reading order.
ANALYSES = {
    analysis.__name__: analysis
    for analysis in (
        step_times,
        step_phases,
        time_tree,
        step_tail,
        step_durations,
        step_metrics,
        step_trend,
        validation_times,
        own_spans,
        critical_segments,
        critical_path,
        bubble_ledger,
        critical_cycle,
        asynchronous_what_if,
        pools_over_time,
        staleness,
        staleness_causes,
        step_replays,
        what_if,
        stragglers,
        straggler_requests,
        request_times,
        request_totals,
        request_parts,
        request_duration_cdf,
        request_percentiles,
        request_breakdown,
        slowest_requests,
        request_engine_time,
        requests_in_flight,
        rollout_tail,
        rollout_balance,
        turns_per_request,
        turn_times,
        step_turn_times,
        tool_times,
        tool_latencies,
        engine_times,
        engine_lanes,
        engine_load,
        engine_load_over_time,
        replica_balance,
        routes,
        token_rates,
        replica_token_rates,
        request_token_rates,
        rewards,
        reward_times,
        phase_efficiency,
        device_use,
        device_use_over_time,
        device_times,
        phase_intervals,
        worker_phases,
        worker_balance,
        rank_balance,
        weight_sync,
        weight_transfers,
        transfer_totals,
        tq_call_stages,
        tq_calls,
        tq_transfers,
        tq_findings,
        tq_functions,
        tq_over_time,
        tq_steps,
        tq_throughput,
        tq_paths,
        tq_trace_counts,
        tq_traces,
        tq_wall,
        loop_lags,
        longest_lags,
        loop_suspects,
        memory_peaks,
        range_times,
        span_kernels,
        top_kernels,
        gpu_idle,
        memory_timeline,
        memory_over_time,
        phase_spans,
        release_effects,
        sleep_times,
        memory_findings,
        clock_agreement,
        profiler_cost,
    )
}

# Explanations: why a step took as long as it did, and what would have helped.
EXPLANATIONS = ("critical_path", "bubble_ledger", "what_if", "stragglers", "straggler_requests")

# Those that the summary and the report show.
SUMMARY = (
    "step_times",
    "step_phases",
    "step_tail",
    "request_times",
    "request_parts",
    "turns_per_request",
    "slowest_requests",
    "tool_times",
    "engine_times",
    "replica_balance",
    "rollout_balance",
    "rank_balance",
    "weight_sync",
    "transfer_totals",
    "loop_lags",
    "memory_peaks",
    "profiler_cost",
)


def summarized(tables: Tables, steps: Steps = None) -> dict[str, Rows]:
    """Return the rows of `SUMMARY`, by name."""
    found: dict[str, Rows] = {}
    for name in SUMMARY:
        with doing(f"analysis {name}"):
            found[name] = ANALYSES[name](tables, steps)
    return found
