"""Columns of the tables of TransferQueue that no view is named after."""

from __future__ import annotations

from collections.abc import Mapping

from verl_profiler.analysis.tq import FAIR_MIB_S, GOOD_MIB_S
from verl_profiler.views.columns import common

__all__ = ["SUMS", "TABLES", "WALL"]

_CLASSES = f"class of mib_per_s: `good` (above {GOOD_MIB_S}), `fair` (from {FAIR_MIB_S}) or `poor`"

# Of `tq_wall` and `tq_functions`.
WALL = {
    "busy_s": (
        "time with at least one call in progress, summed over processes, in s; empty, like "
        "tq_busy_s to concurrency, if only some calls were traced or starts are not known"
    ),
    "tq_busy_s": "time with at least one get or put in progress, summed over processes, in s",
    "tq_alone_s": "time with gets or puts and no compute in progress, in s",
    "wall_share": "tq_busy_s as part of busy_s",
    "alone_share": "tq_alone_s as part of busy_s",
    "concurrency": "time of all calls over busy_s",
}

# Of `tq_steps` and `tq_over_time`.
SUMS = common("size_bytes") | {
    "total_s": "time of these calls, in s",
    "calls": "number of traced calls of functions that do not wait for others",
    "get_s": "time of their stage get, in s",
    "compute_s": "time of their stage compute, in s",
    "put_s": "time of their stage put, in s",
    "overhead_share": "get and put as part of the calls' time",
    "transfers": "number of gets and puts",
    "mib_per_s": "MiB per second of gets and puts, each by its own time",
    "speed": _CLASSES,
    "get_mib_per_s": "MiB per second of gets",
    "put_mib_per_s": "MiB per second of puts",
}

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "tq_wall": common("run")
    | {"func": "traced function; empty for all together but those that wait for others"}
    | WALL,
    "tq_steps": common("run")
    | {"step": "verl's global step; empty for calls of no known step"}
    | SUMS,
    "tq_throughput": common("run traced")
    | {
        "event": "`tq_get` or `tq_put`",
        "caller": "function where it is known, otherwise the role; empty for all together",
        "calls": "number of calls, estimated where only every N-th was traced",
        "size_bytes": "bytes moved",
        "mean_bytes": "mean size of a call, in bytes",
        "total_s": "sum of the calls' durations, in s",
        "p50_s": "median duration of the calls, in s",
        "mib_per_s": "MiB per second: all bytes by all time",
        "speed": _CLASSES,
        "p5_mib_per_s": "5th percentile of the calls' rates, in MiB per second",
        "p50_mib_per_s": "median of the calls' rates, in MiB per second",
        "variation": "standard deviation of the calls' rates by their mean",
        "good_share": "part of the calls whose rate is good",
        "fair_share": "part of the calls whose rate is fair",
        "poor_share": "part of the calls whose rate is poor",
    },
    "tq_calls": common(
        "run step name role func call trace_ids status finished begin_us end_us duration_us rows sampled"
    )
    | {
        "estimated": "whether its stages are computed, not recorded",
        "source": "where the row is from, such as a log",
        "get_us": "time of the stage get, in µs",
        "compute_us": "time of the stage compute, in µs",
        "put_us": "time of the stage put, in µs",
    },
    "tq_call_stages": common("run step name func call begin_us end_us")
    | {
        "stage": "`get`, `compute` or `put`",
    },
    "tq_transfers": common(
        "run step name role event func call trace_ids status begin_us end_us duration_us "
        "size_bytes rows request_id sample session sampled"
    )
    | {
        "mib_per_s": "MiB per second",
        "uid": "uid of the request's prompt",
        "turn": "index of the request's last turn",
    },
    "tq_traces": common("run begin_us failed")
    | {
        "trace_id": "the trace id",
        "calls": "number of calls with it",
        "functions": "their functions in order, each once",
        "first_step": "first step of the calls",
        "last_step": "last step of the calls",
        "spread_s": "from the first start to the last end, in s",
        "total_s": "time in calls, in s",
        "get_s": "time of their stage get, in s",
        "put_s": "time of their stage put, in s",
        "waiting_s": "part of spread_s in which no call handled the data, in s",
    },
    "tq_paths": common("run")
    | {
        "path": "functions in order, a list",
        "trace_ids": "number of trace ids",
        "calls": "number of calls",
        "p50_s": "median of the times from the first start to the last end, in s",
        "max_s": "longest of these times, in s",
        "waiting_share": "part of these times in which no call handled the data",
    },
    "tq_trace_counts": common("run")
    | {
        "trace_ids": "number of trace ids; a call without one counts as one",
    },
    "tq_findings": common("run")
    | {
        "finding": "`overhead`, `failed`, `unstable`, `low_throughput` or `small_transfers`",
        "func": "function of the finding; empty for those of transfers",
        "event": "`tq_get` or `tq_put`, for findings of transfers; otherwise empty",
        "value": "what is compared with the threshold",
        "threshold": "bound of the guide",
        "tq_s": "of `overhead`: time of the stages get and put, in s",
        "of_all_share": (
            "of `overhead`: tq_s as part of the time of all functions that do not wait for others"
        ),
        "total_s": "of `overhead`: time of the function's calls, in s",
        "overhead_share": "of `overhead`: get and put as part of total_s",
        "get_share": "of `overhead`: get as part of total_s",
        "put_share": "of `overhead`: put as part of total_s",
        "alone_share": (
            "of `overhead`: time with gets or puts and no compute in progress, as part of the time "
            "with at least one call in progress"
        ),
        "failed": "of `failed`: number of failed calls",
        "calls": "number of calls; of `unstable`, those with the stage",
        "stage": (
            "of `unstable`: the stage, `get` or `put`, whose durations the columns mean_s to "
            "worst_s are of"
        ),
        "mean_s": "of `unstable`: mean duration, in s",
        "p50_s": "of `unstable`: median duration, in s; of transfers, that of the calls",
        "p95_s": "of `unstable`: 95th percentile of the durations, in s",
        "max_s": "of `unstable`: longest duration, in s",
        "variation": "of `unstable`: standard deviation of the durations by their mean",
        "worst_step": "of `unstable`: step with the longest mean duration; empty if none is known",
        "worst_s": "of `unstable`: that mean duration, in s",
        "size_bytes": "of transfers: bytes moved",
        "mean_bytes": "of transfers: mean size of a call, in bytes",
        "mib_per_s": "of transfers: MiB per second, all bytes by all time",
        "p5_mib_per_s": "of transfers: 5th percentile of the calls' rates, in MiB per second",
        "poor_share": "of transfers: part of the calls whose rate is poor",
    },
}
