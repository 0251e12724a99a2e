"""Plots of rollouts: how many requests were in flight, and the tail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_profiler.analysis.rollout import requests_in_flight, rollout_tail
from verl_profiler.render.colors import ACCENT, PHASE_COLORS
from verl_profiler.render.figure import (
    SEQUENCE,
    end_labels,
    legend,
    sheet,
    stack,
    step_axis,
    time_unit,
    value_axis,
)
from verl_profiler.render.text import seconds, share
from verl_profiler.views.view import Choice, Sheets, View, asking, column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["VIEWS"]

_PANELS = 6


def _flights(sheets: Sheets, choice: Choice) -> Figure:
    tails = sheets["rollout_tail"]
    shown = sorted(tails, key=lambda row: (-row["rollout_s"], row["step"]))[:_PANELS]
    shown.sort(key=lambda row: row["step"])
    worst = max(shown, key=lambda row: row["tail80_s"])
    title = (
        f"The last fifth of the requests takes {share(worst['tail80_share'])} of the rollout"
        f"{'' if len(shown) == 1 else ' in step ' + str(worst['step'])}: {seconds(worst['tail80_s'])} "
        f"of {seconds(worst['rollout_s'])}"
    )
    about = f"{choice.words()}: {sum(row['requests'] for row in tails):,} requests"
    if len(shown) < len(tails):
        about += f"; the {len(shown)} longest rollouts of {len(tails)}"
    notes = [
        "Shaded: after 80 % and after 95 % of the requests were done. Only finished requests.",
        (
            "Empty slots: the part of (most requests in flight at once) times (length of the rollout) in "
            "which no request was in flight."
        ),
    ]
    points = [row for row in sheets["requests_in_flight"] if row["merged"] > 1]
    if points:
        notes.append(
            "Rollouts with more than 2,000 changes are drawn in 2,000 spans of time, each from its "
            "fewest to its most requests."
        )
    columns = 2 if len(shown) == 4 else min(len(shown), 3)
    lines = -(-len(shown) // columns)
    figure, panels = sheet(
        title,
        about,
        size=(10 if columns < 3 else 12, 1.5 + (3.6 if lines == 1 else 2.6 * lines)),
        panels=(lines, columns),
        sharey=True,
        notes=notes,
    )
    longest = max(row["rollout_s"] for row in shown)
    factor, unit = time_unit(longest)
    for axes, tail in zip(panels, shown, strict=False):
        rows = [row for row in sheets["requests_in_flight"] if row["step"] == tail["step"]]
        at = column(rows, "at_s", factor)
        axes.fill_between(
            at,
            column(rows, "fewest"),
            column(rows, "most"),
            step="post",
            color="#8FBBDD",
            linewidth=0,
        )
        axes.step(at, column(rows, "in_flight"), where="post", color=PHASE_COLORS["gen"])
        end = tail["rollout_s"] * factor
        for name, alpha in (("tail80_s", 0.10), ("tail95_s", 0.18)):
            axes.axvspan(end - tail[name] * factor, end, color=ACCENT, alpha=alpha, linewidth=0)
        axes.set_title(
            f"step {tail['step']}: {tail['requests']:,} requests, "
            f"{share(tail['bubble_share'])} of the slots empty"
        )
        value_axis(axes, f"time since the first request [{unit}]", of="x")
        value_axis(axes, "requests in flight" if axes in panels[::columns] else "")
        axes.set_xlim(0, longest * factor * 1.01)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    return figure


def _tails(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["rollout_tail"]
    total = sum(row["rollout_s"] for row in rows)
    title = (
        f"{share(sum(row['tail80_s'] for row in rows) / total if total else 0)} of all rollout time "
        "goes to the last 20 % of the requests, "
        f"{share(sum(row['tail95_s'] for row in rows) / total if total else 0)} to the last 5 %"
    )
    about = (
        f"{choice.words()}: {len(rows)} rollouts, {sum(row['requests'] for row in rows):,} requests"
    )
    figure, panels = sheet(
        title,
        about,
        size=(11, 5),
        panels=(1, 2),
        notes=[
            (
                "empty slots: the part of (most requests in flight at once) times (length of the "
                "rollout) in which no request was in flight. Waiting workers: the part of the workers' "
                "time after their own last request."
            )
        ],
    )
    steps = [row["step"] for row in rows]
    factor, unit = time_unit(max(row["rollout_s"] for row in rows))
    axes = panels[0]
    parts = [
        ("the first 80 %", [row["rollout_s"] - row["tail80_s"] for row in rows], 0.1),
        ("80 to 95 %", [row["tail80_s"] - row["tail95_s"] for row in rows], 0.4),
        ("95 to 99 %", [row["tail95_s"] - row["tail99_s"] for row in rows], 0.7),
        ("the last 1 %", [row["tail99_s"] for row in rows], 1.0),
    ]
    stack(
        axes,
        steps,
        [
            (name, [value * factor for value in values], SEQUENCE(tint))
            for name, values, tint in parts
        ],
    )
    step_axis(axes, steps)
    value_axis(axes, f"time [{unit}]")
    legend(axes, title="until done", reverse=True)
    axes.set_title("what the rollout waited for")
    axes = panels[1]
    labels = []
    for name, key, code in (
        ("empty slots", "bubble_share", PHASE_COLORS["gen"]),
        ("waiting workers", "idle_share", ACCENT),
    ):
        line = [row for row in rows if row[key] is not None]
        if not line:
            continue
        axes.plot(
            [row["step"] for row in line],
            column(line, key),
            color=code,
            marker="o" if len(rows) <= 30 else None,
            markersize=3.5,
        )
        labels.append((line[-1][key], name, code))
    step_axis(axes, steps)
    value_axis(axes, "share", percent=True)
    axes.set_ylim(0, 1)
    end_labels(axes, labels)
    axes.set_title("what stood empty")
    return figure


_NO_REQUESTS = "no finished request was recorded there."
_BOTH = frozenset({"worker", "validate"})


VIEWS: dict[str, View] = {
    "requests_in_flight": View(
        "How many requests were under way at each moment, and how long was the tail?",
        asking(requests_in_flight, rollout_tail),
        _flights,
        _NO_REQUESTS,
        _BOTH,
    ),
    "rollout_tail": View(
        "How much of each rollout goes to its last requests?",
        asking(rollout_tail),
        _tails,
        _NO_REQUESTS,
        _BOTH,
    ),
}
