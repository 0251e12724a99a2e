"""The critical cycle of an asynchronous run, and replays, as text for a terminal."""

from __future__ import annotations

from verl_profiler.analysis.explain.changes import UNCHANGED
from verl_profiler.analysis.explain.critical_cycle import EDGES, cycle_bound
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.text_tables import Rows, bar_table, table_text

__all__ = ["as_decoding", "cycle_replays_text", "cycle_text", "replays_table"]

_BOUNDS = {
    "trainer": "the trainer bounds the steps",
    "rollout": "the rollout bounds the steps",
    "weight_sync": "the weight sync bounds the steps",
    "in_turn": "trainer and rollout bound the steps in turn",
}


def cycle_text(rows: Rows) -> str:
    """Return the edges of a run's critical cycle, with a bar for each; empty without any."""
    if not rows:
        return ""
    title = (
        f"critical cycle of {counted(rows[0]['steps'], 'step')}: {seconds(rows[0]['cycle_s'])} per step; "
        f"{_BOUNDS[cycle_bound(rows)]}"
    )
    edges = [(row["edge"], row["edge_s"], EDGES[row["edge"]]) for row in rows]
    return bar_table(title, edges, rows[0]["cycle_s"])


def cycle_replays_text(rows: Rows) -> str:
    """Return what changes of an asynchronous run would save, or why there is no answer; empty without rows."""
    if not rows:
        return ""
    unchanged = next(row for row in rows if row["what"] == UNCHANGED)
    if unchanged["refused"] is not None:
        return f"what if: no answer; {unchanged['refused']}"
    speed = ", engine speed from iterations" if unchanged["engine"] == "iterations" else ""
    title = (
        f"what if (mean per step, {counted(unchanged['steps'], 'step')} replayed, replay error "
        f"{share(abs(unchanged['residual_share']))}{speed}; 90 % intervals; gains are not additive)"
    )
    notes = [f"\n  {note}" for note in as_decoding(unchanged["undivided_share"])]
    return replays_table(title, rows) + "".join(notes)


def replays_table(title: str, rows: Rows, most: int = 40) -> str:
    """Return what each change would save, the largest saving first."""
    changes = sorted(
        (row for row in rows if row["what"] != UNCHANGED),
        key=lambda row: -(row["expected_s"] or 0.0),
    )
    columns = ["about", "expected_s", "share", "low_s", "high_s"]
    columns += ["saved_s"] if "saved_s" in rows[0] else []
    return table_text(title, changes, columns, "what_if", most)


def as_decoding(undivided_share: float) -> list[str]:
    """Return what a replay does with the calls whose queue and prefill times were not recorded."""
    if not undivided_share:
        return []
    note = (
        f"Of {share(undivided_share)} of the calls, the time in the engines is replayed as decoding: "
        "queue and prefill times were not recorded (profiler.events.engine_timing=true)."
    )
    return [note]
