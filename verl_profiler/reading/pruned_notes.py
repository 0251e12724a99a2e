"""Which steps' event files were deleted (`profiler.events.keep_steps`), in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import counted

__all__ = ["pruned_notes", "ranges"]

_SHOWN = 4


def pruned_notes(tables: Tables, chosen: tuple[int, int] | None = None) -> Iterator[str]:
    """Yield for each run with pruned steps which these are, and what covers them.

    Args:
        tables: Of one run or several.
        chosen: First and last step that are shown; None for all.
    """
    first, last = chosen or (1, 1 << 31)
    for row in tables.rows(
        """
        SELECT run, list(step ORDER BY step) FILTER (pruned) AS pruned, count(*) AS steps
        FROM steps WHERE step BETWEEN ? AND ? GROUP BY run HAVING bool_or(pruned) ORDER BY run
        """,
        [first, last],
    ):
        yield (
            f"{row['run']}: profiler.events.keep_steps deleted the event files of "
            f"{len(row['pruned']):,} of {counted(row['steps'], 'step')} ({ranges(row['pruned'])}). "
            "Durations of steps and phases, verl's metrics, and numbers of requests and tokens per step "
            "cover all steps; everything else, such as percentiles of requests, the kept steps alone, "
            "the slowest of the run among them."
        )


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: `11-32, 34-940`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]
    if len(texts) > _SHOWN:
        texts = [*texts[:_SHOWN], f"and {len(texts) - _SHOWN} more ranges"]
    return ", ".join(texts)
