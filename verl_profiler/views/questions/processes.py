"""Plots of processes: event loops that stood still, and what the profiler itself cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import Patch

from verl_profiler.analysis.event_loop import loop_suspects
from verl_profiler.analysis.profiler import profiler_cost
from verl_profiler.render.colors import ACCENT, GRID, PHASE_COLORS
from verl_profiler.render.figure import (
    bars,
    sheet,
    short,
    stack,
    step_axis,
    time_unit,
    value_axis,
)
from verl_profiler.render.text import lag_weight, seconds, share
from verl_profiler.views.view import Choice, Sheets, View, asking, column, known

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["VIEWS"]

_BARS = 20
_DESIGNED = "#B9C2CC"


def _suspects(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["loop_suspects"]
    suspects = [row for row in rows if not row["by_design"]]
    if suspects:
        worst = max(suspects, key=lag_weight)
        title = f"The event loop of {worst['name']} stood still for {seconds(worst['max_s'])} (step {worst['step']})"
        if worst["during"]:
            title += f", in {short(worst['during'], 30)}"
        if worst["requests"]:
            title += f", while {worst['requests']} of its requests were under way"
    else:
        title = "No event loop stood still that should not have"
    # One bar per process, loop and call, over all steps.
    groups: dict[tuple[str, str | None, str | None], dict] = {}
    for row in rows:
        held = groups.setdefault(
            (row["name"], row["loop"], row["during"]),
            {"total_s": 0.0, "max_s": 0.0, "lags": 0, "by_design": row["by_design"]},
        )
        held["total_s"] += row["total_s"]
        held["max_s"] = max(held["max_s"], row["max_s"])
        held["lags"] += row["lags"]
    order = sorted(
        groups, key=lambda key: (groups[key]["by_design"], -groups[key]["total_s"], str(key))
    )
    shown = order[:_BARS]
    held = [groups[key] for key in shown]
    lags = sum(row["lags"] for row in rows)
    about = f"{choice.words()} and validation: {lags:,} lag{'s' * (lags != 1)}"
    if len(order) > len(shown):
        about += f"; {len(shown)} of {len(order)} process and call pairs"
    figure, (axes,) = sheet(
        title,
        about,
        size=(11, max(3.4, 2.3 + 0.24 * len(shown))),
        notes=[
            (
                "While a loop stands still, everything that awaits in it looks slow. Gray: trainer "
                "workers compute in their event loops by design."
            )
        ],
    )
    factor, unit = time_unit(max(each["total_s"] for each in held))
    names = [
        f"{short(name, 18)}: {'no probed call' if during is None else short(during, 22)}"
        + (f" ({short(loop, 20)})" if _several_loops(order, name) else "")
        for name, loop, during in shown
    ]
    lengths = bars(axes, names, [("", [each["total_s"] * factor for each in held], GRID)])
    axes.barh(
        range(len(shown)),
        [each["total_s"] * factor for each in held],
        0.74,
        color=[_DESIGNED if each["by_design"] else ACCENT for each in held],
    )
    for place, (each, length) in enumerate(zip(held, lengths, strict=True)):
        axes.text(
            length,
            place,
            f"  {each['lags']:,} lag{'s' * (each['lags'] != 1)}, longest {seconds(each['max_s'])}",
            va="center",
            fontsize=8,
        )
    value_axis(axes, f"time in which the loop stood still [{unit}]", of="x")
    axes.set_xlim(0, max(lengths) * 1.3)
    axes.legend(
        handles=[Patch(color=ACCENT, label="suspect"), Patch(color=_DESIGNED, label="by design")],
        loc="lower right",
    )
    return figure


def _several_loops(keys: list[tuple[str, str | None, str | None]], name: str) -> bool:
    return len({loop for other, loop, _ in keys if other == name}) > 1


def _cost(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["profiler_cost"]
    shares = known(rows, "share")
    dropped = sum(known(rows, "dropped"))
    if shares:
        title = (
            f"The profiler costs the busiest process {share(sum(shares) / len(shares))} of a step"
        )
        if share(max(shares)) != share(sum(shares) / len(shares)):
            title += f" on average, {share(max(shares))} at most"
    else:
        title = f"The profiler took {seconds(max(row['dearest_s'] for row in rows))} in the busiest process"
    title += f"; {dropped:,} events were dropped" if dropped else "; no event was dropped"
    figure, panels = sheet(
        title,
        f"{choice.words()} and validation: {sum(known(rows, 'events')):,} events",
        size=(11, 4.6),
        panels=(1, 2),
        notes=[
            (
                "Wrappers run in the process's own threads and can delay it; writing is done by a thread "
                "of its own. What it costs to be scheduled beside that thread is not in these numbers."
            )
        ],
    )
    steps = [row["step"] for row in rows]
    axes = panels[0]
    line = [row for row in rows if row["share"] is not None]
    if line:
        axes.bar(
            [row["step"] for row in line], column(line, "share"), 0.78, color=PHASE_COLORS["gen"]
        )
    step_axis(axes, steps)
    value_axis(axes, "share of the step, in the process with most", percent=True)
    axes.set_title("what it delays, at most")
    axes = panels[1]
    longest = max((row["wrapper_s"] or 0) + (row["writer_s"] or 0) for row in rows)
    factor, unit = time_unit(longest)
    stack(
        axes,
        steps,
        [
            ("wrappers", column(rows, "wrapper_s", factor), PHASE_COLORS["gen"]),
            ("writing", column(rows, "writer_s", factor), PHASE_COLORS["unaccounted"]),
        ],
    )
    step_axis(axes, steps)
    value_axis(axes, f"time of all processes together [{unit}]")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
    axes.legend(loc="upper left", ncols=2)
    axes.set_title("what it did")
    return figure


VIEWS: dict[str, View] = {
    "loop_suspects": View(
        "Did an event loop stand still, so that everything in it looked slow?",
        asking(loop_suspects),
        _suspects,
        "no event loop stood still for long (or the event_loop family was off).",
    ),
    "profiler_cost": View(
        "What did the profiler itself cost?",
        asking(profiler_cost),
        _cost,
        "no account of the profiler's own was recorded there.",
    ),
}
