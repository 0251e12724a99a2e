"""The view of the spans that the user's own code records."""

from __future__ import annotations

from verl_profiler.analysis.overview import own_spans
from verl_profiler.render.charts import Spec, chart, name_bars, panel
from verl_profiler.render.colors import ACCENT
from verl_profiler.units import counted, quantile_texts, seconds
from verl_profiler.views.view import Choice, DataTables, column, view

_SPANS = 20


@view(
    "own_spans",
    "How long do the spans of your own code take, and which of them is the longest?",
    own_spans,
    empty="no span of your own code was recorded there; `with verl_profiler.span('lookup'):` records one.",
)
def _spans(data: DataTables, choice: Choice) -> Spec:
    every = data["own_spans"]
    rows = every[:_SPANS]
    about = f"{choice.text()}: {counted(sum(row['calls'] for row in every), 'call')}"
    if len(every) > len(rows):
        about += f"; the {len(rows)} spans with the most time of {len(every)}"
    bars = name_bars(
        [row["event"] for row in rows],
        [("all calls", column(rows, "total_s"), ACCENT)],
        "time of all calls together",
        form="s",
        texts=[
            f"{counted(row['calls'], 'call')}, P50 {quantile_texts(row, 'p50', 'max')[0]}, "
            f"max {seconds(row['max_s'])}"
            + (f", {row['failed']:,} failed" if row["failed"] else "")
            for row in rows
        ],
        legend=False,
        room=1.7,
    )
    title = f"All calls of {rows[0]['event']} take {seconds(rows[0]['total_s'])} together"
    return chart(title, about, panel(bars, height=0))
