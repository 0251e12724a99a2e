"""The memory report as text for a terminal: faults first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.units import share, size
from verl_profiler.views.text_tables import Rows, table_text, warnings

_TABLES = {
    "release_effects": (
        "release and resume: memory moved (medians), and the largest change on the host",
        ("event", "source", "tags", "role", "calls", "p50_s", "max_s", "effect", "moved_bytes",
         "used_before_bytes", "used_after_bytes", "rss_bytes", "host_used_bytes"),
    ),
    "sleep_times": (
        "time in sleep and wake, in the slowest process",
        ("step", "release_s", "resume_s", "releases", "resumes", "failed", "share", "slowest"),
    ),
    "memory_timeline": (
        "memory by phase: peaks",
        ("step", "phase", "role", "used_bytes", "total_bytes", "used_share", "lowest_used_bytes",
         "reserved_bytes", "fullest", "rss_bytes", "host_used_bytes"),
    ),
}  # fmt: skip


def memory_text(content: Mapping[str, Any]) -> str:
    """Return findings, effects and times of release and resume, and memory by phase.

    Args:
        content: `runs`, `findings`, `tables` and `problems`, as in `verl-profiler memory --json`
            them.
    """
    tables = content["tables"]
    several = len(content["runs"]) > 1
    run = ("run",) if several else ()
    blocks = [_findings(content["findings"], several=several)]
    if not any(row["fault"] for row in content["findings"]):
        blocks.insert(0, _conclusion(tables))
    blocks += [
        table_text(title, tables[name], (*run, *columns), name)
        for name, (title, columns) in _TABLES.items()
    ]
    blocks.append(warnings(content["problems"]))
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
