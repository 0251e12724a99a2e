"""The view of sampled devices: utilization over time with the phases behind it, by phase in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_profiler.analysis.device_use import (
    device_times,
    device_use,
    device_use_over_time,
    phase_intervals,
)
from verl_profiler.analysis.selection import Rows
from verl_profiler.render.colors import ACCENT, INK, MUTED, color
from verl_profiler.render.figure import sheet, short
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, Section, View, asking, known, marks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from verl_profiler.render.panel import Panel

__all__ = ["TABLES", "VIEWS", "device_name"]

# Devices drawn: those with the most idle time.
_DEVICES = 8
# Phases beside each other in the legend.
_COLUMNS = 10


def device_name(row: Mapping[str, object], *, several_hosts: bool) -> str:
    """Return a device's number, with its host where there are several."""
    return f"device {row['device']}" + (f" on {row['host']}" if several_hosts else "")


def _device_use(data: DataTables, choice: Choice) -> Figure:
    readings, intervals = data["device_use_over_time"], data["phase_intervals"]
    # Without start-up, unless there is nothing else.
    rows = [row for row in data["device_use"] if row["step"] > 0] or data["device_use"]
    seen = [row for row in intervals if row["step"] > 0] or intervals
    idle: dict[tuple[str, int], float] = {}
    phases: dict[str, float] = {}
    for row in rows:
        key = row["host"], row["device"]
        idle[key] = idle.get(key, 0.0) + (row["idle_s"] or 0.0)
        phases[row["phase"]] = phases.get(row["phase"], 0.0) + (row["idle_s"] or 0.0)
    devices = sorted(idle, key=lambda key: (-idle[key], key))
    shown = sorted(devices[:_DEVICES])
    covered = sum(row["covered_s"] for row in rows)
    total = sum(idle.values())
    title = (
        f"Devices were idle {share(total / covered)} of the time: {seconds(total)} of device time"
    )
    if total:
        worst = max(phases, key=lambda phase: phases[phase])
        title += f", {share(phases[worst] / total)} of it in {worst}"
    cut = "" if len(shown) == len(devices) else f", the {len(shown)} with most idle time are shown"
    figure, panels = sheet(
        title,
        f"{choice.text()}: {counted(len(devices), 'device')}{cut}",
        size=(12, 2.0 + 1.25 * len(shown)),
        panels=(len(shown), 1),
        sharex=True,
        notes=(
            "Utilization: share of the driver's last sample period in which any kernel ran; NCCL's count.",
            "Behind it: phases of the trainer. Orange: power.",
        ),
    )
    several = len({host for host, _ in devices}) > 1
    for place, (key, axes) in enumerate(zip(shown, panels, strict=True)):
        own = [row for row in readings if (row["host"], row["device"]) == key]
        _draw(axes, own, seen)
        name = device_name({"host": key[0], "device": key[1]}, several_hosts=several)
        axes.set_title(short(name, 50))
        if not place:
            axes.legend(
                loc="lower right",
                bbox_to_anchor=(1, 1.02),
                ncols=_COLUMNS,
                frameon=False,
                fontsize=8,
            )
    if seen:
        panels[-1].set_xlim(max(seen[0]["begin_s"], 0.0), seen[-1]["end_s"])
    panels[-1].set_xlabel("seconds since the first reading")
    return figure


def _draw(axes: Panel, rows: Rows, intervals: Rows) -> None:
    named: set[str] = set()
    for row in intervals:
        phase = row["phase"]
        axes.axvspan(
            max(row["begin_s"], 0.0),
            row["end_s"],
            color=color(phase),
            alpha=0.22,
            linewidth=0,
            label=None if phase in named else phase,
        )
        named.add(phase)
    times = [row["begin_s"] for row in rows] + [row["end_s"] for row in rows[-1:]]
    values = marks(rows, "utilization", 100)
    axes.step(times, [*values, *values[-1:]], where="post", color=INK, linewidth=1.2)
    axes.set_ylim(0, 100)
    axes.set_ylabel("%")
    watts = marks(rows, "power_w")
    if any(known(rows, "power_w")):
        power = axes.twinx()
        power.step(times, [*watts, *watts[-1:]], where="post", color=ACCENT, linewidth=0.8)
        power.set_ylim(bottom=0)
        power.set_ylabel("W", color=MUTED)
        power.grid(visible=False)


VIEWS = (
    View(
        name="device_use",
        question="How busy were the devices in each phase?",
        analysis=asking(device_use, device_use_over_time, phase_intervals, device_times),
        columns=common("run step")
        | {
            "phase": "phase of the trainer; `unaccounted` is what of a step is in no phase",
            "host": "host of the device",
            "device": "its number there",
            "users": "processes of the run that use it, as far as they are known",
            "covered_s": "part of the phase with readings, in s",
            "busy_share": "mean share of the time in which any kernel ran",
            "idle_s": "(1 - busy_share) × covered_s, in s",
            "energy_j": "power × time, in J",
            "power_w": "mean power, in W",
            "sm_mhz": "mean clock of the multiprocessors, in MHz",
            "max_used_bytes": "maximum of its memory in use by all processes, in bytes",
            "slowed_share": "part of the time with lowered clocks (power or temperature); empty if not reported",
        },
        draw=_device_use,
        empty=(
            "no devices were sampled there. Install nvidia-ml-py on the nodes; "
            "profiler.events.devices must be true."
        ),
        section=Section(
            "device-use",
            "Device utilization",
            "in which phase the devices are idle, and whether one of them is slower or hotter than the others",
            link="Utilization",
        ),
        shows="""
            One panel per device: utilization (black) and power (orange), with the phases of the
            trainer behind them. With `--json`, also the host's and the device's time of the workers' calls.
        """,
        conclude="""
            - Idle in `update_actor`, `old_log_prob` or `ref`: the host does not launch work fast
              enough: small micro-batches, offload, data preparation, or waiting for the trainer.
            - Idle in `gen`: see the critical path; usually the tail of the rollout, or tools.
            - A high utilization with low power: small kernels, or waiting in NCCL.
            - Lower clocks on one device: its cooling or its power limit. The other ranks wait for it.
        """,
        limits="""
            Idle time is a lower bound: a device counts as busy while any kernel runs, also one that
            waits for other ranks (NCCL). A sample stands for the interval before it, so phases
            shorter than two intervals are rough. Memory is that of all processes of the device.
            Phases are the trainer's: in asynchronous runs, devices of the rollout work beside them.
            Source: `device` events; NVML.
        """,
        labels={
            "max_used_bytes": "memory at most",
            "sm_mhz": "SM clock [MHz]",
            "power_w": "power [W]",
            "energy_j": "energy [J]",
        },
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "device_use_over_time": common("run step")
    | {
        "host": "host of the device",
        "device": "its number there",
        "begin_s": "start of the time that the reading stands for, in s after the run's first reading",
        "end_s": "its end, in s",
        "utilization": "share of the time in which any kernel ran",
        "power_w": "power, in W",
        "used_bytes": "memory in use by all processes, in bytes",
    },
    "device_times": common("run step name event calls")
    | {
        "host_s": "time of the calls on the host, in s",
        "device_s": "their time on the device, between two CUDA events in their stream, in s",
        "device_per_host": "device_s / host_s: above 1, the calls return before their work is done",
    },
    "phase_intervals": common("run step")
    | {
        "phase": "phase of the trainer; `unaccounted` is what of a step is in no phase",
        "begin_s": "start, in s after the run's first reading of a device",
        "end_s": "end, in s",
    },
}
