"""Views of processes: memory over time and by phase, and event-loop stalls."""

from __future__ import annotations

from verl_profiler.analysis.event_loop import (
    STALL_KINDS,
    loop_suspects,
    stall_weight,
    stalls_over_steps,
)
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
)
from verl_profiler.render.colors import ACCENT, INK, MUTED, color
from verl_profiler.units import counted, seconds, size
from verl_profiler.views.view import Choice, DataTables, column, known, view

# Processes drawn, the fullest first, and points of their lines in all.
_LINES = 6
_POINTS = 1_200
# Phases of the trainer that are shaded behind the lines.
_BANDS = 400
_PALE = 0.3
_GIB = 1 << 30
# None is the color of a phase; dashes show lines that lie over each other.
_COLORS = (INK, "#8B0000", "#003CA0", "#00563B", "#5A4A00", MUTED)
_DASHES = ([1, 0], [12, 3], [8, 4], [6, 6], [4, 6], [2, 6])
# A device's capacity is drawn if it is at most so many times as high as the lines.
_ROOM = 4
_HELD = {"used_bytes": "used on the device", "rss_bytes": "resident in host memory"}


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
    sampled = [row for row in rows if row["role"] == "device"]
    first, last = min(row["begin_s"] for row in rows), max(row["begin_s"] for row in rows)
    x = quantity("at_s", "seconds since the first reading")
    x["scale"] = {"domain": [first, last], "nice": False}
    phases = [row for row in data["phase_spans"] if row["end_s"] > first and row["begin_s"] < last]
    keys = [key for key in _HELD if known(rows, key)]
    # Sampled devices have what a few moments of processes would show with straight lines in between.
    lines = {"used_bytes": sampled or rows, "rss_bytes": rows}
    panels: list[Spec] = []
    for key in keys:
        last = key == keys[-1]
        axis = x if last else {**x, "title": None}
        drawn = _lines(lines[key], key, axis, _POINTS // len(keys))
        own = panel(_bands(phases, axis, legend=last), drawn, height=190)
        panels.append(
            own | {"resolve": {"scale": {"color": "independent", "strokeDash": "independent"}}}
        )
    notes = [
        "A device's memory is the total of all processes on it.",
        "Of many readings the highest and the lowest are drawn; peaks between readings are missed.",
        "Shaded: phases of the trainer."
        if len(phases) <= _BANDS
        else f"Not shaded: {len(phases):,} phases of the trainer are too many; choose fewer --steps.",
    ]
    names = {row["name"] for row in rows if row["role"] != "device"}
    about = (
        f"{choice.text()} and validation: {sum(row['readings'] for row in rows):,} readings of "
        f"{counted(len(names), 'process', 'processes')}"
    )
    if sampled:
        about += f" and {counted(len({row['name'] for row in sampled}), 'device')}"
    return chart(_title(sampled or rows), about, *panels, notes=notes)


def _bands(spans: Rows, x: Spec, *, legend: bool) -> list[Spec]:
    """Shade the trainer's phases over the height of a panel."""
    if not spans or len(spans) > _BANDS:
        return []
    colors = {row["phase"]: color(row["phase"]) for row in spans}
    shaded = colored("phase", colors, legend=legend)
    if legend:
        shaded["legend"] |= {"symbolType": "square", "symbolOpacity": _PALE}
    mark = {"type": "rect", "opacity": _PALE, "clip": True}
    x, x2 = {**x, "field": "begin_s"}, {"field": "end_s"}
    return [layer(spans, mark, tip=("step", "phase"), x=x, x2=x2, color=shaded)]


def _title(rows: Rows) -> str:
    used = [row for row in rows if row["used_bytes"] is not None]
    if not used:
        fullest = max(rows, key=lambda row: row["rss_bytes"] or 0)
        return (
            f"No device memory could be read; the largest process on the host is {fullest['name']}: "
            f"{size(fullest['rss_bytes'])}"
        )
    top = max(
        used,
        key=lambda row: (
            row["used_bytes"] / (row["total_bytes"] or float("inf")),
            row["used_bytes"],
        ),
    )
    low = min(row["used_bytes"] for row in used if row["name"] == top["name"])
    of = f" of {size(top['total_bytes'])}" if top["total_bytes"] else ""
    of_process = f"The device of {top['name']}"
    who = top["name"].capitalize() if top["role"] == "device" else of_process
    return f"{who} holds {size(top['used_bytes'])}{of} at its fullest, {size(low)} at its emptiest"


def _lines(rows: Rows, key: str, x: Spec, most: int) -> Spec:
    """Draw a line per process or device, and the capacity of the devices."""
    of = grouped((row for row in rows if row[key] is not None), "name")
    peaks = {name: max(known(own, key)) for name, own in of.items()}
    order = sorted(filter(peaks.get, peaks), key=lambda name: (-peaks[name], name))
    shown = order[:_LINES]
    every = -(-sum(len(of[name]) for name in shown) // most)
    points = [
        {"at_s": row["begin_s"], "process": name, "size": row[key] / _GIB}
        for name in shown
        for row in fewer(of[name], key, every)
    ]
    y = quantity("size", f"{_HELD[key]} [GiB]")
    code = colored("process", dict(zip(shown, _COLORS, strict=False)))
    title = f"fullest of {len(order)}" if len(order) > len(shown) else None
    code["legend"] |= {"orient": "top", "symbolType": "stroke", "title": title}
    dashes = code | {"scale": {"domain": shown, "range": [*_DASHES[: len(shown)]]}}
    mark: Spec = {"type": "line", "point": len(points) < 60 * len(shown)}
    tip = ("at_s", "process", "size")
    drawn = [layer(points, mark, tip=tip, x=x, y=y, color=code, strokeDash=dashes)]
    totals = known(rows, "total_bytes") if key == "used_bytes" else []
    # Else it would press the lines to the bottom; the title has it.
    if totals and max(totals) <= _ROOM * max(peaks.values(), default=0):
        mark = {"type": "rule", "strokeDash": [4, 3], "color": INK}
        drawn.append(layer([{"capacity": max(totals) / _GIB}], mark, y={**y, "field": "capacity"}))
    return {"layer": drawn}


_BARS = 20
# Bars below this share of the longest of their kind are counted, not drawn.
_LITTLE = 0.02
_KINDS = dict(zip(STALL_KINDS, (ACCENT, MUTED, "#B9C2CC"), strict=True))


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
        worst = max(suspects, key=stall_weight)
        title = f"The event loop of {worst['name']} stalled for {seconds(worst['max_s'])} (step {worst['step']})"
        if worst["during"]:
            title += f", in {worst['during']}"
        if worst["requests"]:
            title += f", with {worst['requests']} of its requests in progress"
    else:
        title = "No event loop stalled except by design"
    held = stalls_over_steps(rows)
    most = {kind: max(column(own, "total_s")) for kind, own in grouped(held, "kind").items()}
    shown = [each for each in held if each["total_s"] >= _LITTLE * most[each["kind"]]][:_BARS]
    about = f"{choice.text()} and validation: {counted(sum(row['lags'] for row in rows), 'stall')}"
    if len(held) > len(shown):
        about += f"; {len(shown)} of {len(held)} process and call pairs"
    notes = [
        "While an event loop stalls, everything awaiting on it appears slow.",
        "By design: trainer workers compute in their event loops.",
    ]
    if len(rows) < len(data["loop_suspects"]):
        notes.append(
            f"Not drawn: {counted(sum(row['lags'] for row in early), 'stall')} before the first step."
        )
    loops = grouped(shown, "name", "during")
    bars = name_bars(
        [
            each["name"]
            + (f" ({each['loop']})" if len(loops[each["name"], each["during"]]) > 1 else "")
            + f": {each['during'] or 'unknown cause'}"
            + (f" ({each['code']})" if each["code"] else "")
            for each in shown
        ],
        [
            (kind, [each["total_s"] * (each["kind"] == kind) for each in shown], hue)
            for kind, hue in _KINDS.items()
        ],
        "event-loop stalls",
        texts=[
            f"{counted(each['lags'], 'stall')}, longest {seconds(each['max_s'])}" for each in shown
        ],
    )
    return chart(title, about, bars, notes=notes)
