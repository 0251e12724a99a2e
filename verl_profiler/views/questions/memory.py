"""Views of processes: memory over time and by phase, and event-loop stalls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.event_loop import loop_suspects
from verl_profiler.analysis.memory import memory_over_time, phase_spans
from verl_profiler.analysis.selection import Rows, grouped
from verl_profiler.render.charts import (
    Spec,
    chart,
    colored,
    fewer,
    layer,
    name_bars,
    panel,
    quantity,
    size_unit,
)
from verl_profiler.render.colors import ACCENT, ENGINE_COLORS, INK, MUTED, PHASE_COLORS, color
from verl_profiler.units import counted, seconds, size
from verl_profiler.views.summary_text import lag_weight
from verl_profiler.views.view import Choice, DataTables, column, known, view

# Processes drawn, the fullest first; points of their lines, and triangles, in all.
_LINES = 6
_POINTS = 1_200
_MARKS = 300
# Phases of the trainer that are shaded behind the lines.
_BANDS = 400
_PALE = 0.3
_COLORS = (
    PHASE_COLORS["gen"],
    PHASE_COLORS["update_actor"],
    PHASE_COLORS["update_weights"],
    PHASE_COLORS["values"],
    ENGINE_COLORS["queue"],
    MUTED,
)


@view(
    "memory_over_time",
    "How much memory did devices, processes and hosts use, and what was the trainer doing?",
    memory_over_time,
    phase_spans,
    empty="no memory was read there (or profiler.events.exclude had memory).",
    example="--steps 10:12",
)
def _memory(data: DataTables, choice: Choice) -> Spec:
    rows = data["memory_over_time"]
    device = bool(known(rows, "used_bytes"))
    keys = [key for key in ("used_bytes", "rss_bytes") if known(rows, key)]
    first, last = min(row["begin_s"] for row in rows), max(row["begin_s"] for row in rows)
    x = quantity("at_s", "seconds since the first reading")
    x["scale"] = {"domain": [first, last], "nice": False}
    bands = [row for row in data["phase_spans"] if row["end_s"] > first and row["begin_s"] < last]
    notes = [
        "A device's memory is the total of all processes on it.",
        "Peaks between readings are missed.",
        "Shaded: phases of the trainer."
        if len(bands) <= _BANDS
        else f"Not shaded: {len(bands):,} phases of the trainer are too many; choose fewer --steps.",
    ]
    panels: list[Spec] = []
    if known(rows, "moves"):
        notes.append(
            f"Triangles: memory released (down) or resumed (up), of each device or host the first {_MARKS}."
        )
    for key in keys:
        shaded = _bands(bands, x, legend=key == keys[-1])
        panels.append(panel(shaded, _lines(rows, key, x, _POINTS // len(keys), notes), height=190))
        panels[-1]["resolve"] = {"scale": {"color": "independent"}}
    about = (
        f"{choice.text()} and validation: {sum(row['readings'] for row in rows):,} readings of "
        f"{counted(len({row['name'] for row in rows}), 'process', 'processes')}"
    )
    return chart(_title(rows, device=device), about, *panels, notes=list(dict.fromkeys(notes)))


def _bands(spans: Rows, x: Spec, *, legend: bool) -> list[Spec]:
    """Shade the trainer's phases over the height of a panel."""
    if not spans or len(spans) > _BANDS:
        return []
    shaded = colored("phase", {row["phase"]: color(row["phase"]) for row in spans}, legend=legend)
    if legend:
        shaded["legend"] |= {"symbolType": "square", "symbolOpacity": _PALE}
    mark = {"type": "rect", "opacity": _PALE, "clip": True}
    x, x2 = {**x, "field": "begin_s"}, {"field": "end_s"}
    return [layer(spans, mark, tip=("step", "phase"), x=x, x2=x2, color=shaded)]


def _title(rows: Rows, *, device: bool) -> str:
    if not device:
        fullest = max(rows, key=lambda row: row["rss_bytes"] or 0)
        return (
            f"No device memory could be read; the largest process on the host is {fullest['name']}: "
            f"{size(fullest['rss_bytes'])}"
        )
    on_device = [row for row in rows if row["used_bytes"] is not None and row["total_bytes"]]
    if not on_device:
        return (
            f"At most {size(max(known(rows, 'used_bytes')))} in use; no device's capacity was read"
        )
    top = max(on_device, key=lambda row: row["used_bytes"] / row["total_bytes"])
    if top["used_bytes"] > top["total_bytes"]:
        return (
            f"The device of {top['name']} reports {size(top['used_bytes'])} in use, above its "
            f"capacity of {size(top['total_bytes'])}: one of the two readings is wrong"
        )
    low = min(row["used_bytes"] for row in on_device if row["name"] == top["name"])
    return (
        f"The device of {top['name']} holds {size(top['used_bytes'])} of {size(top['total_bytes'])} "
        f"at its fullest, {size(low)} at its emptiest"
    )


def _lines(rows: Rows, key: str, x: Spec, most: int, notes: list[str]) -> Spec:
    """Draw a line per process, with triangles where memory was released or resumed."""
    on_device = key == "used_bytes"
    of = grouped((row for row in rows if row[key] is not None), "name")
    peaks = {name: max(known(mine, key)) for name, mine in of.items()}
    order = sorted((name for name in peaks if peaks[name]), key=lambda name: (-peaks[name], name))
    shown = order[:_LINES]
    factor, unit = size_unit(max(peaks.values()))
    every = -(-sum(len(of[name]) for name in shown) // most)
    if every > 1:
        notes.append(f"Of {2 * every} successive readings the highest and the lowest are drawn.")
    moved = [row for name in shown for row in of[name] if row["moves"]][:_MARKS]
    points, moves = (
        [
            {"at_s": row["begin_s"], "process": row["name"], "size": row[key] * factor}
            | {"moved": "released" if row["moves"] > 0 else "resumed"}
            for row in own
        ]
        for own in ([row for name in shown for row in fewer(of[name], key, every)], moved)
    )
    held = "used on the device" if on_device else "resident in host memory"
    y = quantity("size", f"{held} [{unit}]")
    code = colored("process", dict(zip(shown, _COLORS, strict=False)))
    title = f"fullest of {len(order)}" if len(order) > len(shown) else None
    code["legend"] |= {"orient": "top", "symbolType": "stroke", "title": title}
    dots = {"size": 22, "filled": True} if len(points) < 60 * len(shown) else False
    drawn = [
        layer(
            points,
            {"type": "line", "point": dots},
            tip=("at_s", "process", "size"),
            x=x,
            y=y,
            color=code,
        )
    ]
    if moves:
        shape = {
            "field": "moved",
            "type": "nominal",
            "scale": {"domain": ["released", "resumed"], "range": ["triangle-down", "triangle-up"]},
            "legend": None,
        }
        mark = {"type": "point", "filled": True, "size": 50}
        drawn.append(
            layer(moves, mark, tip=("at_s", "process", "moved"), x=x, y=y, color=code, shape=shape)
        )
    totals = known(rows, "total_bytes") if on_device else []
    if totals:
        mark = {"type": "rule", "strokeDash": [4, 3], "color": INK}
        capacity = [{"capacity": max(totals) * factor}]
        drawn.append(layer(capacity, mark, y={**y, "field": "capacity"}))
    return {"layer": drawn}


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
