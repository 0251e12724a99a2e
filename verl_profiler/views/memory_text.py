"""The memory report as text for a terminal: faults first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.render.text import align
from verl_profiler.units import seconds, share, size

__all__ = ["memory_text"]

Rows = Sequence[Mapping[str, Any]]

_EFFECTS = {"moved": "", "nothing": "NOTHING", "unknown": "not measured"}
# With more steps than this, only the peak of each phase is shown.
_STEPS = 12


def memory_text(content: Mapping[str, Any]) -> str:
    """Return findings, effects and times of release and resume, and memory by phase.

    Args:
        content: `runs`, `findings`, `tables` and `problems`, as in `verl-profiler memory --json`
            them.
    """
    tables = content["tables"]
    several = len(content["runs"]) > 1
    blocks = [_findings(content["findings"], several=several)]
    if not any(row["fault"] for row in content["findings"]):
        blocks.insert(0, _conclusion(tables))
    blocks.append(_effects(tables["release_effects"], several=several))
    blocks.append(_sleep(tables["sleep_times"], several=several))
    blocks.append(_timeline(tables["memory_timeline"], several=several))
    if content["problems"]:
        blocks.append(
            "\n".join(["data-quality warnings", *(f"  {text}" for text in content["problems"])])
        )
    return "\n\n".join(block for block in blocks if block) + "\n"


def _conclusion(tables: Mapping[str, Rows]) -> str:
    """Return a sentence about memory freed by a release and its cost; empty if unknown."""
    freed = [
        row
        for row in tables["release_effects"]
        if row["event"] == "memory_release" and row["effect"] == "moved"
    ]
    if not freed:
        return ""
    best = max(freed, key=lambda row: row["moved_bytes"])
    text = (
        f"A release frees {size(best['moved_bytes'])} on the device "
        f"({size(best['used_before_bytes'])} -> {size(best['used_after_bytes'])})"
    )
    shares = [row["share"] for row in tables["sleep_times"] if row["share"] is not None]
    if shares:
        text += f"; sleep and wake take {share(sum(shares) / len(shares))} of a step"
    return text + "."


def _findings(rows: Rows, *, several: bool) -> str:
    lines: list[str] = []
    for row in rows:
        mark = "!" if row["fault"] else " "
        lines.append(f"{mark} {row['run'] + ': ' if several else ''}{row['message']}")
        if row["advice"]:
            lines.append(f"    {row['advice']}")
    return "\n".join(lines)


def _effects(rows: Rows, *, several: bool) -> str:
    """Return a table of memory moved, measured around the call itself if possible."""
    called = [row for row in rows if row["source"] == "call"]
    measured = any(row["measured"] for row in called)
    shown = called if measured or not any(row["measured"] for row in rows) else rows
    if not shown:
        return ""
    head = [
        "",
        "tags",
        "in",
        "calls",
        "median",
        "longest",
        "moved on the device",
        "",
        "host, at most",
        "",
    ]
    cells = [head]
    for row in shown:
        moved = _EFFECTS[row["effect"]]
        span = ""
        if row["measured"]:
            moved = f"{size_change(row['moved_bytes'])} {moved}".strip()
            span = f"({size(row['used_before_bytes'])} -> {size(row['used_after_bytes'])})"
        what = row["event"].removeprefix("memory_") + (
            " (from checkpoints)" if row["source"] == "checkpoint" else ""
        )
        cells.append(
            [
                f"{row['run']} {what}" if several else what,
                row["tags"] or "",
                row["role"] or "",
                f"{row['calls']:,}",
                seconds(row["p50_s"]),
                seconds(row["max_s"]),
                moved,
                span,
                f"process {size_change(row['rss_bytes'])}",
                f"machine {size_change(row['host_used_bytes'])}",
            ]
        )
    return "release and resume\n" + align(cells, left=(0, 1, 2, 7))


def size_change(value: float | None) -> str:
    """Return a signed difference of sizes."""
    if value is None:
        return "-"
    return f"-{size(-value)}" if value < 0 else f"+{size(value)}"


def _sleep(rows: Rows, *, several: bool) -> str:
    if not rows:
        return ""
    cells = [["step", "released", "resumed", "calls", "of the step", "slowest"]]
    for row in rows:
        failed = f", {row['failed']} failed" if row["failed"] else ""
        cells.append(
            [
                _step(row, several=several),
                seconds(row["release_s"]),
                seconds(row["resume_s"]),
                f"{row['releases']} + {row['resumes']}{failed}",
                share(row["share"]),
                row["slowest"],
            ]
        )
    return "time in sleep and wake, in the slowest process\n" + align(cells, left=(0, 5))


def _timeline(rows: Rows, *, several: bool) -> str:
    """Return memory by phase of each step, or with many steps, the peak of each phase."""
    steps = {(row["run"], row["step"]) for row in rows}
    title = "memory by phase: peaks"
    if len(steps) > _STEPS:
        title += f" of {len(steps)} steps together"
        best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        for row in rows:
            key = (row["run"], row["phase"], row["role"])
            if key not in best or _fullness(row) > _fullness(best[key]):
                best[key] = row
        rows = list(best.values())
    if not rows:
        return ""
    on_device = any(row["used_bytes"] is not None or row["reserved_bytes"] for row in rows)
    device = ["device", "", "lowest", "process"] if on_device else []
    head = ["step", "phase", "of", *device, "host: process", "machine"]
    cells = [
        [
            _step(row, several=several),
            row["phase"] or "-",
            row["role"] or "",
            *(_device(row) if on_device else ()),
            size(row["rss_bytes"]),
            size(row["host_used_bytes"]),
        ]
        for row in rows
    ]
    return f"{title}\n" + align([head, *cells], left=(0, 1, 2, 6) if on_device else (0, 1, 2))


def _device(row: Mapping[str, Any]) -> list[str]:
    """Return memory used on the device; without the driver's number, torch's own."""
    if row["used_bytes"] is None:
        reserved = row["reserved_bytes"]
        return [f"{size(reserved)} reserved" if reserved else "-", "", "-", ""]
    return [
        f"{size(row['used_bytes'])} of {size(row['total_bytes'])}",
        share(row["used_share"]),
        size(row["lowest_used_bytes"]),
        row["fullest"] or "",
    ]


def _fullness(row: Mapping[str, Any]) -> tuple[float, float]:
    return (row["used_share"] or 0.0, row["rss_bytes"] or 0.0)


def _step(row: Mapping[str, Any], *, several: bool) -> str:
    name = "-" if row["step"] is None else str(row["step"])
    return f"{row['run']} {name}" if several else name
