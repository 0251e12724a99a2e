"""The view of an asynchronous run's pools: trainer, queue and replicas over the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_profiler.analysis.pools import pools_over_time
from verl_profiler.analysis.selection import Rows
from verl_profiler.render.colors import INK, MUTED, VERSION_COLORS, color
from verl_profiler.render.figure import patch, sheet
from verl_profiler.units import counted, seconds
from verl_profiler.views.view import Choice, DataTables, Section, View, asking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from verl_profiler.render.panel import Panel

__all__ = ["VIEWS"]

_UNKNOWN = "#8FA3BF"
_LANES = {"trainer": "trainer", "queue": "ready prompts"}


def _pools(data: DataTables, choice: Choice) -> Figure:
    rows = data["pools_over_time"]
    syncs = [row for row in rows if row["phase"] == "weight_sync"]
    pools = sorted({row["lane"] for row in rows} - set(_LANES))
    lanes = [lane for lane in _LANES if any(row["lane"] == lane for row in rows)] + pools
    versions = sorted({row["weight_version"] for row in rows if row["weight_version"] is not None})
    phases: dict[str, float] = {}
    for row in rows:
        if row["lane"] == "trainer":
            length = row["end_s"] - row["begin_s"]
            phases[row["phase"]] = phases.get(row["phase"], 0.0) + length
    title = "Trainer, queue and replicas over time"
    if phases:
        most = max(phases, key=lambda phase: (phases[phase], phase))
        title = f"The trainer is longest in {most}: {seconds(phases[most])}"
    if versions:
        title += f"; {counted(len(versions), 'weight version')} answered"
    figure, panels = sheet(
        title,
        f"{choice.text()} and validation: {counted(len(syncs), 'weight sync')}",
        size=(12, 1.8 + 1.5 * len(lanes)),
        panels=(len(lanes), 1),
        sharex=True,
        notes="Means of equal parts of the time. Colors of replicas: version of the weights. Lines: weight syncs.",
    )
    for lane, axes in zip(lanes, panels, strict=True):
        own = [row for row in rows if row["lane"] == lane and row["phase"] != "weight_sync"]
        if lane == "trainer":
            _phases(axes, own)
        else:
            _levels(axes, own, versioned=lane != "queue")
            axes.set_ylabel("prompts" if lane == "queue" else "calls")
        for row in syncs:
            if lane in ("trainer", row["lane"]):
                axes.axvline(row["begin_s"], color=INK, linewidth=0.8, linestyle=":")
        axes.set_title(_LANES.get(lane, f"{lane} replicas: generate calls"))
    panels[-1].set_xlabel("seconds since the first step's start")
    return figure


def _phases(axes: Panel, rows: Rows) -> None:
    for row in rows:
        axes.axvspan(row["begin_s"], row["end_s"], color=color(row["phase"]), linewidth=0)
    names = list(dict.fromkeys(row["phase"] for row in rows))
    axes.set_yticks([])
    axes.legend(
        handles=[patch(color(name), name) for name in names],
        loc="upper left",
        bbox_to_anchor=(1.005, 1.0),
        borderaxespad=0.0,
        fontsize=8,
    )


def _levels(axes: Panel, rows: Rows, *, versioned: bool) -> None:
    below: dict[float, float] = {}
    drawn: dict[str, str] = {}
    for row in rows:
        version: int | None = row["weight_version"]
        fill = MUTED
        if versioned:
            fill = _UNKNOWN if version is None else VERSION_COLORS[version % len(VERSION_COLORS)]
            drawn["unknown" if version is None else f"version {version}"] = fill
        base = below.get(row["begin_s"], 0.0)
        axes.bar(
            row["begin_s"], row["mean"], row["end_s"] - row["begin_s"], bottom=base,
            align="edge", color=fill, linewidth=0,
        )  # fmt: skip
        below[row["begin_s"]] = base + row["mean"]
    if len(drawn) <= len(VERSION_COLORS):
        axes.legend(
            handles=[patch(fill, name) for name, fill in drawn.items()],
            loc="upper left",
            bbox_to_anchor=(1.005, 1.0),
            borderaxespad=0.0,
            fontsize=8,
        )


VIEWS = (
    View(
        name="pools_over_time",
        question="What do trainer, queue and replicas of an asynchronous run do at the same time?",
        analysis=asking(pools_over_time),
        columns={
            "run": "label of the run",
            "lane": "`trainer`, `queue`, or the pool of replicas: `hybrid`, `standalone`",
            "phase": (
                "the trainer's longest phase in that part of the time; `weight_sync` of a pool; else "
                "empty"
            ),
            "weight_version": "version of the weights that answers, or that is synced",
            "mean": (
                "mean number of generate calls with that version, or of prompts that are ready in the "
                "queue; empty for the trainer and for syncs"
            ),
            "begin_s": "start, after that of the first step, in s",
            "end_s": "end, after the start of the first step, in s",
        },
        draw=_pools,
        empty="no asynchronous training with a finished step.",
        section=Section(
            "pools",
            "Pools over time",
            "trainer, queue and replicas over the same time, replicas in the colors of their weight "
            "versions; asynchronous runs only",
            link="Pools",
        ),
        shows="""
            From top to bottom: the trainer's phases, the prompts that are ready in the queue, and
            the generate calls of each pool of replicas, colored by the version of the weights.
            Dotted lines: weight syncs.
        """,
        conclude="""
            - The queue is empty while the trainer is in `gen`: the rollout bounds the run.
            - The queue is full and the replicas have no calls: the trainer bounds it.
            - Calls of one color continue after a sync: they were not aborted, or their engine
              reports no new version.
        """,
        limits="""
            Means over 160 equal parts of the time: in long runs, phases shorter than a part are
            missing. Syncs are left out if there are more than 200. Calls include validation.
        """,
    ),
)
