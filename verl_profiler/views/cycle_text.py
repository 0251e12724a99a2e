"""The critical cycle of an asynchronous run as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.explain.critical_cycle import EDGES, cycle_bound
from verl_profiler.render.text import align
from verl_profiler.units import counted, seconds, share

__all__ = ["BOUNDS", "cycle_text"]

_BAR = 30
BOUNDS = {
    "trainer": "the trainer bounds the steps",
    "rollout": "the rollout bounds the steps",
    "weight_sync": "the weight sync bounds the steps",
    "in_turn": "trainer and rollout bound the steps in turn",
}


def cycle_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the edges of a run's critical cycle, with a bar for each; empty without any."""
    if not rows:
        return ""
    longest = max(row["edge_s"] for row in rows)
    lines = [
        [
            row["edge"],
            seconds(row["edge_s"]),
            share(row["share"]),
            "#" * round(_BAR * row["edge_s"] / longest),
            EDGES[row["edge"]],
        ]
        for row in rows
    ]
    steps = counted(rows[0]["steps"], "step")
    title = (
        f"critical cycle of {steps}: {seconds(rows[0]['cycle_s'])} per step; "
        f"{BOUNDS[cycle_bound(rows)]}"
    )
    return f"{title}\n{align(lines, left=(0, 3, 4))}"
