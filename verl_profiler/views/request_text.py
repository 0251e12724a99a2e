"""Requests as text for a terminal: a table of many, and one as a timeline."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.reading.tables.tables import REQUEST_PARTS
from verl_profiler.render.text import align
from verl_profiler.render.visible import visible
from verl_profiler.units import seconds, share

__all__ = ["request_lines", "request_table"]

Rows = Sequence[Mapping[str, Any]]

_PARTS = (*REQUEST_PARTS, "other")
_SHORT = {
    "prompt_build": "prompt",
    "tool_parsing": "parsing",
    "token_merge": "merge",
    "postprocess": "post",
}
_EIGHTHS = " ▏▎▍▌▋▊▉█"

# Order of events that start at the same time.
_INSIDE = {
    "request": 0,
    "agent_loop": 1,
    "prompt_build": 2,
    "turn": 2,
    "engine_call": 3,
    "token_merge": 3,
    "tool_parsing": 3,
    "tool_execution": 3,
    "server_acquire": 4,
    "engine_request": 4,
    "tool_call": 4,
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
        width: Columns of the terminal; columns that do not fit are left out and named below the table.
    """
    parts = [part for part in _PARTS if any(row[f"{part}_s"] for row in rows)]
    divided = any(row["queue_s"] is not None for row in rows)
    inner = ("queue", "prefill", "decode") if divided else ()
    head = ["request", "worker", "step", "turns", "tools", "tokens", "time"]
    lines = [
        [
            *(["run"] if several else []),
            *head,
            *(_SHORT.get(part, part) for part in parts),
            *inner,
            "score",
            "status",
        ]
    ]
    lines += [
        [
            *([str(row["run"])] if several else []),
            (row["request_id"] or "(no id)")[:8],
            str(row["name"]),
            _text(row["step"]),
            _text(row["turns"]),
            _text(row["tool_calls"]),
            _text(row["generated_tokens"]),
            seconds(row["duration_s"]) if row["finished"] else f">{seconds(row['seen_s'])}",
            *(seconds(row[f"{part}_s"]) for part in parts),
            *(seconds(row[f"{part}_s"]) for part in inner),
            "-" if row["reward"] is None else f"{row['reward']:.3g}",
            _state(row),
        ]
        for row in rows
    ]
    table, left_out = _fitting(lines, parts, inner, rows, width)
    finished, unfinished = counts["finished"], counts["unfinished"]
    about = f"The {len(rows)} slowest of {finished + unfinished:,} requests"
    if unfinished:
        about += f"; {unfinished:,} unfinished, listed last"
    notes = ["--request ID shows one in detail."]
    if left_out:
        notes.insert(
            0, f"Left out to fit {width} columns: {', '.join(left_out)} (--width, --json)."
        )
    if divided and not set(inner) <= set(left_out):
        notes.insert(0, "queue, prefill and decode are components of engine.")
    if any(row["overlap_s"] for row in rows):
        notes.insert(
            0,
            "The components of some requests add up to more than their time, because they made concurrent calls.",
        )
    wrapped = textwrap.wrap(" ".join(notes), width or 10_000)
    return "\n".join([about + ".", "", table, "", *wrapped])


def _fitting(
    lines: list[list[str]],
    parts: Sequence[str],
    inner: Sequence[str],
    rows: Rows,
    width: int | None,
) -> tuple[str, list[str]]:
    """Return the table without the columns that do not fit, and their names.

    The engine's stages go first, then the components that take least, then counts.
    """
    totals = {_SHORT.get(part, part): sum(row[f"{part}_s"] or 0 for row in rows) for part in parts}
    least = sorted(totals, key=lambda name: totals[name])
    order = [*reversed(inner), *least[:-1], "score", "tools", "tokens", "turns", "run", "status"]
    left_out: list[str] = []
    if not any(line[-1] for line in lines[1:]):
        lines = [line[:-1] for line in lines]
    while True:
        kept = [place for place, name in enumerate(lines[0]) if name not in left_out]
        shown = [[line[place] for place in kept] for line in lines]
        left = [
            i for i, name in enumerate(shown[0]) if name in ("run", "request", "worker", "status")
        ]
        table = align(shown, left=tuple(left), indent="")
        droppable = [name for name in order if name in shown[0]]
        widest = max(map(len, table.splitlines()))
        if width is None or widest <= width or not droppable:
            return table, left_out
        left_out.append(droppable[0])


def request_lines(request: Mapping[str, Any], timeline: Rows, *, width: int = 110) -> str:
    """Return one request: its attributes, its components, and a bar for each event.

    Args:
        request: A row of `request_breakdown`.
        timeline: The rows of `request_timeline` of the same request.
        width: Columns of the terminal.
    """
    blocks = [_about(request), _parts(request, width), _bars(request, timeline, width)]
    return "\n\n".join(block for block in blocks if block)


def _about(request: Mapping[str, Any]) -> str:
    who = f"request {request['request_id'] or '(no id)'}: {request['name']}, step {request['step']}"
    if request["validate"]:
        who += ", validation"
    if request["sample"] is not None:
        who += f", sample {request['sample']}"
    if request["session"] is not None:
        who += f", session {request['session']}"
    if request["finished"]:
        what = seconds(request["duration_s"])
    else:
        what = f"unfinished; last event {seconds(request['seen_s'])} after its start"
    facts = [what]
    for key, word in (("turns", "turn"), ("tool_calls", "tool call")):
        if request[key] is not None:
            facts.append(f"{request[key]} {word}{'' if request[key] == 1 else 's'}")
    for key, word in (
        ("prompt_tokens", "prompt tokens"),
        ("generated_tokens", "generated tokens"),
        ("tool_tokens", "tool tokens"),
    ):
        if request[key] is not None:
            facts.append(f"{request[key]:,} {word}")
    if request["reward"] is not None:
        facts.append(f"reward {request['reward']:.4g}")
    if _state(request):
        facts.append(_state(request))
    return visible(who) + "\n" + visible(", ".join(facts))


