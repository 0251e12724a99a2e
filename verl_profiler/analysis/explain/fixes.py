"""The fix for a finding: Hydra overrides with values of this run, and files that they refer to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.events.json_values import is_mapping
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

__all__ = [
    "FILES",
    "VALUES",
    "fix_values",
    "lowers_memory",
    "names_in",
    "overrides_of",
    "values_of",
]

# Values that overrides refer to, and their fallbacks if the run does not show them: verl 0.9.1's
# defaults, changed in the direction of the advice.
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
    "more_warm_up": 2,
}

# Files that overrides refer to, by name.
FILES: dict[str, str] = {
    "fast_poll.py": '''\
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class FastPoll(ReplayBuffer):
    """Polls for finished samples every 0.2 s, not every 2 s."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, poll_interval=0.2, **kwargs)
''',
    "spread_calls.yaml": "router_class: spread_calls.SpreadCalls\n",
    "spread_calls.py": '''\
from verl.workers.rollout.router import GlobalRequestLoadBalancer


class SpreadCalls(GlobalRequestLoadBalancer):
    """Moves a conversation when its replica has a quarter and two more calls than the least loaded."""

    def __init__(self, servers, config):
        super().__init__(servers)

    def acquire_server(self, request_id):
        calls = self._inflight_requests
        server = self._request_id_to_server.get(request_id)
        if server in calls and calls[server] > 1.25 * min(calls.values()) + 2:
            del self._request_id_to_server[request_id]
        return super().acquire_server(request_id)
''',
}

_NAMED = re.compile(r"\{(\w+)\}")


_PROCESSES = "SELECT run, 2 * count(*) AS value FROM processes WHERE role = '{role}' GROUP BY run"
_RARER = """
    SELECT p.run, greatest(round(5.0 * any_value(c.steps) / count(DISTINCT p.step)), 2) AS value
    FROM phases AS p JOIN (
        SELECT run, count(*) AS steps FROM steps WHERE finished AND step > 0 AND {chosen}
        GROUP BY run) AS c ON c.run = p.run
    WHERE p.phase = '{phase}' AND {chosen} GROUP BY p.run"""
# Queries for the values that can be derived from a run.
_SHOWN = {
    "twice_the_workers": _PROCESSES.format(role="agent_loop"),
    "twice_the_reward_workers": _PROCESSES.format(role="reward"),
    "twice_the_storage": _PROCESSES.format(role="tq_storage"),
    "rarer_tests": _RARER.replace("{phase}", "testing"),
    "rarer_saves": _RARER.replace("{phase}", "save_checkpoint"),
    "more_warm_up": """
        SELECT run, 1 + ceil(sum(prompts) FILTER (reason = 'warm_up')
            / max(prompts) FILTER (reason = 'step')) AS value
        FROM (SELECT run, integer_of(rest, 'prompts') AS prompts, rest->>'$.reason' AS reason
            FROM event_fields WHERE event = 'dispatch') GROUP BY run""",
    "p95_turns": f"""
        SELECT run, ceil({quantiles("turns", 0.95)}[1]) AS value FROM requests
        WHERE finished AND NOT validate AND turns > 0 AND {{chosen}} GROUP BY run""",
    "twice_the_limit": """
        SELECT run, 2 * max(running) AS value FROM (
            SELECT run, sum(change) OVER (
                PARTITION BY run, step, engine_name ORDER BY at_us, change) AS running
            FROM (
                SELECT run, step, engine_name, engine_begin_us AS at_us, sampled AS change
                FROM engine_calls WHERE NOT validate AND {chosen}
                UNION ALL SELECT run, step, engine_name, engine_end_us, -sampled
                FROM engine_calls WHERE NOT validate AND {chosen}
            ) WHERE at_us IS NOT NULL
        ) GROUP BY run""",
}


def fix_values(tables: Tables, names: Iterable[str], steps: Steps = None) -> Rows:
    """Derive values for the settings that fixes change from the run.

    Args:
        tables: Of a run.
        names: Keys of `VALUES`; those that cannot be derived are left out.
        steps: First and last step; None for all.

    Returns:
        One row per run and name: value.
    """
    rows: Rows = []
    for name in sorted(set(names) & set(_SHOWN)):
        query = _SHOWN[name].replace("{chosen}", in_steps(steps, "step"))
        rows += [
            {"run": row["run"], "name": name, "value": int(row["value"])}
            for row in tables.rows(f"{query} ORDER BY 1")
            if row["value"] is not None
        ]
    return rows


def names_in(overrides: Iterable[str]) -> set[str]:
    """Return the names in braces in overrides."""
    return {name for each in overrides for name in _NAMED.findall(each)}


def overrides_of(
    overrides: Iterable[str], values: Mapping[str, int]
) -> tuple[list[str], dict[str, str]]:
    """Fill in the values of overrides.

    Returns:
        The overrides, and the files that they refer to, by name.
    """
    filled = [
        _NAMED.sub(lambda match: str(values.get(match[1], VALUES[match[1]])), each)
        for each in overrides
    ]
    files = {
        name: text
        for name, text in FILES.items()
        if any(name.rpartition(".")[0] in each for each in filled)
    }
    return filled, files


def lowers_memory(override: str, launch: Mapping[str, Any]) -> bool:
    """Return whether an override gives the engines less memory than they had by `run.json`."""
    key, _, value = override.partition("=")
    training = launch.get("training")
    had = training.get("gpu_memory_utilization") if is_mapping(training) else None
    return (
        key.endswith(".gpu_memory_utilization")
        and isinstance(had, (int, float))
        and float(value) <= had
    )


def values_of(rows: Iterable[Mapping[str, Any]], run: str) -> dict[str, int]:
    """Return the values of one run from the rows of `fix_values`."""
    return {row["name"]: row["value"] for row in rows if row["run"] == run}
