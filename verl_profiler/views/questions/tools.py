"""Views of what requests call: tools, rewards, and spans of the user's own code."""

from __future__ import annotations

from verl_profiler.analysis.overview import own_spans
from verl_profiler.analysis.selection import Rows, grouped
from verl_profiler.analysis.tools import reward_times, tool_latencies
from verl_profiler.render.charts import Spec, chart, name_bars, panel, step_lines
from verl_profiler.render.colors import ACCENT, PART_COLORS
from verl_profiler.units import counted, quantile_texts, seconds, share
from verl_profiler.views.view import Choice, DataTables, column, view

_NAMES = 20


def _by_name(rows: Rows, name: str, title: str, code: str, choice: Choice) -> Spec:
    """Draw the time of all calls of each name, with how many and how long they were."""
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
        [row[name] for row in drawn],
        [("", column(drawn, "total_s"), code)],
        "time of all calls together",
        form="s",
        texts=texts,
    )
    return chart(title, about, bars)


@view(
    "tool_latencies",
    "Which tools take the most time, how long are their calls, and how often do they fail?",
    tool_latencies,
    empty="no tool call was recorded there.",
    example="--steps 3:10",
)
def _tools(data: DataTables, choice: Choice) -> Spec:
    rows = data["tool_latencies"]
    title = f"{rows[0]['tool']} takes {share(rows[0]['share'])} of all tool time"
    if rows[0]["requests_share"] is not None:
        title += f", {share(rows[0]['requests_share'])} of all request time"
    return _by_name(rows, "tool", title, PART_COLORS["tool"], choice)


_REWARD_COLORS = {
    "postprocess": PART_COLORS["postprocess"],
    "reward": "#A89500",
    "score": "#5B5100",
}


@view(
    "reward_times",
    "How long do scoring and post-processing take?",
    reward_times,
    empty="no reward or post-processing was recorded there.",
)
def _rewards(data: DataTables, choice: Choice) -> Spec:
    times = data["reward_times"]
    found = grouped(times, "part")
    parts = [part for part in _REWARD_COLORS if part in found]
    waits = found["reward" if "reward" in parts else parts[0]]
    slowest = max(waits, key=lambda row: row["max_s"])
    requests = sum(row["count"] for row in waits)
    mean = sum(row["total_s"] for row in waits) / requests
    what = "waits for its reward" if "reward" in parts else "is post-processed for"
    lines = step_lines(
        sorted({row["step"] for row in times}),
        [(part, found[part], "mean_s", _REWARD_COLORS[part]) for part in parts],
        "mean time",
        form="s",
    )
    return chart(
        f"A request {what} {seconds(mean)} on average, {seconds(slowest['max_s'])} at most (step {slowest['step']})",
        f"{choice.text()}: {requests:,} requests",
        panel(lines, height=200),
        notes=(
            "Waiting for the reward includes the reward function's own time (score); the rest is "
            "waiting for a reward worker. Post-processing excludes the reward."
        ),
    )


@view(
    "own_spans",
    "How long do the spans of your own code take, and which of them is the longest?",
    own_spans,
    empty="no span of your own code was recorded there; `with verl_profiler.span('lookup'):` records one.",
)
def _spans(data: DataTables, choice: Choice) -> Spec:
    rows = data["own_spans"]
    title = f"All calls of {rows[0]['event']} take {seconds(rows[0]['total_s'])} together"
    return _by_name(rows, "event", title, ACCENT, choice)