def _parts(request: Mapping[str, Any], width: int) -> str:
    """Return the components as bars, with those of the engine below it."""
    whole = request["duration_s"] or request["seen_s"] or 0
    names: list[tuple[str, str]] = []
    for part in _PARTS:
        if request[f"{part}_s"] is None:
            continue
        names.append((part, part))
        if part == "engine" and request["queue_s"] is not None:
            names += [(f"  {inner}", inner) for inner in ("queue", "prefill", "decode", "outside")]
    if not names:
        return ""
    room = max(min(width - 44, 60), 10)
    lines = [
        [
            label,
            seconds(request[f"{part}_s"]),
            share(request[f"{part}_s"] / whole) if whole else "-",
            _bar(0.0, request[f"{part}_s"] / whole if whole else 0.0, room),
        ]
        for label, part in names
    ]
    if request["overlap_s"]:
        lines.append(["overlap", f"-{seconds(request['overlap_s'])}", "", ""])
    if request["stalled_s"]:
        lines.append(["(event loop stalled)", seconds(request["stalled_s"]), "", ""])
    return _columns(lines)


def _bars(request: Mapping[str, Any], timeline: Rows, width: int) -> str:
    whole = request["duration_s"] or request["seen_s"] or 0
    rows = sorted(
        (row for row in timeline if row["event"] != "request"),
        key=lambda row: (row["begin_s"], _INSIDE.get(row["event"], _ELSEWHERE), -row["duration_s"]),
    )
    if not rows or not whole:
        return ""
    lines: list[tuple[str, str, str, Mapping[str, Any], str]] = []
    for row in rows:
        name = "  " * max(_INSIDE.get(row["event"], _ELSEWHERE) - 1, 0) + row["event"]
        if row["event"] == "turn" and row["turn"] is not None:
            name += f" {row['turn']}"
        what = visible(str(row["what"])) if row["what"] else ""
        if row["event"] == "engine_request":
            what = str(row["name"])
        notes = [what] if what else []
        if row["event"] in ("engine_call", "engine_request") and row["tokens"] is not None:
            notes.append(f"{row['tokens']:,} tokens")
        if row["status"] is not None:
            notes.append(" ".join(str(each) for each in (row["status"], row["error"]) if each))
        lines.append(
            (name, seconds(row["begin_s"]), seconds(row["duration_s"]), row, ", ".join(notes))
        )
        if row["event"] == "engine_request" and row["queue_s"] is not None:
            begin = row["begin_s"]
            for part in ("queue", "prefill", "decode"):
                length = row[f"{part}_s"]
                if length is not None:
                    piece = {"begin_s": begin, "end_s": begin + length}
                    lines.append(("        " + part, seconds(begin), seconds(length), piece, ""))
                    begin += length
    names = max(len(line[0]) for line in lines)
    texts = max(len(line[1]) for line in lines) + max(len(line[2]) for line in lines)
    longest = min(max((len(line[4]) for line in lines), default=0), 34)
    room = max(width - names - texts - longest - 9, 16)
    shown = [
        [
            line[0],
            line[1],
            line[2],
            _bar(line[3]["begin_s"] / whole, line[3]["end_s"] / whole, room).ljust(room),
            line[4] if len(line[4]) <= 34 else line[4][:33] + "…",
        ]
        for line in lines
    ]
    head = ["", "begins", "takes", "0 s".ljust(room - len(seconds(whole))) + seconds(whole), ""]
    return _columns([head, *shown])


def _bar(begin: float, end: float, room: int) -> str:
    """Draw an interval of 0 to 1; shorter than an eighth of a column is a thin line."""
    begin, end = min(max(begin, 0.0), 1.0), min(max(end, 0.0), 1.0)
    first = int(begin * room)
    if first >= room:
        first = room - 1
    inside = round((begin * room - first) * 8)
    eighths = max(round((end * room - first) * 8), inside)
    if eighths - inside <= 1:
        return " " * first + ("" if end <= begin else "▏" if inside < 4 else "▕")
    full, rest = divmod(eighths, 8)
    body = "█" * full + (_EIGHTHS[rest] if rest else "")
    # A bar that starts in the second half of a column leaves the first half empty.
    if inside >= 4:
        body = "▐" + body[1:]
    return (" " * first + body)[:room]


def _columns(lines: Sequence[Sequence[str]]) -> str:
    """Align the first four cells; bars and notes are left-aligned."""
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    result: list[str] = []
    for line in lines:
        cells = [
            visible(cell).rjust(width) if place in (1, 2) else visible(cell).ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        result.append("  ".join(cells).rstrip())
    return "\n".join(result)


def _state(row: Mapping[str, Any]) -> str:
    if not row["finished"]:
        return "unfinished"
    return " ".join(str(each) for each in (row["status"], row["error"]) if each)


def _text(value: object) -> str:
    return "-" if value is None else str(value)
