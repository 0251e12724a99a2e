"""Phrases of the TransferQueue report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_profiler.reading.formats.tq_log import Note

__all__ = ["PHRASES", "note_text", "phrase"]

# Data-quality warnings first, then findings, each with the guide's advice.
PHRASES = {
    "doubled": "{number} lines occur more than once in the logs; each is counted once",
    "missing": (
        "{number} lines are missing: Ray merged similar lines of several processes into "
        "one ([repeated Nx across cluster]) {times} times ({ends} of the missing lines are ends "
        "of calls). Counts and totals are too low accordingly. Set RAY_DEDUP_LOGS=0 for the run, "
        "or analyze its run directory, which has all calls"
    ),
    "unreadable": "{number} unreadable lines were left out:",
    "line": "  {line}",
    "more": "  and {number} more like these",
    "unfinished": (
        "{number} calls of {func} did not end; their last line is {stage}. They are "
        "counted as calls, but excluded from times"
    ),
    "open_transfers": "{number} gets and puts did not end; they are excluded from times and rates",
    "estimated": (
        "{number} calls lack stage lines: get, compute and put were derived from "
        "the percentages in the last line, with a resolution of 0.01 % of the call"
    ),
    "verl_rows": (
        "{number} calls are known only from verl's own cost time lines: get and put are "
        "exact, compute and total times have the log's resolution of 1 ms, and functions "
        "without put have no total"
    ),
    "verl_left_out": (
        "{number} calls in verl's own cost time lines were also traced; they are counted once"
    ),
    "inferred_steps": (
        "{number} calls and transfers have no step; each was assigned to the step during which "
        "it ended, by the log's step: lines"
    ),
    "unplaced": (
        "{number} timestamps are from the processes' own clocks, which differ between hosts: "
        "their lines have no time of day"
    ),
    "sampled": (
        "{func}: 1 in {number} calls was traced. Counts, totals and shares are scaled "
        "accordingly; quantiles are those of the traced calls"
    ),
    "both": (
        "A run directory and a log were given; they may contain the same calls and are shown separately"
    ),
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


def note_text(note: Note) -> str:
    """Return a note as a sentence."""
    return phrase(note.kind, note.values)


def phrase(kind: str, values: Mapping[str, Any]) -> str:
    """Return a formatted phrase."""
    return PHRASES[kind].format_map(values)
