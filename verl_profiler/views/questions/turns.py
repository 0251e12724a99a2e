"""Views of turns: how long they took, and how many requests take."""

from __future__ import annotations

from verl_profiler.analysis.requests import turn_times, turns_per_request
from verl_profiler.analysis.selection import Rows, Steps, grouped, summed
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    colored,
    layer,
    name_bars,
    names,
    panel,
    quantity,
    step_bars,
    tint,
)
from verl_profiler.render.colors import MUTED, PART_COLORS
from verl_profiler.units import seconds, share
from verl_profiler.views.view import Choice, DataTables, column, known, view

__all__ = ["spread_layers"]


def _with_turns(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    rows = turn_times(tables, steps, worker=worker, validate=validate)
    return [row for row in rows if row["turns"]]


@view(
    "turn_times",
    "Do late turns take longer than early ones, and in which component?",
    _with_turns,
    empty="no turn was recorded there. Single-turn agent loops of older versions have none.",
    example="--validate",
)
def _turn_times(data: DataTables, choice: Choice) -> Spec:
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
    labels = [f"turn {row['turn']} ({row['turns']:,})" for row in rows]
    x = quantity("value", "duration of a turn", form="s")
    spread = spread_layers(rows, x, names("at", labels))
    panels = [panel(spread, title="how it is spread")]
    if parts:
        series = [(part, column(rows, f"{part}_s"), PART_COLORS[part]) for part in parts]
        about_parts = "mean duration of a turn"
        panels.append(name_bars(labels, series, about_parts, above="what it consists of", form="s"))
    return chart(title, about, *panels)


def spread_layers(rows: Rows, x: Spec, y: Spec) -> list[Spec]:
    """Draw percentiles on a line from the median to the longest.

    Args:
        rows: With `p50_s` to `max_s`; percentiles that no row has are not in the legend.
        x: The channel of the durations.
        y: Of a name per row.
    """
    codes = {
        name if name == "max" else name.upper(): tint(shade)
        for name, shade in (("p50", 0.2), ("p80", 0.4), ("p95", 0.6), ("p99", 0.8), ("max", 1.0))
        if known(rows, f"{name}_s")
    }
    places = y["scale"]["domain"]
    # A logarithmic axis has no zero.
    least = 0 if x["scale"].get("type") == "log" else -1
    marked = [
        {"at": place, "of": name, "value": row[f"{name.lower()}_s"]}
        for row, place in zip(rows, places, strict=True)
        for name in codes
        if row[f"{name.lower()}_s"] is not None and row[f"{name.lower()}_s"] > least
    ]
    ranges = [
        {"at": place, "value": row["p50_s"], "to": row["max_s"]}
        for row, place in zip(rows, places, strict=True)
        if row["p50_s"] is not None and row["p50_s"] > least
    ]
    line = layer(ranges, {"type": "rule", "color": MUTED}, x=x, x2={"field": "to"}, y=y)
    mark = {"type": "point", "filled": True, "size": 45}
    tip = ("at", "of", "value")
    return [line, layer(marked, mark, tip=tip, x=x, y=y, color=colored("of", codes))]


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


def _either(tables: Tables, steps: Steps = None, *, validate: bool = False) -> Rows:
    return [row for row in turns_per_request(tables, steps) if row["validate"] == validate]


@view(
    "turns_per_request",
    "How many turns do requests take, and does that change over the run?",
    _either,
    empty="no request with a number of turns was recorded there.",
)
def _turns(data: DataTables, choice: Choice) -> Spec:
    rows = data["turns_per_request"]
    requests = sum(row["requests"] for row in rows)
    by_count = summed(rows, "requests", "turns")
    counts, steps = sorted(by_count), sorted({row["step"] for row in rows})
    usual = max(by_count, key=lambda turns: (by_count[turns], -turns))
    mean = sum(turns * number for turns, number in by_count.items()) / requests
    title = (
        f"{share(by_count[usual] / requests)} of the requests took {usual} turn"
        f"{'' if usual == 1 else 's'}; the mean is {mean:.1f}, the most {counts[-1]}"
    )
    # Beyond ten kinds, colors say less than groups do.
    groups = [[count] for count in counts]
    if len(counts) > 10:
        groups[9:] = [counts[9:]]
    series: list[Series] = [
        (
            f"{members[0]} turn{'' if members == [1] else 's'}"
            if len(members) == 1
            else f"{members[0]} to {members[-1]} turns",
            [
                sum(r["requests"] for r in rows if r["step"] == step and r["turns"] in members)
                for step in steps
            ],
            tint(place / max(len(groups) - 1, 1)),
        )
        for place, members in enumerate(groups)
    ]
    means: dict[int, float] = {}
    for turns, own in grouped(rows, "turns").items():
        timed = [row for row in own if row["mean_s"] is not None]
        number = sum(row["requests"] for row in timed)
        if number:
            means[turns] = sum(row["mean_s"] * row["requests"] for row in timed) / number
    every = range(counts[0], counts[-1] + 1)
    timed = name_bars(
        [f"{turns} turn{'s' * (turns != 1)}" for turns in every],
        [("", [means.get(turns, 0) for turns in every], PART_COLORS["engine"])],
        "mean duration of such a request",
        above="how long such requests took, as a whole",
        form="s",
    )
    return chart(
        title,
        f"{choice.text()}: {requests:,} requests",
        panel(
            step_bars(steps, series, "requests"),
            title="requests by their number of turns",
            height=200,
        ),
        timed,
    )
