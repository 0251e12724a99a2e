"""Views of what requests call: tools."""

from __future__ import annotations

from verl_profiler.analysis.tools import tool_latencies
from verl_profiler.render.charts import Spec, chart, name_bars
from verl_profiler.render.colors import PART_COLORS
from verl_profiler.units import counted, quantile_texts, seconds, share
from verl_profiler.views.view import Choice, DataTables, column, view

_NAMES = 20


@view(
    "tool_latencies",
    "Which tools take the most time, how long are their calls, and how often do they fail?",
    tool_latencies,
    empty="no tool call was recorded there.",
    example="--steps 3:10",
)
def _tools(data: DataTables, choice: Choice) -> Spec:
    """Draw the time of all calls of each tool, with how many and how long they were."""
    rows = data["tool_latencies"]
    title = f"{rows[0]['tool']} takes {share(rows[0]['share'])} of all tool time"
    if rows[0]["requests_share"] is not None:
        title += f", {share(rows[0]['requests_share'])} of all request time"
    drawn = rows[:_NAMES]
    failed = sum(row["failed"] for row in rows)
    about = f"{choice.text()}: {counted(sum(row['calls'] for row in rows), 'call')}"
    if failed:
        about += f", {failed:,} failed"
    if len(rows) > len(drawn):
        about += f"; the {len(drawn)} names with the most time of {len(rows)}"
    texts = [
        f"{counted(row['calls'], 'call')}, P50 {quantile_texts(row, 'p50', 'max')[0]}, "
        f"max {seconds(row['max_s'])}"
        + (f", {share(row['failed'] / row['calls'])} failed" if row["failed"] else "")
        for row in drawn
    ]
    bars = name_bars(
        [row["tool"] for row in drawn],
        [("", column(drawn, "total_s"), PART_COLORS["tool"])],
        "time of all calls together",
        form="s",
        texts=texts,
    )
    return chart(title, about, bars)
