"""One step of the summary as text: its phases, requests, engine, tools, workers and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from verl_profiler.events.vocabulary import COMPUTING_ROLES
from verl_profiler.render.text import align
from verl_profiler.render.visible import visible
from verl_profiler.units import seconds, share
from verl_profiler.views.text_tables import cell, facts

__all__ = ["PART_NAMES", "lag_weight", "of_step", "of_which", "step_block", "step_name"]

Rows = Sequence[Mapping[str, Any]]


class _Lines(NamedTuple):
    """Lines of a step's block: one per row, or one of all rows where they have a single value.

    Args:
        label: Before the first of them.
        table: The rows of the step, the largest first.
        name: The column that names a row.
        columns: What is shown of it.
        most: Rows.
        recorded: Events without which nothing of it can be known.
    """

    label: str
    table: str
    name: str
    columns: tuple[str, ...]
    most: int = 5
    recorded: AbstractSet[str] = frozenset()


_QUANTILES = ("p50_s", "p95_s", "max_s")
_LINES = (
    _Lines(
        "requests", "request_times", "",
        ("requests", "unfinished", "failed", "p50_s", "p95_s", "p99_s", "max_s"),
        recorded={"request"},
    ),
    _Lines(
        "turns", "request_times", "",
        ("mean_turns", "max_turns", "generated_tokens", "tool_tokens"),
    ),
    _Lines("components", "request_parts", "part", ("share",), 10),
    _Lines("tail", "step_tail", "", ("after_p80_s", "after_p95_s", "poll_s")),
    _Lines(
        "slowest", "slowest_requests", "request_id",
        ("duration_s", "name", "turns", "engine_s", "tool_s", "other_s"), 1,
    ),
    _Lines(
        "engine", "engine_times", "",
        ("calls", *_QUANTILES, "queue_s", "prefill_s", "decode_s", "outside_s", "engine_tokens_per_s"),
        recorded={"engine_call"},
    ),
    _Lines(
        "tools", "tool_times", "tool", ("calls", "failed", "total_s", *_QUANTILES),
        recorded={"tool_call", "tool_execution"},
    ),
    _Lines("workers", "rollout_balance", "name", ("busy_s", "behind_s"), 1),
    _Lines("ranks", "rank_balance", "event", ("slowest", "slowest_s", "median_s", "fastest_s")),
    _Lines(
        "weight sync", "weight_sync", "",
        ("trainer_s", "slowest_rank", "slowest_rank_s", "transfer_s", "release_s", "resume_s"),
    ),
    _Lines(
        "TransferQueue", "transfer_totals", "event",
        ("role", "calls", "size_bytes", "total_s", "max_s"),
    ),
    _Lines("event loop", "loop_lags", "name", ("lags", "max_s", "total_s"), 3),
    _Lines(
        "memory peak", "memory_peaks", "role",
        ("used_bytes", "total_bytes", "reserved_bytes", "allocated_bytes", "name", "at"),
    ),
    _Lines(
        "profiler", "profiler_cost", "",
        ("costliest", "costliest_s", "share", "wrapper_s", "processes",
         "events", "dropped"),
        recorded={"profiler_cost"},
    ),
)  # fmt: skip


def step_block(
    row: Mapping[str, Any], tables: Mapping[str, Rows], about: Mapping[str, Any], *, several: bool
) -> str:
    """Write everything about one step."""
    phases = [
        [phase["phase"], seconds(phase["duration_s"]), share(phase["share"])]
        for phase in of_step(tables["step_phases"], row)
    ] or [["phases", "not recorded (no trainer events)"]]
    length, seen = seconds(row["duration_s"]), f"({seconds(row['seen_s'])} seen)"
    title = f"{step_name(row, several=several)}  {seen if row['duration_s'] is None else length}"
    lines = [line for each in _LINES for line in _lines(each, row, tables, about["recorded"])]
    return "\n".join([visible(title), align(phases, left=(0,)), *map(visible, lines)])


def _lines(
    of: _Lines, step: Mapping[str, Any], tables: Mapping[str, Rows], recorded: AbstractSet[str]
) -> list[str]:
    rows = of_step(tables[of.table], step)
    if of.table == "loop_lags":
        waiting = [row for row in rows if row["role"] not in COMPUTING_ROLES]
        rows = sorted(waiting, key=lag_weight, reverse=True)
    texts = [
        (f"{cell(row, of.name)}: " if of.name else "")
        + facts(row, of.columns, of.table, missing=bool(of.recorded))
        for row in rows[: of.most]
    ]
    if len(of.columns) == 1:
        (column,) = of.columns
        texts = [", ".join(f"{row[of.name]} {cell(row, column)}" for row in rows)] if rows else []
    elif len(rows) > of.most > 1:
        texts.append(f"and {len(rows) - of.most} more")
    if not rows and of.recorded and not of.recorded & recorded:
        texts = ["not recorded"]
    labels = [of.label, *[""] * len(texts)]
    return [f"  {label:<14}{text}" for label, text in zip(labels, texts, strict=False)]


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
        Text to append, with the longest single call where it is of that part; empty if no part is known.
    """
    spent = {part: request.get(key) or 0.0 for key, part in PART_NAMES.items()}
    most = max(spent, key=lambda part: spent[part])
    longest, turn = request["longest"], request["longest_turn"]
    if longest is not None and most == ("engine calls" if longest == "engine" else "tools"):
        named = {"engine": "one engine call", "tool": "tools"}
        what = named.get(longest, f"tool {longest}") + ("" if turn is None else f" (turn {turn})")
        return f", {seconds(request['longest_s'])} of it in {what}"
    return f", {seconds(spent[most])} of it in {most}" if spent[most] else ""


def lag_weight(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Return what sorts rows of lags: a stall where requests wait matters most, then a long one."""
    waits = row["role"] in ("agent_loop", "engine", "reward", "trainer")
    return waits and (row["step"] or 0) > 0, row["max_s"]


def of_step(rows: Rows, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of the same run and step, without validation."""
    return [
        each
        for each in rows
        if (each["run"], each["step"]) == (row["run"], row["step"]) and not each.get("validate")
    ]


def step_name(row: Mapping[str, Any], *, several: bool) -> str:
    """Return the step's name, with its run if there are several."""
    return f"step {row['step']}" + (f" of {row['run']}" if several else "")
