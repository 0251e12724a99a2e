"""The view of sampled devices: utilization over time with the phases behind it, by phase in numbers."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from verl_profiler.analysis.device_use import (
    device_times,
    device_use,
    device_use_over_time,
    phase_intervals,
)
from verl_profiler.analysis.selection import Rows, grouped, summed
from verl_profiler.render.charts import Spec, chart, colored, layer, panel, quantity
from verl_profiler.render.colors import ACCENT, INK, color
from verl_profiler.render.visible import visible
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.view import Choice, DataTables, known, view

__all__ = ["few_phases", "phase_bands", "with_phases"]

# Devices drawn: those with the most idle time; points of their lines in all; phases behind them.
_DEVICES = 8
_POINTS = 800
_BANDS = 600
_PALE = 0.3


@view(
    "device_use",
    "How busy were the devices in each phase?",
    device_use,
    device_use_over_time,
    phase_intervals,
    device_times,
    empty="no devices were sampled there. Install nvidia-ml-py on the nodes; "
    "profiler.events.devices must be true.",
)
def _device_use(data: DataTables, choice: Choice) -> Spec:
    readings, intervals = data["device_use_over_time"], data["phase_intervals"]
    # Without start-up, unless there is nothing else.
    rows = [row for row in data["device_use"] if row["step"] > 0] or data["device_use"]
    seen = [row for row in intervals if row["step"] > 0] or intervals
    idle, phases = summed(rows, "idle_s", "host", "device"), summed(rows, "idle_s", "phase")
    devices = sorted(idle, key=lambda key: (-idle[key], key))
    shown = sorted(devices[:_DEVICES])
    covered = sum(row["covered_s"] for row in rows)
    total = sum(idle.values())
    title = (
        f"Devices were idle {share(total / covered)} of the time: {seconds(total)} of device time"
    )
    if total:
        worst = next(iter(phases))
        title += f", {share(phases[worst] / total)} of it in {worst}"
    cut = "" if len(shown) == len(devices) else f", the {len(shown)} with most idle time are shown"
    several = len({host for host, _ in devices}) > 1
    bands, note = few_phases(seen)
    x = quantity("at_s", "seconds since the first reading")
    if seen:
        ends = [max(seen[0]["begin_s"], 0.0), seen[-1]["end_s"]]
        x["scale"] = {"domain": ends, "nice": False}
    panels: list[Spec] = []
    own = grouped(readings, "host", "device")
    every = -(-sum(len(own.get(key, ())) for key in shown) // _POINTS) or 1
    for key in shown:
        last = key == shown[-1]
        time = x if last else {**x, "title": None}
        drawn = [
            *phase_bands(bands, time, legend=last),
            *_lines(_means(own.get(key, []), every), time),
        ]
        name = f"device {key[1]}" + (f" on {key[0]}" if several else "")
        panels.append(panel(drawn, title=name, height=84))
        panels[-1]["resolve"] = {"scale": {"y": "independent"}}
    notes = [
        "Utilization: share of the driver's last sample period in which any kernel ran; NCCL's count.",
        f"{note} Orange: power, on the right.",
    ]
    if every > 1:
        notes.append(f"Of {every} successive readings the mean is drawn.")
    about = f"{choice.text()}: {counted(len(devices), 'device')}{cut}"
    return with_phases(chart(title, about, *panels, notes=notes), bands)


def _means(rows: Rows, every: int) -> Rows:
    """Average successive readings of a device; the last one holds until its end."""
    means: Rows = []
    for at in range(0, len(rows), every):
        group = rows[at : at + every]
        mean: dict[str, Any] = {"at_s": group[0]["begin_s"]}
        for name in ("utilization", "power_w"):
            mean[name] = fmean(known(group, name)) if known(group, name) else None
        means.append(mean)
    return [*means, *({**last, "at_s": rows[-1]["end_s"]} for last in means[-1:])]


def _lines(rows: Rows, x: Spec) -> list[Spec]:
    """Draw utilization, and power on an axis at the right."""
    step: Spec = {"type": "line", "interpolate": "step-after", "clip": True}
    y = quantity("utilization", None, form="%", ends=(0, 1), tickCount=2)
    drawn = [layer(rows, step, tip=("at_s", "utilization"), x=x, y=y, color=INK)]
    if any(known(rows, "power_w")):
        right = quantity("power_w", "power [W]", orient="right", tickCount=2, grid=False)
        mark = {**step, "strokeWidth": 1}
        drawn.append(layer(rows, mark, tip=("at_s", "power_w"), x=x, y=right, color=ACCENT))
    return drawn


def phase_bands(spans: Rows, x: Spec, *, legend: bool = True) -> list[Spec]:
    """Shade the trainer's phases over the height of a panel; `with_phases` gives the chart their rows."""
    if not spans:
        return []
    shaded = colored("phase", {row["phase"]: color(row["phase"]) for row in spans}, legend=legend)
    if legend:
        shaded["legend"] |= {"symbolType": "square", "symbolOpacity": _PALE}
    mark = {"type": "rect", "opacity": _PALE, "clip": True}
    begin, end = {**x, "field": "begin_s"}, {"field": "end_s"}
    drawn = layer((), mark, tip=("step", "phase"), x=begin, x2=end, color=shaded)
    return [{key: each for key, each in drawn.items() if key != "data"}]


def with_phases(made: Spec, spans: Rows) -> Spec:
    """Add the trainer's phases to a chart, once for all of its panels."""
    rows = [
        {"step": row["step"], "phase": visible(row["phase"])}
        | {end: round(row[end], 3) for end in ("begin_s", "end_s")}
        for row in spans
    ]
    return {**made, "data": {"values": rows}}


def few_phases(spans: Rows) -> tuple[Rows, str]:
    """Return phases if they are few enough to be shaded, and a note."""
    if len(spans) <= _BANDS:
        return spans, "Shaded: phases of the trainer."
    return (
        [],
        f"Not shaded: {len(spans):,} phases of the trainer are too many; choose fewer --steps.",
    )
