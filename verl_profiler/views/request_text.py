"""Requests as text for a terminal: a table of many, and one as a timeline."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.reading.tables.tables import REQUEST_PARTS
from verl_profiler.render.text import align
from verl_profiler.render.visible import visible
from verl_profiler.units import seconds
from verl_profiler.views.text_tables import bar_table, facts, fitting_table

__all__ = ["request_lines", "request_table"]

Rows = Sequence[Mapping[str, Any]]

_PARTS = (*REQUEST_PARTS, "other")
_STAGES = ("queue", "prefill", "decode")
# Columns of what is noted beside a bar.
_NOTE = 34

# How deep an event lies, which is also the order of events that start at the same time.
_INSIDE = {
    "request": 0,
    "agent_loop": 1,
    "prompt_build": 2,
    "turn": 2,
    "engine_call": 3,
    "token_merge": 3,
    "tool_parsing": 3,
    "tool_execution": 3,
    "postprocess": 1,
    "reward": 2,
    "tq_put": 2,
    "tq_get": 2,
    "tq_meta": 2,
    "tq_clear": 2,
}
_ELSEWHERE = 4


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
    columns += [
        "status",
        "error",
        "turns",
        "tool_calls",
        "generated_tokens",
        "reward",
        *parts,
        *stages,
    ]
    about = f"The {len(rows)} slowest of {counts['finished'] + counts['unfinished']:,} requests"
    if counts["unfinished"]:
        about += f"; {counts['unfinished']:,} unfinished, listed last"
    table, left_out = fitting_table(rows, columns, "request_breakdown", width)
    notes: list[str] = []
    if any(row["overlap_s"] for row in rows):
        notes.append(
            "The components of some requests add up to more than their time, because they made concurrent calls."
        )
    if any(row["queue_s"] is not None for row in rows):
        notes.append("queue, prefill and decode are components of engine.")
    if left_out:
        notes.append(f"Left out to fit {width} columns: {', '.join(left_out)} (--width, --json).")
    notes.append("--request ID shows one in detail.")
    wrapped = textwrap.wrap(" ".join(notes), width or 10_000)
    return "\n".join([about + ".", "", table, "", *wrapped])


def request_lines(request: Mapping[str, Any], timeline: Rows, *, width: int = 110) -> str:
    """Return one request: its attributes, its components, and a bar for each event.

    Args:
        request: A row of `request_breakdown`.
        timeline: The rows of `request_timeline` of the same request.
        width: Columns of the terminal.
    """
    blocks = [_about(request), _parts(request), _bars(request, timeline, width)]
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


def _bars(request: Mapping[str, Any], timeline: Rows, width: int) -> str:
    whole = request["duration_s"] or request["seen_s"] or 0
    rows = sorted(
        (row for row in timeline if row["event"] != "request"),
        key=lambda row: (row["begin_s"], _INSIDE.get(row["event"], _ELSEWHERE), -row["duration_s"]),
    )
    if not rows or not whole:
        return ""
    lines: list[tuple[str, float, float, str]] = []
    for row in rows:
        name = "  " * max(_INSIDE.get(row["event"], _ELSEWHERE) - 1, 0) + row["event"]
        if row["event"] == "turn" and row["turn"] is not None:
            name += f" {row['turn']}"
        lines.append((name, row["begin_s"], row["duration_s"], _note(row)))
        begin = row["begin_s"]
        for stage in _STAGES:
            length = row[f"{stage}_s"] if row["event"] == "engine_request" else None
            if length is not None:
                lines.append((f"        {stage}", begin, length, ""))
                begin += length
    texts = [[name, seconds(begin), seconds(length)] for name, begin, length, _ in lines]
    used = sum(max(len(line[at]) for line in texts) for at in range(3))
    room = max(width - used - min(max(len(line[3]) for line in lines), _NOTE) - 9, 16)
    shown = [
        [
            *text,
            _bar(begin / whole, length / whole, room),
            textwrap.shorten(note, _NOTE, placeholder="…"),
        ]
        for text, (_, begin, length, note) in zip(texts, lines, strict=True)
    ]
    head = ["", "begins", "takes", "0 s".ljust(room - len(seconds(whole))) + seconds(whole), ""]
    return align([head, *shown], left=(0, 3, 4), indent="")


def _note(row: Mapping[str, Any]) -> str:
    what = row["name"] if row["event"] == "engine_request" else row["what"]
    notes = [str(what)] if what else []
    if row["event"] in ("engine_call", "engine_request") and row["tokens"] is not None:
        notes.append(f"{row['tokens']:,} tokens")
    if row["status"] is not None:
        notes.append(" ".join(str(each) for each in (row["status"], row["error"]) if each))
    return ", ".join(notes)


def _bar(begin: float, length: float, room: int) -> str:
    """Draw a part of 0 to 1; shorter than half a column is a thin line."""
    first = min(int(min(max(begin, 0.0), 1.0) * room), room - 1)
    return (" " * first + ("█" * round(length * room) or "▏"))[:room]
