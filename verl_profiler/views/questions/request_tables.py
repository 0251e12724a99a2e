"""Columns of the tables of requests that no view is named after."""

from __future__ import annotations

from collections.abc import Mapping

from verl_profiler.views.columns import common

__all__ = ["BREAKDOWN", "TABLES"]

# Of `request_breakdown`, which the view `slowest_requests` shows.
BREAKDOWN = common(
    "run step name validate request_id sample session agent status error finished turns "
    "tool_calls prompt_tokens response_tokens generated_tokens tool_tokens reward "
    "begin_us prompt_build_s engine_s tool_s tool_parsing_s token_merge_s postprocess_s "
    "reward_s other_s overlap_s prefill_s decode_s outside_s"
) | {
    "queue_s": (
        "time in the engine's queue, in s; adds up to engine_s with prefill_s, decode_s "
        "and outside_s, and is empty, as they are, unless the engine reported them for "
        "every call"
    ),
    "duration_s": (
        "duration, in s: prompt_build_s, engine_s, tool_s, tool_parsing_s, token_merge_s, "
        "postprocess_s, reward_s and other_s together, minus overlap_s; empty if unfinished"
    ),
    "seen_s": "from its start to its last event, in s",
    "stalled_s": "time in which its worker's event loop stalled, whatever the component, in s",
}

_REQUESTS = {
    "requests": "number of requests",
    "failed": "number of requests that failed or were cancelled",
}

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "request_percentiles": common("run unfinished")
    | {
        "step": "verl's global step; empty for all steps together",
        "requests": "number of finished requests",
        "mean_s": "mean duration of the requests, in s",
        "percentile": "the percentile, from 0 to 100",
        "duration_s": "its duration, interpolated linearly, in s",
    },
    "request_times": common(
        "run step validate unfinished mean_s p50_s p80_s p95_s p99_s max_s generated_tokens "
        "tool_tokens mean_turns"
    )
    | {
        **_REQUESTS,
        "p90_s": "90th percentile of the durations, in s",
        "p999_s": "99.9th percentile of the durations, in s",
        "max_turns": "most turns",
        "prompt_tokens": "prompt tokens; a conversation's earlier tokens count in each turn",
        "response_tokens": "tokens of the responses: generated_tokens and tool_tokens",
    },
    "request_totals": common("run unfinished p50_s p95_s p99_s max_s generated_tokens mean_turns")
    | {
        **_REQUESTS,
    },
    "request_parts": common("run step validate")
    | {
        "part": "component of the requests; `other` is in no recorded event",
        "total_s": "time of all finished requests in it, in s",
        "share": "part of the sum of all components",
        "mean_s": "mean time of a request in it, in s",
    },
    "request_breakdown": BREAKDOWN,
    "slowest_requests": common(
        "run step name request_id sample session status turns duration_s prompt_build_s engine_s "
        "tool_s tool_parsing_s token_merge_s postprocess_s reward_s other_s"
    )
    | {
        "longest": "longest call: `engine`, or the name of the tool",
        "longest_turn": "index of the turn of that call",
        "longest_s": "duration of that call, in s",
    },
    "request_timeline": common("run step validate event turn status error")
    | {
        "name": "process of the event",
        "what": "tool or replica",
        "begin_s": "start, in s after the request's",
        "end_s": "end, in s after the request's start",
        "duration_s": "duration, in s",
        "tokens": "generated tokens",
        "queue_s": "time in the engine's queue, in s; only of `engine_request`",
        "prefill_s": "prefill time, in s; only of `engine_request`",
        "decode_s": "decode time, in s; only of `engine_request`",
    },
}
