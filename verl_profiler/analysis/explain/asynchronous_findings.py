"""Findings of asynchronous runs, judged by what their devices did: there is no critical path per step."""

from __future__ import annotations

from typing import Any

from verl_profiler.analysis.explain.rules import RULES
from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["asynchronous_findings"]

_GENERATING = (
    "generating",
    "generating_unconsumed",
    "generating_aborted",
    "generating_dropped",
)
_EVIDENCE = 3
_NOTHING = 1e-9
# Older runs lack what became of their samples.
_RECORDED = """
SELECT run FROM asynchronous WHERE run IN (SELECT run FROM samples) ORDER BY run
"""


def asynchronous_findings(tables: Tables, ledger: Rows, steps: Steps = None) -> Rows:
    """Return what bounds asynchronous runs, and what their rollout makes in vain.

    Steps get shorter by no more than `recoverable_s`: a faster rollout saves at most what the trainer
    waits, a faster trainer or sync at most its own time.

    Args:
        tables: Of the runs; those that did not record their samples have none.
        ledger: The rows of `bubble_ledger`.
        steps: Those to judge; None for all.

    Returns:
        Rows as `findings.ranked` returns them, most recoverable time first, of each run.
    """
    rows: Rows = []
    others = {row["run"] for row in tables.rows(_EXPERIMENTAL)}
    for found in tables.rows(_RECORDED):
        own = [
            row
            for row in ledger
            if row["run"] == found["run"] and (steps is None or steps[0] <= row["step"] <= steps[1])
        ]
        if own:
            rows += sorted(
                _of_run(found["run"], own),
                key=lambda row: (row["dominates"], -row["recoverable_s"]),
            )
    for row in rows:
        if row["run"] in others:
            row["overrides"] = [each for each in row["overrides"] if "trainer.v1." not in each]
    return rows


# Trainers of verl.experimental dispatch prompt by prompt; they have none of the V1 trainers' settings.
_EXPERIMENTAL = """
SELECT run FROM processes WHERE role = 'rollouter'
UNION SELECT run FROM event_fields WHERE event = 'dispatch' AND uid IS NOT NULL
"""


class _Pool:
    """The accounts of a pool, in seconds per step of each of its devices."""

    def __init__(self, rows: Rows, steps: list[int]) -> None:
        self.steps = steps
        self.devices = rows[0]["devices"]
        self._rows = rows
        self.step_s = self.of(*{row["account"] for row in rows})

    def of(self, *accounts: str) -> float:
        return sum(self.by_step(*accounts).values()) / len(self.steps)

    def by_step(self, *accounts: str) -> dict[int, float]:
        found = dict.fromkeys(self.steps, 0.0)
        for row in self._rows:
            if row["account"] in accounts:
                found[row["step"]] += row["device_s"] / row["devices"]
        return found


def _of_run(run: str, ledger: Rows) -> Rows:
    steps = sorted({row["step"] for row in ledger})
    pools = {
        name: _Pool([row for row in ledger if row["pool"] == name], steps)
        for name in dict.fromkeys(row["pool"] for row in ledger)
    }
    rollout = pools.get("rollout")
    trainer = next(pool for name, pool in pools.items() if name != "rollout")
    shared = "shared" in pools
    # While devices that both share generate, the trainer has nothing to train on.
    waited = trainer.of("waiting_for_samples", *(_GENERATING if shared else ()))
    idle = trainer.of("waiting_for_samples")
    ahead = rollout.of("staleness_limit") if rollout else 0.0
    makers = rollout or trainer
    found: list[tuple[str, _Pool, tuple[str, ...], float]] = []
    if rollout and min(idle, ahead) > max(idle, ahead) / 2:
        found.append(("waits_in_turn", trainer, ("waiting_for_samples",), idle))
    elif idle > ahead:
        found.append(("waits_for_rollout", trainer, ("waiting_for_samples",), idle))
    elif rollout:
        found.append(("waits_for_trainer", rollout, ("staleness_limit",), trainer.of("training")))
    found.append(("sync_bound", trainer, ("weight_sync",), trainer.of("weight_sync")))
    found += [
        (name, makers, (account,), waited)
        for name, account in (
            ("stale_samples", "generating_dropped"),
            ("wasted_aborts", "generating_aborted"),
        )
    ]
    split = _split(trainer, rollout) if rollout and not shared else ""
    return [
        _row(
            run, name, pool, accounts, gain, split if name.startswith("waits_for") else "", rollout
        )
        for name, pool, accounts, gain in found
        if pool.of(*accounts) >= RULES[name].least * pool.step_s
        and gain >= RULES[name].least * trainer.step_s
    ]


def _split(trainer: _Pool, rollout: _Pool) -> str:
    """Return how many devices the other pool lacks if work divides evenly over devices."""
    training = trainer.of("training") * trainer.devices
    generating = rollout.of(*_GENERATING) * rollout.devices
    devices = trainer.devices + rollout.devices
    wanted = round(devices * training / max(training + generating, _NOTHING))
    moved = min(max(wanted, 1), int(devices) - 1) - int(trainer.devices)
    if not moved:
        return ""
    more, less = ("trainer", "rollout") if moved > 0 else ("rollout", "trainer")
    return f" (about {abs(moved)} of the {less}'s for the {more}, if both scale evenly)"


def _row(
    run: str,
    name: str,
    pool: _Pool,
    accounts: tuple[str, ...],
    gain: float,
    split: str,
    rollout: _Pool | None,
) -> dict[str, Any]:
    rule = RULES[name]
    lost = pool.of(*accounts)
    by_step = pool.by_step(*accounts)
    worst = sorted(by_step, key=lambda step: (-by_step[step], step))[:_EVIDENCE]
    who = accounts[0].replace("_", " ")
    return {
        "run": run,
        "finding": name,
        "dominates": rule.dominates,
        "recoverable_s": gain,
        "bound_s": None,
        "share": gain / pool.step_s,
        "low_s": None,
        "high_s": None,
        "unseen": False,
        "steps": len(pool.steps),
        "replayed": None,
        "step_s": pool.step_s,
        "mostly_step": worst[0]
        if len(pool.steps) > 2 and by_step[worst[0]] > lost * len(pool.steps) / 2
        else None,
        "culprit": who,
        "culprit_kind": "account",
        "culprit_text": who,
        "where": "",
        "evidence": [
            {"step": step, "who": who, "seconds": by_step[step], "what": ""}
            for step in worst
            if by_step[step]
        ],
        "values": {
            "lost_s": lost,
            "lost_share": lost / pool.step_s,
            "who": split,
            "reason": "",
        },
        "message": rule.sentence,
        "cause": rule.cause,
        "advice": rule.advice,
        "overrides": list(rule.overrides) if rollout else [],
        "proof": None,
        "shows": list(rule.shows),
    }
