"""Metrics of steps that are compared where at least one of two runs is asynchronous."""

from __future__ import annotations

from collections.abc import Sequence

from verl_profiler.analysis.compare.step_metrics import once
from verl_profiler.analysis.explain.ledger import ACCOUNTS
from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.analysis.staleness import staleness
from verl_profiler.reading.tables.tables import Tables

# What the names of device time begin with.
DEVICE = "device:"
STALENESS = ("versions_behind", "off_policy_share")
# Of an asynchronous run, `gen` is the trainer's wait for samples, and no step has a rollout of its own.
NOT_COMPARED = frozenset({"gen", "rollout", "tail_p80", "tail_p95"})

# Synchronous runs without a replay buffer train on what they dispatch.
_TAKEN = """
WITH taken AS (
    SELECT consumed_step AS step, count(*) AS samples FROM samples
    WHERE fate = 'consumed' GROUP BY consumed_step
    UNION ALL
    SELECT step, count(*) FROM requests WHERE finished AND NOT validate
        AND run NOT IN (SELECT run FROM samples WHERE fate = 'consumed')
    GROUP BY step
)
SELECT step, samples * 1e6 / duration_us AS value FROM steps JOIN taken USING (step)
WHERE finished AND duration_us > 0 AND step > 0 AND {chosen}
"""


def sample_metrics(tables: Tables, steps: Steps) -> Rows:
    """Return samples per second and staleness of each step of one run, as `step_metrics` returns its rows.

    Samples of a synchronous run are no version behind.
    """
    rows = [
        once(row["step"], "samples_per_s", "/s", row["value"])
        for row in tables.rows(_TAKEN.format(chosen=in_steps(steps)))
    ]
    if not tables.rows("SELECT run FROM asynchronous"):
        return rows + [once(row["step"], name, "", 0.0) for row in rows for name in STALENESS]
    for found in staleness(tables, steps):
        if found["part"] == "all":
            values = (found["behind"], found["off_policy_share"])
            rows += [
                once(found["step"], name, "", value)
                for name, value in zip(STALENESS, values, strict=True)
                if value is not None
            ]
    return rows


def device_metrics(ledgers: Sequence[Rows]) -> list[Rows]:
    """Return the device-seconds of each step by account: `device:POOL:ACCOUNT`, or summed over pools.

    Args:
        ledgers: Rows of `bubble_ledger` of each run. If their pools differ, the pools are added up.

    Returns:
        Rows as `step_metrics` returns them, for each run. What only the other one has is 0 s.
    """
    pools = [{row["pool"] for row in ledger} for ledger in ledgers]
    by_pool = all(each == pools[0] for each in pools)
    sums: list[dict[tuple[int, str], float]] = []
    for ledger in ledgers:
        sums.append({})
        for row in ledger:
            pool = f"{row['pool']}:" if by_pool else ""
            key = row["step"], f"{DEVICE}{pool}{row['account']}"
            sums[-1][key] = sums[-1].get(key, 0.0) + row["device_s"]
    names = sorted({name for each in sums for _, name in each}, key=_place)
    return [
        [
            once(step, name, "s", found.get((step, name), 0.0))
            for name in names
            for step in sorted({step for step, _ in found})
        ]
        for found in sums
    ]


def _place(name: str) -> tuple[str, int]:
    pool, _, account = name.rpartition(":")
    return pool, list(ACCOUNTS).index(account)
