"""The bubble ledger as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.explain.ledger import ACCOUNTS, POOLS, USEFUL, account_totals
from verl_profiler.analysis.selection import NOTHING, LeftOut, grouped, named, steady
from verl_profiler.render.text import without
from verl_profiler.units import seconds, share
from verl_profiler.views.text_tables import Rows, bar_table

# Accounts below this share are left out of the line.
_SMALL = 0.01
_NAMED = 3
_BUSY = {
    "shared": "training and generation",
    "trainer": "training",
    "rollout": "consumed generation",
}
# A pool that waits for less of its time than this does not wait.
_WAITS = 0.05


def ledger_text(rows: Rows, left_out: LeftOut = NOTHING) -> str:
    """Return the mean of a run's accounts over the steps, with a bar for each.

    Args:
        rows: The rows of `bubble_ledger`.
        left_out: The steps that means leave out.
    """
    blocks: list[str] = []
    rows = steady(rows, left_out)
    for own in grouped(rows, "pool").values():
        steps = len({row["step"] for row in own})
        sums = account_totals(own)
        total = sum(sums.values())
        title = (
            f"device time, {pool_text(own[0])}: {seconds(total / steps)} per step over all of them"
            f"{without(named(left_out, rows))}, "
            "every second attributed to one account"
        )
        accounts = [(name, spent / steps, ACCOUNTS[name]) for name, spent in sums.items()]
        blocks.append(bar_table(title, accounts, total / steps))
    bound = bound_text(rows)
    return "\n\n".join(blocks) + (f"\n  {bound}" if bound else "")


def ledger_lines(rows: Rows, left_out: LeftOut = NOTHING) -> list[str]:
    """Return a run's accounts over its steps but those left out, a line for each pool."""
    texts: list[str] = []
    rows = steady(rows, left_out)
    for pool, own in grouped(rows, "pool").items():
        sums = account_totals(own)
        total = sum(sums.values())
        useful = sum(sums.get(account, 0.0) for account in USEFUL)
        rest = sorted(
            ((spent, account) for account, spent in sums.items() if account not in USEFUL),
            reverse=True,
        )
        named = [
            f"{share(spent / total)} {account.replace('_', ' ')}"
            for spent, account in rest[:_NAMED]
            if spent >= _SMALL * total
        ]
        busy = f"{share(useful / total)} {_BUSY[pool]}"
        texts.append(f"{pool_text(own[0])}: {', '.join([busy, *named])}")
    bound = bound_text(rows)
    return [*texts, bound] if bound else texts


def bound_text(rows: Rows) -> str:
    """Return which pool the other one waits for, where trainer and rollout have devices of their own."""
    pools = grouped(rows, "pool")
    if "rollout" not in pools:
        return ""
    shares: dict[str, dict[str, float]] = {}
    for pool, own in pools.items():
        sums = account_totals(own)
        shares[pool] = {name: spent / sum(sums.values()) for name, spent in sums.items()}
    rollout = shares.pop("rollout").get("staleness_limit", 0.0)
    waits = [each.get("waiting_for_samples", 0.0) for each in shares.values()]
    trainer = max(waits, default=0.0)
    times = f"the trainer waits {share(trainer)} of its time, the rollout is ahead {share(rollout)}"
    if max(trainer, rollout) < _WAITS:
        return f"trainer and rollout are balanced: {times}"
    if min(trainer, rollout) > max(trainer, rollout) / 2:
        return f"trainer and rollout alternately wait for each other: {times}"
    return f"bounded by the {'rollout' if trainer > rollout else 'trainer'}: {times}"


def pool_text(row: Mapping[str, Any]) -> str:
    """Return the devices of a row's pool: `2 devices of the trainer`."""
    return f"{row['devices']:g} device{'s' * (row['devices'] != 1)} {POOLS[row['pool']]}"
