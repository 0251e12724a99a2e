"""Whether the clocks of different hosts agree with what must be: nothing arrives before it is sent."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.clock_contradictions import contradictions_query
from verl_profiler.reading.tables.tables import Tables

__all__ = ["clock_agreement"]


def clock_agreement(tables: Tables, steps: Steps = None) -> Rows:
    """Hold generate calls against what their engines saw of them, where those are on other hosts.

    Returns:
        One row per run, agent loops' host and engines' host: calls, early (calls that begin in the
        engine before they were made, or end in it after they came back), contradiction_us (by how
        much at least the two clocks are wrong against each other; 0 where nothing contradicts),
        low_us and high_us (what could be added to the engines' times without a contradiction; low
        is above high where no single amount would do), bound_us (the error that is stated).
    """
    return tables.rows(contradictions_query(in_steps(steps, "c.step")))
