"""The view of an asynchronous run's pools: trainer, queue and replicas over the same time."""

from __future__ import annotations

from verl_profiler.analysis.pools import pools_over_time
from verl_profiler.analysis.selection import Rows
from verl_profiler.render.charts import Spec, chart, colored, layer, panel, quantity
from verl_profiler.render.colors import INK, MUTED, VERSION_COLORS, color
from verl_profiler.units import counted, seconds
from verl_profiler.views.view import Choice, DataTables, view

_UNKNOWN = "#8FA3BF"
_LANES = {"trainer": "trainer", "queue": "ready prompts"}


@view(
    "pools_over_time",
    "What do trainer, queue and replicas of an asynchronous run do at the same time?",
    pools_over_time,
    empty="no asynchronous training with a finished step.",
)
def _pools(data: DataTables, choice: Choice) -> Spec:
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
    x = quantity("begin_s", None, ends=(0, max(row["end_s"] for row in rows)))
    panels: list[Spec] = []
    for lane in lanes:
        if lane == lanes[-1]:
            x = {**x, "title": "seconds since the first step's start"}
        own = [row for row in rows if row["lane"] == lane and row["phase"] != "weight_sync"]
        marked = [row for row in syncs if lane in ("trainer", row["lane"])]
        panels.append(
            panel(
                _phases(own, x) if lane == "trainer" else _levels(own, x, lane == "queue"),
                layer(marked, {"type": "rule", "strokeDash": [2, 2]}, x=x, color=INK),
                title=_LANES.get(lane, f"{lane} replicas: generate calls"),
                height=36 if lane == "trainer" else 90,
            )
        )
    return chart(
        title,
        f"{choice.text()} and validation: {counted(len(syncs), 'weight sync')}",
        *panels,
        notes="Means of equal parts of the time. Colors of replicas: version of the weights. Lines: weight syncs.",
    )


def _phases(rows: Rows, x: Spec) -> Spec:
    phases = {row["phase"]: color(row["phase"]) for row in rows}
    drawn: Rows = []
    for row in rows:
        last = drawn[-1] if drawn else None
        if last and (last["phase"], last["end_s"]) == (row["phase"], row["begin_s"]):
            last["end_s"] = row["end_s"]
        else:
            drawn.append({**row})
    tip = ("phase", "begin_s", "end_s")
    return layer(drawn, "rect", tip=tip, x=x, x2={"field": "end_s"}, color=colored("phase", phases))


def _levels(rows: Rows, x: Spec, queue: bool) -> Spec:
    tops: dict[float, float] = {}
    codes: dict[str, str] = {}
    drawn: Rows = []
    for row in rows:
        low = tops.get(row["begin_s"], 0.0)
        tops[row["begin_s"]] = low + row["mean"]
        version: int | None = row["weight_version"]
        what = "unknown" if version is None else f"version {version}"
        codes[what] = _UNKNOWN if version is None else VERSION_COLORS[version % len(VERSION_COLORS)]
        drawn.append({**row, "weights": what, "low": low, "high": tops[row["begin_s"]]})
    of_versions = colored("weights", codes, legend=len(codes) <= len(VERSION_COLORS))
    return layer(
        drawn,
        "rect",
        tip=("begin_s", "mean") if queue else ("begin_s", "weights", "mean"),
        x=x,
        x2={"field": "end_s"},
        y=quantity("low", "prompts" if queue else "calls", tickCount=3),
        y2={"field": "high"},
        color=MUTED if queue else of_versions,
    )
