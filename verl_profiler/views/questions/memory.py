"""Views of memory: how full devices, processes and machines were over time and by phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_profiler.analysis.memory import memory_over_time, memory_phases, phase_spans
from verl_profiler.analysis.selection import Rows
from verl_profiler.render.axes import EndLabel, end_labels, legend, size_axis, step_axis
from verl_profiler.render.colors import ACCENT, ENGINE_COLORS, INK, MUTED, PHASE_COLORS, color
from verl_profiler.render.figure import patch, sheet, short
from verl_profiler.units import size
from verl_profiler.views.columns import common
from verl_profiler.views.view import Choice, DataTables, View, asking, column, known

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from verl_profiler.render.panel import Panel

__all__ = ["TABLES", "VIEWS"]

# Processes drawn, the fullest first; and phases, beyond which bands would run into each other.
_LINES = 6
_BANDS = 80
# Roles with a panel, those with most memory first.
_ROLES = 6
_COLORS = (
    PHASE_COLORS["gen"],
    PHASE_COLORS["update_actor"],
    PHASE_COLORS["update_weights"],
    PHASE_COLORS["values"],
    ENGINE_COLORS["queue"],
    MUTED,
)


def _memory(data: DataTables, choice: Choice) -> Figure:
    rows, spans = data["memory_over_time"], data["phase_spans"]
    device = bool(known(rows, "used_bytes"))
    keys = ["used_bytes", "rss_bytes"] if device else ["rss_bytes"]
    keys = [key for key in keys if known(rows, key)]
    figure, panels = sheet(
        _title(rows, device=device),
        f"{choice.text()} and validation: {sum(row['readings'] for row in rows):,} readings of "
        f"{len({row['name'] for row in rows})} processes; triangles: released (down), resumed (up)",
        size=(11, 1.2 + 3.2 * len(keys)),
        panels=(len(keys), 1),
        sharex=True,
        notes=(
            "A device's memory is the total of all processes on it. Peaks between readings are "
            "missed; profiler.memory_saver.sample_interval_s=1 takes a reading every second."
        ),
    )
    for axes, key in zip(panels, keys, strict=True):
        _lines(axes, rows, key)
        _bands(axes, spans)
    panels[-1].set_xlabel("seconds since the first reading")
    return figure


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


def _lines(axes: Panel, rows: Rows, key: str) -> None:
    """Draw one line per process, with triangles where memory was released or resumed."""
    on_device = key == "used_bytes"
    peaks = {
        name: max(known([row for row in rows if row["name"] == name], key), default=0)
        for name in {row["name"] for row in rows}
    }
    names = sorted((name for name in peaks if peaks[name]), key=lambda name: (-peaks[name], name))
    for name, code in zip(names[:_LINES], _COLORS, strict=False):
        mine = [row for row in rows if row["name"] == name and row[key] is not None]
        axes.plot(
            column(mine, "begin_s"), column(mine, key), color=code, label=short(name, 18),
            linewidth=1.3, marker="." if len(mine) < 60 else None, markersize=4,
        )  # fmt: skip
        for sign, marker in ((1, "v"), (-1, "^")):
            moved = [row for row in mine if row["moves"] * sign > 0]
            axes.plot(
                column(moved, "begin_s"), column(moved, key), marker, color=code, markersize=6
            )
    size_axis(axes, "used on the device" if on_device else "resident in host memory")
    totals = known(rows, "total_bytes") if on_device else []
    if totals:
        axes.axhline(max(totals), color=INK, linewidth=0.9, linestyle="--")
        # Readings above the capacity are drawn as well, not cut off.
        axes.set_ylim(0, max(*totals, *known(rows, key)) * 1.08)
    more = len(names) - _LINES
    legend(axes, title=f"fullest of {len(names)}" if more > 0 else None)


def _bands(axes: Panel, spans: Rows) -> None:
    """Shade the phases of the trainer below the axis's top, and name them."""
    first, last = axes.get_xlim()
    shown = [row for row in spans if row["end_s"] > first and row["begin_s"] < last]
    if not shown or len(shown) > _BANDS:
        return
    axes.set_xlim(max(0.0, first), last)
    for row in shown:
        axes.axvspan(
            max(row["begin_s"], axes.get_xlim()[0]),
            min(row["end_s"], last),
            color=color(row["phase"]),
            alpha=0.16,
            linewidth=0,
        )
    held = axes.get_legend()
    phases = sorted({row["phase"] for row in shown})
    handles = [patch(color(phase), short(phase, 18), alpha=0.35) for phase in phases]
    lines = axes.get_legend_handles_labels()[0]
    title = None if held is None else held.get_title().get_text() or None
    axes.legend(
        handles=[*lines, *handles],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.0),
        borderaxespad=0.0,
        handlelength=1.3,
        title=title,
        fontsize=8,
    )


