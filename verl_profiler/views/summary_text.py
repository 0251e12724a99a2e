"""The summary of a run as text for a terminal: the conclusion first, then a line per step; and one step in tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.selection import grouped
from verl_profiler.events.vocabulary import COMPUTING_ROLES
from verl_profiler.render.visible import visible
from verl_profiler.units import seconds
from verl_profiler.views.columns import heading
from verl_profiler.views.step_rows import step_rows
from verl_profiler.views.text_tables import Rows, cell, table_text, warnings

# Of more steps, the longest have a line.
_LINES = 60
_QUANTILES = ("p50_s", "p95_s", "max_s")


def summary(tables: Mapping[str, Rows], about: Mapping[str, Any], problems: Sequence[str]) -> str:
    """Write what happened in a run.

    Args:
        tables: The rows of the analyses, by name.
        about: `runs` (labels), `recorded` (names of events that occur), `head`, `findings` and `totals`
            (their texts), `notes` (of the reader).
        problems: Plain sentences; they come last.
    """
    several = len(about["runs"]) > 1
    steps: Rows = step_rows(tables)
    steps = [row for row in steps if row["step"] or row["requests"] or row["finished"]] or steps
    blocks = [about["head"], about["findings"], about["totals"]]
    blocks.append(_step_lines(steps, several=several))
    blocks += [visible(f"Note: {note}") for note in about["notes"]]
    blocks.append(warnings(problems))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _length(row: Mapping[str, Any]) -> float:
    return row["duration_s"] or row["seen_s"]


def _step_lines(steps: Rows, *, several: bool) -> str:
    columns = [
        *(["run"] if several else []),
        *("step", "duration_s", "gen_s", "requests", *_QUANTILES, "after_p80_s"),
        *("longest_phase", "longest_share"),
    ]
    title = "steps (after P80: from the end of 80 % of the requests to the last)"
    note = ""
    if len(steps) > _LINES:
        title += f"; the {_LINES} longest of {len(steps)}, --steps FIRST:LAST has a line for each"
        longest = {id(row) for row in sorted(steps, key=_length)[-_LINES:]}
        steps = [row for row in steps if id(row) in longest]
    if any(not row["finished"] for row in steps):
        columns.append("seen_s")
        note = "\n  without a duration: the step has no end, or its trainer was not recorded"
    return table_text(title, steps, columns, "step_times", _LINES) + note


# Rows of a table.
_MOST = 10
_TABLES = {
    "request_parts": ("components", ("part", "total_s", "share")),
    "request_times": (
        "requests",
        ("requests", "unfinished", "failed", "p50_s", "p95_s", "p99_s", "max_s", "mean_turns",
         "max_turns", "generated_tokens", "tool_tokens"),
    ),
    "step_tail": ("tail", ("after_p80_s", "after_p95_s", "poll_s")),
    "slowest_requests": (
        "slowest requests",
        ("request_id", "duration_s", "name", "turns", "engine_s", "tool_s", "other_s"),
    ),
    "engine_times": (
        "engine",
        ("calls", *_QUANTILES, "queue_s", "prefill_s", "decode_s", "outside_s", "engine_tokens_per_s"),
    ),
    "tool_times": ("tools", ("tool", "calls", "failed", "total_s", *_QUANTILES)),
    "rollout_balance": ("workers", ("name", "busy_s", "behind_s")),
    "rank_balance": ("ranks", ("event", "slowest", "slowest_s", "median_s", "fastest_s")),
    "weight_sync": (
        "weight sync",
        ("trainer_s", "slowest_rank", "slowest_rank_s", "transfer_s", "release_s", "resume_s"),
    ),
    "transfer_totals": (
        "TransferQueue", ("event", "role", "calls", "size_bytes", "total_s", "max_s")
    ),
    "loop_lags": ("event-loop stalls", ("name", "lags", "max_s", "total_s")),
    "memory_peaks": (
        "memory peak",
        ("role", "used_bytes", "total_bytes", "reserved_bytes", "allocated_bytes", "name", "at"),
    ),
    "profiler_cost": (
        "profiler",
        ("costliest", "costliest_s", "share", "wrapper_s", "processes", "events", "dropped"),
    ),
}  # fmt: skip
# Events without which nothing of a table can be known.
_EVENTS = {
    "request_times": {"request"},
    "engine_times": {"engine_call"},
    "tool_times": {"tool_call", "tool_execution"},
    "profiler_cost": {"profiler_cost"},
}


def step_tables(tables: Mapping[str, Rows], about: Mapping[str, Any]) -> str:
    """Write what is known about a step; the last block names what was not recorded.

    Args:
        tables: The rows of the analyses of that step, by name.
        about: `runs`, and `recorded`, the names of events that occur.
    """
    blocks: list[str] = []
    absent = [] if tables["step_phases"] else ["phases (no trainer events)"]
    which = ["run"] if len(about["runs"]) > 1 else []
    for name, (title, columns) in _TABLES.items():
        rows = [row for row in tables[name] if not row.get("validate")]
        if name == "loop_lags":
            waiting = [row for row in rows if row["role"] not in COMPUTING_ROLES]
            rows = sorted(waiting, key=lag_weight, reverse=True)
        kept = [row for own in grouped(rows, "run").values() for row in own[:_MOST]]
        some = f", {len(kept)} of {len(rows)} rows" if len(kept) < len(rows) else ""
        blocks.append(table_text(title + some, kept, (*which, *columns), name, len(kept)))
        if name in _EVENTS and not rows and not _EVENTS[name] & about["recorded"]:
            absent.append(title)
        elif name in _EVENTS:
            unknown = [each for each in columns if all(cell(row, each) == "-" for row in rows)]
            absent += [f"{title}: {heading(each, name)}" for each in unknown if rows]
    blocks.append(f"not recorded: {', '.join(absent)}" if absent else "")
    return "\n\n".join(block for block in blocks if block) + "\n"


PART_NAMES = {
    "engine_s": "engine calls",
    "tool_s": "tools",
    "prompt_build_s": "building the prompt",
    "tool_parsing_s": "parsing tool calls",
    "token_merge_s": "merging tokens",
    "postprocess_s": "postprocessing",
    "reward_s": "its reward",
    "other_s": "unattributed time",
}


def of_which(request: Mapping[str, Any]) -> str:
    """Describe what a row of `slowest_requests` consists of: its largest part.

    Returns:
        Text to append; empty if no part is known.
    """
    spent = {part: request.get(key) or 0.0 for key, part in PART_NAMES.items()}
    most = max(spent, key=lambda part: spent[part])
    return f", {seconds(spent[most])} of it in {most}" if spent[most] else ""


def lag_weight(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Return what sorts rows of lags: a stall where requests wait matters most, then a long one."""
    waits = row["role"] in ("agent_loop", "engine", "reward", "trainer")
    return waits and (row["step"] or 0) > 0, row["max_s"]
