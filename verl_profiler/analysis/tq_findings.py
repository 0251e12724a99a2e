"""What the guide would investigate: high overhead, unstable times, low throughput, failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_profiler.analysis.explain.rules import TEXTS
from verl_profiler.analysis.selection import Rows, Steps, in_steps, summed
from verl_profiler.analysis.tq import FAIR_MIB_S, tq_functions, tq_throughput
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import rate, seconds, share, size

HIGH_OVERHEAD = 0.30
# The guide names no number: the standard deviation of a stage over its mean, of this many calls.
UNSTABLE = 0.5
_ENOUGH_CALLS = 10
# Below this size a call's fixed costs, not the bandwidth, determine its measured rate.
SMALL_BYTES = 1 << 20
# Columns of `tq_functions` that a high overhead and an unstable stage have.
_OVERHEAD = ("total_s", "overhead_share", "get_share", "put_share", "alone_share")
_STAGE = ("calls", "mean_s", "p50_s", "p95_s", "max_s", "variation")


def tq_findings(tables: Tables, steps: Steps = None, *, function: str | None = None) -> Rows:
    """Compare functions and transfers with the guide's bounds.

    Returns:
        Table `tq_findings`: one row per finding, most important first (of high overheads, the
        one that takes most time), with the numbers that it rests on.
    """
    functions = tq_functions(tables, steps, function=function)
    rates = tq_throughput(tables, steps, function=function)
    working = (row for row in functions if not row["waits"])
    wholes: dict[str, float] = summed(working, "total_s", "run")
    found = [each for row in functions for each in _of_function(row, wholes.get(row["run"], 0.0))]
    found += [_of_rates(row) for row in rates if row["caller"] is None and row["speed"] == "poor"]
    for row in found:
        if row["finding"] == "unstable":
            row.update(_worst_step(tables, steps, row))
    order = ("overhead", "failed", "unstable", "low_throughput", "small_transfers")
    return sorted(
        found,
        key=lambda row: (row["run"], order.index(row["finding"]), -row.get("tq_s", row["value"])),
    )


def _of_function(row: Mapping[str, Any], whole_s: float) -> Iterator[dict[str, Any]]:
    def found(finding: str, value: float, threshold: float, **more: Any) -> dict[str, Any]:
        about = {"run": row["run"], "func": row["func"], "event": None}
        return {**about, "finding": finding, "value": value, "threshold": threshold, **more}

    overhead = row["overhead_share"]
    if overhead is not None and overhead > HIGH_OVERHEAD and not row["waits"]:
        tq_s = overhead * row["total_s"]
        more = {key: row[key] for key in _OVERHEAD}
        yield found(
            "overhead", overhead, HIGH_OVERHEAD, tq_s=tq_s, of_all_share=tq_s / whole_s, **more
        )
    if row["failed"]:
        more = {key: row[key] for key in ("failed", "calls")}
        yield found("failed", row["failed"] / row["calls"], 0, **more)
    for stage in ("get", "put"):
        variation = row[f"{stage}_variation"]
        measured = min(row["traced"], row[f"{stage}_calls"])
        if variation is not None and variation > UNSTABLE and measured >= _ENOUGH_CALLS:
            more = {key: row[f"{stage}_{key}"] for key in _STAGE}
            yield found("unstable", variation, UNSTABLE, stage=stage, **more)


def _worst_step(tables: Tables, steps: Steps, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step in which the stage took longest on average; Nones where none is known."""
    column = f"{row['stage']}_us"
    found = tables.row(
        f"""
        SELECT step AS worst_step, avg({column}) / 1e6 AS worst_s FROM tq_calls
        WHERE run = $run AND func = $func AND step IS NOT NULL AND {in_steps(steps)}
        GROUP BY step HAVING worst_s IS NOT NULL ORDER BY worst_s DESC, step LIMIT 1
        """,
        {"run": row["run"], "func": row["func"]},
    )
    return found or {"worst_step": None, "worst_s": None}


def _of_rates(row: Mapping[str, Any]) -> dict[str, Any]:
    small = row["mean_bytes"] < SMALL_BYTES
    keys = ("calls", "size_bytes", "mean_bytes", "mib_per_s", "p5_mib_per_s", "p50_s", "poor_share")
    return {
        "run": row["run"],
        "func": None,
        "event": row["event"],
        "finding": "small_transfers" if small else "low_throughput",
        # The slower, the more important.
        "value": FAIR_MIB_S - row["mib_per_s"],
        "threshold": FAIR_MIB_S,
        **{key: row[key] for key in keys},
    }


def finding_lines(row: Mapping[str, Any]) -> list[str]:
    """Return a finding as a sentence, and further sentences with its evidence."""
    shown = {name: _shown(name, value) for name, value in row.items()}
    finding = row["finding"]
    lines = [TEXTS[finding, "tq"].sentence.format_map(shown)]
    if row.get("alone_share") is not None and row["alone_share"] < 0.8 * row["value"]:
        lines.append(TEXTS[finding, "tq alone"].sentence.format_map(shown))
    if row.get("worst_step") is not None:
        lines.append(TEXTS[finding, "tq worst"].sentence.format_map(shown))
    return lines


def _shown(name: str, value: Any) -> str:
    """Write a value of a finding by its name."""
    if value is None:
        # A quantile of so few calls is none.
        return "too few" if name in ("p50_s", "p95_s") else "-"
    if name == "stage":
        return str(value).upper()
    if name.endswith("share") or name == "variation" or (name == "threshold" and value < 1):
        return share(value)
    if name.endswith("mib_per_s"):
        return rate(value)
    if name.endswith("_bytes"):
        return size(value)
    if name.endswith("_s"):
        return seconds(value)
    return f"{value:,}" if name in ("calls", "failed") else str(value)
