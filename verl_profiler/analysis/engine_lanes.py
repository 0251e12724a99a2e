"""The generate calls that each engine served, side by side."""

from __future__ import annotations

import heapq
from typing import Any

from verl_profiler.analysis.selection import Rows, Steps, after_warm_up, in_steps
from verl_profiler.reading.tables.tables import Tables

# Parts of a call inside the engine, in the order in which they are drawn.
LANE_PARTS = ("parked", "queue", "cold", "prefill", "recomputed", "decode", "undivided")


def engine_lanes(tables: Tables, steps: Steps = None) -> Rows:
    """Lay the calls of each engine out in lanes, so that calls of one lane do not overlap.

    A call takes the lowest lane that is free when it arrives at the engine: the number of lanes is the
    highest number of calls that were there at once, those in the queue included.  Seconds are counted from
    the first reading of the engines in these steps (as in `engine_load_over_time`); without readings from
    the first call.

    Returns:
        Table `engine_lanes`: one row per run, engine process and generate call (or attempt of one) that
        the engine served.
    """
    parts = ", ".join(f"{part}_us" for part in LANE_PARTS)
    rows = tables.rows(
        f"""
        WITH served AS (
            SELECT *, greatest(queue_from_us - coalesce(parked_us, 0), begin_us)::BIGINT AS arrived_us
            FROM engine_call_times WHERE engine_name IS NOT NULL AND {in_steps(steps)}
        ), origins AS (
            SELECT run, coalesce(read_us, arrived_us) AS from_us
            FROM (SELECT run, min(arrived_us) AS arrived_us FROM served GROUP BY run) LEFT JOIN (
                SELECT run, min(at_us) AS read_us FROM engine_states WHERE {in_steps(steps)}
                GROUP BY run) USING (run)
        )
        SELECT run, engine_name AS name, step, request_id, turn, attempt, validate, retractions,
            arrived_us, arrived_us - from_us AS since_us, {parts}
        FROM served JOIN origins USING (run)
        ORDER BY run, engine_name, arrived_us, request_id, turn, attempt
        """
    )
    lanes: dict[tuple[str, str], _Lanes] = {}
    found: Rows = []
    for row in rows:
        lengths = {
            part: None if row[f"{part}_us"] is None else max(row[f"{part}_us"], 0) / 1e6
            for part in LANE_PARTS
        }
        begin_s = row["since_us"] / 1e6
        engine = lanes.setdefault((row["run"], row["name"]), _Lanes())
        kept = ("run", "name", "step", "request_id", "turn", "attempt", "validate")
        made: dict[str, Any] = {key: row[key] for key in kept}
        made |= {
            "lane": engine.place(begin_s, begin_s + sum(filter(None, lengths.values()))),
            "begin_s": begin_s,
            **{f"{part}_s": length for part, length in lengths.items()},
            "retractions": row["retractions"],
        }
        found.append(made)
    return found


def longest_step(tables: Tables, steps: Steps = None) -> Steps:
    """Return the longest step of these with event files, without the warm-up; None if none has finished."""
    rows = tables.rows(
        "SELECT step FROM steps WHERE finished AND step > 0 AND "
        f"{in_steps(after_warm_up(tables, steps))} ORDER BY duration_us DESC, step LIMIT 1"
    )
    return (rows[0]["step"], rows[0]["step"]) if rows else None


class _Lanes:
    """Gives each interval the lowest lane that is free; intervals come by their begins."""

    def __init__(self) -> None:
        self.busy: list[tuple[float, int]] = []
        self.free: list[int] = []
        self.count = 0

    def place(self, begin_s: float, end_s: float) -> int:
        while self.busy and self.busy[0][0] <= begin_s:
            heapq.heappush(self.free, heapq.heappop(self.busy)[1])
        if self.free:
            lane = heapq.heappop(self.free)
        else:
            lane = self.count
            self.count += 1
        heapq.heappush(self.busy, (end_s, lane))
        return lane
