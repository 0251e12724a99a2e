"""Views of devices: what each second of theirs went to, how busy they were, and training by tokens."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from verl_profiler.analysis.device_use import (
    device_times,
    device_use,
    device_use_over_time,
    phase_intervals,
)
from verl_profiler.analysis.explain.ledger import (
    ACCOUNTS,
    POOLS,
    USEFUL,
    account_totals,
    bubble_ledger,
)
from verl_profiler.analysis.phase_efficiency import phase_efficiency
from verl_profiler.analysis.selection import Rows, grouped, named, steady, summed, warm_ups
from verl_profiler.render.charts import (
    Series,
    Spec,
    chart,
    colored,
    layer,
    panel,
    quantity,
    step_bars,
    step_lines,
)
from verl_profiler.render.colors import ACCENT, ACCOUNT_COLORS, INK, color
from verl_profiler.render.text import without
from verl_profiler.render.visible import visible
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.ledger_text import pool_text
from verl_profiler.views.view import Choice, DataTables, at_steps, known, view

__all__ = ["few_phases", "phase_bands", "with_phases"]


_NAMES = {account: account.replace("_", " ") for account in ACCOUNTS}
# Accounts below this share of a pool are in the table, and not in the plot.
_SMALL = 0.002


@view(
    "bubble_ledger",
    "How much of the device time is useful work, and what is the rest spent on?",
    bubble_ledger,
    empty="no step finished there.",
)
def _ledger(data: DataTables, choice: Choice) -> Spec:
    rows = data["bubble_ledger"]
    steps = sorted({row["step"] for row in rows})
    pools = grouped(rows, "pool")
    left_out = warm_ups(rows, choice.steps)
    kept = steady(rows, left_out)
    sums = account_totals(kept)
    total = sum(sums.values())
    useful = sum(sums.get(account, 0.0) for account in USEFUL)
    lost = {account: spent for account, spent in sums.items() if account not in USEFUL}
    title = f"{share(useful / total)} of device time is training and generation"
    if lost:
        largest = max(lost, key=lambda account: lost[account])
        title += f"; next is {_NAMES[largest]}, {share(lost[largest] / total)}"
    return chart(
        title,
        f"{choice.text()}: {counted(len(steps), 'step')}{without(named(left_out, rows))}; {', '.join(pool_text(own[0]) for own in pools.values())}",
        *[
            panel(
                _bars(own, steps),
                title=POOLS[pool] if len(pools) > 1 else "",
                height=200,
            )
            for pool, own in pools.items()
        ],
        notes=(
            "Every device-second is attributed to exactly one account, from the start of a step to the start of the next."
        ),
    )


def _bars(rows: Rows, steps: list[int]) -> list[Spec]:
    accounts, sums = grouped(rows, "account"), account_totals(rows)
    series: list[Series] = [
        (_NAMES[account], at_steps(accounts[account], "share", steps), ACCOUNT_COLORS[account])
        for account in sums
        if sums[account] >= _SMALL * sum(sums.values())
    ]
    return step_bars(steps, series, "share of device time", form="%")


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
        if ends[0]:
            x["title"] += ", from the first step on"
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


@view(
    "phase_efficiency",
    "Did a phase of the trainer become slower, or its sequences longer?",
    phase_efficiency,
    empty="no batches with tokens were recorded there. Sequences must not be padded "
    "(verl's nested tensors), and profiler.events.exclude must not have workers.",
)
def _efficiency(data: DataTables, choice: Choice) -> Spec:
    rows = data["phase_efficiency"]
    steps = sorted({row["step"] for row in rows})
    phases = grouped(rows, "phase")
    spent = summed(rows, "duration_s", "phase")
    longest = next(iter(spent))
    tokens = sum(row["tokens"] for row in phases[longest])
    title = f"{longest} takes {seconds(spent[longest] / tokens * 1000)} per 1,000 tokens"
    shown = (
        ("s_per_1k_tokens", "time per 1,000 tokens", "s"),
        ("mean_length", "tokens per sequence", ""),
        ("mfu", "MFU", "%"),
    )
    panels: list[Spec] = []
    for key, label, form in shown:
        lines = [(phase, own, key, color(phase)) for phase, own in phases.items()]
        if known(rows, key):
            panels.append(panel(step_lines(steps, lines, label, form=form), height=150))
    return chart(
        title,
        f"{choice.text()}: {counted(len(steps), 'step')}",
        *panels,
        notes="Time of the trainer's phase, by the tokens of its workers' batches, padding left out.",
    )
