"""Views of shares: of every event, and of its own time without what it contains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.time_split import event_shares, exclusive_times
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.axes import percent, step_lines, value_axis
from verl_profiler.render.bars import colored_bars
from verl_profiler.render.colors import color
from verl_profiler.render.figure import sheet
from verl_profiler.units import seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, View, asking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TABLES", "VIEWS"]


def _share_tables(tables: Tables, choice: Choice) -> dict[str, Rows]:
    rows = event_shares(tables, choice.steps, validate=choice.validate)
    return {"event_shares": [row for row in rows if row["share"] is not None]}


# Events of the profiler's own watch, and what contains everything, say nothing here.
_NOT_DRAWN = {"step", "request", "event_loop_lag", "request_start"}
_ROLES = ("trainer", "agent_loop", "engine", "actor", "critic", "ref", "reward")
_LINES = 7


def _shares(data: DataTables, choice: Choice) -> Figure:
    rows = [row for row in data["event_shares"] if row["event"] not in _NOT_DRAWN]
    if not rows:
        rows = list(data["event_shares"])
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
        f"{choice.text()}: {len(steps)} finished steps",
        size=(11, 1.4 + 2.7 * ((len(roles) + 1) // 2)),
        panels=((len(roles) + 1) // 2, 2 if len(roles) > 1 else 1),
        notes=(
            "Share of the step (trainer), of the time of all requests (agent loops, engines), or "
            "of the step in each process (others). Events are nested, so these shares are not "
            "additive; those of exclusive_times are."
        ),
    )
    for axes, role in zip(panels, roles, strict=False):
        events = sorted(
            (key[1] for key in average if key[0] == role), key=lambda event: -average[role, event]
        )
        left_out += max(len(events) - _LINES, 0)
        more = f" (the {_LINES} largest of {len(events)})" if len(events) > _LINES else ""
        lines = [
            (
                [row for row in rows if (row["role"], row["event"]) == (role, event)],
                "share",
                event,
                _shaded(color(event), _repeats(events[:place], event)),
                ("-", "--", ":")[_repeats(events[:place], event) % 3],
            )
            for place, event in enumerate(events[:_LINES])
        ]
        step_lines(
            axes,
            lines,
            steps,
            "share",
            f"{role}{more}",
            form=percent,
            top=1 if role == "trainer" else None,
            gap=0.085,
        )
    for axes in panels[len(roles) :]:
        axes.set_visible(False)
    return figure


def _shaded(code: str, repeats: int) -> str:
    """Darken the color of an event whose color others have already: their lines may coincide."""
    part = max(1 - 0.45 * repeats, 0.1)
    return "#" + "".join(f"{round(int(code[at : at + 2], 16) * part):02X}" for at in (1, 3, 5))


def _repeats(events: list[str], event: str) -> int:
    """Return how many of the events before have the same color."""
    return sum(color(other) == color(event) for other in events)


_BARS = 12


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
    figure, panels = sheet(
        title,
        f"{choice.text()}: {len(steps)} steps",
        size=(10, 1.5 + sum(0.62 + 0.24 * size for size in sizes)),
        panels=(len(scopes), 1),
        height_ratios=[size + 1.2 for size in sizes],
        notes=(
            "Self time is an event's time without nested events; the self times of a panel add up "
            "to 100 %. Pale: including nested events. Self time of step: in no timer."
        ),
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
        names = [f"{event}  {share(mine)}" for event, mine in zip(shown, own, strict=True)]
        colored_bars(axes, names, own, [color(event) for event in shown], pale=total)
        value_axis(axes, "", of="x", form=percent)
        axes.set_xlim(0, 1.01)
        what = {"step": "steps, by the trainer's timers", "requests": "requests"}.get(
            scope, f"{scope} ranks, while they work"
        )
        axes.set_title(f"{what}: {seconds(whole)} together")
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    return figure


VIEWS = (
    View(
        name="event_shares",
        question="What share of the step, of the requests or of a process does each event take?",
        analysis=_share_tables,
        columns=common("run step role event events processes total_s estimated")
        | {
            "whole": (
                "what the share refers to: `step`, for the trainer's events; `requests`, the time "
                "of all requests together, for what belongs to a request; `processes`, the step's "
                "time in each process of the role, for the rest"
            ),
            "whole_s": "length of the whole, in s; empty for unfinished steps",
            "share": (
                "total_s as part of whole_s; above 1 where a process does several things at once"
            ),
        },
        draw=_shares,
        empty="no event there belongs to a finished step or request.",
        section=None,
        shows="""
            A panel per role, a line per event, the seven largest of each role. The whole is the
            step for the trainer's timers, the time of all requests for what belongs to a
            request, and the step in each process for the rest.
        """,
        conclude="""
            - A rising line takes a growing share of the step; the title has the range of the
              largest.
            - `update_actor` falls while `gen` rises: responses became longer, or the engines
              slower.
            - An event whose share differs between two runs is where the runs differ.
        """,
        limits="""
            Shares are not additive, because events are nested (a `turn` contains its
            `engine_call`); those of `exclusive_times` are. With concurrent calls in a process a
            share can exceed 100 %. Unfinished steps have no shares. Engine requests count under
            the step of the agent loop's call; the engine itself does not have it.
        """,
        takes=frozenset({"validate"}),
    ),
    View(
        name="exclusive_times",
        question="Where is the time spent, if the time of nested events is not counted twice?",
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
            The self times of a panel add up to 100 %.
        """,
        conclude="""
            - Start with the longest colored bar.
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