_KINDS = (
    ("used_bytes", "used on the device", ACCENT),
    ("reserved_bytes", "reserved", "#0072B2"),
    ("allocated_bytes", "allocated", "#56B4E9"),
)


def _by_phase(data: DataTables, choice: Choice) -> Figure:
    rows = data["memory_phases"]

    def measure(row: Mapping[str, Any]) -> float:
        return row["used_bytes"] or row["reserved_bytes"] or row["allocated_bytes"] or 0

    worst = max(rows, key=lambda row: (measure(row), row["step"]))
    title = f"Memory use is highest in {worst['fullest']}: {size(measure(worst))}"
    if worst["total_bytes"]:
        title += f" of {size(worst['total_bytes'])}"
    title += f", {short(worst['at'], 60)} (step {worst['step']})"
    steps = sorted({row["step"] for row in rows})
    roles = sorted(
        {row["role"] for row in rows},
        key=lambda role: -max(measure(r) for r in rows if r["role"] == role),
    )[:_ROLES]
    figure, panels = sheet(
        title,
        f"{choice.text()}: {sum(row['readings'] for row in rows):,} readings at verl's own checkpoints; "
        "the highest of all processes of the role",
        size=(11, 1.4 + 3.1 * len(roles)),
        panels=(len(roles), 2 if len(steps) > 1 else 1),
        notes="Peaks between checkpoints are missed.",
    )
    for number, role in enumerate(roles):
        mine = [row for row in rows if row["role"] == role]
        shown = worst["step"] if any(r["step"] == worst["step"] for r in mine) else mine[-1]["step"]
        one = [row for row in mine if row["step"] == shown]
        axes = panels[number * (2 if len(steps) > 1 else 1)]
        places = [row["place"] for row in one]
        for key, name, code in _KINDS:
            line = [row for row in one if row[key] is not None]
            if line:
                axes.plot(
                    [row["place"] for row in line],
                    column(line, key),
                    color=code,
                    marker="o",
                    markersize=4,
                    label=name,
                )
        axes.set_xticks(places, [short(row["at"], 26) for row in one], rotation=35, ha="right")
        axes.set_xlim(0.4, max(places) + 0.6)
        _byte_axis(axes, one)
        axes.legend(loc="upper left", ncols=3, fontsize=8)
        axes.set_title(f"{role}, checkpoints of step {shown}")
        if len(steps) > 1:
            axes = panels[number * 2 + 1]
            labels: list[EndLabel] = []
            for key, name, code in _KINDS:
                tops = [
                    (step, max(known([r for r in mine if r["step"] == step], key)))
                    for step in steps
                    if known([r for r in mine if r["step"] == step], key)
                ]
                if tops:
                    axes.plot([step for step, _ in tops], [top for _, top in tops], color=code)
                    labels.append(EndLabel(tops[-1][1], name, code))
            step_axis(axes, steps)
            _byte_axis(axes, mine)
            end_labels(axes, labels, gap=0.08)
            axes.set_title(f"{role}, highest reading of each step")
    return figure


def _byte_axis(axes: Panel, rows: Rows) -> None:
    size_axis(axes, "device memory")
    totals = known(rows, "total_bytes")
    if totals:
        axes.axhline(max(totals), color=INK, linewidth=0.9, linestyle="--")
        axes.set_ylim(0, max(totals) * 1.18)
    else:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.18)


