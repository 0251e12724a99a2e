"""One process of a run as text for a terminal: its phases, its rollouts and its slowest requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.render.text import align
from verl_profiler.render.visible import visible
from verl_profiler.units import seconds
from verl_profiler.views.request_text import request_table

__all__ = ["SLOWEST", "worker_text"]

Rows = Sequence[Mapping[str, Any]]

# Requests in the table of the slowest.
SLOWEST = 5
_PHASES = 8
_WIDTH = 120


def worker_text(name: str, tables: Mapping[str, Rows]) -> str:
    """Return what a process did in all steps, in at most 20 lines.

    Args:
        name: The process.
        tables: Its rows of `worker_phases`, `rollout_balance` and `request_breakdown`.
    """
    phases, rollouts, requests = (
        tables[table] for table in ("worker_phases", "rollout_balance", "request_breakdown")
    )
    if not phases and not rollouts:
        return (
            f"{visible(name)}: no phases or requests of its own were recorded; "
            "`verl-profiler plot --list` lists what shows engines and other processes\n"
        )
    role = next((row["role"] for row in phases), "agent_loop")
    steps = len({(row["run"], row["step"]) for row in [*phases, *rollouts]})
    blocks = [visible(f"{name} ({role}), {steps} step{'s' * (steps != 1)}")]
    blocks[0] += "\n" + "\n".join([*_phase_lines(phases), *_rollout_line(rollouts)])
    if requests:
        counts = {
            "finished": sum(row["requests"] for row in rollouts),
            "unfinished": sum(not row["finished"] for row in requests),
        }
        several = len({row["run"] for row in requests}) > 1
        blocks.append(request_table(requests, counts, several=several, width=_WIDTH))
    return "\n\n".join(blocks) + "\n"


def _phase_lines(rows: Rows) -> list[str]:
    """Return a table of the process's phases, most time first."""
    phases: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        phases.setdefault(row["phase"], []).append(row)
    if not phases:
        return []
    ranked = sorted(phases, key=lambda phase: -sum(row["duration_s"] for row in phases[phase]))
    lines = [["phase", "mean", "waited", "slowest of its role", "longest"]]
    for phase in ranked[:_PHASES]:
        own = phases[phase]
        longest = max(own, key=lambda row: row["duration_s"])
        slowest = sum(row["slowest"] for row in own)
        lines.append(
            [
                phase,
                seconds(sum(row["duration_s"] for row in own) / len(own)),
                seconds(sum(row["waited_s"] for row in own) / len(own)),
                f"in {slowest:,} of {len(own):,} steps",
                f"{seconds(longest['duration_s'])} (step {longest['step']})",
            ]
        )
    text = align(lines, left=(0, 4), indent="").split("\n")
    if len(ranked) > _PHASES:
        text.append(f"and {len(ranked) - _PHASES} more phases: --json")
    return text


def _rollout_line(rows: Rows) -> list[str]:
    if not rows:
        return []
    latest = max(rows, key=lambda row: row["behind_s"])
    requests = sum(row["requests"] for row in rows)
    mean = sum(row["mean_s"] * row["requests"] for row in rows) / requests
    behind = sum(row["behind_s"] for row in rows) / len(rows)
    place = "behind" if behind > 0 else "ahead of"
    text = (
        f"{requests:,} requests, mean {seconds(mean)}; last one {seconds(abs(behind))} {place} the "
    )
    text += "median worker's"
    if latest["behind_s"] > max(0, behind):
        text += f", at most {seconds(latest['behind_s'])} behind (step {latest['step']})"
    return [text]
