"""Plots of requests: how long they took, and the slowest of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from verl_profiler.analysis.requests import (
    request_breakdown,
    request_duration_cdf,
    request_percentiles,
)
from verl_profiler.analysis.selection import Rows, rows_of
from verl_profiler.reading.tables.tables import REQUEST_PARTS, Tables
from verl_profiler.render.colors import ACCENT, INK, PART_COLORS
from verl_profiler.render.figure import (
    SEQUENCE,
    bars,
    end_labels,
    legend,
    plain,
    sheet,
    short,
    step_axis,
    time_unit,
    value_axis,
)
from verl_profiler.render.text import seconds, share
from verl_profiler.views.view import Choice, Sheets, View, column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["VIEWS"]


def _cdf_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    selection = {"worker": choice.worker, "validate": choice.validate}
    return {
        "request_duration_cdf": request_duration_cdf(tables, choice.steps, **selection),
        "request_percentiles": request_percentiles(
            tables, choice.steps, sorted({50.0, *choice.percentiles}), **selection
        ),
    }


def _cdf(sheets: Sheets, choice: Choice) -> Figure:
    curve = sheets["request_duration_cdf"]
    marks = sheets["request_percentiles"]
    pooled = [row for row in curve if row["step"] is None]
    overall = [row for row in marks if row["step"] is None]
    steps = sorted({row["step"] for row in curve if row["step"] is not None})
    requests, unfinished = overall[0]["requests"], overall[0]["unfinished"]
    middle = next(row for row in overall if row["percentile"] == 50)
    # A percentile means something when at least one request lies beyond it.
    far = [row for row in overall if (100 - row["percentile"]) * requests >= 100 or row is middle][
        -1
    ]
    title = f"Half of the requests took {seconds(middle['duration_s'])} or less"
    if far is not middle:
        rest = share(1 - far["percentile"] / 100)
        title += f", the slowest {rest} more than {seconds(far['duration_s'])}"
    about = f"{choice.words()}: {requests:,} requests, mean {seconds(overall[0]['mean_s'])}"
    if unfinished:
        about += f"; {unfinished:,} unfinished ones left out"
    notes = []
    if len(pooled) < requests:
        notes.append(
            f"The curve of all steps is drawn through {len(pooled):,} of its {requests:,} requests "
            "(every thousandth part and the 100 slowest); each point is exact."
        )
    if far is not overall[-1]:
        notes.append(
            f"{requests:,} requests are too few for P{overall[-1]['percentile']:g}: "
            "it lies between the two slowest."
        )
    several = len(steps) > 1
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
    tints = Normalize(steps[0], steps[-1]) if several else None
    if tints is not None:
        for step in steps:
            rows = [row for row in curve if row["step"] == step]
            axes.step(
                [0, *column(rows, "duration_s", factor)],
                [0, *column(rows, "share")],
                where="post",
                color=SEQUENCE(0.2 + 0.8 * float(tints(step))),
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
    value_axis(axes, "share of requests that took no longer", percent=True)
    axes.set_ylim(0, 1.02)
    for row in overall:
        axes.plot(
            [row["duration_s"] * factor],
            [row["percentile"] / 100],
            "o",
            color=ACCENT,
            markersize=4.5,
        )
    listed = "\n".join(
        f"P{row['percentile']:g}".ljust(7) + seconds(row["duration_s"]).rjust(10) for row in overall
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
    if tints is not None:
        _percentile_lines(panels[1], marks, steps)
        figure.colorbar(
            ScalarMappable(tints, SEQUENCE),
            ax=axes,
            label="step",
            location="bottom",
            fraction=0.04,
            pad=0.02,
            aspect=40,
            ticks=MaxNLocator(integer=True, nbins=10),
        )
    return figure


def _percentile_lines(axes, marks: Rows, steps: list[int]) -> None:  # noqa: ANN001
    rows = [row for row in marks if row["step"] is not None]
    names = sorted({row["percentile"] for row in rows})
    factor, unit = time_unit(max(row["duration_s"] for row in rows))
    labels = []
    for place, name in enumerate(names):
        line = [row for row in rows if row["percentile"] == name]
        code = SEQUENCE(0.25 + 0.75 * place / max(len(names) - 1, 1))
        axes.plot(
            [row["step"] for row in line],
            column(line, "duration_s", factor),
            color=code,
            marker="o" if len(steps) <= 30 else None,
            markersize=3.5,
        )
        labels.append((line[-1]["duration_s"] * factor, f"P{name:g}", code))
    step_axis(axes, steps)
    value_axis(axes, f"duration of a request [{unit}]")
    end_labels(axes, labels)
    axes.set_title("percentiles of each step")


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


def _slowest(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["slowest_requests"]
    counts = sheets["counts"][0]
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
    about = f"{choice.words()}: the {len(rows)} slowest of {counts['requests']:,} finished requests"
    if counts["unfinished"]:
        about += f"; {counts['unfinished']:,} never finished and are not shown"
    several_steps = len({row["step"] for row in rows}) > 1
    wide = max(len(str(row["step"])) for row in rows)
    notes = []
    if any(row["overlap_s"] for row in rows):
        notes.append(
            "Calls made at the same time count each: such a bar is longer than the request."
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
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        turns = "" if row["turns"] is None else f", {row['turns']} turn" + "s" * (row["turns"] != 1)
        mark = "" if row["status"] is None else f", {short(row['status'], 12)}"
        axes.text(
            length, place, f"  {seconds(row['duration_s'])}{turns}{mark}", va="center", fontsize=8
        )
    value_axis(axes, f"time [{unit}]", of="x")
    axes.set_xlim(0, max(lengths) * 1.2)
    for text in axes.get_yticklabels():
        text.set_fontfamily("DejaVu Sans Mono")
        text.set_fontsize(8)
    legend(axes)
    return figure


def _in(part: str) -> str:
    return {
        "engine": "in the engine",
        "tool": "in tools",
        "tool_parsing": "reading tool calls",
        "token_merge": "merging tokens",
        "prompt_build": "building the prompt",
        "postprocess": "in post-processing",
        "reward": "waiting for its reward",
        "other": "in nothing that was recorded",
    }[part]


_NO_REQUESTS = (
    "no finished request was recorded there. The rollout family may be off "
    "(profiler.events.families.rollout), or no request ended."
)
_BOTH = frozenset({"worker", "validate"})


VIEWS: dict[str, View] = {
    "request_duration_cdf": View(
        "How long did requests take, and how long were the slowest few percent?",
        _cdf_tables,
        _cdf,
        _NO_REQUESTS,
        _BOTH | {"percentiles"},
    ),
    "slowest_requests": View(
        "Which requests were the slowest, and what did they spend their time on?",
        _slowest_tables,
        _slowest,
        _NO_REQUESTS,
        _BOTH | {"count"},
    ),
}
