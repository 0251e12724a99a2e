"""The bubble ledger as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.explain.ledger import ACCOUNTS, POOLS, USEFUL
from verl_profiler.render.text import align, seconds, share

__all__ = ["ledger_line", "ledger_text"]

_Rows = Sequence[Mapping[str, Any]]
_BAR = 30
# Accounts below this share are left out of the line.
_SMALL = 0.01
_NAMED = 3


def ledger_text(rows: _Rows) -> str:
    """Return a run's accounts over all steps, with a bar for each."""
    blocks = []
    for pool in dict.fromkeys(row["pool"] for row in rows):
        own = [row for row in rows if row["pool"] == pool]
        steps = len({row["step"] for row in own})
        sums = _sums(own)
        total = sum(sums.values())
        lines = [
            [
                account,
                seconds(spent / steps),
                share(spent / total),
                "#" * round(_BAR * spent / max(sums.values())),
                ACCOUNTS[account],
            ]
            for account, spent in sums.items()
        ]
        title = (
            f"device time, {_devices(own[0])} {POOLS[pool]}: {seconds(total / steps)} per step, "
            "every second in one account"
        )
        blocks.append(f"{title}\n{align(lines, left=(0, 3, 4))}")
    return "\n\n".join(blocks)


def ledger_line(rows: _Rows) -> str:
    """Return a run's accounts over all steps in one line."""
    texts = []
    for pool in dict.fromkeys(row["pool"] for row in rows):
        own = [row for row in rows if row["pool"] == pool]
        sums = _sums(own)
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
        busy = f"{share(useful / total)} training and consumed generation"
        texts.append(f"{_devices(own[0])} {POOLS[pool]}: {', '.join([busy, *named])}")
    return "; ".join(texts)


def _devices(row: Mapping[str, Any]) -> str:
    return f"{row['devices']:g} device{'s' * (row['devices'] != 1)}"


def _sums(rows: _Rows) -> dict[str, float]:
    """Return the device-seconds by account, in the order of `ACCOUNTS`."""
    sums = {
        account: sum(row["device_s"] for row in rows if row["account"] == account)
        for account in ACCOUNTS
    }
    return {account: spent for account, spent in sums.items() if spent}
