"""Views of devices, what each second of theirs went to, and of an asynchronous run: how stale its samples are."""

from __future__ import annotations

from verl_profiler.analysis.explain.ledger import (
    ACCOUNTS,
    POOLS,
    USEFUL,
    account_totals,
    bubble_ledger,
)
from verl_profiler.analysis.selection import Rows, grouped, named, steady, summed, warm_ups
from verl_profiler.analysis.staleness import staleness, staleness_of
from verl_profiler.render.charts import Series, Spec, chart, panel, step_bars, tints
from verl_profiler.render.colors import ACCOUNT_COLORS
from verl_profiler.render.text import without
from verl_profiler.units import counted, share
from verl_profiler.views.ledger_text import pool_text
from verl_profiler.views.view import Choice, DataTables, at_steps, view

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
            panel(_bars(own, steps), title=POOLS[pool] * (len(pools) > 1), height=200)
            for pool, own in pools.items()
        ],
        notes=(
            "Every device-second is attributed to exactly one account, from the start of a step to the start of the next."
        ),
    )


def _bars(rows: Rows, steps: list[int]) -> list[Spec]:
    accounts, sums = grouped(rows, "account"), account_totals(rows)
    least = _SMALL * sum(sums.values())
    series: list[Series] = [
        (_NAMES[account], at_steps(accounts[account], "share", steps), ACCOUNT_COLORS[account])
        for account, spent in sums.items()
        if spent >= least
    ]
    return step_bars(steps, series, "share of device time", form="%")


@view(
    "staleness",
    "How stale are the samples that an asynchronous run trains on?",
    staleness,
    empty="no asynchronous training with recorded weight versions.",
    only_of="asynchronous",
)
def _staleness(data: DataTables, choice: Choice) -> Spec:
    rows = data["staleness"]
    (whole,) = staleness_of(rows, "all")
    off = whole["off_policy_share"]
    title = f"Samples are {whole['behind']:.2f} weight versions behind when they are consumed"
    if off is not None:
        title += f"; {share(off)} of their tokens are off-policy"
    steps = sorted({row["step"] for row in rows})
    return chart(
        title,
        f"{choice.text()}: {counted(whole['samples'], 'sample')} of {counted(len(steps), 'step')}",
        _distribution([row for row in rows if row["part"] == "versions"], steps),
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
                code,
            )
            for versions, code in zip(behind, tints(len(behind)), strict=True)
        ],
        "share of tokens",
        form="%",
    )
    return panel(bars, title="tokens by versions behind", height=200)
