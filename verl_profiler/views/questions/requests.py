"""Views of requests: how long they, their turns, generate calls and tool calls took, and how many turns they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.engine import CALL_PARTS, UNRECORDED, request_engine_time
from verl_profiler.analysis.requests import (
    duration_band,
    request_breakdown,
    request_duration_cdf,
    request_percentiles,
    turn_times,
    turns_per_request,
)
from verl_profiler.analysis.selection import Rows, Steps, summed
from verl_profiler.analysis.tools import tool_latencies
from verl_profiler.reading.tables.schemas import REQUEST_PARTS
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    layer,
    name_bars,
    panel,
    quantity,
    step_bars,
    tints,
)
from verl_profiler.render.colors import ACCENT, CALL_PART_COLORS, INK, PART_COLORS
from verl_profiler.render.text import short
from verl_profiler.units import counted, quantile_texts, seconds, share
from verl_profiler.views.overview_text import of_which
from verl_profiler.views.view import (
    Choice,
    DataTables,
    column,
    components,
    known,
    request_names,
    unfinished_text,
    view,
)

# Tools drawn.
_TOOLS = 20
_NO_REQUESTS = (
    "no finished request was recorded there. profiler.events.exclude may have "
    "rollout, or no request ended."
)


@view(
    "request_duration_cdf",
    "How long did requests take, and how long were the slowest few percent?",
    request_duration_cdf,
    request_percentiles,
    empty=_NO_REQUESTS,
    example="--steps 3:10 --worker 2",
)
def _cdf(data: DataTables, choice: Choice) -> Spec:
    curve = data["request_duration_cdf"]
    marks = data["request_percentiles"]
    pooled = [row for row in curve if row["step"] is None]
    overall = [row for row in marks if row["step"] is None]
    steps = sorted({row["step"] for row in curve if row["step"] is not None})
    requests, unfinished = overall[0]["requests"], overall[0]["unfinished"]
    middle = next(row for row in overall if row["percentile"] == 50)
    # Too few requests have no high percentiles.
    sure = [row for row in overall if row["duration_s"] is not None]
    far = sure[-1]
    title = f"Half of the requests took {seconds(middle['duration_s'])} or less"
    if far is not middle:
        rest = 100 - far["percentile"]
        title += f", the slowest {rest:g} % more than {seconds(far['duration_s'])}"
    about = (
        f"{choice.text()}: {requests:,} requests, mean {seconds(overall[0]['mean_s'])}"
        f"{unfinished_text(unfinished)}"
    )
    marked = ", ".join(f"P{row['percentile']:g} {seconds(row['duration_s'])}" for row in sure)
    notes = [f"Marked: {marked}."]
    several = len(steps) > 1
    if several:
        notes.insert(0, "Line: all steps together. Shaded: from the fastest to the slowest step.")
    x = quantity("duration_s", "duration of a request", form="s")
    y = quantity("share", "share of requests that took no longer", form="%", ends=(0, 1))
    points = [{"duration_s": 0.0, "share": 0.0}, *pooled]
    drawn = [
        layer(
            points,
            {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
            tip=("duration_s", "share"),
            x=x,
            y=y,
            color=INK,
        ),
        layer(
            [row | {"share": row["percentile"] / 100} for row in sure],
            {"type": "point", "filled": True, "size": 45},
            tip=("percentile", "duration_s"),
            x=x,
            y=y,
            color=ACCENT,
        ),
    ]
    if several:
        band = duration_band(curve)
        low, high = {**x, "field": "low"}, {"field": "high"}
        area = {"type": "area", "orient": "horizontal", "opacity": 0.5}
        drawn.insert(0, layer(band, area, x=low, x2=high, y=y, color=tints(5)[1]))
    return chart(title, about, panel(drawn, height=300), notes=notes)


@view(
    "slowest_requests",
    "Which requests were the slowest, and how did they spend their time?",
    request_breakdown,
    request_percentiles,
    kept="finished",
    empty=_NO_REQUESTS,
    table="request_breakdown",
    example="--steps 5",
)
def _slowest(data: DataTables, choice: Choice) -> Spec:
    rows = data["slowest_requests"]
    counts = next(row for row in data["request_percentiles"] if row["step"] is None)
    worst = rows[0]
    divided = all(row["queue_s"] is not None for row in rows if row["engine_s"])
    of_engine = ("queue", "prefill", "decode", "outside") if divided else ("engine",)
    whole = [*REQUEST_PARTS, "other"]
    parts = [each for part in whole for each in (of_engine if part == "engine" else (part,))]
    title = f"The slowest request took {seconds(worst['duration_s'])}{of_which(worst)}"
    about = (
        f"{choice.text()}: the {len(rows)} slowest of {counts['requests']:,} finished requests"
        f"{unfinished_text(counts['unfinished'])}"
    )
    notes: list[str] = []
    if any(row["overlap_s"] for row in rows):
        notes.append(
            "Concurrent calls are counted separately: such a bar is longer than the request."
        )
    if divided:
        notes.append(
            "queue, prefill, decode: as the engine reports them; outside: the rest of the generate "
            "call (transport, load balancing, pauses of the engine, waiting for the event loop)."
        )
    bars = name_bars(
        request_names(rows),
        components(rows, parts, PART_COLORS),
        "time",
        texts=list(map(_bar_text, rows)),
    )
    return chart(title, about, bars, notes=notes)


def _bar_text(row: Mapping[str, Any]) -> str:
    turns = "" if row["turns"] is None else f", {counted(row['turns'], 'turn')}"
    mark = "" if row["status"] is None else f", {short(row['status'], 12)}"
    return f"{seconds(row['duration_s'])}{turns}{mark}"


_TURN_PARTS = ("engine", "tool", "tool_parsing", "token_merge", "other")


@view(
    "turn_times",
    "Do late turns take longer than early ones, and in which component?",
    turn_times,
    kept="turns",
    empty="no turn was recorded there. Single-turn agent loops of older versions have none.",
    example="--validate",
)
def _turn_times(data: DataTables, choice: Choice) -> Spec:
    rows = data["turn_times"]
    total = sum(row["turns"] for row in rows)
    unfinished = sum(row["unfinished"] for row in rows)
    title = _turn_title(rows)
    about = f"{choice.text()}: {total:,} turns, counted from 0{unfinished_text(unfinished)}"
    parts = components(rows, _TURN_PARTS, PART_COLORS)
    if not any(map(any, (values for _, values, _ in parts))):
        parts = [("", column(rows, "mean_s"), PART_COLORS["engine"])]
    bars = name_bars(
        [f"turn {row['turn']} ({row['turns']:,})" for row in rows],
        parts,
        "mean duration of a turn",
        texts=[
            f"P50 {quantile_texts(row, 'p50', 'max')[0]}, max {seconds(row['max_s'])}"
            for row in rows
        ],
    )
    return chart(title, about, bars)


def _turn_title(rows: Rows) -> str:
    usual = [row for row in rows if row["turns"] >= 5] or rows
    longest = max(usual, key=lambda row: row["mean_s"])
    shortest = min(usual, key=lambda row: row["mean_s"])
    most = max(rows, key=lambda row: row["total_s"])
    alike = longest["mean_s"] < 1.2 * shortest["mean_s"]
    first = "All turns take about as long" if alike else f"Turn {longest['turn']} takes longest"
    who = "it" if most is longest and not alike else f"turn {most['turn']}"
    return (
        f"{first}, {seconds(longest['mean_s'])} on average; {who} takes {share(most['share'])} of "
        "all turn time"
    )


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
    title = f"All requests took {counted(usual, 'turn')}"
    if len(counts) > 1:
        title = (
            f"{share(by_count[usual] / requests)} of the requests took {counted(usual, 'turn')}; "
            f"the mean is {mean:.1f}, the most {counts[-1]}"
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
            code,
        )
        for members, code in zip(groups, tints(len(groups)), strict=True)
    ]
    return chart(
        title,
        f"{choice.text()}: {requests:,} requests",
        panel(step_bars(steps, series, "requests"), height=260),
    )


@view(
    "request_engine_time",
    "How do the slowest requests spend the time of their generate calls?",
    request_engine_time,
    empty="no generate call was recorded there.",
    example="--steps 5",
)
def _engine_time(data: DataTables, choice: Choice) -> Spec:
    rows = data["request_engine_time"]
    worst = rows[0]
    title = f"The longest generate calls of a request took {seconds(worst['engine_s'])}"
    if worst["mostly"] == "undivided":
        title += "; what they consist of was not recorded"
    elif worst["mostly"] is not None:
        part = worst["mostly"]
        title += f", {share(worst[f'{part}_s'] / worst['engine_s'])} of it {CALL_PARTS[part]}"
    texts = [
        ", ".join(
            [
                seconds(row["engine_s"]),
                *([f"{row['tokens']:,} tokens"] if row["tokens"] is not None else []),
                *([f"batch {row['batch']:.1f}"] if row["batch"] is not None else []),
                *([f"{row['moved']} moved"] if row["moved"] else []),
                *([counted(row["retractions"], "retraction")] if row["retractions"] else []),
            ]
        )
        for row in rows
    ]
    series = components(rows, CALL_PARTS, CALL_PART_COLORS)
    bars = name_bars(request_names(rows), series, "time of generate calls", texts=texts)
    return chart(
        title,
        f"{choice.text()}: the {counted(len(rows), 'request')} with the longest generate calls",
        bars,
        notes=[
            (
                "At the bars: tokens generated, mean batch of the replica while they were decoded, calls "
                "on another replica than the previous one, retractions."
            ),
            *([f"Not divided: {UNRECORDED}."] if any(known(rows, "undivided_s")) else []),
        ],
    )


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
    drawn = rows[:_TOOLS]
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
        texts=texts,
    )
    return chart(title, about, bars)
