"""The critical cycle of an asynchronous run, and its replays, as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.explain.changes import UNCHANGED
from verl_profiler.analysis.explain.critical_cycle import EDGES, cycle_bound
from verl_profiler.render.text import align
from verl_profiler.units import counted, seconds, share

__all__ = ["BOUNDS", "as_decoding", "cycle_replays_text", "cycle_text"]

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


def cycle_replays_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what changes of an asynchronous run would save, or why there is no answer; empty without rows."""
    if not rows:
        return ""
    unchanged = next(row for row in rows if row["what"] == UNCHANGED)
    if unchanged["refused"] is not None:
        return f"what if: no answer; {unchanged['refused']}"
    lines = [["", "saved", "share", "90 % interval"]]
    lines += [
        [
            row["about"],
            seconds(row["expected_s"]),
            share(row["share"]),
            f"{seconds(row['low_s'])} to {seconds(row['high_s'])}",
        ]
        for row in sorted(rows, key=lambda row: -(row["expected_s"] or 0.0))
        if row["what"] != UNCHANGED
    ]
    speed = ", engine speed from iterations" if unchanged["engine"] == "iterations" else ""
    title = (
        f"what if (mean per step, {counted(unchanged['steps'], 'step')} replayed, replay error "
        f"{share(abs(unchanged['residual_share']))}{speed}; gains are not additive)"
    )
    notes = [f"\n  {note}" for note in as_decoding(unchanged["undivided_share"])]
    return f"{title}\n{align(lines)}{''.join(notes)}"


def as_decoding(undivided_share: float) -> list[str]:
    """Return what a replay does with the calls whose queue and prefill times were not recorded."""
    if not undivided_share:
        return []
    note = (
        f"Of {share(undivided_share)} of the calls, the time in the engines is replayed as decoding: "
        "queue and prefill times were not recorded (profiler.events.engine_timing=true)."
    )
    return [note]
