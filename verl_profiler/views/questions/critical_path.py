"""Plots of why steps took as long as they did: the critical path, and who others waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_profiler.analysis.explain.critical_path import UNEXPLAINED, critical_path
from verl_profiler.analysis.explain.stragglers import straggler_requests, stragglers
from verl_profiler.analysis.explain.what_if import UNCHANGED, what_if
from verl_profiler.analysis.selection import Rows
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.colors import ACCENT, INK, MUTED, owner_color
from verl_profiler.render.figure import (
    bars,
    legend,
    sheet,
    short,
    stack,
    step_axis,
    time_unit,
    value_axis,
)
from verl_profiler.render.text import seconds, share
from verl_profiler.views.view import Choice, Sheets, View, column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["VIEWS"]

# Owners with less than this part of the steps are drawn together.
_SMALL = 0.005
_SMALL_COLOR = "#E4E7EB"


def _path_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    return {"critical_path": critical_path(tables, choice.steps)}


def _path(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["critical_path"]
    steps = sorted({row["step"] for row in rows})
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["owner"]] = sums.get(row["owner"], 0.0) + row["duration_s"]
    total = sum(sums.values())
    order = sorted(sums, key=lambda owner: (owner == UNEXPLAINED, -sums[owner]))
    shown = [owner for owner in order if sums[owner] >= _SMALL * total]
    small = [owner for owner in order if owner not in shown]
    first, second = (*order[:2], order[0])[:2]
    figure, (axes,) = sheet(
        f"{share(sums[first] / total)} of the critical path is {first}, "
        f"{share(sums[second] / total)} {second}; "
        f"{share(sums.get(UNEXPLAINED, 0.0) / total)} is explained by nothing",
        f"{choice.words()}: {len(steps)} steps, {seconds(total / len(steps))} on average",
        size=(11, 5.2),
        notes=[
            (
                "Each second of a step has one owner: what the step waited for then. "
                "Pale: the trainer's phases."
            )
        ],
    )
    lengths = {(row["step"], row["owner"]): row["duration_s"] for row in rows}
    factor, unit = time_unit(
        max(sum(lengths.get((step, owner), 0.0) for owner in order) for step in steps)
    )

    def heights(owners: list[str]) -> list[float]:
        return [factor * sum(lengths.get((step, owner), 0.0) for owner in owners) for step in steps]

    series = [(owner, heights([owner]), owner_color(owner)) for owner in shown]
    if small:
        series.append((f"{len(small)} more", heights(small), _SMALL_COLOR))
    stack(axes, steps, series)
    step_axis(axes, steps)
    value_axis(axes, f"time [{unit}]")
    legend(axes, reverse=True)
    return figure


def _what_if_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    return {"what_if": what_if(tables, choice.steps)}


def _what_if(sheets: Sheets, choice: Choice) -> Figure:
    replays = [row for row in sheets["what_if"] if row["expected_s"] is not None]
    (unchanged,) = (row for row in sheets["what_if"] if row["what"] == UNCHANGED)
    best = max(replays, key=lambda row: row["expected_s"])
    figure, (axes,) = sheet(
        f"{best['about'][0].upper()}{best['about'][1:]}: {seconds(best['expected_s'])} per step "
        f"({share(best['share'])})",
        f"{choice.words()}: {unchanged['steps']} steps replayed, {seconds(unchanged['step_s'])} on "
        f"average; unchanged, off by {share(unchanged['residual_share'])} (median)",
        size=(11, 5.6),
        notes=[
            (
                "Bars: saved per step on average. Lines: 90 % interval, from three steps on; the first "
                "step is left out as warm-up where two others remain; for loads never seen, also from replicas that give no more tokens per second "
                "to calls that do not slow each other down. Diamonds: in these steps, where the "
                "trainer polls. Gains are not additive."
            )
        ],
    )
    spans = [max(abs(row["saved_s"]), abs(row["earlier_s"]), row["high_s"] or 0) for row in replays]
    factor, unit = time_unit(max(spans))
    bars(
        axes,
        [row["about"] for row in replays],
        [("saved", column(replays, "expected_s", factor), ACCENT)],
    )
    for place, row in enumerate(replays):
        if row["low_s"] is not None:
            axes.plot(
                [row["low_s"] * factor, row["high_s"] * factor], [place, place], color=INK, lw=1.4
            )
    axes.plot(
        column(replays, "saved_s", factor),
        range(len(replays)),
        linestyle="none",
        marker="D",
        markersize=4,
        markerfacecolor="white",
        markeredgecolor=MUTED,
    )
    value_axis(axes, f"saved per step [{unit}]", of="x")
    axes.axvline(0, color=MUTED, linewidth=0.8)
    return figure


def _straggler_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    return {
        "stragglers": stragglers(tables, choice.steps),
        "straggler_requests": straggler_requests(tables, choice.steps, choice.count),
    }


def _stragglers(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["stragglers"]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    worst = [
        max((r for r in rows if r["kind"] == kind), key=lambda r: r["blame_s"]) for kind in kinds
    ]
    reasons = [row for row in rows if row["kind"] == "request"]
    title = "Nobody waited for anybody"
    if reasons:
        title = (
            f"{share(reasons[0]['share'])} of the waiting for requests is for those that are "
            f"{reasons[0]['who']}"
        )
    figure, (left, right) = sheet(
        title,
        f"{choice.words()}: {max(row['of_steps'] for row in rows)} steps; others' waiting, charged "
        "to whoever is not done yet",
        size=(12, 5.2),
        panels=(1, 2),
    )
    factor, unit = time_unit(max((row["per_step_s"] for row in reasons), default=1.0))
    bars(
        left,
        [row["who"] for row in reasons],
        [("request", column(reasons, "per_step_s", factor), ACCENT)],
    )
    value_axis(left, f"caused wait time per step [{unit}]", of="x")
    left.set_title("requests, by why they were late")
    shares = [row for row in worst if row["kind"] != "request"]
    names = [f"{row['kind']}: {short(row['who'])}, {seconds(row['per_step_s'])}" for row in shares]
    bars(right, names, [("share", column(shares, "share"), MUTED)])
    value_axis(right, "part of its kind's waiting", of="x", percent=True)
    right.set_title("the one that others of its kind wait for most, per step")
    return figure


_NO_STEP = "no step has an end there."

VIEWS: dict[str, View] = {
    "critical_path": View(
        "What did each second of a step wait for?", _path_tables, _path, _NO_STEP
    ),
    "what_if": View(
        "What would a step have taken, had something been otherwise?",
        _what_if_tables,
        _what_if,
        _NO_STEP,
    ),
    "stragglers": View(
        "Who makes others wait, and why?",
        _straggler_tables,
        _stragglers,
        "no waiting was recorded there.",
        frozenset({"count"}),
    ),
}
