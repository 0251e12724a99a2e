"""Views of what requests call: tools, rewards, and spans of the user's own code."""

from __future__ import annotations

from verl_profiler.analysis.overview import own_spans
from verl_profiler.analysis.selection import Rows, grouped
from verl_profiler.analysis.tools import reward_times, tool_latencies
from verl_profiler.render.charts import Spec, chart, name_bars, panel, quantity, step_lines
from verl_profiler.render.colors import ACCENT, PART_COLORS
from verl_profiler.units import counted, quantile_texts, seconds, share
from verl_profiler.views.questions.requests import spread_layers
from verl_profiler.views.view import Choice, DataTables, column, known, view

_TOOLS = 20


@view(
    "tool_latencies",
    "Which tools take the most time, how long are their calls, and how often do they fail?",
    tool_latencies,
    empty="no tool call was recorded there.",
    example="--steps 3:10",
)
def _tools(data: DataTables, choice: Choice) -> Spec:
    every = data["tool_latencies"]
    rows = every[:_TOOLS]
    most = rows[0]
    failed = sum(row["failed"] for row in every)
    calls = sum(row["calls"] for row in every)
    title = f"{most['tool']} takes {share(most['share'])} of all tool time"
    if most["requests_share"] is not None:
        title += f", {share(most['requests_share'])} of all request time"
    about = f"{choice.text()}: {calls:,} tool calls, {failed:,} failed"
    if len(every) > len(rows):
        about += f"; the {len(rows)} tools with the most time of {len(every)}"
    bars = name_bars(
        [row["tool"] for row in rows],
        [("", column(rows, "total_s"), PART_COLORS["tool"])],
        "time of all calls together",
        form="s",
        texts=[
            counted(row["calls"], "call")
            + (f", {share(row['failed_share'])} failed" if row["failed"] else "")
            for row in rows
        ],
        above="how much",
    )
    return chart(
        title,
        about,
        bars,
        panel(_calls(rows, bars["layer"][0]["encoding"]["y"]), title="how long"),
    )


def _calls(rows: Rows, y: Spec) -> list[Spec]:
    """Draw percentiles of each tool's calls, on a line from the median to the longest."""
    slowest = max(row["max_s"] for row in rows)
    quickest = min((row["p50_s"] for row in rows if row["p50_s"]), default=0.0)
    wide = quickest > 0 and slowest / quickest > 50
    title = "time of one call" + (", logarithmic" if wide else "")
    return spread_layers(rows, quantity("value", title, form="s", log=wide), y)


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
    steps = sorted({row["step"] for row in times})
    found = grouped(times, "part")
    parts = [part for part in _REWARD_COLORS if part in found]
    waits = found["reward" if "reward" in parts else parts[0]]
    slowest = max(waits, key=lambda row: row["max_s"])
    mean = sum(row["total_s"] for row in waits) / sum(row["count"] for row in waits)
    what = (
        "A request waits for its reward" if "reward" in parts else "A request is post-processed for"
    )
    title = f"{what} {seconds(mean)} on average, {seconds(slowest['max_s'])} at most (step {slowest['step']})"
    requests = sum(row["count"] for row in waits)
    notes = [
        (
            "Waiting for the reward includes the reward function's own time; the rest is waiting "
            "for a reward worker. Post-processing excludes the reward."
        )
    ]
    timed = [("mean_s", "mean time"), ("p99_s", "time, P99")]
    if not known(times, "p99_s"):
        del timed[1]
        notes.append("Not drawn: P99, which needs 100 requests in a step.")
    panels: list[Spec] = []
    for key, name in timed:
        lines = step_lines(
            steps,
            [(part, found[part], key, _REWARD_COLORS[part]) for part in parts],
            name,
            form="s",
        )
        panels.append(panel(lines, height=150))
    return chart(title, f"{choice.text()}: {requests:,} requests", *panels, notes=notes)


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
        [("", column(rows, "total_s"), ACCENT)],
        "time of all calls together",
        form="s",
        texts=[
            f"{counted(row['calls'], 'call')}, P50 {quantile_texts(row, 'p50', 'max')[0]}, "
            f"max {seconds(row['max_s'])}"
            + (f", {row['failed']:,} failed" if row["failed"] else "")
            for row in rows
        ],
    )
    title = f"All calls of {rows[0]['event']} take {seconds(rows[0]['total_s'])} together"
    return chart(title, about, bars)
