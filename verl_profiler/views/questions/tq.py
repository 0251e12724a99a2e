"""Plots of the functions that TransferQueue feeds, and of its rates over time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.tq import FAIR_MIB_S, GOOD_MIB_S, tq_functions, tq_over_time
from verl_profiler.analysis.tq_findings import HIGH_OVERHEAD
from verl_profiler.reading.tables.schemas import TQ_STAGES
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.colors import ACCENT, GRID, MUTED, TQ_COLORS
from verl_profiler.render.figure import (
    bars,
    end_labels,
    legend,
    sheet,
    short,
    time_unit,
    value_axis,
)
from verl_profiler.render.text import seconds, share
from verl_profiler.views.tq_text import rate
from verl_profiler.views.view import Choice, Sheets, View, column, known

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["VIEWS"]

_FUNCTIONS = 16
_PARTS = 60


def _function_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    return {"tq_functions": tq_functions(tables, choice.steps)}


def _functions(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["tq_functions"]
    timed = [row for row in rows if row["overhead_share"] is not None]
    busy = [row for row in timed if not row["waits"]] or timed
    most = max(busy, key=lambda row: row["overhead_share"], default=None)
    title = "No traced call has an end"
    if most is not None:
        title = (
            f"{most['func']} spends the largest share on TransferQueue: "
            f"{share(most['overhead_share'])} of its time is get and put, "
            f"{seconds(most['total_s'] * most['overhead_share'])} in all"
        )
    shown = rows[:_FUNCTIONS]
    traced, calls = (sum(row[key] for row in rows) for key in ("traced", "calls"))
    about = f"{choice.words()} and validation: {calls:,} calls of {len(rows)} functions"
    notes = [
        (
            "A call of a bridged function gets, computes and puts one after the other; calls of one "
            "process at the same time count each."
        )
    ]
    if traced != calls:
        notes.append(f"{traced:,} calls were traced; the others are estimated from them.")
    figure, (left, right) = sheet(
        title, about, size=(12, 1.9 + 0.42 * max(len(shown), 3)), panels=(1, 2), notes=notes
    )
    names = [short(row["func"], 34) for row in shown]
    factor, unit = time_unit(max([*known(shown, "mean_s"), *_stage_sums(shown)], default=0))
    lengths = bars(
        left,
        names,
        [(s, column(shown, f"{s}_mean_s", factor), TQ_COLORS[s]) for s in TQ_STAGES],
    )
    for place, (row, length) in enumerate(zip(shown, lengths, strict=True)):
        text = f"  {row['calls']:,} call{'s' * (row['calls'] != 1)}"
        if row["failed"]:
            text += f", {row['failed']} failed"
        left.text(length, place, text, va="center", fontsize=8)
    value_axis(left, f"mean time of a call [{unit}]", of="x")
    left.set_xlim(0, (max(lengths) or 1) * 1.35)
    left.set_title("a call")
    bars(
        right,
        [""] * len(shown),
        [(s, column(shown, f"{s}_share"), TQ_COLORS[s]) for s in TQ_STAGES],
    )
    for place, row in enumerate(shown):
        if row["overhead_share"] is not None:
            text = f"  {share(row['overhead_share'])} get and put"
            if row["waits"]:
                text += " (waits for others)"
            right.text(1.0, place, text, va="center", fontsize=8)
    right.set_xlim(0, 1.42)
    right.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    right.set_xlabel("share of the function's time")
    more = "" if len(shown) == len(rows) else f" ({len(shown)} of {len(rows)} functions)"
    right.set_title(f"shares{more}")
    legend(right)
    return figure


def _stage_sums(rows: Rows) -> list[float]:
    return [sum(row[f"{stage}_mean_s"] or 0 for stage in TQ_STAGES) for row in rows]


def _time_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    return {"tq_over_time": tq_over_time(tables, choice.steps, parts=_PARTS)}


def _over_time(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["tq_over_time"]
    rated = [row for row in rows if row["mib_per_s"] is not None]
    loaded = [row for row in rows if row["overhead_share"] is not None]
    sentences = []
    if rated:
        slow = sum(row["speed"] == "poor" for row in rated)
        slowest = min(rated, key=lambda row: row["mib_per_s"])
        sentences.append(
            f"{slow} of {len(rated)} parts of the run move less than {FAIR_MIB_S} MB/s; the slowest "
            f"{rate(slowest['mib_per_s'])} MB/s, {seconds(slowest['begin_s'])} after the first call"
        )
    if loaded:
        worst = max(loaded, key=lambda row: row["overhead_share"])
        sentences.append(f"get and put take {share(worst['overhead_share'])} at most")
    kinds = [kind for kind, there in (("rate", rated), ("load", loaded)) if there]
    figure, panels = sheet(
        "; ".join(sentences) or "Neither rates nor functions are known",
        f"{choice.words()} and validation: {sum(row['transfers'] for row in rows):,} gets and puts, "
        f"{sum(row['calls'] for row in rows):,} traced calls",
        size=(11, 1.5 + 2.6 * max(len(kinds), 1)),
        panels=(max(len(kinds), 1), 1),
        notes=[
            (
                f"The run in {_PARTS} equal parts of time; a call is in the part in which it begins. "
                "MB are 2^20 bytes; each call by its own time, so calls at the same time move more."
            )
        ],
        sharex=True,
    )
    factor, unit = time_unit(rows[-1]["end_s"])
    for axes, kind in zip(panels, kinds, strict=False):
        (_rates if kind == "rate" else _load)(axes, rows, factor)
    panels[-1].set_xlabel(f"time after the first call [{unit}]")
    return figure


def _rates(axes: Axes, rows: Rows, factor: float) -> None:
    labels = []
    for operation in ("get", "put"):
        line = [row for row in rows if row[f"{operation}_mib_per_s"] is not None]
        if not line:
            continue
        middles, rates = [], []
        for place, row in enumerate(line):
            if place and row["part"] > line[place - 1]["part"] + 1:
                # A part without a call is a gap, not a slope.
                middles.append(row["begin_s"] * factor)
                rates.append(math.nan)
            middles.append((row["begin_s"] + row["end_s"]) / 2 * factor)
            rates.append(row[f"{operation}_mib_per_s"])
        axes.plot(middles, rates, color=TQ_COLORS[operation], marker="o", markersize=3.5)
        labels.append((rates[-1], operation, TQ_COLORS[operation]))
    value_axis(axes, "MB/s")
    top = axes.get_ylim()[1]
    for bound, name in ((GOOD_MIB_S, "good above"), (FAIR_MIB_S, "poor below")):
        if bound < top:
            axes.axhline(bound, color=MUTED, linewidth=0.9, linestyle="--", zorder=1)
            axes.text(
                0.995,
                bound,
                f"{name} {bound}",
                transform=axes.get_yaxis_transform(),
                ha="right",
                va="bottom",
                fontsize=8,
                color=MUTED,
            )
    end_labels(axes, labels)
    axes.set_title("throughput of gets and puts")


def _load(axes: Axes, rows: Rows, factor: float) -> None:
    line = [row for row in rows if row["overhead_share"] is not None]
    width = (rows[0]["end_s"] - rows[0]["begin_s"]) * factor
    axes.bar(
        [row["begin_s"] * factor for row in line],
        column(line, "overhead_share"),
        width,
        align="edge",
        color=[ACCENT if row["overhead_share"] > HIGH_OVERHEAD else GRID for row in line],
        edgecolor="white",
        linewidth=0.4,
    )
    axes.axhline(HIGH_OVERHEAD, color=MUTED, linewidth=0.9, linestyle="--")
    value_axis(axes, "share of calls' time", percent=True)
    axes.set_ylim(0, max(axes.get_ylim()[1], HIGH_OVERHEAD * 1.1))
    axes.set_title(f"get and put in the time of functions; above {share(HIGH_OVERHEAD)} is high")


_TRACE = "Functions are traced with TQ_TRACE_ENABLED=1."

VIEWS: dict[str, View] = {
    "tq_functions": View(
        "How much of each function's time goes to TransferQueue's gets and puts?",
        _function_tables,
        _functions,
        f"no traced function was recorded there. {_TRACE}",
    ),
    "tq_over_time": View(
        "When was TransferQueue slow, and when did it cost most?",
        _time_tables,
        _over_time,
        "no TransferQueue call was recorded there.",
    ),
}
