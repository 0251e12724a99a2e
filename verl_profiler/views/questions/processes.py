"""The view of event-loop stalls, and tables of processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.event_loop import loop_suspects
from verl_profiler.analysis.selection import grouped
from verl_profiler.render.charts import Spec, chart, name_bars
from verl_profiler.render.colors import ACCENT, MUTED
from verl_profiler.units import counted, seconds
from verl_profiler.views.step_text import lag_weight
from verl_profiler.views.view import Choice, DataTables, column, view

_BARS = 20
# By kind of stall, the one to look at first.
_KINDS = {"requests may wait": ACCENT, "no request waits there": MUTED, "by design": "#B9C2CC"}


@view(
    "loop_suspects",
    "Did an event loop stall and make everything on it look slow?",
    loop_suspects,
    empty="no event loop stalled beyond the threshold (or profiler.events.exclude had event_loop).",
)
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
    groups: dict[tuple[str, str | None, str | None], dict[str, Any]] = {
        key: {"kind": _kind(own[0]), "code": own[0]["code"], "max_s": max(column(own, "max_s"))}
        | {name: sum(column(own, name)) for name in ("total_s", "lags")}
        for key, own in grouped(rows, "name", "loop", "during").items()
    }
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
    bars = name_bars(
        [
            f"{name}: {during or 'no probed call'}"
            + (f" ({code})" if (code := groups[name, loop, during]["code"]) else "")
            + (f" ({loop})" if loop and _several_loops(order, name) else "")
            for name, loop, during in shown
        ],
        [
            (kind, [each["total_s"] if each["kind"] == kind else 0 for each in held], hue)
            for kind, hue in _KINDS.items()
            if any(each["kind"] == kind for each in held)
        ],
        "event-loop stalls",
        form="s",
        texts=[
            f"{counted(each['lags'], 'stall')}, longest {seconds(each['max_s'])}" for each in held
        ],
    )
    return chart(title, about, bars, notes=notes)


def _kind(row: Mapping[str, Any]) -> str:
    if row["by_design"]:
        return "by design"
    return "requests may wait" if lag_weight(row)[0] else "no request waits there"


def _several_loops(keys: list[tuple[str, str | None, str | None]], name: str) -> bool:
    return len({loop for other, loop, _ in keys if other == name}) > 1
