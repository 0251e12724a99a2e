"""The critical cycle of an asynchronous run: the loop of dependencies that its steps cannot beat.

A step consumes samples when the trainer is free and the last of them is ready. What is waited for then
depends on something earlier: the trainer on its previous consumption; a sample on its dispatch, and
that on the consumption before it. The walk back over a window of steps, always to the one that came
last, leaves no second of it out; divided by the steps that it passes, it is the mean step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from verl_profiler.analysis.explain.device_time import Span, overlaps
from verl_profiler.analysis.explain.ledger import trainer_states
from verl_profiler.analysis.selection import Rows, Steps, after_warm_up, by_run, steps_of
from verl_profiler.reading.tables.tables import Tables

# What each edge is, in the order in which people read them.
EDGES = {
    "training": "log-probabilities, values, advantages, updates, rewards in the trainer",
    "weight_sync": "weight sync",
    "generating": "generate calls of the last sample, including queueing",
    "tools": "tool calls of the last sample",
    "rollout_other": "the last sample from dispatch to its end, except its calls and tools",
    "noticing": "from the end of the last sample until the trainer takes it",
    "mode_switch": "aborting calls, putting engines to sleep, waking them, switching them between pools",
    "dispatch": "reading prompts and passing them to the agent loops",
    "overhead": "start-up, validation, checkpoints, captures",
    "trainer_other": "not covered by any event of the trainer",
}
_ROLLOUT = frozenset({"generating", "tools", "rollout_other", "noticing"})
_TRAINER = {
    "driver": "training",
    "unattributed": "trainer_other",
    "waiting_for_samples": "trainer_other",
}


def critical_cycle(tables: Tables, steps: Steps = None) -> Rows:
    """Divide the critical cycle of an asynchronous run into its edges.

    The window ends with the last consumption of `steps` (without the warm-up), and begins with a
    consumption before them, that which the walk back reaches.

    Returns:
        Table `critical_cycle`: one row per run and edge, in the order of `EDGES`.
    """
    if not tables.row("SELECT run FROM asynchronous LIMIT 1"):
        return []
    steady = after_warm_up(tables, steps)
    rows: Rows = []
    for run, own in by_run(tables.rows(_TAKINGS)).items():
        window = steps_of(steady, run) or (own[0]["step"], own[-1]["step"])
        taken = [row for row in own if row["step"] <= window[1]]
        if taken:
            rows += _walked(run, taken, window[0], trainer_states(tables, run))
    return rows


def _walked(run: str, taken: Rows, first_step: int, states: list[Span]) -> Rows:
    """Walk back from the last moment at which the trainer took samples; each row has the sample that was ready last."""
    times = [row["at_us"] for row in taken]
    place, spent = len(taken) - 1, dict.fromkeys(EDGES, 0)
    while place > 0 and taken[place]["step"] >= first_step:
        here = taken[place]
        before, until_us = place - 1, here["at_us"]
        if here["ready_us"] > here["arrived_us"] and here["dispatched_us"] is not None:
            # The consumption before its dispatch: the trainer dispatches when it has taken samples.
            # One that was dispatched before the first consumption is followed back to that.
            before = min(max(bisect_right(times, here["dispatched_us"]) - 1, 0), place - 1)
            until_us = max(here["dispatched_us"], times[before])
            _add_rollout(spent, here, until_us)
        _add_trainer(spent, states, times[before], until_us)
        place = before
    passed = taken[-1]["step"] - taken[place]["step"]
    if passed <= 0:
        return []
    total = sum(spent.values())
    return [
        {
            "run": run,
            "edge": edge,
            "pool": "rollout" if edge in _ROLLOUT else "trainer",
            "steps": passed,
            "cycle_s": total / passed / 1e6,
            "edge_s": spent_us / passed / 1e6,
            "share": spent_us / total,
        }
        for edge, spent_us in spent.items()
        if spent_us
    ]


def _add_rollout(spent: dict[str, int], here: Mapping[str, Any], begin_us: int) -> None:
    """Add the time of a sample from `begin_us`, at its dispatch or later, until it is taken."""
    whole = max(here["ready_us"] - here["dispatched_us"], 1)
    lasted = max(here["ready_us"] - begin_us, 0)
    # Parallel calls of one request may last longer than it does.
    generating = min(here["engine_us"] * lasted // whole, lasted)
    tools = min(here["tool_us"] * lasted // whole, lasted - generating)
    spent["generating"] += generating
    spent["tools"] += tools
    spent["rollout_other"] += lasted - generating - tools
    spent["noticing"] += here["at_us"] - max(here["ready_us"], begin_us)


def _add_trainer(spent: dict[str, int], states: list[Span], begin_us: int, end_us: int) -> None:
    """Add the trainer's states between two times."""
    spent["trainer_other"] += max(end_us - begin_us, 0)
    for span, length_us in overlaps(states, begin_us, end_us):
        spent[_TRAINER.get(span.state, span.state)] += round(length_us)
        spent["trainer_other"] -= round(length_us)


def cycle_bound(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return what takes most of a cycle: `trainer`, `rollout`, `weight_sync`, or `in_turn`.

    In turn: neither pool has most of it, so that each waits for the other one.
    """
    shares: dict[str, float] = defaultdict(float)
    for row in rows:
        shares["weight_sync" if row["edge"] == "weight_sync" else row["pool"]] += row["share"]
    largest = max(shares, key=lambda name: shares[name])
    if largest == "weight_sync" or shares[largest] >= _MOST:
        return largest
    return "in_turn"


# A pool with at least this share of the cycle bounds it alone.
_MOST = 0.75

# The sample that was ready last at each moment when the trainer took some; in order. A prompt's samples
# are ready when the last of them is. Calls are counted once where the engine ran them in parallel.
_TAKINGS = """
WITH taken AS (
    SELECT run, consumed_step AS step, at_us, uid, session FROM samples
    WHERE fate = 'consumed' AND run IN (SELECT run FROM asynchronous)
        AND consumed_step IS NOT NULL AND at_us IS NOT NULL
), ready AS (
    SELECT t.run, t.step, t.at_us, r.end_us AS ready_us, r.engine_us, r.tool_us,
        least(r.begin_us, coalesce(d.at_us, r.begin_us)) AS dispatched_us
    FROM taken AS t JOIN requests AS r ON r.run = t.run AND r.uid = t.uid AND NOT r.validate
        AND r.session IS NOT DISTINCT FROM t.session AND r.finished
    LEFT JOIN dispatched AS d ON d.run = t.run AND d.uid = t.uid
    QUALIFY row_number() OVER (PARTITION BY t.run, t.at_us
        ORDER BY r.end_us DESC, r.request_id) = 1
), waits AS (
    SELECT run, begin_us, end_us FROM phases WHERE phase = 'gen' AND NOT validate
)
SELECT r.run, r.at_us, r.step, coalesce(max(w.begin_us), r.at_us) AS arrived_us,
    any_value(least(r.ready_us, r.at_us)) AS ready_us, any_value(r.dispatched_us) AS dispatched_us,
    any_value(coalesce(r.engine_us, 0)) AS engine_us, any_value(coalesce(r.tool_us, 0)) AS tool_us
FROM ready AS r LEFT JOIN waits AS w
    -- A queue that passes samples on after the timer is behind by a moment.
    ON w.run = r.run AND w.begin_us <= r.at_us AND w.end_us + 1000 >= r.at_us
GROUP BY r.run, r.at_us, r.step ORDER BY r.run, r.at_us
"""
