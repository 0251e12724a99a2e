"""The share that each event has of a step, of requests and of ranks' work, by self time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.time_split import exclusive_times
from verl_profiler.render.axes import percent, step_stack, value_axis
from verl_profiler.render.bars import colored_bars
from verl_profiler.render.colors import GRID, color
from verl_profiler.render.figure import sheet
from verl_profiler.units import seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, View, asking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from verl_profiler.render.panel import Panel

__all__ = ["TABLES", "VIEWS"]


def _shaded(code: str, repeats: int) -> str:
    """Darken the color of an event whose color others have already."""
    part = max(1 - 0.45 * repeats, 0.1)
    return "#" + "".join(f"{round(int(code[at : at + 2], 16) * part):02X}" for at in (1, 3, 5))


def _repeats(events: list[str], event: str) -> int:
    """Return how many of the events before have the same color."""
    return sum(color(other) == color(event) for other in events)


_BARS = 12
# Events that have a color of their own in the stacks of the steps.
_STACKED = 7


def _exclusive(data: DataTables, choice: Choice) -> Figure:
    rows = data["exclusive_times"]
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
    steps = {row["step"] for row in rows if row["step"]} or {row["step"] for row in rows}
    sizes = [min(_BARS, sum(1 for key in sums if key[0] == scope)) for scope in scopes]
    columns = 2 if len(steps) > 1 else 1
    if columns == 2:
        # Room for the legends of the steps.
        sizes = [max(size, _STACKED) for size in sizes]
    figure, panels = sheet(
        title,
        f"{choice.text()}: {len(steps)} steps",
        size=(10 if columns == 1 else 15, 1.5 + sum(0.62 + 0.24 * size for size in sizes)),
        panels=(len(scopes), columns),
        height_ratios=[size + 1.2 for size in sizes],
        notes=(
            "Self time is an event's time without nested events; the self times of a panel add up "
            "to 100 %. Pale: including nested events. Self time of step: in no timer."
        ),
    )
    for axes, scope in zip(panels[::columns], scopes, strict=True):
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
        names = [f"{event}  {share(mine)}" for event, mine in zip(shown, own, strict=True)]
        colored_bars(axes, names, own, [color(event) for event in shown], pale=total)
        value_axis(axes, "", of="x", form=percent)
        axes.set_xlim(0, 1.01)
        what = {"step": "steps, by the trainer's timers", "requests": "requests"}.get(
            scope, f"{scope} ranks, while they work"
        )
        axes.set_title(f"{what}: {seconds(whole)} together")
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        if columns == 2:
            beside = panels[panels.index(axes) + 1]
            _by_step(beside, [row for row in rows if row["scope"] == scope], events)
    return figure


def _by_step(axes: Panel, rows: Rows, events: list[str]) -> None:
    """Stack the shares of the events in each step: the largest by name, the others together."""
    steps = sorted({row["step"] for row in rows})
    shares = {(row["step"], row["event"]): row["share"] or 0.0 for row in rows}
    named, others = events[:_STACKED], events[_STACKED:]
    series = [
        (
            event,
            [shares.get((step, event), 0.0) for step in steps],
            _shaded(color(event), _repeats(named[:place], event)),
        )
        for place, event in enumerate(named)
    ]
    if others:
        rest = [sum(shares.get((step, event), 0.0) for event in others) for step in steps]
        series.append((f"{len(others)} more", rest, GRID))
    step_stack(axes, steps, series, "share of self time", "each step", form=percent)
    axes.set_ylim(0, 1.01)


VIEWS = (
    View(
        name="exclusive_times",
        question="What share of the time does each event take, nested events not counted twice?",
        analysis=asking(exclusive_times),
        columns=common("run step event events")
        | {
            "total_s": (
                "time with nested events, in s; calls that a request makes at the same time count "
                "each"
            ),
            "scope": (
                "`requests` (all finished requests together; self_s adds up to the sum of their "
                "durations), `step` (the trainer's timers; it adds up to the step) or the role of "
                "trainer workers (all ranks together; it adds up to the time in which anything was "
                "recorded)"
            ),
            "self_s": (
                "self time, without nested events, in s; calls that a request makes at the same "
                "time count once"
            ),
            "share": "self_s as part of all time of the scope; the shares add up to 1",
        },
        draw=_exclusive,
        empty="no finished step, request or rank's work was recorded there.",
        section=None,
        shows="""
            Each moment of a request, of a step or of a rank's work belongs to the innermost
            interval that is open. Colored: this self time. Pale: the time including nested events.
            The self times of a panel add up to 100 %. Right, of several steps: the same shares in
            each step.
        """,
        conclude="""
            - Start with the longest colored bar.
            - A share that grows over the steps; one that differs between two runs is where the
              runs differ.
            - Self time of `turn`, `agent_loop` or `request`: the agent loop's own code between
              the calls, or waiting for its event loop (`loop_suspects`).
            - Self time of `step`: in none of the trainer's timers.
            - Self time of `engine_call`: the engine and transport, see `engine_parts`.
        """,
        limits="""
            Requests run concurrently: 90 % of all request time in the engine does not mean that
            the step would be 90 % shorter without it. Concurrent calls of a request count once in
            its self time and separately in the pale bar. Intervals are nested as in
            [events](events.md); TransferQueue calls and a user's own events are innermost.
        """,
        takes=frozenset({"validate"}),
        example="--steps 5",
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "time_tree": common("run step")
    | {
        "phase": "phase of the step; empty for the step itself",
        "component": "component of the requests in `gen`, or `idle slots`; empty above that level",
        "tool": "tool in the component `tool`; empty above that level",
        "duration_s": "duration, in s; those below a row add up to its own",
    },
}
