"""Plots of shares: of every event, and of its own time without what it contains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.time_split import event_shares, exclusive_times
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.colors import GRID, color
from verl_profiler.render.figure import (
    bars,
    end_labels,
    sheet,
    step_axis,
    value_axis,
)
from verl_profiler.render.text import seconds, share
from verl_profiler.views.view import Choice, Sheets, View, asking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["VIEWS"]


def _share_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    rows = event_shares(tables, choice.steps, validate=choice.validate)
    return {"event_shares": [row for row in rows if row["share"] is not None]}


# Events of the profiler's own watch, and what contains everything, say nothing here.
_NOT_DRAWN = {"step", "request", "event_loop_lag", "request_start"}
_ROLES = ("trainer", "agent_loop", "engine", "actor", "critic", "ref", "reward")
_LINES = 7


def _shares(sheets: Sheets, choice: Choice) -> Figure:
    rows = [row for row in sheets["event_shares"] if row["event"] not in _NOT_DRAWN]
    if not rows:
        rows = list(sheets["event_shares"])
    present = {row["role"] for row in rows}
    roles = [role for role in _ROLES if role in present]
    roles += sorted(present - set(roles))
    roles = [
        role for role in roles if role != "engine" or any(r["role"] == "agent_loop" for r in rows)
    ][:4]
    means: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        means.setdefault((row["role"], row["event"]), []).append(row["share"])
    steps = sorted({row["step"] for row in rows})
    average = {key: sum(values) / len(steps) for key, values in means.items()}
    first = next(iter(roles))
    top = max((key for key in average if key[0] == first), key=lambda key: average[key])
    low, high = min(means[top]), max(means[top])
    whole = next(row["whole"] for row in rows if (row["role"], row["event"]) == top)
    title = f"{top[1]} takes {share(average[top])} of the {whole.rstrip('s')} time"
    if share(low) != share(high):
        title += f" on average, between {share(low)} and {share(high)}"
    left_out = 0
    figure, panels = sheet(
        title,
        f"{choice.words()}: {len(steps)} steps with a whole",
        size=(11, 1.4 + 2.7 * ((len(roles) + 1) // 2)),
        panels=((len(roles) + 1) // 2, 2 if len(roles) > 1 else 1),
        notes=[
            (
                "Share of the step (trainer), of the time of all requests (agent loops, engines), or of "
                "the step in each process (others). Events contain each other, so shares do not add up; "
                "the plot exclusive_times has those that do."
            )
        ],
    )
    for axes, role in zip(panels, roles, strict=False):
        events = sorted(
            (key[1] for key in average if key[0] == role), key=lambda event: -average[role, event]
        )
        left_out += max(len(events) - _LINES, 0)
        labels = []
        for place, event in enumerate(events[:_LINES]):
            style = ("-", "--", ":")[_repeats(events[:place], event) % 3]
            line = {
                row["step"]: row["share"]
                for row in rows
                if (row["role"], row["event"]) == (role, event)
            }
            axes.plot(
                list(line),
                list(line.values()),
                color=color(event),
                linestyle=style,
                marker="o" if len(steps) <= 30 else None,
                markersize=3.5,
            )
            labels.append((list(line.values())[-1], event, color(event), style))
        step_axis(axes, steps)
        value_axis(axes, "share", percent=True)
        if role == "trainer":
            axes.set_ylim(0, 1)
        end_labels(axes, labels, gap=0.085)
        more = f" (the {_LINES} largest of {len(events)})" if len(events) > _LINES else ""
        axes.set_title(f"{role}{more}")
    for axes in panels[len(roles) :]:
        axes.set_visible(False)
    return figure


def _repeats(events: list[str], event: str) -> int:
    """Return how many of the events before have the same color."""
    return sum(color(other) == color(event) for other in events)


_BARS = 12


def _exclusive(sheets: Sheets, choice: Choice) -> Figure:
    rows = sheets["exclusive_times"]
    scopes = list(dict.fromkeys(row["scope"] for row in rows))
    scopes.sort(key=lambda scope: ({"step": 0, "requests": 1}.get(scope, 2), scope))
    sums: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        held = sums.setdefault((row["scope"], row["event"]), [0.0, 0.0, 0])
        held[0] += row["self_s"]
        held[1] += row["total_s"]
        held[2] += row["events"]
    wholes = {scope: sum(v[0] for k, v in sums.items() if k[0] == scope) for scope in scopes}
    scopes = [scope for scope in scopes if wholes[scope] > 0][:4]
    first = "requests" if "requests" in scopes else scopes[0]
    top = max((key for key in sums if key[0] == first), key=lambda key: sums[key][0])
    where = {"requests": "all request time", "step": "all step time"}.get(
        first, f"the work of {first}s"
    )
    title = f"{share(sums[top][0] / wholes[first])} of {where} is spent in {top[1]} itself"
    steps = {row["step"] for row in rows}
    sizes = [min(_BARS, sum(1 for key in sums if key[0] == scope)) for scope in scopes]
    figure, panels = sheet(
        title,
        f"{choice.words()}: {len(steps)} steps",
        size=(10, 1.5 + sum(0.62 + 0.24 * size for size in sizes)),
        panels=(len(scopes), 1),
        height_ratios=[size + 1.2 for size in sizes],
        notes=[
            (
                "An event's own time is without what it contains; the own times of a panel add up to "
                "100 %. Pale: with what it contains. Own time of step: in no timer."
            )
        ],
    )
    for axes, scope in zip(panels, scopes, strict=True):
        events = sorted(
            (key[1] for key in sums if key[0] == scope), key=lambda event: -sums[scope, event][0]
        )
        shown, rest = events[:_BARS], events[_BARS:]
        whole = wholes[scope]
        own = [sums[scope, event][0] / whole for event in shown]
        total = [min(sums[scope, event][1] / whole, 1.0) for event in shown]
        if rest:
            shown = [*shown[:-1], f"{len(rest) + 1} more"]
            own[-1] = sum(sums[scope, event][0] for event in events[_BARS - 1 :]) / whole
            total[-1] = own[-1]
        bars(
            axes,
            [f"{event}  {share(mine)}" for event, mine in zip(shown, own, strict=True)],
            [("", total, GRID)],
        )
        places = range(len(shown))
        axes.barh(places, own, 0.74, color=[color(event) for event in shown])
        value_axis(axes, "", of="x", percent=True)
        axes.set_xlim(0, 1.01)
        what = {"step": "steps, by the trainer's timers", "requests": "requests"}.get(
            scope, f"{scope} ranks, while they work"
        )
        axes.set_title(f"{what}: {seconds(whole)} together")
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    return figure


VIEWS: dict[str, View] = {
    "event_shares": View(
        "Which share of the step, of the requests or of a process does each event take?",
        _share_tables,
        _shares,
        "no event there belongs to a finished step or request.",
        frozenset({"validate"}),
    ),
    "exclusive_times": View(
        "Where is the time really spent, without counting anything twice?",
        asking(exclusive_times),
        _exclusive,
        "no finished step, request or rank's work was recorded there.",
        frozenset({"validate"}),
    ),
}
