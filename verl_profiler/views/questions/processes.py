"""The view of event-loop stalls, and tables of processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.event_loop import loop_suspects
from verl_profiler.render.charts import Spec, chart, name_bars, panel, time_unit
from verl_profiler.render.colors import ACCENT, MUTED
from verl_profiler.units import counted, seconds
from verl_profiler.views.columns import common
from verl_profiler.views.step_text import lag_weight
from verl_profiler.views.view import Choice, DataTables, View, asking

__all__ = ["TABLES", "VIEWS"]

_BARS = 20
# By kind of stall, the one to look at first.
_KINDS = {"requests may wait": ACCENT, "no request waits there": MUTED, "by design": "#B9C2CC"}


def _suspects(data: DataTables, choice: Choice) -> Spec:
    rows = data["loop_suspects"]
    early = [row for row in rows if not row["step"]]
    if len(early) < len(rows):
        rows = [row for row in rows if row["step"]]
    suspects = [row for row in rows if not row["by_design"]]
    if suspects:
        worst = max(suspects, key=lag_weight)
        title = f"The event loop of {worst['name']} stalled for {seconds(worst['max_s'])} (step {worst['step']})"
        if worst["during"]:
            title += f", in {worst['during']}"
        if worst["requests"]:
            title += f", with {worst['requests']} of its requests in progress"
    else:
        title = "No event loop stalled except by design"
    # One bar per process, loop and call, over all steps.
    groups: dict[tuple[str, str | None, str | None], dict[str, Any]] = {}
    for row in rows:
        held = groups.setdefault(
            (row["name"], row["loop"], row["during"]),
            {"total_s": 0.0, "max_s": 0.0, "lags": 0, "kind": _kind(row), "code": row["code"]},
        )
        held["total_s"] += row["total_s"]
        held["max_s"] = max(held["max_s"], row["max_s"])
        held["lags"] += row["lags"]
    order = sorted(
        groups,
        key=lambda key: ([*_KINDS].index(groups[key]["kind"]), -groups[key]["total_s"], str(key)),
    )
    shown = order[:_BARS]
    held = [groups[key] for key in shown]
    lags = sum(row["lags"] for row in rows)
    about = f"{choice.text()} and validation: {counted(lags, 'stall')}"
    if len(order) > len(shown):
        about += f"; {len(shown)} of {len(order)} process and call pairs"
    notes = [
        (
            "While an event loop stalls, everything awaiting on it appears slow. By design: trainer "
            "workers compute in their event loops."
        )
    ]
    if early and len(rows) < len(data["loop_suspects"]):
        notes.append(
            f"Not drawn: {counted(sum(row['lags'] for row in early), 'stall')} before the first step."
        )
    factor, unit = time_unit(max(each["total_s"] for each in held))
    bars = name_bars(
        [
            f"{name}: {during or 'no probed call'}"
            + (f" ({code})" if (code := groups[name, loop, during]["code"]) else "")
            + (f" ({loop})" if loop and _several_loops(order, name) else "")
            for name, loop, during in shown
        ],
        [
            (kind, [each["total_s"] * factor if each["kind"] == kind else 0 for each in held], hue)
            for kind, hue in _KINDS.items()
            if any(each["kind"] == kind for each in held)
        ],
        f"event-loop stalls [{unit}]",
        texts=[
            f"{counted(each['lags'], 'stall')}, longest {seconds(each['max_s'])}" for each in held
        ],
        room=1.4,
    )
    return chart(title, about, panel(bars, height=0), notes=notes)


def _kind(row: Mapping[str, Any]) -> str:
    if row["by_design"]:
        return "by design"
    return "requests may wait" if lag_weight(row)[0] else "no request waits there"


def _several_loops(keys: list[tuple[str, str | None, str | None]], name: str) -> bool:
    return len({loop for other, loop, _ in keys if other == name}) > 1


_STALLS = {
    "total_s": "sum of the stalls, in s",
    "max_s": "longest stall, in s",
}

VIEWS = (
    View(
        name="loop_suspects",
        question="Did an event loop stall and make everything on it look slow?",
        analysis=asking(loop_suspects),
        columns=common("run step name role loop lags during worst_begin_us")
        | {
            "code": "`file:line` of the blocking function; empty if it was not recorded",
            "by_design": (
                "whether it is a trainer worker, which computes in its event loop by design"
            ),
            **_STALLS,
            "step_share": "total_s as part of the step; empty for unfinished steps",
            "requests": (
                "finished requests of the process that the stalls overlap; only of agent-loop "
                "workers"
            ),
            "requests_s": "sum of these overlaps, in s; only of agent-loop workers",
        },
        chart=_suspects,
        empty="no event loop stalled beyond the threshold (or the event_loop family was off).",
        section="lags",
        shows="""
            A bar per process and blocking call: how long its event loop was blocked, how often, and
            the longest stall. Orange: suspects. Gray: trainer workers, which compute in
            their event loops by design.
        """,
        conclude="""
            - An agent-loop worker stalled while requests were in progress: any part of them that
              overlaps the stall (a tool, a reward, an engine call) appears slow but is not.
            - If the blocking function is named (`module:function`), make it asynchronous, or move
              it to a thread or process.
            - If it is not named, the loop was late while no callback ran, because the host was busy
              or another thread held the GIL.
            - An engine's loop stalled: its scheduler's messages wait, and all its requests with
              them.
        """,
        limits="""
            A stall below the threshold (20 ms by default) is not recorded. Its start lies
            between two heartbeats (every 50 ms; every 200 ms in a loop without probed calls for
            2 s) or the start of a probed coroutine; `begin_error_us` is the bound. A C function
            that holds the GIL is named when it returns, unless another thread takes the GIL
            first. On Python 3.10 and 3.11 the request is unknown where the
            user's code blocks in a task of its own. The affected requests are known for agent
            loops only, and only finished ones. Sources: `event_loop_lag` events. A thread in
            each process samples the stack of the loop's thread while a heartbeat is late;
            `during` is the probed synchronous call that ran there, otherwise the innermost
            function of the user's code.
        """,
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "profiler_cost": common("run step processes events")
    | {
        "size_bytes": "bytes written",
        "dropped": "number of dropped events",
        "wrapper_s": "time in wrappers, all processes, in s",
        "wrapper_cpu_s": "CPU time in wrappers, all processes, in s",
        "writer_s": "time of the writer threads, all processes, in s",
        "writer_cpu_s": "CPU time of the writer threads, all processes, in s",
        "costliest": "costliest process: the one with most time in wrappers",
        "costliest_s": "its time in wrappers, in s",
        "costliest_cpu_s": (
            "for how much of costliest_s its threads ran, from samples, in s; empty if that "
            "was not recorded"
        ),
        "share": "costliest_s as part of the step; empty for unfinished steps",
    },
    "loop_lags": common("run step name role loop lags worst_begin_us")
    | {
        **_STALLS,
    },
    "longest_lags": common("run step name role loop during duration_s")
    | {
        "at_s": "start of the stall, in s after the step's",
    },
    "clock_agreement": common("run calls")
    | {
        "host": "host of the agent loops",
        "engine_host": "host of the engines",
        "early": (
            "calls that begin in the engine before they were made, or end in it after they came "
            "back"
        ),
        "contradiction_us": (
            "by how much at least the two clocks contradict each other, in µs; 0 if nothing does"
        ),
        "low_us": "least that could be added to the engines' times without a contradiction, in µs",
        "high_us": "most that could be added, in µs; below low_us if no single amount would do",
        "bound_us": "error of the times as stated by the clock alignment, in µs",
    },
}
