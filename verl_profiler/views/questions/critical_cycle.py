"""Views of an asynchronous run's cycle: the loop of dependencies that bounds its steps, and its replays."""

from __future__ import annotations

from verl_profiler.analysis.explain.changes import UNCHANGED
from verl_profiler.analysis.explain.critical_cycle import critical_cycle, cycle_bound
from verl_profiler.analysis.explain.what_if import asynchronous_what_if
from verl_profiler.render.charts import Series, Spec, chart, name_bars, panel
from verl_profiler.render.colors import ACCENT, MUTED
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.cycle_text import BOUNDS, as_decoding
from verl_profiler.views.questions.critical_path import savings
from verl_profiler.views.view import Choice, DataTables, view

_POOLS = (("trainer", MUTED), ("rollout", ACCENT))


@view(
    "critical_cycle",
    "Which loop of dependencies bounds the steps of an asynchronous run?",
    critical_cycle,
    empty="no asynchronous training with recorded samples.",
)
def _cycle(data: DataTables, choice: Choice) -> Spec:
    rows = data["critical_cycle"]
    series: list[Series] = [
        (pool, [row["edge_s"] if row["pool"] == pool else None for row in rows], color)
        for pool, color in _POOLS
        if any(row["pool"] == pool for row in rows)
    ]
    bars = name_bars(
        [row["edge"].replace("_", " ") for row in rows],
        series,
        "time per step [s]",
        texts=[f"{seconds(row['edge_s'])}, {share(row['share'])}" for row in rows],
    )
    return chart(
        f"{seconds(rows[0]['cycle_s'])} per step: {BOUNDS[cycle_bound(rows)]}",
        f"{choice.text()}: {counted(rows[0]['steps'], 'step')}",
        panel(bars, height=0),
        notes="Dependencies traced back from the last step, always to the one that finished last.",
    )


@view(
    "asynchronous_what_if",
    "How long would the steps of an asynchronous run take after a change?",
    asynchronous_what_if,
    empty="no asynchronous training. Synchronous training: what_if.",
)
def _replays(data: DataTables, choice: Choice) -> Spec:
    rows = data["asynchronous_what_if"]
    return savings(
        rows,
        choice,
        "",
        "Bars: mean saving per step. Lines: 90 % interval.",
        "The first step is left out as warm-up if two others remain. Gains are not additive.",
        *as_decoding(next(row["undivided_share"] for row in rows if row["what"] == UNCHANGED)),
    )
