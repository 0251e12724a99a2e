"""What to paste for a finding: Hydra overrides with values of this run, and files that they name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.tables import Tables

__all__ = ["FILES", "VALUES", "fix_values", "overrides_of", "values_of"]

# What overrides may name, and what they get where the run does not show it: verl 0.9.1's default,
# changed in the direction of the advice.
VALUES: dict[str, int] = {
    "twice_the_workers": 16,
    "twice_the_limit": 512,
    "twice_the_reward_workers": 16,
    "twice_the_storage": 16,
    "p95_turns": 4,
    "rarer_tests": 10,
    "rarer_saves": 10,
    "buckets": 4096,
    "more_loaders": 16,
}

# Files that overrides name, by name.
FILES: dict[str, str] = {
    "fast_poll.py": '''\
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class FastPoll(ReplayBuffer):
    """Polls for finished samples every 0.2 s, not every 2 s."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, poll_interval=0.2, **kwargs)
''',
}

_NAMED = re.compile(r"\{(\w+)\}")


def fix_values(tables: Tables, steps: Steps = None) -> Rows:
    """Return what the run itself shows about the settings that fixes change.

    Returns:
        One row per run and name (a key of `VALUES`): value.
    """
    rows = tables.rows(
        f"""
        WITH many AS (
            SELECT run, role, count(*) AS processes FROM processes GROUP BY run, role
        ), chosen AS (
            SELECT * FROM steps WHERE finished AND step > 0 AND {in_steps(steps)}
        ), counted AS (
            SELECT run, count(*) AS steps FROM chosen GROUP BY run
        ), timers AS (
            SELECT run, CASE phase WHEN 'save_checkpoint' THEN 'rarer_saves' ELSE 'rarer_tests' END
                AS name, count(DISTINCT step) AS steps
            FROM phases WHERE phase IN ('save_checkpoint', 'testing') AND {in_steps(steps)}
            GROUP BY ALL
        ), flights AS (
            SELECT run, step, engine_name, sum(change) OVER (
                PARTITION BY run, step, engine_name ORDER BY at_us, change) AS running
            FROM (
                SELECT run, step, engine_name, engine_begin_us AS at_us, 1 AS change
                FROM engine_calls WHERE NOT validate AND {in_steps(steps)}
                UNION ALL SELECT run, step, engine_name, engine_end_us, -1
                FROM engine_calls WHERE NOT validate AND {in_steps(steps)}
            ) WHERE at_us IS NOT NULL
        )
        SELECT run, CASE role WHEN 'agent_loop' THEN 'twice_the_workers'
            WHEN 'reward' THEN 'twice_the_reward_workers' ELSE 'twice_the_storage' END AS name,
            2 * processes AS value
        FROM many WHERE role IN ('agent_loop', 'reward', 'tq_storage')
        UNION ALL SELECT run, 'twice_the_limit', 2 * max(running) FROM flights GROUP BY run
        UNION ALL SELECT run, 'p95_turns', quantile_disc(turns, 0.95) FROM requests
            WHERE finished AND NOT validate AND turns > 0 AND {in_steps(steps)} GROUP BY run
        UNION ALL SELECT t.run, t.name, greatest(round(5.0 * c.steps / t.steps), 2)
            FROM timers AS t JOIN counted AS c USING (run)
        ORDER BY ALL
        """
    )
    return [{**row, "value": int(row["value"])} for row in rows if row["value"] is not None]


def overrides_of(
    overrides: Iterable[str], values: Mapping[str, int]
) -> tuple[list[str], dict[str, str]]:
    """Fill in the values of overrides.

    Returns:
        The overrides, and the files that they name, by name.
    """
    filled = [
        _NAMED.sub(lambda match: str(values.get(match[1], VALUES[match[1]])), each)
        for each in overrides
    ]
    files = {name: text for name, text in FILES.items() if any(name in each for each in filled)}
    return filled, files


def values_of(rows: Iterable[Mapping[str, Any]], run: str) -> dict[str, int]:
    """Return the values of one run from the rows of `fix_values`."""
    return {row["name"]: row["value"] for row in rows if row["run"] == run}
