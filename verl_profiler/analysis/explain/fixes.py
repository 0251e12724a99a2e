"""The fixes that findings give to paste: Hydra overrides that a run's trainer and engine read.

A fix is given only if the run recorded what shows that it can work there: verl's version, trainer and
engine read its keys, the value differs from what is set, and neither samples nor losses change.  What
changes the training is advice in words (`rules`), never a fix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl_profiler.analysis.selection import Steps, in_steps
from verl_profiler.events.json_values import mapping_or_empty

if TYPE_CHECKING:
    from verl_profiler.reading.tables.tables import Tables


# Files that fixes refer to, by name.
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

# Values of `trainer.v1.trainer_mode`; `legacy` is the trainer of `trainer.use_v1=false`.
SYNC_MODES = ("sync",)
_V1 = ("sync", "colocate_async", "separate_async")
_ALL = (*_V1, "legacy")
# Trainers of verl.experimental have settings of their own.
_EXPERIMENTAL = """
SELECT run FROM processes WHERE role = 'rollouter'
UNION SELECT run FROM event_fields WHERE event = 'dispatch' AND uid IS NOT NULL
"""
_ROLLOUT = "actor_rollout_ref.rollout"


class Facts:
    """What a run recorded of its settings and its work.

    Args:
        tables: Of the run.
        run: Its label.
        steps: First and last step that measurements are of; None for all.
    """

    def __init__(self, tables: Tables, run: str, steps: Steps = None) -> None:
        launch = tables.launches.get(run, {})
        training = mapping_or_empty(launch.get("training"))
        self._tables, self._run, self._steps = tables, run, steps
        events = mapping_or_empty(mapping_or_empty(launch.get("settings")).get("events"))
        self._settings = {
            **mapping_or_empty(training.get("settings")),
            **{f"profiler.events.{key}": value for key, value in events.items()},
        }
        self.engine = training.get("rollout")
        self.version = _version(mapping_or_empty(launch.get("versions")).get("verl"))
        use_v1 = training.get("use_v1")
        self.trainer = (
            training.get("trainer_mode") if use_v1 else "legacy" if use_v1 is False else None
        )
        if any(row["run"] == run for row in tables.rows(_EXPERIMENTAL)):
            self.trainer = "experimental"

    def setting(self, key: str) -> Any:
        """Return a recorded setting of verl; None if it is null or was not recorded."""
        return self._settings.get(key)

    def count(self, key: str) -> int:
        """Return a recorded positive integer; 0 if it is none."""
        value = self.setting(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def off(self, *keys: str) -> bool:
        """Return whether all of these were recorded as unset or false."""
        return all(key in self._settings and not self._settings[key] for key in keys)

    def measured(self, query: str) -> list[Any]:
        """Return the column `value` of a query's rows of this run."""
        rows = self._tables.rows(query.replace("{chosen}", in_steps(self._steps)), [self._run])
        return [row["value"] for row in rows if row["value"] is not None]