VIEWS = (
    View(
        name="memory_phases",
        question="In which phase does each role use the most device memory?",
        analysis=asking(memory_phases),
        columns=common("run step role readings processes lowest_used_bytes total_bytes")
        | {
            "used_bytes": "device memory in use, the highest of all processes' devices, in bytes",
            "reserved_bytes": (
                "device memory reserved by torch, the highest of all processes, in bytes"
            ),
            "allocated_bytes": (
                "device memory allocated by torch, the highest of all processes, in bytes"
            ),
            "at": "verl's checkpoint, as verl names it",
            "place": "order of the checkpoint in the step, from 1",
            "fullest": "process with the highest reading",
        },
        draw=_by_phase,
        empty="no reading of device memory was recorded there. A CPU has no memory counter.",
        section="weights",
        shows="""
            For each role, the readings at verl's own checkpoints in the step with the highest
            one, and the highest reading of every step. Dashed: the memory of the device.
        """,
        conclude="""
            - Close to the dashed line at one checkpoint: that phase limits the batch size.
            - `reserved` far above `allocated`: fragmentation, or memory that the engine keeps
              for its cache.
            - A line that rises over steps: a leak, or longer sequences.
        """,
        limits="""
            Peaks between checkpoints are missed. A CPU has no memory
            counter. Values are the highest of all processes of the role.
        """,
    ),
    View(
        name="memory_over_time",
        question="How much memory did devices, processes and hosts use, and what was the trainer doing?",
        analysis=asking(memory_over_time, phase_spans),
        columns=common("run name role step readings total_bytes")
        | {
            "host_used_bytes": "memory in use on the host, the highest of the part, in bytes",
            "rss_bytes": "host memory resident in the process, the highest of the part, in bytes",
            "used_bytes": (
                "device memory in use by all processes, the highest of the part, in bytes"
            ),
            "begin_s": (
                "time of the part's reading with the highest used_bytes, or else rss_bytes, in s "
                "after the run's first reading"
            ),
            "moves": (
                "releases minus resumes of an engine's memory that ended in the part: positive "
                "where memory was given back"
            ),
        },
        draw=_memory,
        empty="no memory was read there (or the memory family was off).",
        section="weights",
        shows="""
            One line per process. Above: device memory in use by all processes together; dashed,
            the memory of the device. Below: host memory of the process. Triangles are releases
            (down) and resumes (up) of an engine's memory; the shading is the trainer's phase.
        """,
        conclude="""
            - A drop at each triangle that points down: the memory saver works, and the size of the
              drop is what the trainer gains.
            - No drop there: the saver is off or ineffective; `verl-profiler memory` has the
              reason.
            - Host memory rises at the first release and stays: the backup of the released
              weights.
            - The lowest device memory rises over steps: possibly a leak.
            - A line above the dashed one, which the title states: the reading or the capacity is
              wrong; do not conclude anything from either.
        """,
        limits="""
            Peaks between readings are missed. Without `profiler.memory_saver.sample_interval_s`,
            readings are taken only at verl's own checkpoints, releases and resumes. A CPU has no device,
            and only host memory is drawn. For each process the time is divided into at most 600
            intervals, each drawn with its highest reading in `memory_readings`.
        """,
        example="--steps 10:12",
    ),
)

# Other tables of the topic's analyses: their columns by name.
TABLES: dict[str, Mapping[str, str]] = {
    "memory_peaks": common(
        "run step role name readings allocated_bytes reserved_bytes used_bytes total_bytes"
    )
    | {
        "name": "process with the highest reading",
        "at": "verl's checkpoint of the highest reading",
    },
    "memory_timeline": common("run step role readings total_bytes")
    | {
        "phase": "phase of the trainer at that moment; empty outside of any",
        "place": "order of the phase in the step, from 1",
        "used_bytes": (
            "device memory in use by all processes, the highest reading, in bytes; empty, as is "
            "all of devices, if no device could be read"
        ),
        "used_share": "part of the device's memory in use at that reading",
        "lowest_used_bytes": "lowest device memory in use, of all processes, in bytes",
        "reserved_bytes": "highest device memory reserved by torch, of all processes, in bytes",
        "fullest": "process of the highest reading",
        "at": "verl's checkpoint of the highest reading; empty for a sample",
        "rss_bytes": "host memory of the largest process, in bytes",
        "host_used_bytes": "memory in use on the fullest host, in bytes",
    },
    "phase_spans": common("run step")
    | {
        "phase": "phase of the step, or `testing` or `init`",
        "begin_s": "start, in s after the first reading of memory",
        "end_s": "end, in s after the first reading of memory",
    },
    "release_effects": common("run role event calls total_bytes")
    | {
        "event": "`memory_release` or `memory_resume`",
        "tags": "what was released or resumed, such as `kv_cache`",
        "source": (
            "`call`: read around the call itself; `checkpoint`: between verl's own checkpoints, so "
            "that what else happened there counts too"
        ),
        "measured": "number of calls with readings of a device",
        "moved_bytes": "memory freed by a release or taken by a resume, median, in bytes",
        "least_bytes": "the least of it, in bytes",
        "most_bytes": "the most of it, in bytes",
        "used_before_bytes": "device memory in use before, median, in bytes",
        "used_after_bytes": "device memory in use after, median, in bytes",
        "p50_s": "median duration, in s; empty for checkpoints",
        "max_s": "longest duration, in s; empty for checkpoints",
        "rss_bytes": "largest change of the process's host memory, in bytes",
        "host_used_bytes": "largest change of the host's memory in use, in bytes",
        "effect": "`moved`, `nothing`, or `unknown` without a device that could be read",
    },
    "sleep_times": common("run step")
    | {
        "releases": "number of releases, all processes",
        "resumes": "number of resumes, all processes",
        "failed": "number of these calls that failed",
        "release_s": "time of the releases, of the process with most, in s",
        "resume_s": "time of the resumes, of the process with most, in s",
        "slowest": "process with most time of both together",
        "step_s": "length of the step, in s; empty if it was not recorded",
        "share": "release_s and resume_s as part of the step",
    },
    "memory_findings": common("run")
    | {
        "slug": "name of the finding",
        "fault": "whether something is wrong; false if it is only not known",
        "message": "what was found",
        "advice": "what to do about it",
    },
}
