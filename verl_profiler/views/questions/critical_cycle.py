"""The view of the critical cycle: the loop of dependencies that an asynchronous run's steps cannot beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_profiler.analysis.explain.critical_cycle import EDGES, critical_cycle, cycle_bound
from verl_profiler.render.axes import bars, legend, value_axis
from verl_profiler.render.colors import ACCENT, MUTED
from verl_profiler.render.figure import sheet
from verl_profiler.units import counted, seconds
from verl_profiler.views.cycle_text import BOUNDS
from verl_profiler.views.view import Choice, DataTables, Section, View, asking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["VIEWS"]

_POOLS = (("trainer", MUTED), ("rollout", ACCENT))


def _cycle(data: DataTables, choice: Choice) -> Figure:
    rows = data["critical_cycle"]
    figure, (axes,) = sheet(
        f"{seconds(rows[0]['cycle_s'])} per step: {BOUNDS[cycle_bound(rows)]}",
        f"{choice.text()}: {counted(rows[0]['steps'], 'step')}",
        size=(11, 2.2 + 0.45 * len(rows)),
        panels=(1, 1),
        notes=(
            "Dependencies traced back from the last step, always to the one that finished last.",
        ),
    )
    series = [
        (pool, [row["edge_s"] if row["pool"] == pool else 0.0 for row in rows], color)
        for pool, color in _POOLS
        if any(row["pool"] == pool for row in rows)
    ]
    bars(axes, [row["edge"].replace("_", " ") for row in rows], series)
    value_axis(axes, "time per step in s", of="x")
    legend(axes)
    return figure


_EDGE_TABLE = "\n".join(
    ["| edge | what the time is spent on |", "| --- | --- |"]
    + [f"| `{edge}` | {text} |" for edge, text in EDGES.items()]
)

VIEWS = (
    View(
        name="critical_cycle",
        question="Which loop of dependencies bounds the steps of an asynchronous run?",
        analysis=asking(critical_cycle),
        columns={
            "edge": "what happens between the two ends of the dependency",
            "pool": "the pool whose time it is, `trainer` or `rollout`",
            "steps": "steps that the cycle passes",
            "cycle_s": "all edges together, time per step, in s",
            "edge_s": "this edge, time per step, in s",
            "share": "this edge, part of the cycle",
        },
        draw=_cycle,
        empty="no asynchronous training with recorded samples.",
        section=Section(
            "cycle",
            "Critical cycle",
            "what a step of an asynchronous run waits for, and what that waited for in turn, over "
            "all steps; making anything else faster gains nothing",
        ),
        shows=f"""\
The seconds per step of each edge. A step takes samples when the trainer is free and the last sample is
ready; the trainer was busy since it last took samples, and the sample is made since its dispatch.
The cycle is traced from the last step backwards, always to what finished last.

{_EDGE_TABLE}
""",
        conclude="""
            - Edges of the trainer alone: the trainer bounds the run. A faster rollout gains nothing.
            - Mostly `generating`, `tools` or `rollout_other`: requests take longer than the steps that
              they overlap with. Shorten the last ones, or dispatch them earlier.
            - `training` and `generating`, both large: they do not overlap. Where the rollout has devices
              of its own, more samples in flight (`num_warmup_batches`) make them overlap.
            - `weight_sync` is large in either case: it stops both pools.
        """,
        limits="""
            The next bottleneck after the cycle gets shorter is not computed. A rollouter dispatches without
            the trainer (`fully_async_policy`): the time before its dispatch counts as the trainer's.
            A sample that was dispatched before the first consumption is followed back to that, with its
            calls and tools in proportion.
        """,
    ),
)
