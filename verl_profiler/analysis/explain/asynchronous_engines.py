"""What queues, retractions and lost prefix caches take of the generate calls of asynchronous runs."""

from __future__ import annotations

from typing import NamedTuple

from verl_profiler.analysis.explain.engine_culprits import lost_by_engine
from verl_profiler.analysis.selection import Rows, Steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["LOST_IN_ENGINES", "Lost", "lost_in_engines"]

# The findings, and their sentences in an asynchronous run, where no request delays its own step.
LOST_IN_ENGINES = {
    "kv_bound": "Generate calls spend {lost_share} of the rollout's time queueing for space in the KV cache.",
    "unbalanced_replicas": (
        "Generate calls spend {lost_share} of the rollout's time in a queue while another replica has free "
        "capacity."
    ),
    "retractions": "Generate calls lose {lost_share} of the rollout's time to retractions.",
    "cold_prefix_cache": (
        "Generate calls spend {lost_share} of the rollout's time on prefill of tokens that were cached before."
    ),
}


class Lost(NamedTuple):
    """What a finding is about: its share of the calls' time by step, and the engine with over half of it."""

    shares: dict[int, float]
    engine: str


def lost_in_engines(tables: Tables, run: str, steps: Steps) -> dict[str, Lost]:
    """Return the losses of a run's generate calls, by finding."""
    rows = [row for row in lost_by_engine(tables, steps, last_only=False) if row["run"] == run]
    found: dict[str, Lost] = {}
    for finding in LOST_IN_ENGINES:
        lost = [row for row in rows if row[finding]]
        if not lost:
            continue
        whole: dict[int, float] = {}
        for row in rows:
            whole[row["step"]] = whole.get(row["step"], 0.0) + row["calls_s"]
        shares = {
            step: sum(row[finding] for row in lost if row["step"] == step) / seconds
            for step, seconds in whole.items()
            if seconds
        }
        found[finding] = Lost(shares, _most(lost, finding))
    return found


def _most(rows: Rows, finding: str) -> str:
    """Return the engine with more than half of the loss, if there is one."""
    by_engine: dict[str, float] = {}
    for row in rows:
        by_engine[row["engine_name"]] = by_engine.get(row["engine_name"], 0.0) + row[finding]
    worst = max(by_engine, key=lambda name: (by_engine[name], name))
    return worst if by_engine[worst] > sum(by_engine.values()) / 2 else ""
