"""Views of requests: how long they took, and the slowest of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_profiler.analysis.requests import (
    request_breakdown,
    request_duration_cdf,
    request_percentiles,
)
from verl_profiler.analysis.selection import Rows, rows_of
from verl_profiler.reading.tables.tables import REQUEST_PARTS, Tables
from verl_profiler.render.axes import legend, percent, step_lines, time_unit, value_axis
from verl_profiler.render.bars import bar_texts, bars
from verl_profiler.render.colors import ACCENT, INK, PART_COLORS
from verl_profiler.render.figure import colorbar, plain, sheet, short, tint
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.questions.request_tables import BREAKDOWN
from verl_profiler.views.view import Choice, DataTables, View, column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from verl_profiler.render.panel import Panel

__all__ = ["VIEWS"]


def _cdf_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    worker, validate = choice.worker, choice.validate
    percentiles = sorted({50.0, *choice.percentiles})
    return {
        "request_duration_cdf": request_duration_cdf(
            tables, choice.steps, worker=worker, validate=validate
        ),
        "request_percentiles": request_percentiles(
            tables, choice.steps, percentiles, worker=worker, validate=validate
        ),
    }


def _cdf(data: DataTables, choice: Choice) -> Figure:
    curve = data["request_duration_cdf"]
    marks = data["request_percentiles"]
    pooled = [row for row in curve if row["step"] is None]
    overall = [row for row in marks if row["step"] is None]
    steps = sorted({row["step"] for row in curve if row["step"] is not None})
    requests, unfinished = overall[0]["requests"], overall[0]["unfinished"]
    middle = next(row for row in overall if row["percentile"] == 50)
    sure = [row for row in overall if row["duration_s"] is not None]
    far = sure[-1]
    title = f"Half of the requests took {seconds(middle['duration_s'])} or less"
    if far is not middle:
        rest = 100 - far["percentile"]
        title += f", the slowest {rest:g} % more than {seconds(far['duration_s'])}"
    about = f"{choice.text()}: {requests:,} requests, mean {seconds(overall[0]['mean_s'])}"
    if unfinished:
        about += f"; {unfinished:,} unfinished ones left out"
    notes: list[str] = []
    if len(pooled) < requests:
        notes.append(
            f"The curve of all steps has {len(pooled):,} points for {requests:,} requests (one per "
            "0.1 %, and the 100 slowest); each point is a request."
        )
    few = [f"P{row['percentile']:g}" for row in overall if row["duration_s"] is None]
    if few:
        notes.append(f"{requests:,} requests are too few for {' and '.join(few)}.")
    several = len(steps) > 1
    lines = [row for row in marks if row["step"] is not None and row["duration_s"] is not None]
    left_out = sorted({row["percentile"] for row in sure} - {row["percentile"] for row in lines})
    if several and left_out:
        listed = " and ".join(f"P{percentile:g}" for percentile in left_out)
        notes.append(f"Too few requests in each step for {listed}: drawn of all steps only.")
    figure, panels = sheet(
        title,
        about,
        size=(11, 5.2) if several else (8.5, 5.2),
        panels=(1, 2 if several else 1),
        notes=notes,
        **({"width_ratios": (1.15, 1)} if several else {}),
    )
    axes = panels[0]
    factor, unit = time_unit(pooled[-1]["duration_s"])
    if several:
        for step in steps:
            rows = [row for row in curve if row["step"] == step]
            axes.step(
                [0, *column(rows, "duration_s", factor)],
                [0, *column(rows, "share")],
                where="post",
                color=tint(0.2 + 0.8 * (step - steps[0]) / (steps[-1] - steps[0])),
                linewidth=0.8,
            )
    axes.step(
        [0, *column(pooled, "duration_s", factor)],
        [0, *column(pooled, "share")],
        where="post",
        color=INK,
        linewidth=2.0,
    )
    value_axis(axes, f"duration of a request [{unit}]", of="x")
    value_axis(axes, "share of requests that took no longer", form=percent)
    axes.set_ylim(0, 1.02)
    for row in sure:
        axes.plot(
            [row["duration_s"] * factor],
            [row["percentile"] / 100],
            "o",
            color=ACCENT,
            markersize=4.5,
        )
    listed = "\n".join(
        f"P{row['percentile']:g}".ljust(7) + seconds(row["duration_s"]).rjust(10) for row in sure
    )
    axes.text(
        0.97,
        0.05,
        listed,
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        family="DejaVu Sans Mono",
        fontsize=8.5,
        bbox={"facecolor": "white", "edgecolor": "#DDE1E6", "boxstyle": "round,pad=0.5"},
    )
    axes.set_title("all steps together (black) and each step" if several else "")
    if several:
        _percentile_lines(panels[1], lines, steps)
        colorbar(
            figure,
            axes,
            (steps[0], steps[-1]),
            "step",
            location="bottom",
            fraction=0.04,
            pad=0.02,
            aspect=40,
            bins=10,
        )
    return figure


def _percentile_lines(axes: Panel, rows: Rows, steps: list[int]) -> None:
    names = sorted({row["percentile"] for row in rows})
    factor, unit = time_unit(max(row["duration_s"] for row in rows))
    step_lines(
        axes,
        [
            (
                [row for row in rows if row["percentile"] == name],
                "duration_s",
                f"P{name:g}",
                tint(0.25 + 0.75 * place / max(len(names) - 1, 1)),
            )
            for place, name in enumerate(names)
        ],
        steps,
        f"duration of a request [{unit}]",
        "percentiles of each step",
        factor=factor,
    )


def _slowest_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    rows = request_breakdown(
        tables, choice.steps, worker=choice.worker, validate=choice.validate, count=choice.count
    )
    finished = [row for row in rows if row["finished"]]
    selection = rows_of(choice.steps, worker=choice.worker, validate=choice.validate)
    counts = tables.rows(
        "SELECT run, count(*) FILTER (finished) AS requests, "
        "count(*) FILTER (NOT finished) AS unfinished "
        f"FROM requests WHERE {selection} GROUP BY run ORDER BY run"
    )
    return {"slowest_requests": finished, "counts": counts}


def _slowest(data: DataTables, choice: Choice) -> Figure:
    rows = data["slowest_requests"]
    counts = data["counts"][0]
    worst = rows[0]
    divided = all(row["queue_s"] is not None for row in rows if row["engine_s"])
    parts = [
        part
        for name in (*REQUEST_PARTS, "other")
        for part in (
            ("queue", "prefill", "decode", "outside") if name == "engine" and divided else (name,)
        )
        if any(row[f"{part}_s"] for row in rows)
    ]
    largest = max((*REQUEST_PARTS, "other"), key=lambda part: worst[f"{part}_s"] or 0)
    title = (
        f"The slowest request took {seconds(worst['duration_s'])}, "
        f"{share((worst[f'{largest}_s'] or 0) / (worst['duration_s'] or 1))} of it {_in(largest)}"
    )
    about = f"{choice.text()}: the {len(rows)} slowest of {counts['requests']:,} finished requests"
    if counts["unfinished"]:
        about += f"; {counts['unfinished']:,} never finished and are not shown"
    several_steps = len({row["step"] for row in rows}) > 1
    wide = max(len(str(row["step"])) for row in rows)
    notes: list[str] = []
    if any(row["overlap_s"] for row in rows):
        notes.append(
            "Concurrent calls are counted separately: such a bar is longer than the request."
        )
    if divided:
        notes.append(
            "queue, prefill, decode: as the engine reports them; outside: the rest of the generate "
            "call (transport, load balancing, waiting for the event loop)."
        )
    figure, (axes,) = sheet(
        title, about, size=(10.5, max(3.2, 1.9 + 0.23 * len(rows))), notes=notes
    )
    factor, unit = time_unit(worst["duration_s"])
    names = [
        f"{plain(row['request_id'] or '(no id)')[:8]:8}  {short(row['name'], 14)}"
        + (f"  step {row['step']}".ljust(7 + wide) if several_steps else "")
        for row in rows
    ]
    lengths = bars(
        axes,
        names,
        [(part, column(rows, f"{part}_s", factor), PART_COLORS[part]) for part in parts],
    )
    bar_texts(axes, lengths, map(_bar_text, rows), f"time [{unit}]", room=1.2)
    for text in axes.get_yticklabels():
        text.set_fontfamily("DejaVu Sans Mono")
        text.set_fontsize(8)
    legend(axes)
    return figure


def _bar_text(row: Mapping[str, Any]) -> str:
    turns = "" if row["turns"] is None else f", {counted(row['turns'], 'turn')}"
    mark = "" if row["status"] is None else f", {short(row['status'], 12)}"
    return f"{seconds(row['duration_s'])}{turns}{mark}"


def _in(part: str) -> str:
    return {
        "engine": "in the engine",
        "tool": "in tools",
        "tool_parsing": "reading tool calls",
        "token_merge": "merging tokens",
        "prompt_build": "building the prompt",
        "postprocess": "in post-processing",
        "reward": "waiting for its reward",
        "other": "in no recorded event",
    }[part]


_NO_REQUESTS = (
    "no finished request was recorded there. The rollout family may be in "
    "profiler.events.exclude, or no request ended."
)
_BOTH = frozenset({"worker", "validate"})


VIEWS = (
    View(
        name="request_duration_cdf",
        question="How long did requests take, and how long were the slowest few percent?",
        analysis=_cdf_tables,
        columns=common("run duration_s")
        | {
            "requests": "number of requests of the curve",
            "step": "verl's global step; empty for all steps together",
            "share": "part of the requests that took at most duration_s",
        },
        draw=_cdf,
        empty=_NO_REQUESTS,
        section="rollout",
        shows="""
            The cumulative share of requests by duration, for all steps together and for each,
            with the percentiles marked; beside it, the percentiles of each step.
        """,
        conclude="""
            - P50 and P99 close together: requests are similar; a shorter step needs faster engines.
            - P99 a multiple of P50: the tail determines the length of the step; see
              `slowest_requests`.
            - A plateau inside the curve: two kinds of requests, or a stall that released many
              at once (`loop_suspects`).
            - Percentiles that drift apart over steps: response lengths vary more and more.
        """,
        limits="""
            Unfinished requests are left out and counted below the title. P95 needs 20 requests,
            P99 100 and P99.9 1,000; with fewer it is left out, and the plot has a note. With more than
            1,000 requests the curve has a point per 0.1 % and one for each of the 100 slowest;
            every point is a real request. Percentiles are interpolated linearly, as in numpy.
        """,
        takes=_BOTH | {"percentiles"},
        example="--steps 3:10 --worker 2 --percentiles 50,90,99",
    ),
    View(
        name="slowest_requests",
        question="Which requests were the slowest, and how did they spend their time?",
        analysis=_slowest_tables,
        columns=BREAKDOWN,
        draw=_slowest,
        empty=_NO_REQUESTS,
        section="requests",
        shows="""
            A bar per request, the slowest on top, divided into its components. Where the engine
            reports them, `queue`, `prefill`, `decode` and `outside` replace the generate calls.
        """,
        conclude="""
            - One color dominates in all: that is what makes requests slow.
            - They differ: look at one with `verl-profiler requests RUN --request ID`.
            - Much `outside` or `other`: the agent loop's event loop was busy; see `loop_suspects`.
            - All of one worker, or of one step: see `worker_phases` and `step_durations`.
        """,
        limits="""
            Requests that never ended have no duration and are not drawn; `verl-profiler
            requests` lists them last. Concurrent calls are counted separately: such a bar is longer
            than its request, and the plot has a note. The engine's components are drawn only if it
            reported them for every call of every request shown. The rows are those of
            `request_breakdown`.
        """,
        takes=_BOTH | {"count"},
        example="--steps 5 --slowest 30",
    ),
)
