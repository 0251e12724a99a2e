"""What the list of steps shows of each step, on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["step_rows"]


def step_rows(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of `step_times`, each with its requests, tail, longest phase, rate and cost."""

    def by_step(name: str) -> dict[tuple[Any, Any], Mapping[str, Any]]:
        chosen: dict[tuple[Any, Any], Mapping[str, Any]] = {}
        for row in found[name]:
            if not row.get("validate"):
                chosen.setdefault((row["run"], row["step"]), row)
        return chosen

    times, tails, phases, engines, costs = map(
        by_step, ("request_times", "step_tail", "step_phases", "engine_times", "profiler_cost")
    )
    rows: list[dict[str, Any]] = []
    for row in found["step_times"]:
        key = row["run"], row["step"]
        time, tail, phase = (each.get(key, {}) for each in (times, tails, phases))
        rows.append(
            {
                **row,
                **{
                    key: time.get(key) for key in ("p50_s", "p95_s", "p99_s", "max_s", "mean_turns")
                },
                "failed_requests": time.get("failed"),
                **{key: tail.get(key) for key in ("after_p80_s", "after_p95_s", "after_p99_s")},
                "spread_s": tail.get("spread_s"),
                "poll_s": tail.get("poll_s"),
                "longest_phase": phase.get("phase"),
                "longest_share": phase.get("share"),
                **{key: time.get(key) for key in ("generated_tokens", "tool_tokens")},
                "engine_tokens_per_s": engines.get(key, {}).get("engine_tokens_per_s"),
                "profiler_share": costs.get(key, {}).get("share"),
            }
        )
    return rows
