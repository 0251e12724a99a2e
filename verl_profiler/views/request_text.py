"""Requests as text for a terminal: a table of many, and one with its events."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.events.vocabulary import depth
from verl_profiler.reading.tables.schemas import REQUEST_PARTS
from verl_profiler.render.visible import visible
from verl_profiler.units import seconds
from verl_profiler.views.text_tables import Rows, bar_table, facts, fitting_table

_PARTS = (*REQUEST_PARTS, "other")
_STAGES = ("queue", "prefill", "decode")
_EVENTS = (
    *("event", "begin_s", "duration_s", "what", "tokens", "queue_s", "prefill_s", "decode_s"),
    *("status", "error"),
)


def request_table(
    rows: Rows, counts: Mapping[str, int], *, several: bool = False, width: int | None = None
) -> str:
    """Return a table of the slowest requests, with a column per component.

    Args:
        rows: Of `request_breakdown`.
        counts: `finished` and `unfinished` requests of the selection.
        several: Add a column with the run.
        width: Columns of the terminal; what does not fit is left out and named below the table.
    """
    parts = [f"{part}_s" for part in _PARTS if any(row[f"{part}_s"] for row in rows)]
    parts.sort(key=lambda part: -sum(row[part] or 0 for row in rows))
    stages = [f"{stage}_s" for stage in _STAGES]
    columns = ["request_id", "name", "step", "duration_s", *(["run"] if several else [])]
    columns += ["seen_s"] if counts["unfinished"] else []
    # The last ones do not fit into a narrow terminal.
    columns += ["status", "error", *parts[:2], "turns", "tool_calls", "generated_tokens", "reward"]
    columns += [*parts[2:], *stages]
    about = f"The {len(rows)} slowest of {counts['finished'] + counts['unfinished']:,} requests"
    if counts["unfinished"]:
        about += f"; {counts['unfinished']:,} unfinished, listed last"
    table, left_out = fitting_table(rows, columns, "request_breakdown", width)
    notes = [
        "Concurrent calls count each. queue, prefill and decode are components of engine.",
        "--request ID shows one in detail.",
    ]
    wrapped = textwrap.wrap(" ".join(notes), width or 10_000)
    return "\n".join([about + ".", "", table, "", *wrapped]) + _left_out(left_out, width)


def request_lines(request: Mapping[str, Any], timeline: Rows, *, width: int | None = 110) -> str:
    """Return one request: its attributes, its components, and its events.

    Args:
        request: A row of `request_breakdown`.
        timeline: The rows of `request_timeline` of the same request.
        width: Columns of the terminal.
    """
    blocks = [_about(request), _parts(request), _events(timeline, width)]
    return "\n\n".join(block for block in blocks if block)


def _about(request: Mapping[str, Any]) -> str:
    who = f"request {request['request_id'] or '(no id)'}: {request['name']}, step {request['step']}"
    who += ", validation" if request["validate"] else ""
    prompt = facts(request, ("sample", "session"))
    who += f", {prompt}" if prompt else ""
    columns = (
        "duration_s",
        "turns",
        "tool_calls",
        "prompt_tokens",
        "generated_tokens",
        "tool_tokens",
    )
    what = facts(request, (*columns, "reward", "status", "error"))
    if not request["finished"]:
        seen = f"unfinished; last event {seconds(request['seen_s'])} after its start"
        what = f"{seen}, {what}" if what else seen
    return f"{visible(who)}\n{visible(what)}"


def _parts(request: Mapping[str, Any]) -> str:
    """Return the components as bars, with those of the engine below it."""
    parts: list[tuple[str, float, str]] = []
    for part in _PARTS:
        if request[f"{part}_s"] is None:
            continue
        parts.append((part, request[f"{part}_s"], ""))
        if part == "engine" and request["queue_s"] is not None:
            parts += [
                (f"  {each}", request[f"{each}_s"] or 0.0, "") for each in (*_STAGES, "outside")
            ]
    if not parts:
        return ""
    more = facts(
        {key: request[key] or None for key in ("overlap_s", "stalled_s")},
        ("overlap_s", "stalled_s"),
    )
    whole = request["duration_s"] or request["seen_s"] or sum(spent for _, spent, _ in parts)
    return bar_table("components" + f" ({more})" * bool(more), parts, whole or 1.0)


def _events(timeline: Rows, width: int | None) -> str:
    """Return each event below the one that contains it."""
    rows = [
        {
            **row,
            "event": "  " * max(depth(row["event"]) - 1, 0)
            + row["event"]
            + (f" {row['turn']}" if row["event"] == "turn" and row["turn"] is not None else ""),
            "what": row["name"] if row["event"] == "engine_request" else row["what"],
        }
        for row in sorted(
            timeline, key=lambda row: (row["begin_s"], depth(row["event"]), -row["duration_s"])
        )
        if row["event"] != "request"
    ]
    table, left_out = fitting_table(rows, _EVENTS, "request_timeline", width)
    return table + _left_out(left_out, width)


def _left_out(columns: Sequence[str], width: int | None) -> str:
    """Name the columns that a table left out; empty without any."""
    named = f"Left out to fit {width} columns: {', '.join(columns)} (--json has them)."
    return "\n" + "\n".join(textwrap.wrap(named, width or 10_000)) if columns else ""
