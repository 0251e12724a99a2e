"""The share that each event has of a step, of requests and of ranks' work, by self time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.time_split import exclusive_times
from verl_profiler.render.charts import Series, Spec, chart, name_bars, panel, step_bars
from verl_profiler.render.colors import GRID, MUTED, color
from verl_profiler.units import seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, View, asking

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
_PIECES = 3_000


def _exclusive(data: DataTables, choice: Choice) -> Spec:
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
    panels: list[Spec] = []
    for scope in scopes:
        events = sorted(
            (key[1] for key in sums if key[0] == scope), key=lambda event: -sums[scope, event][0]
        )
        times = {event: sums[scope, event] for event in events}
        what = {"step": "steps, by the trainer's timers", "requests": "requests"}.get(
            scope, f"{scope} ranks, while they work"
        )
        whole = f"{what}: {seconds(wholes[scope])} together"
        panels.append(panel(_bars(times, wholes[scope]), title=whole, height=0))
        if len(steps) > 1:
            mine = [row for row in rows if row["scope"] == scope]
            panels.append(
                panel(
                    _by_step(mine, events, _PIECES // len(scopes)),
                    title=f"{what}, each step",
                    height=150,
                )
            )
    return chart(
        title,
        f"{choice.text()}: {len(steps)} steps",
        *panels,
        notes=(
            "Self time is an event's time without nested events; the self times of a panel add up "
            "to 100 %. Pale: including nested events. Self time of step: in no timer."
        ),
    )


def _bars(times: Mapping[str, Sequence[float]], whole: float) -> list[Spec]:
    """Draw the self time of each event, and pale what the events nested in it add."""
    rest = list(times)[_BARS:] and list(times)[_BARS - 1 :]
    shown = [event for event in times if event not in rest]
    own = [times[event][0] / whole for event in shown]
    more = [
        max(min(times[event][1] / whole, 1.0) - mine, 0.0)
        for event, mine in zip(shown, own, strict=True)
    ]
    codes = [color(event) for event in shown]
    if rest:
        shown.append(f"{len(rest)} more")
        own.append(sum(times[event][0] for event in rest) / whole)
        more.append(0.0)
        codes.append(MUTED)
    series: list[Series] = [
        (event, [mine if name == event else None for name in shown], code)
        for event, mine, code in zip(shown, own, codes, strict=True)
    ]
    names = [f"{event}  {share(mine)}" for event, mine in zip(shown, own, strict=True)]
    nested: Series = ("nested events", more, GRID)
    return name_bars(names, [*series, nested], "share of the time", legend=False, form="%")


def _by_step(rows: Rows, events: list[str], most: int) -> list[Spec]:
    """Stack the shares of the events in each step: the largest by name, the others together."""
    steps = sorted({row["step"] for row in rows})
    shares = {(row["step"], row["event"]): row["share"] or 0.0 for row in rows}
    named, others = events[:_STACKED], events[_STACKED:]
    series: list[Series] = [
        (
            event,
            [shares.get((step, event)) for step in steps],
            _shaded(color(event), _repeats(named[:place], event)),
        )
        for place, event in enumerate(named)
    ]
    if others:
        rest = [sum(shares.get((step, event), 0.0) for event in others) for step in steps]
        series.append((f"{len(others)} more", rest, GRID))
    return step_bars(steps, series, "share of self time", form="%", most=most)


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
        chart=_exclusive,
        empty="no finished step, request or rank's work was recorded there.",
        section=None,
        shows="""
            Each moment of a request, of a step or of a rank's work belongs to the innermost
            interval that is open. Colored: this self time. Pale: the time including nested events.
            The self times of a panel add up to 100 %. Below, of several steps: the same shares in
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
