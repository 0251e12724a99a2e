"""The critical cycle of an asynchronous run, and replays, as text for a terminal."""

from __future__ import annotations

from verl_profiler.analysis.explain.changes import CHANGES, UNCHANGED
from verl_profiler.analysis.explain.critical_cycle import EDGES, cycle_bound
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.text_tables import Rows, bar_table, table_text

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


def cycle_replays_text(rows: Rows, most: int = 40, *, brief: bool = False) -> str:
    """Return what changes of a run would save, the largest saving first, or why there is no answer.

    Args:
        rows: Of `what_if`, of one run; empty without any.
        most: So many lines.
        brief: Leave out what the intervals assume.
    """
    if not rows:
        return ""
    unchanged = next(row for row in rows if row["what"] == UNCHANGED)
    if unchanged["refused"] is not None:
        return f"what if: no answer; {unchanged['refused']}"
    known = [row for row in rows if row["expected_s"] is not None]
    few = [row["about"] for row in rows if row["expected_s"] is None and row is not unchanged]
    notes = [f"too few requests to replay: {', '.join(few)}"] if few else []
    if not brief and any(
        row["saved_s"] and CHANGES[row["what"]].beyond for row in known if row["what"] in CHANGES
    ):
        notes += [
            "load not observed: the interval ranges from no additional tokens per second (saturated",
            "replicas) to no additional slowdown per call (with speeds from iterations: to the slowdown",
            "at the highest batch)",
        ]
    notes += as_decoding(unchanged["undivided_share"])
    between = next(
        (row["between_runs_s"] for row in known if row["between_runs_s"] is not None), None
    )
    if between is not None:
        notes += [
            f"two runs with the same settings differ by up to {seconds(between)} per step in nine of ten",
            "pairs; with one run each, smaller gains cannot be distinguished from noise",
        ]
    title = (
        f"what if (mean per step, {counted(unchanged['steps'], 'step')} replayed, replay error "
        f"{share(abs(unchanged['residual_share']))}, engine speed from {unchanged['engine']}; 90 % intervals "
        "from three steps on; gains are not additive)"
    )
    columns = ["about", "expected_s", "share", "low_s", "high_s"]
    columns += ["saved_s"] if any(row["saved_s"] != row["expected_s"] for row in known) else []
    changes = sorted(known, key=lambda row: -row["expected_s"])
    return "\n  ".join([table_text(title, changes, columns, "what_if", most), *notes])


def as_decoding(undivided_share: float) -> list[str]:
    """Return what a replay does with the calls whose queue and prefill times were not recorded."""
    if not undivided_share:
        return []
    note = (
        f"Of {share(undivided_share)} of the calls, the time in the engines is replayed as decoding: "
        "queue and prefill times were not recorded (profiler.events.engine_timing=true)."
    )
    return [note]