@dataclass(frozen=True)
class Fix:
    """A fix: one setting of verl.

    Args:
        key: Its key.
        wanted: Returns its value, or None if it is pointless in this run, changes what is trained, or if the
            run did not record what would show that.
        trainers: The trainers that read it.
        engines: The engines for which it is read; empty for all.
        since: The first version of verl that reads it.
        files: Names of `FILES` that the value refers to.
        also: Other settings that belong to it.
    """

    key: str
    wanted: Callable[[Facts, str], str | float | None]
    trainers: tuple[str, ...]
    engines: tuple[str, ...] = ()
    since: tuple[int, ...] = (0, 9, 0)
    files: tuple[str, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that it sets."""
        return self.key, *self.also

    def values(self, facts: Facts) -> Mapping[str, str | float]:
        """Return the values by key; empty where it is pointless."""
        value = self.wanted(facts, self.key)
        return {} if value is None else {self.key: value, **self.also}


# The first versions whose sources nobody has compared with the table yet.
_UNKNOWN_FROM = (0, 10)


def _version(text: object) -> tuple[int, ...] | None:
    """Return the numbers of a release; None for others, such as those of a checkout."""
    found = (
        re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.post\d+)?", text) if isinstance(text, str) else None
    )
    return tuple(int(found[place]) for place in (1, 2, 3)) if found else None


# A custom sampler gets neither the filter nor the refills of the built-in one (verl 0.9.1
# trainer_base.py:163), so a run that has one of them would train on other samples.
_CUSTOM_SAMPLER = "trainer.v1.sampler.custom_sampler"
_FILTER = "algorithm.filter_groups.enable"
_REFILL = "trainer.v1.sampler.sync_refill_failed_groups"


def _fast_poll(facts: Facts, _key: str) -> str | None:
    return "fast_poll.py" if facts.off(_CUSTOM_SAMPLER, _FILTER, _REFILL) else None


def _agent_workers(facts: Facts, key: str) -> int | None:
    """Double the workers, up to one per prompt: a prompt's requests stay together.

    Refills are dispatched late whatever the number of workers.
    """
    had, prompts = facts.count(key), facts.count("data.train_batch_size")
    refilled = not facts.off(_FILTER, _REFILL)
    return min(2 * had, prompts) if 0 < had < prompts and not refilled else None


_LATER_CALLS = """
SELECT 1 AS value FROM engine_calls
WHERE run = ? AND request_id IS NOT NULL AND NOT validate AND {chosen}
GROUP BY name, request_id HAVING count(*) > 1 LIMIT 1"""


def _spread_calls(facts: Facts, key: str) -> str | None:
    """Only later calls of a request are sent to the replica of its first one."""
    return "spread_calls.yaml" if facts.off(key) and facts.measured(_LATER_CALLS) else None


_IN_FLIGHT = """
SELECT max(calls) AS value FROM (
    SELECT sum(change) OVER (PARTITION BY step, engine_name ORDER BY at_us, change) AS calls
    FROM (
        SELECT step, engine_name, unnest([engine_begin_us, engine_end_us]) AS at_us,
            unnest([sampled, -sampled]) AS change
        FROM engine_calls WHERE run = ? AND NOT validate AND {chosen}
    ) WHERE at_us IS NOT NULL
)"""


def _running_limit(facts: Facts, key: str) -> int | None:
    """Double the limit if a replica has ever had more calls than it admits at once."""
    had = facts.count(key)
    return 2 * had if had and any(calls > had for calls in facts.measured(_IN_FLIGHT)) else None


_MEMORY = 0.8


def _engine_memory(facts: Facts, key: str) -> float | None:
    had = facts.setting(key)
    return _MEMORY if isinstance(had, (int, float)) and 0 < had < _MEMORY else None


def _switched_on(facts: Facts, key: str) -> str | None:
    return "true" if facts.setting(key) is False else None


_STEPS = "SELECT step AS value FROM steps WHERE run = ? AND finished AND step > 0 ORDER BY step"
_RARER = 5


def _rarer(facts: Facts, key: str) -> int | None:
    """Do something in fewer steps.

    verl does it in the last step for any positive value: only the others can be spared.
    """
    had, steps = facts.count(key), facts.measured(_STEPS)[:-1]
    spared = had > 0 and any(step % had == 0 and step % (_RARER * had) for step in steps)
    return _RARER * had if spared else None


_DISAGGREGATED = f"{_ROLLOUT}.disaggregation.enabled"


def _hybrid_switch(facts: Facts, key: str) -> str | None:
    """Replicas on the trainer's devices need the hybrid engine, and verl's own sampler."""
    possible = facts.setting("actor_rollout_ref.hybrid_engine") is True and facts.off(
        key, _CUSTOM_SAMPLER, _DISAGGREGATED
    )
    return "true" if possible else None


_ENGINES = ("vllm", "sglang")

FIXES: dict[str, Fix] = {
    "fast_poll": Fix(
        f"{_CUSTOM_SAMPLER}.path",
        _fast_poll,
        SYNC_MODES,
        files=("fast_poll.py",),
        also={f"{_CUSTOM_SAMPLER}.name": "FastPoll"},
    ),
    "agent_workers": Fix(f"{_ROLLOUT}.agent.num_workers", _agent_workers, SYNC_MODES),
    "spread_calls": Fix(
        f"{_ROLLOUT}.router_config_path",
        _spread_calls,
        _V1,
        since=(0, 9, 1),
        files=("spread_calls.yaml", "spread_calls.py"),
    ),
    "running_limit": Fix(f"{_ROLLOUT}.max_num_seqs", _running_limit, _ALL, engines=_ENGINES),
    "engine_memory": Fix(
        f"{_ROLLOUT}.gpu_memory_utilization", _engine_memory, _ALL, engines=_ENGINES
    ),
    "reward_workers": Fix(
        "reward.num_workers", lambda facts, key: 2 * facts.count(key) or None, _ALL
    ),
    "rarer_validation": Fix("trainer.test_freq", _rarer, _V1),
    "rarer_checkpoints": Fix("trainer.save_freq", _rarer, _V1),
    "engine_timing": Fix(
        "profiler.events.engine_timing", _switched_on, (*_ALL, "experimental"), engines=_ENGINES
    ),
    "hybrid_switch": Fix(
        "trainer.v1.separate_async.hybrid_rollout.enable_switch",
        _hybrid_switch,
        ("separate_async",),
        since=(0, 9, 1),
    ),
}


def fixes_of(names: Iterable[str], facts: Facts) -> tuple[list[str], dict[str, str]]:
    """Return what to paste.

    Args:
        names: Of `FIXES`; those that a run does not show to work there are left out.
        facts: Of the run.

    Returns:
        The Hydra overrides, and the files that they refer to, by name.
    """
    overrides: list[str] = []
    files: dict[str, str] = {}
    for fix in map(FIXES.__getitem__, names):
        known = facts.version is not None and fix.since <= facts.version < _UNKNOWN_FROM
        reads = facts.trainer in fix.trainers and (not fix.engines or facts.engine in fix.engines)
        values = fix.values(facts) if known and reads else None
        if values:
            overrides += [f"{key}={value}" for key, value in values.items()]
            files |= {file: FILES[file] for file in fix.files}
    return overrides, files
