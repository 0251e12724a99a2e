"""Views of devices: what each second of theirs went to, how busy they were, and training by tokens."""

from __future__ import annotations

from verl_profiler.analysis.device_use import device_times, device_use
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
    name_bars,
    panel,
    step_bars,
    step_lines,
)
from verl_profiler.render.colors import ACCOUNT_COLORS, color
from verl_profiler.render.text import without
from verl_profiler.units import counted, seconds, share
from verl_profiler.views.ledger_text import pool_text
from verl_profiler.views.view import Choice, DataTables, at_steps, known, view

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


# Devices drawn: those with the most idle time.
_DEVICES = 16


@view(
    "device_use",
    "How busy were the devices in each phase?",
    device_use,
    device_times,
    empty="no devices were sampled there. Install nvidia-ml-py on the nodes; "
    "profiler.events.devices must be true.",
)
def _device_use(data: DataTables, choice: Choice) -> Spec:
    # Without start-up, unless there is nothing else.
    rows = [row for row in data["device_use"] if row["step"] > 0] or data["device_use"]
    phases = summed(rows, "idle_s", "phase")
    devices = grouped(rows, "host", "device")
    idle = summed(rows, "idle_s", "host", "device")
    order = sorted(idle, key=lambda key: (-idle[key], key))[:_DEVICES]
    covered, total = sum(row["covered_s"] for row in rows), sum(idle.values())
    title = (
        f"Devices were idle {share(total / covered)} of the time: {seconds(total)} of device time"
    )
    if total:
        worst = next(iter(phases))
        title += f", {share(phases[worst] / total)} of it in {worst}"
    own = {key: summed(devices[key], "idle_s", "phase") for key in order}
    series: list[Series] = [
        (phase, [own[key].get(phase, 0.0) for key in order], color(phase)) for phase in phases
    ]
    bars = name_bars(
        [f"device {device} on {host}" for host, device in order],
        series,
        "idle time",
        form="s",
        texts=[_about_device(devices[key]) for key in order],
    )
    cut = "" if len(order) == len(idle) else f", the {len(order)} with most idle time are shown"
    return chart(
        title,
        f"{choice.text()}: {counted(len(idle), 'device')}{cut}",
        bars,
        notes="Utilization: share of the driver's last sample period in which any kernel ran; NCCL's count.",
    )


def _about_device(rows: Rows) -> str:
    """Return the share of a device's time in which it was idle, and its mean power."""
    covered = sum(row["covered_s"] for row in rows)
    text = f"{share(sum(row['idle_s'] or 0 for row in rows) / covered)} idle"
    powered = [row for row in rows if row["power_w"] is not None]
    if powered:
        energy = sum(row["power_w"] * row["covered_s"] for row in powered)
        text += f", {energy / sum(row['covered_s'] for row in powered):.0f} W"
    return text


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
