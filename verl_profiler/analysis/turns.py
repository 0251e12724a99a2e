"""How long turns took, by their index in the request."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, rows_of
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = ["step_turn_times", "turn_times"]

_PARTS = ("engine", "tool", "tool_parsing", "token_merge", "other")


def turn_times(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Summarize turns by their index, from 0.

    Returns:
        One row per run and turn: turns (finished ones), unfinished, total_s, share (of all turn
        time), mean_s, p50_s, p80_s, p95_s, p99_s, max_s; engine_s, tool_s, tool_parsing_s,
        token_merge_s and other_s (means, which add up to mean_s plus overlap_s; None where the
        parts were not recorded); prompt_tokens and response_tokens (means).
    """
    return _summarized(tables, ("run",), rows_of(steps, worker=worker, validate=validate))


def step_turn_times(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize the turns of each step by their index, training and validation apart.

    Returns:
        One row per run, step, validate and turn, with the columns of `turn_times`; share is of the
        turn time of the step.
    """
    return _summarized(tables, ("run", "step", "validate"), rows_of(steps))


def _summarized(tables: Tables, keys: tuple[str, ...], selection: str) -> Rows:
    by = ", ".join(keys)
    means = ", ".join(f"avg({part}_us) FILTER (finished) / 1e6 AS {part}_s" for part in _PARTS)
    listed = ", ".join(f"{part}_s" for part in _PARTS)
    known = " + ".join(f"{part}_us" for part in _PARTS)
    return tables.rows(
        f"""
        SELECT {by}, turn, turns, unfinished, total_us / 1e6 AS total_s,
            total_us / nullif(sum(total_us) OVER (PARTITION BY {by}), 0) AS share,
            mean_us / 1e6 AS mean_s, q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p80_s, q[3] / 1e6 AS p95_s,
            q[4] / 1e6 AS p99_s, max_us / 1e6 AS max_s,
            {listed}, overlap_s, prompt_tokens, response_tokens
        FROM (
            SELECT {by}, turn, count(*) FILTER (finished) AS turns,
                count(*) FILTER (NOT finished) AS unfinished,
                coalesce(sum(duration_us), 0) AS total_us, avg(duration_us) AS mean_us,
                {quantiles("duration_us", 0.5, 0.8, 0.95, 0.99)} AS q,
                max(duration_us) AS max_us, {means},
                avg({known} - duration_us) FILTER (finished) / 1e6 AS overlap_s,
                avg(prompt_tokens) FILTER (finished) AS prompt_tokens,
                avg(response_tokens) FILTER (finished) AS response_tokens
            FROM turns WHERE {selection} GROUP BY {by}, turn
        ) ORDER BY {by}, turn
        """
    )
