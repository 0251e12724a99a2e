"""Views of turns: how long they took, and how many requests take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_profiler.analysis.requests import turn_times, turns_per_request
from verl_profiler.analysis.selection import Rows
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.axes import (
    legend,
    stack,
    step_stack,
    time_unit,
    value_axis,
    whole_numbers,
)
from verl_profiler.render.colors import MUTED, PART_COLORS
from verl_profiler.render.figure import sheet, tint
from verl_profiler.units import seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, View, column, known, marks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from verl_profiler.render.panel import Panel

__all__ = ["TABLES", "VIEWS"]


def _turn_time_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    rows = turn_times(tables, choice.steps, worker=choice.worker, validate=choice.validate)
    return {"turn_times": [row for row in rows if row["turns"]]}


def _turn_times(data: DataTables, choice: Choice) -> Figure:
    rows = data["turn_times"]
    total = sum(row["turns"] for row in rows)
    unfinished = sum(row["unfinished"] for row in rows)
    title = _turn_title(rows)
    about = f"{choice.text()}: {total:,} turns, counted from 0"
    if unfinished:
        about += f"; {unfinished:,} unfinished ones left out"
    parts = [
        part
        for part in ("engine", "tool", "tool_parsing", "token_merge", "other")
        if any(row[f"{part}_s"] for row in rows)
    ]
    figure, panels = sheet(title, about, size=(11, 5.2), panels=(1, 2 if parts else 1))
    axes = panels[0]
    factor, unit = time_unit(max(row["max_s"] for row in rows))
    places = [row["turn"] for row in rows]
    for name, code in (("max", 1.0), ("p99", 0.8), ("p95", 0.6), ("p80", 0.4), ("p50", 0.2)):
        if not known(rows, f"{name}_s"):
            continue
        axes.plot(
            places,
            marks(rows, f"{name}_s", factor),
            "_" if name == "max" else "o",
            color=tint(code),
            markersize=9 if name == "max" else 6,
            markeredgewidth=1.8 if name == "max" else 0.5,
            label=name if name == "max" else name.upper(),
        )
    axes.vlines(
        places,
        column(rows, "p50_s", factor),
        column(rows, "max_s", factor),
        color=MUTED,
        linewidth=0.7,
    )
    value_axis(axes, f"duration of a turn [{unit}]")
    legend(axes)
    _turn_axis(axes, rows)
    axes.set_title("how it is spread")
    if parts:
        axes = panels[1]
        factor, unit = time_unit(max(row["mean_s"] for row in rows))
        stack(
            axes,
            places,
            [(part, column(rows, f"{part}_s", factor), PART_COLORS[part]) for part in parts],
        )
        value_axis(axes, f"mean duration of a turn [{unit}]")
        legend(axes, reverse=True)
        _turn_axis(axes, rows)
        axes.set_title("what it consists of")
    return figure


def _turn_title(rows: Rows) -> str:
    usual = [row for row in rows if row["turns"] >= 5] or rows
    longest = max(usual, key=lambda row: row["mean_s"])
    shortest = min(usual, key=lambda row: row["mean_s"])
    most = max(rows, key=lambda row: row["total_s"])
    if len(rows) == 1:
        return f"Every request has one turn, of {seconds(longest['mean_s'])} on average"
    if longest["mean_s"] < 1.2 * shortest["mean_s"]:
        first = f"All turns take about as long, {seconds(longest['mean_s'])} on average"
    else:
        first = f"Turn {longest['turn']} takes longest, {seconds(longest['mean_s'])} on average"
    return f"{first}; turn {most['turn']} takes {share(most['share'])} of all turn time"


def _turn_axis(axes: Panel, rows: Rows) -> None:
    """Name the turns, with how many there are of each."""
    places = [row["turn"] for row in rows]
    axes.set_xlim(min(places) - 0.6, max(places) + 0.6)
    axes.grid(visible=False, axis="x")
    shown = rows if len(rows) <= 12 else rows[:: len(rows) // 12 + 1]
    axes.set_xticks(
        [row["turn"] for row in shown], [f"{row['turn']}\nn={row['turns']:,}" for row in shown]
    )
    axes.set_xlabel("turn")


def _turns_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    rows = turns_per_request(tables, choice.steps)
    return {"turns_per_request": [row for row in rows if row["validate"] == choice.validate]}


def _turns(data: DataTables, choice: Choice) -> Figure:
    rows = data["turns_per_request"]
    requests = sum(row["requests"] for row in rows)
    counts = sorted({row["turns"] for row in rows})
    steps = sorted({row["step"] for row in rows})
    by_count = {
        turns: sum(row["requests"] for row in rows if row["turns"] == turns) for turns in counts
    }
    usual = max(by_count, key=lambda turns: (by_count[turns], -turns))
    mean = sum(turns * number for turns, number in by_count.items()) / requests
    title = (
        f"{share(by_count[usual] / requests)} of the requests took {usual} turn"
        f"{'' if usual == 1 else 's'}; the mean is {mean:.1f}, the most {counts[-1]}"
    )
    figure, panels = sheet(
        title,
        f"{choice.text()}: {requests:,} requests",
        size=(11, 5.2),
        panels=(1, 2),
        width_ratios=(1.5, 1),
    )
    # Beyond ten kinds, colors say less than groups do.
    groups = [[count] for count in counts]
    if len(counts) > 10:
        groups[9:] = [counts[9:]]
    series: list[tuple[str, list[float], Any]] = []
    for place, members in enumerate(groups):
        name = str(members[0]) if len(members) == 1 else f"{members[0]} to {members[-1]}"
        values: list[float] = [
            sum(r["requests"] for r in rows if r["step"] == step and r["turns"] in members)
            for step in steps
        ]
        series.append((name, values, tint(place / max(len(groups) - 1, 1))))
    title = "requests by their number of turns"
    step_stack(panels[0], steps, series, "requests", title, legend_title="turns")
    axes = panels[1]
    means: list[float] = []
    for turns in counts:
        timed = [row for row in rows if row["turns"] == turns and row["mean_s"] is not None]
        number = sum(row["requests"] for row in timed)
        means.append(
            sum(row["mean_s"] * row["requests"] for row in timed) / number if number else 0.0
        )
    factor, unit = time_unit(max(means))
    axes.bar(counts, [mean * factor for mean in means], 0.78, color=PART_COLORS["engine"])
    value_axis(axes, f"mean duration of such a request [{unit}]")
    axes.set_xlabel("turns of the request")
    whole_numbers(axes)
    axes.set_xlim(min(counts) - 0.6, max(counts) + 0.6)
    axes.set_title("how long such requests took, as a whole")
    return figure


_BOTH = frozenset({"worker", "validate"})


_TURN_TIMES = common("total_s mean_s p50_s p80_s p95_s p99_s max_s turn estimated") | {
    "unfinished": "number of turns without an end",
    "turns": "number of finished turns with this index",
    "share": "part of all turn time",
    "engine_s": (
        "mean time in generate calls, in s; empty, like the other components, if they were not "
        "recorded; the components add up to mean_s plus overlap_s"
    ),
    "tool_s": "mean time in tool calls, in s",
    "tool_parsing_s": "mean time spent parsing tool calls, in s",
    "token_merge_s": "mean time spent merging tokens, in s",
    "other_s": "mean time in no recorded event, in s",
    "overlap_s": "mean time counted more than once because calls ran concurrently, in s",
    "prompt_tokens": "mean number of prompt tokens",
    "response_tokens": "mean number of generated tokens",
}

VIEWS = (
    View(
        name="turn_times",
        question="Do late turns take longer than early ones, and in which component?",
        analysis=_turn_time_tables,
        columns=common("run") | _TURN_TIMES,
        draw=_turn_times,
        empty="no turn was recorded there. Single-turn agent loops of older versions have none.",
        section="turns",
        shows="""
            By the index of the turn, from 0: percentiles and the longest, the number of turns,
            and the mean components.
        """,
        conclude="""
            - Later turns take longer in `engine`: the context grows; see cached tokens in
              `token_rates`.
            - The first turn is the longest: it contains the reasoning, or queues with those of all
              other requests.
            - `tool` grows with the turn: late turns call other tools (`tool_latencies`).
        """,
        limits="""
            Only few requests have late turns, and they may not be representative: compare n. A turn is an
            assistant turn with its tools; verl's `num_turns` counts user turns too. Unfinished
            turns are counted and left out. The first version of the original logger recorded
            turns without components: then only the left panel is drawn.
        """,
        takes=_BOTH,
        example="--validate",
    ),
    View(
        name="turns_per_request",
        question="How many turns do requests take, and does that change over the run?",
        analysis=_turns_tables,
        columns=common("run step validate")
        | {
            "turns": "number of turns of a request",
            "requests": "number of requests with that many",
            "share": "part of the step's requests",
            "mean_s": "mean duration of these requests that finished, in s",
        },
        draw=_turns,
        empty="no request with a number of turns was recorded there.",
        section="turns",
        shows="""
            Left: the requests of each step by their number of turns. Right: the mean duration
            of whole requests with that many turns.
        """,
        conclude="""
            - The stack becomes darker over the run: the model uses its tools more, and rollouts
              become longer.
            - It becomes lighter: the model stops calling tools.
            - A steep right panel: a limit on turns shortens the tail.
        """,
        limits="""
            The right panel is about whole requests, not about single turns; see `turn_times`.
            More than ten numbers of turns are grouped, as the legend shows.
        """,
        takes=frozenset({"validate"}),
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "step_turn_times": common("run step validate")
    | _TURN_TIMES
    | {"share": "part of the turn time of the step"},
}
