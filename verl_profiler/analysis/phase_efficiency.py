"""Whether a phase of the trainer became slower, or its sequences longer: time by tokens."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables


def phase_efficiency(tables: Tables, steps: Steps = None) -> Rows:
    """Divide the time of each phase that trains or infers by the tokens that its workers processed.

    FLOPs and MFU are verl's own (`FlopsCounter`), where it has them: for updates in verl 0.9.1, of
    models and devices that it supports.

    Returns:
        Table `phase_efficiency`: one row per run, step and phase, in the order of a step.
    """
    return tables.rows(
        f"""
        WITH began AS (
            SELECT run, step, phase, min(begin_us) AS begin_us FROM phases GROUP BY ALL
        )
        SELECT run, step, phase, batches, sequences, tokens,
            tokens / nullif(sequences, 0) AS mean_length, duration_us / 1e6 AS duration_s,
            tokens * 1e6 / nullif(duration_us, 0) AS tokens_per_s,
            duration_us / 1e3 / nullif(tokens, 0) AS s_per_1k_tokens, tflop, mfu
        FROM phase_tokens JOIN began AS b USING (run, step, phase) WHERE {in_steps(steps)}
        ORDER BY run, step, b.begin_us, phase
        """
    )
