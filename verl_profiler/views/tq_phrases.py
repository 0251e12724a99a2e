"""Phrases of the findings about TransferQueue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PHRASES", "phrase"]

# Findings, each with the guide's advice.
PHRASES = {
    "overhead": (
        "{func}: get and put take {overhead_share} of its time ({tq_s} of {total_s}; get "
        "{get_share}, put {put_share}), more than {threshold}; {of_all_share} of the time of all "
        "traced functions"
    ),
    "overhead.advice": (
        "check the storage backend's settings; use larger batches, so that there are fewer "
        "transfers; consider compressing the data"
    ),
    "alone": "with concurrent compute: only {alone_share} of the busy wall-clock time",
    "unstable": (
        "{func}: {stage} times vary: p50 {p50_s}, p95 {p95_s}, max {max_s} over {calls} calls "
        "(standard deviation {variation} of the mean)"
    ),
    "worst": "longest in step {worst_step}: {worst_s} on average",
    "unstable.advice": (
        "the cause is not measured: check below when it happened, and what else used network and "
        "storage at that time"
    ),
    "low_throughput": (
        "{event}: {mib_per_s} MiB/s over {calls} calls and {size_bytes}; below {threshold} MiB/s "
        "is poor ({poor_share} of the calls are)"
    ),
    "low_throughput.advice": (
        "what limits the rate is not measured: check network bandwidth, the storage's IOPS, and "
        "how the data is serialized"
    ),
    "small_transfers": (
        "{event}: {mib_per_s} MiB/s, with {mean_bytes} per call and p50 {p50_s}: calls this small "
        "do not measure the bandwidth"
    ),
    "small_transfers.advice": "move more data per call: larger batches, fewer transfers",
    "failed": "{func}: {failed} of {calls} calls ended with an error",
    "failed.advice": "check the exceptions in the log; times of failed calls are included",
}


def phrase(kind: str, values: Mapping[str, Any]) -> str:
    """Return a formatted phrase."""
    return PHRASES[kind].format_map(values)
