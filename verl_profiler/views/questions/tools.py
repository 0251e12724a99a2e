"""Views of what requests call: tools, and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_profiler.analysis.tools import reward_times, rewards, tool_latencies
from verl_profiler.render.axes import legend, step_axis, step_lines, time_unit, value_axis
from verl_profiler.render.bars import bar_texts, bars, percentile_marks
from verl_profiler.render.colors import ACCENT, INK, PART_COLORS
from verl_profiler.render.figure import sheet, short
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, Section, View, asking, column, known, marks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TABLES", "VIEWS"]

_TOOLS = 20


def _tools(data: DataTables, choice: Choice) -> Figure:
    every = data["tool_latencies"]
    rows = every[:_TOOLS]
    most = rows[0]
    failed = sum(row["failed"] for row in every)
    calls = sum(row["calls"] for row in every)
    title = f"{short(most['tool'], 40)} takes {share(most['share'])} of all tool time"
    if most["requests_share"] is not None:
        title += f", {share(most['requests_share'])} of all request time"
    about = f"{choice.text()}: {calls:,} tool calls, {failed:,} failed"
    if len(every) > len(rows):
        about += f"; the {len(rows)} tools with the most time of {len(every)}"
    figure, panels = sheet(
        title,
        about,
        size=(11.5, max(3.0, 2.2 + 0.3 * len(rows))),
        panels=(1, 2),
        width_ratios=(1, 1.3),
        sharey=True,
    )
    axes = panels[0]
    names = [short(row["tool"], 26) for row in rows]
    factor, unit = time_unit(max(row["total_s"] for row in rows))
    lengths = bars(axes, names, [("", column(rows, "total_s", factor), PART_COLORS["tool"])])
    texts = [counted(row["calls"], "call") for row in rows]
    bar_texts(axes, lengths, texts, f"time of all calls together [{unit}]", room=1.35)
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row["failed"]:
            axes.annotate(
                f"{share(row['failed_share'])} failed",
                (length, place),
                xytext=(6, -9),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                color=ACCENT,
            )
    axes.set_title("how much")
    axes = panels[1]
    slowest = max(row["max_s"] for row in rows)
    quickest = min((row["p50_s"] for row in rows if row["p50_s"]), default=0.0)
    wide = quickest > 0 and slowest / quickest > 50
    factor, unit = time_unit(slowest)
    places = range(len(rows))
    axes.hlines(
        places,
        column(rows, "p50_s", factor),
        column(rows, "max_s", factor),
        color="#B8C0C8",
        linewidth=1,
    )
    percentile_marks(
        axes,
        rows,
        places,
        {"p50": 0.15, "p80": 0.35, "p95": 0.6, "p99": 0.8, "max": 1.0},
        factor=factor,
        markersize=6,
    )
    axes.grid(visible=False, axis="y")
    value_axis(axes, f"time of one call [{unit}]" + (", logarithmic" if wide else ""), of="x")
    if wide:
        axes.set_xscale("log")
        axes.set_xlim(quickest * factor / 2, slowest * factor * 1.5)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.xaxis.set_minor_formatter("")
    axes.tick_params(axis="y", length=0)
    legend(axes)
    axes.set_title("how long")
    return figure


_REWARD_COLORS = {
    "postprocess": PART_COLORS["postprocess"],
    "reward": "#A89500",
    "score": "#5B5100",
}


def _rewards(data: DataTables, choice: Choice) -> Figure:
    times, scores = data["reward_times"], data["rewards"]
    steps = sorted({row["step"] for row in times})
    parts = [part for part in _REWARD_COLORS if any(row["part"] == part for row in times)]
    waits = [row for row in times if row["part"] == ("reward" if "reward" in parts else parts[0])]
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
    timed = [("mean_s", "on average"), ("p99_s", "the slowest 1 %: P99")]
    if not known(times, "p99_s"):
        del timed[1]
        notes.append("Not drawn: P99, which needs 100 requests in a step.")
    count = len(timed) + bool(scores)
    figure, panels = sheet(
        title,
        f"{choice.text()}: {requests:,} requests",
        size=(1 + 3.5 * count if count > 1 else 8.5, 4.8),
        panels=(1, count),
        notes=notes,
    )
    for axes, (key, name) in zip(panels, timed, strict=False):
        longest = max(known(times, key), default=0.0)
        factor, unit = time_unit(longest)
        step_lines(
            axes,
            [
                ([row for row in times if row["part"] == part], key, part, _REWARD_COLORS[part])
                for part in parts
            ],
            steps,
            f"time [{unit}]",
            name,
            factor=factor,
            gap=0.06,
            broken=True,
        )
    if scores:
        axes = panels[-1]
        at = [row["step"] for row in scores]
        if known(scores, "p5"):
            axes.fill_between(
                at,
                marks(scores, "p5"),
                marks(scores, "p95"),
                color="#E5DD9A",
                linewidth=0,
                label="P5 to P95",
            )
        axes.plot(
            at,
            column(scores, "mean"),
            color=INK,
            marker="o" if len(at) <= 30 else None,
            markersize=3.5,
            label="mean",
        )
        step_axis(axes, at)
        shown = [value for key in ("p5", "mean", "p95") for value in known(scores, key)]
        lowest, highest = min(shown), max(shown)
        pad = (highest - lowest) * 0.08 or 0.05
        axes.set_ylim(lowest - pad, highest + pad * 3)
        axes.set_ylabel("reward")
        axes.legend(loc="upper left", ncols=2, fontsize=8)
        axes.set_title("rewards")
    return figure


VIEWS = (
    View(
        name="tool_latencies",
        question="Which tools take the most time, how long are their calls, and how often do they fail?",
        analysis=asking(tool_latencies),
        columns=common(
            "run calls failed total_s mean_s p50_s p80_s p95_s p99_s max_s tool slowest_step "
            "estimated"
        )
        | {
            "failed_share": "part of the calls that failed",
            "errors": "types of errors with their counts, most frequent first",
            "share": "part of the time of all tool calls",
            "requests_share": (
                "part of the time of all finished requests; calls made at the same time count each"
            ),
            "slowest_request_id": "request of the longest call",
        },
        draw=_tools,
        empty="no tool call was recorded there.",
        section="tools",
        shows="""
            A row per tool, most time first: total time, calls, failures; percentiles and the
            longest call. The right axis is logarithmic, and labeled so, if tools differ by more
            than 50 times.
        """,
        conclude="""
            - A small P50 and a long `max`: a timeout, a cold start, a retry;
              `slowest_request_id` in the table leads to it.
            - A tool with many failures delays the request twice: its own time, and the turn that recovers from it.
            - All tools are slow at the same times: the cause is the event loop (`loop_suspects`),
              not the tools.
        """,
        limits="""
            Concurrent calls count separately in the time of all calls, and once in the length of
            the request (`exclusive_times`). A tool that returns an error as text is not counted as
            failed, because verl does not report it. Sources: `tool_call` events with their `status`.
        """,
        takes=frozenset({"worker", "validate"}),
        example="--steps 3:10",
    ),
    View(
        name="reward_times",
        question="How long do scoring and post-processing take, and how high are the rewards?",
        analysis=asking(reward_times, rewards),
        columns=common("run step count total_s mean_s p50_s p95_s p99_s max_s")
        | {
            "part": (
                "`postprocess`, without the reward; `reward`, as the request waits for it; or "
                "`score`, inside the reward function: part of `reward`, the rest of which is "
                "waiting for a reward worker"
            ),
            "requests_share": "part of the time of all finished requests",
        },
        draw=_rewards,
        empty="no reward or post-processing was recorded there.",
        section=Section("rewards", "Rewards", "how long requests wait for their reward, and why"),
        shows="""
            The time after the conversation, mean and P99: post-processing without the reward,
            waiting for the reward, and the reward function itself, which is part of that
            waiting. Right: rewards, mean and P5 to P95.
        """,
        conclude="""
            - `reward` far above `score`: requests wait for a reward worker; add reward workers.
            - `score` itself is long: the reward function is slow.
            - Both short on average, but long at P99 together with everything else: the cause is an
              event-loop stall (`loop_suspects`), not the reward.
        """,
        limits="""
            Rewards that the trainer computes for a whole batch are the phase `reward` of the
            step, not here. Reward workers have neither the step nor the validation flag: both come
            from the request with the same `uid`.
        """,
        takes=frozenset({"worker", "validate"}),
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "tool_times": common(
        "run step validate tool calls failed total_s p50_s p95_s p99_s max_s estimated"
    )
    | {
        "share": "part of all tool time of the step",
    },
    "rewards": common("run step requests")
    | {
        "scored": "number of requests with a reward",
        "mean": "mean reward",
        "p5": "5th percentile of the rewards",
        "p50": "median reward",
        "p95": "95th percentile of the rewards",
        "lowest": "lowest reward",
        "highest": "highest reward",
    },
}
