"""Views of an asynchronous run: its pools, replays of its steps, its samples."""

from __future__ import annotations

from verl_profiler.analysis.pools import pools_over_time
from verl_profiler.analysis.selection import Rows, summed
from verl_profiler.analysis.staleness import staleness
from verl_profiler.analysis.staleness_causes import staleness_causes
from verl_profiler.render.charts import (
    Spec,
    chart,
    colored,
    layer,
    name_bars,
    panel,
    quantity,
    step_bars,
    tint,
)
from verl_profiler.render.colors import ACCENT, INK, MUTED, VERSION_COLORS, color
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.staleness_text import by_cause, by_group, makers
from verl_profiler.views.view import Choice, DataTables, column, view

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
    versions = {row["weight_version"] for row in rows if row["phase"] != "weight_sync"} - {None}
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


_QUEUE = "#B9C2CC"


@view(
    "staleness",
    "How stale are the samples that an asynchronous run trains on?",
    staleness,
    empty="no asynchronous training with recorded weight versions.",
)
def _staleness(data: DataTables, choice: Choice) -> Spec:
    rows = data["staleness"]
    (whole,) = by_group(rows, "all")
    off = whole["off_policy_share"]
    title = f"Samples are {whole['behind']:.2f} weight versions behind when they are consumed"
    if off is not None:
        title += f"; {share(off)} of their tokens are off-policy"
    steps = sorted({row["step"] for row in rows})
    groups = makers(rows)
    made = name_bars(
        [f"{row['what']} ({row['samples']})" for row in groups],
        [
            ("in queue", column(groups, "waited"), _QUEUE),
            ("while generating", column(groups, "spanned"), ACCENT),
        ],
        "versions behind, mean",
        above="by generated tokens, prompt tokens and aborts (samples)",
    )
    return chart(
        title,
        f"{choice.text()}: {counted(whole['samples'], 'sample')} of {counted(len(steps), 'step')}",
        _distribution([row for row in rows if row["part"] == "versions"], steps),
        made,
        notes="In queue: after the last token. While generating: between first and last token.",
    )


def _distribution(rows: Rows, steps: list[int]) -> Spec:
    tokens = {(row["step"], int(row["what"])): row["tokens"] for row in rows}
    totals = summed(rows, "tokens", "step")
    behind = sorted({versions for _, versions in tokens})
    bars = step_bars(
        steps,
        [
            (
                f"{versions} behind",
                [tokens.get((step, versions), 0) / max(totals.get(step, 0), 1) for step in steps],
                tint(place / max(len(behind) - 1, 1)),
            )
            for place, versions in enumerate(behind)
        ],
        "share of tokens",
        form="%",
    )
    return panel(bars, title="tokens by versions behind", height=200)


@view(
    "staleness_causes",
    "What were samples in while they went stale?",
    staleness_causes,
    empty="no asynchronous training with recorded weight versions.",
)
def _causes(data: DataTables, choice: Choice) -> Spec:
    rows = by_cause(data["staleness_causes"])
    samples, behind = rows[0]["samples"], sum(row["behind"] for row in rows)
    most = max(rows, key=lambda row: row["behind"])
    title = f"Samples are {seconds(sum(row['age_s'] for row in rows))} old when they are consumed"
    if behind:
        part = share(most["behind"] / behind)
        title += f"; {part} of the versions behind are due to {most['cause'].replace('_', ' ')}"
    causes = [row["cause"].replace("_", " ") for row in rows]
    of_versions = name_bars(
        causes,
        [("", column(rows, "behind"), ACCENT)],
        "versions behind, mean",
        above="versions behind by cause",
    )
    of_time = name_bars(
        causes,
        [("", column(rows, "age_s"), MUTED)],
        "time per sample, mean",
        form="s",
        above="from dispatch to consumption",
    )
    return chart(
        title,
        f"{choice.text()}: {samples} samples",
        of_versions,
        of_time,
        notes="Versions count where the sample was when their weight sync began.",
    )
