"""Which analyses the details of a run are too few or too many for, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import counted, share

# A dozen replays of a step with so many generate calls take about a minute, and half a gigabyte.
REPLAYED_CALLS = 200_000
# Of each step and process; their details are always recorded.
_SLOWEST = 5
_EXACT = "Counts, durations, components and percentiles of requests, the critical path and tails are exact"


def detail_notes(tables: Tables) -> Iterator[str]:
    """Yield for each run with sampled details how many requests have them, and what is an estimate."""
    for row in tables.rows(
        """
        WITH chosen AS (
            SELECT run, min(one_in) AS least, max(one_in) AS most
            FROM (
                SELECT run, integer_of(rest, 'one_in') AS one_in FROM event_fields
                WHERE event = 'request' AND family = 'rollout' AND rest IS NOT NULL
            ) WHERE one_in IS NOT NULL GROUP BY run
        ), settings AS (
            SELECT run, count(*) AS requests, count_if(detailed) AS detailed FROM requests GROUP BY run
        )
        SELECT * FROM chosen JOIN settings USING (run) WHERE detailed < requests ORDER BY run
        """
    ):
        least, most = row["least"], row["most"]
        slowest = f"the {_SLOWEST} slowest of each step and process"
        if not most:
            chosen = f"only of {slowest}"
        else:
            part = (
                share(1 / most)
                if least == most
                else f"{share(1 / most)} to {share(1 / max(least, 1))}"
            )
            if least == 0:
                part = f"at most {share(1 / most)}, none at the end"
            chosen = f"share {part}, and {slowest}"
        estimates = (
            "numbers of turns, engine calls and tools (≈) are estimated from them"
            if most
            else "numbers of turns, engine calls and tools are those of these requests alone"
        )
        yield (
            f"{row['run']}: details of {row['detailed']:,} of {counted(row['requests'], 'request')} were "
            f"recorded ({chosen}). {_EXACT}; {estimates}. What-if needs the details of all requests of "
            "a step (profiler.events.detail_share=1)."
        )


def too_large(tables: Tables) -> list[dict[str, Any]]:
    """Return run, step and calls of the steps that are not replayed, because they have too many calls."""
    return tables.rows(
        "SELECT run, step, sum(events)::BIGINT AS calls FROM event_counts "
        "WHERE event = 'engine_call' AND family = 'rollout' GROUP BY run, step "
        f"HAVING sum(events) > {REPLAYED_CALLS} ORDER BY run, step"
    )


def replay_notes(tables: Tables) -> Iterator[str]:
    """Yield a sentence for the steps that are too large to be replayed."""
    steps = too_large(tables)
    if steps:
        most = max(steps, key=lambda row: row["calls"])
        others = f" and {counted(len(steps) - 1, 'other step')}" if len(steps) > 1 else ""
        yield (
            f"What-if leaves out step {most['step']} with {most['calls']:,} generate calls{others}: a step "
            f"is replayed if it has at most {REPLAYED_CALLS:,}."
        )
