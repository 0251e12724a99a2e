"""The bubble ledger: device-seconds of each pool and step, each in exactly one account.

It holds for synchronous and asynchronous runs alike, because it follows devices and not requests.
A device is where the trainer works, or where a replica serves generate calls, or both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from verl_profiler.analysis.explain.device_time import Group, Span, innermost, integrate
from verl_profiler.analysis.selection import Rows, Steps, by_run, in_steps
from verl_profiler.reading.tables.tables import Tables

if TYPE_CHECKING:
    from verl_profiler.analysis.explain.device_time import Times

# What each account is, in the order in which people read them.
ACCOUNTS = {
    "training": "log-probabilities, values, updates in the trainer",
    "driver": "timers of the trainer in which no rank is active: advantages, rewards",
    "offload": "loading and offloading parameters, gradients or optimizer state",
    "rank_transfer": "TransferQueue calls of the rank that ends last in a timer of the trainer",
    "handover": "timers of the trainer while the rank that ends last in them is idle",
    "generating": "generate calls of samples that were consumed",
    "few_requests": "the same while a replica runs fewer than a quarter of the calls that it runs at "
    "most in the step, in synchronous training",
    "generating_unconsumed": "generate calls of samples that no recorded step consumed",
    "generating_aborted": "generate calls whose tokens an abort discarded; prefill repeated after one",
    "generating_dropped": "generate calls of samples that were dropped",
    "waiting_for_samples": "the trainer waits for samples while the devices run no calls",
    "rollout_idle": "idle replica, while requests run tools, rewards or calls on other replicas",
    "staleness_limit": "idle replica, because no more samples are dispatched",
    "weight_sync": "weight sync",
    "mode_switch": "aborting calls, putting engines to sleep, waking them, switching them between pools",
    "dispatch": "reading prompts and passing them to the agent loops",
    "overhead": "start-up, validation, checkpoints, captures",
    "unattributed": "not covered by any event",
}

# What the devices are for.
USEFUL = ("training", "generating")

POOLS = {
    "shared": "shared by trainer and rollout",
    "trainer": "of the trainer",
    "rollout": "of the rollout",
}

_OVERHEADS = ("init", "testing", "validation", "save_checkpoint", "start_profile", "stop_profile")
# The account of the trainer's timers; all others are training.
_TIMERS = {
    "step": "unattributed",
    **dict.fromkeys(("prepare_step", "dispatch"), "dispatch"),
    **dict.fromkeys(
        ("gen", "sample_wait", "sampleable_wait", "switch_wait", "wait_for_enough_samples"),
        "waiting_for_samples",
    ),
    **dict.fromkeys(
        (
            *("sleep_replicas", "abort_replicas", "resume_replicas"),
            *("switch_to_rollout", "switch_to_trainer", "pool_switch"),
        ),
        "mode_switch",
    ),
    **dict.fromkeys(
        ("update_weights", "weight_sync", "param_sync", "sync_rollout_weights"), "weight_sync"
    ),
    **dict.fromkeys(_OVERHEADS, "overhead"),
}
# Parts of the timers around them.
_INSIDE = frozenset({"replicas_join", "replicas_leave"})
# The same inside of syncs and switches; by themselves they are switches of their own.
_STOPS = frozenset({"abort_replicas", "resume_replicas"})
# In these states of the trainer, devices that it shares with replicas run calls.
_SHARED = frozenset({"waiting_for_samples", "dispatch", "unattributed"})
# In these states of a replica with devices of its own, it runs calls.
_SEPARATE = frozenset({"rollout_idle", "staleness_limit"})

_NEVER = 1 << 62

# Of one replica: begins and ends of its calls by account.
_Calls: TypeAlias = "dict[str, tuple[Times, Times]]"


def bubble_ledger(tables: Tables, steps: Steps = None) -> Rows:
    """Charge the time of all devices to accounts, for each step from its begin to the next one's.

    The devices of a pool are those that the trainer noted, or else as many as it has ranks; a
    replica has an equal part of them. Generate calls that a replica runs at the same time share its
    devices' time evenly. What a sample became is known from the step that consumed it; in runs
    without that, all generate calls are `generating`. While the last requests of a synchronous step
    run, it is `few_requests`.

    Returns:
        Table `bubble_ledger`: one row per run, step, pool and account, in the order of
        `ACCOUNTS`.
    """
    rows: Rows = []
    timers = by_run(tables.rows(_TIMED))
    syncs = by_run(tables.rows(_SYNCS))
    alone = by_run(tables.rows(_ALONE))
    calls = _calls(tables)
    pools = standalone_replicas(tables)
    ranks = trainer_devices(tables)
    ahead = {row["run"] for row in tables.rows("SELECT run FROM asynchronous")}
    for run, spans in step_windows(tables, steps).items():
        windows = [(begin, end) for _, begin, end in spans]
        trainer = innermost(_states(timers.get(run, []), alone.get(run, [])))
        replicas = calls.get(run, {})
        own, devices = pools.get(run, (set[str](), 0.0))
        apart = {name: served for name, served in replicas.items() if name in own}
        shared = {name: served for name, served in replicas.items() if name not in apart}
        trained = float(ranks.get(run) or len(shared) or 1)
        few = {} if run in ahead else {"generating": "few_requests"}
        groups = [
            Group(trained / len(shared), trainer, served, _SHARED, few=few)
            for served in shared.values()
        ] or [Group(trained, trainer)]
        pool = "shared" if shared or not apart else "trainer"
        found = integrate(windows, groups)
        rows += _rows(run, pool, trained, spans, found)
        if apart:
            states = _without_trainer(tables, run, windows, syncs.get(run, []), trainer)
            groups = [
                Group(devices / len(apart), states, served, _SEPARATE, "rollout_idle")
                for served in apart.values()
            ]
            rows += _rows(run, "rollout", devices, spans, integrate(windows, groups))
    return rows


def trainer_states(tables: Tables, run: str) -> list[Span]:
    """Return what the trainer of a run does at each time, as accounts: without overlaps, in order.

    What its ranks do in its timers is training.
    """
    alone = by_run(tables.rows(_ALONE)).get(run, [])
    driver = [row for row in alone if row["account"] == "driver"]
    return innermost(_states(by_run(tables.rows(_TIMED)).get(run, []), driver))


def is_training(phase: str) -> bool:
    """Return whether a timer of the trainer is training."""
    return _TIMERS.get(phase, "training") == "training"


def _states(timers: Rows, alone: Iterable[Mapping[str, Any]] = ()) -> Iterator[Span]:
    """Give the account of each timer, in order; what happens inside of validation is overhead.

    Args:
        timers: Of the trainer.
        alone: What is no training inside of its timers, with its account.
    """
    training: list[Span] = []
    whole_us = stopped_us = 0
    for row in timers:
        if row["end_us"] <= whole_us or row["phase"] in _INSIDE:
            continue
        if row["phase"] in _STOPS and row["end_us"] <= stopped_us:
            continue
        account = _TIMERS.get(row["phase"], "training")
        if account == "overhead":
            whole_us = row["end_us"]
        elif account in ("weight_sync", "mode_switch"):
            stopped_us = max(stopped_us, row["end_us"])
        span = Span(row["begin_us"], row["end_us"], account)
        if account == "training":
            training.append(span)
        yield span
    begins = [span.begin_us for span in training]
    for row in alone:
        place = bisect_right(begins, row["begin_us"]) - 1
        if place >= 0 and row["begin_us"] < training[place].end_us:
            end_us = min(row["end_us"], training[place].end_us)
            yield Span(row["begin_us"], end_us, row["account"])


def _without_trainer(
    tables: Tables,
    run: str,
    windows: list[tuple[int, int]],
    syncs: Rows,
    trainer: list[Span],
) -> list[Span]:
    """Return what replicas with devices of their own do without calls, other than `rollout_idle`."""
    synced = [Span(row["begin_us"], row["end_us"], "weight_sync") for row in syncs] or [
        span for span in trainer if span.state == "weight_sync"
    ]
    return innermost([*_nothing_open(tables, run, windows), *synced])


def _nothing_open(tables: Tables, run: str, windows: list[tuple[int, int]]) -> Iterator[Span]:
    """Give the times in which no request is open, from its dispatch if that is known."""
    import numpy as np

    open_ = tables.arrays(
        f"""
        SELECT least(begin_us, coalesce(at_us, begin_us)) AS begin_us,
            coalesce(end_us, {_NEVER}) AS end_us
        FROM requests LEFT JOIN dispatched USING (run, uid)
        WHERE run = {quoted(run)} AND begin_us IS NOT NULL ORDER BY 1
        """
    )
    first, last = windows[0][0], windows[-1][1]
    begins = np.append(open_["begin_us"], last)
    ends = np.maximum.accumulate(np.insert(open_["end_us"], 0, first))
    for place in np.flatnonzero(begins > ends):
        yield Span(int(ends[place]), int(begins[place]), "staleness_limit")


def quoted(text: str) -> str:
    """Return a string of SQL."""
    return "'" + text.replace("'", "''") + "'"


def step_windows(tables: Tables, steps: Steps) -> dict[str, list[tuple[int, int, int]]]:
    """Return step, begin and end by run: from a step's begin to the next one's.

    The last one ends with its last timer, of validation for example.  Steps whose event files were
    deleted are left out.
    """
    found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for row in tables.rows(
        f"""
        WITH timed AS (SELECT run, step, max(end_us) AS last_us FROM phases GROUP BY run, step)
        SELECT * FROM (
            SELECT run, step, begin_us, greatest(end_us, coalesce(lead(begin_us) OVER (
                PARTITION BY run ORDER BY begin_us), last_us)) AS end_us
            FROM steps JOIN timed USING (run, step) WHERE finished
        ) WHERE {in_steps(steps)} ORDER BY run, begin_us
        """
    ):
        found[row["run"]].append((row["step"], row["begin_us"], row["end_us"]))
    return found


def standalone_replicas(tables: Tables) -> dict[str, tuple[set[str], float]]:
    """Return by run: which replicas have devices of their own, by process; and how many devices."""
    rows = tables.rows(_STANDALONE)
    return {row["run"]: ({*row["names"]}, float(row["devices"])) for row in rows}


def trainer_devices(tables: Tables) -> dict[str, float]:
    """Return the number of the trainer's ranks, by run."""
    return {row["run"]: float(row["ranks"]) for row in tables.rows(_RANKS)}


def _calls(tables: Tables) -> dict[str, dict[str, _Calls]]:
    """Return begins and ends of the generate calls by run, replica and account."""
    calls = tables.arrays(
        "SELECT run, replica, account, list(begin_us) AS begins, list(end_us) AS ends "
        f"FROM ({_CALLS}) GROUP BY ALL ORDER BY ALL"
    )
    found: dict[str, dict[str, _Calls]] = {}
    for run, replica, account, begins, ends in zip(*calls.values(), strict=True):
        found.setdefault(run, {}).setdefault(replica, {})[account] = begins, ends
    return found


def _rows(
    run: str,
    pool: str,
    devices: float,
    windows: Iterable[tuple[int, int, int]],
    found: Iterable[Mapping[str, float]],
) -> Rows:
    return [
        {
            "run": run,
            "step": step,
            "pool": pool,
            "account": account,
            "devices": devices,
            "device_s": seconds[account],
            "share": seconds[account] / sum(seconds.values()),
        }
        for (step, _, _), seconds in zip(windows, found, strict=True)
        for account in ACCOUNTS
        if seconds.get(account)
    ]


def by_timer(tables: Tables, ledger: Rows) -> Rows:
    """Return rows of `bubble_ledger`; the trainer's overhead and what its driver does are divided by its timers.

    Each timer is an account of its own, with the one that it is of as `timer_of`; so is what lies between steps.  Of a
    step without any, and of the rollout's devices, an account stays one row.
    """
    timers: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
    for row in tables.rows(_BY_TIMER) if ledger else ():
        timers[row["run"], row["step"], row["account"]][row["phase"]] = row["spent_us"]
    found: Rows = []
    for row in ledger:
        account = row["account"]
        divided = row["pool"] != "rollout"
        spent_us = dict(timers.get((row["run"], row["step"], account), {})) if divided else {}
        if account == "unattributed" or not spent_us:
            # What no timer has.
            whole_us = row["device_s"] / row["devices"] * 1e6
            spent_us[account] = max(whole_us - sum(spent_us.values()), 0.0)
        for name, us in spent_us.items():
            part = us / sum(spent_us.values())
            more = {} if name == account else {"account": name, "timer_of": account}
            if part:
                found.append(
                    {**row, **more, **{key: part * row[key] for key in ("device_s", "share")}}
                )
    return found


def account_totals(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sum rows of `bubble_ledger`: device-seconds by account, in the order of `ACCOUNTS`."""
    sums = dict.fromkeys(ACCOUNTS, 0.0)
    for row in rows:
        sums[row["account"]] += row["device_s"]
    return {account: device_s for account, device_s in sums.items() if device_s}


# The timers of the process that runs the steps.
_TIMED = """
SELECT p.run, p.phase, p.begin_us, p.end_us FROM phases AS p JOIN (
    SELECT run, arg_max(name, spent) AS name FROM (
        SELECT run, name, sum(duration_us) AS spent FROM phases WHERE phase = 'step'
        GROUP BY run, name
    ) GROUP BY run
) AS t USING (run, name)
ORDER BY p.begin_us, p.end_us DESC
"""
_OF_TRAINER = "(run, name) IN (SELECT (run, name) FROM phases WHERE phase = 'step')"
# Timers with no active rank while ranks are active in others, unless only ranks can do what they are for; what
# the last rank of a timer loads, how long it waits for the TransferQueue, and when it is idle.
_ALONE = f"""
WITH timers AS (
    SELECT run, step, phase, begin_us, end_us FROM phases
    WHERE coalesce(parent, 'step') = 'step' AND phase NOT IN ('step', 'gen', 'sample_wait') AND NOT validate
        AND {_OF_TRAINER}
), inside AS MATERIALIZED (
    SELECT t.*, r.name, r.event, r.begin_us AS from_us, r.end_us AS until_us
    FROM timers AS t JOIN rank_spans AS r ON r.run = t.run AND r.step = t.step
        AND r.role NOT IN ('trainer', 'engine') AND r.family = 'workers'
        AND (r.begin_us + r.end_us) // 2 BETWEEN t.begin_us AND t.end_us
), last AS (
    SELECT run, begin_us, arg_max(name, (until_us, from_us, name)) AS name FROM inside
    GROUP BY run, begin_us
), worked AS (
    SELECT run, step, phase, begin_us, end_us, min(from_us) AS from_us, max(until_us) AS until_us
    FROM inside SEMI JOIN last USING (run, begin_us, name) GROUP BY ALL
)
SELECT run, step, phase, begin_us, end_us, 'driver' AS account
FROM timers ANTI JOIN inside USING (run, begin_us) SEMI JOIN inside USING (run)
WHERE phase NOT IN ('old_log_prob', 'ref', 'values', 'update_actor', 'update_critic')
UNION ALL
SELECT i.run, step, phase, from_us, until_us, 'offload' FROM inside AS i JOIN last USING (run, begin_us, name)
WHERE i.event IN ('load', 'offload')
UNION ALL
SELECT t.run, t.step, phase, c.begin_us, c.end_us, 'rank_transfer'
FROM timers AS t JOIN last AS l USING (run, begin_us) JOIN transfers AS c ON c.run = t.run AND c.name = l.name
    AND within(c.begin_us, c.end_us, t.begin_us, t.end_us)
UNION ALL
SELECT run, step, phase, begin_us, from_us, 'handover' FROM worked WHERE from_us > begin_us
UNION ALL
SELECT run, step, phase, until_us, end_us, 'handover' FROM worked WHERE until_us < end_us
ORDER BY run, begin_us
"""
# The timers of overhead, of those inside each other the outer one, and of the driver; and what lies between steps.
_BY_TIMER = f"""
SELECT run, step, phase, 'overhead' AS account, sum(duration_us) AS spent_us FROM phases
WHERE {_OF_TRAINER} AND phase IN ({", ".join(f"'{name}'" for name in _OVERHEADS)}) AND parent IS DISTINCT FROM 'testing'
GROUP BY ALL
UNION ALL
SELECT run, step, phase, account, sum(end_us - begin_us) FROM ({_ALONE})
WHERE account = 'driver' AND phase NOT IN ({", ".join(f"'{name}'" for name in _TIMERS)}) GROUP BY ALL
UNION ALL
SELECT run, step, 'between_steps', 'unattributed', next_us - end_us - coalesce(timed_us, 0)
FROM (SELECT *, lead(begin_us) OVER (PARTITION BY run ORDER BY step) AS next_us FROM steps)
    LEFT JOIN (SELECT run, step, sum(duration_us) AS timed_us FROM phases
        WHERE {_OF_TRAINER} AND parent IS NULL AND phase <> 'step' GROUP BY ALL) USING (run, step)
WHERE finished AND next_us > end_us + coalesce(timed_us, 0)
ORDER BY ALL
"""
_SYNCS = """
SELECT run, begin_us, end_us FROM event_fields
WHERE event = 'weight_sync' AND duration_us IS NOT NULL AND rest->>'$.pool' = 'standalone'
"""
_RANKS = """
SELECT run, count(DISTINCT rank) AS ranks FROM processes WHERE role = 'actor' GROUP BY run
"""
# Replicas with devices of their own, and how many devices these are together.
_STANDALONE = """
SELECT p.run, list(p.name) AS names, coalesce(max(pool.devices), 0) AS devices FROM processes AS p JOIN (
    SELECT run, integer_of(rest, 'devices') AS devices,
        unnest(from_json(rest->'$.replicas', '["BIGINT"]')) AS replica
    FROM event_fields WHERE event = 'replica_pool' AND rest->>'$.pool' = 'standalone'
) AS pool ON pool.run = p.run AND pool.replica = p.replica
WHERE p.role = 'engine' GROUP BY p.run
"""
# An aborted attempt that returned no tokens is lost; the next one repeats the prefill of all others.
_CALLS = """
WITH calls AS (
    SELECT run, engine_request_id AS id, request_id, validate, server, begin_us, end_us, attempt,
        finish_reason LIKE 'abort%' AND coalesce(response_tokens, 0) = 0 AS lost, NULL AS served_us
    FROM engine_attempts
    UNION ALL
    SELECT run, engine_request_id, request_id, validate, server, begin_us, end_us, 0, false, engine_begin_us
    FROM engine_calls ANTI JOIN engine_attempts USING (run, request_id, turn)
), served AS (
    SELECT s.run, s.name AS replica,
        CASE WHEN p.end_us IS NULL THEN s.begin_us ELSE least(p.end_us, s.end_us) END AS begin_us,
        s.end_us, s.validate OR c.validate AS validate,
        c.request_id, c.lost,
        -- Where details are sampled, the requests of most calls are not known.
        c.request_id IS NULL AND (c.id IS NOT NULL
            OR s.run IN (SELECT run FROM requests WHERE NOT detailed)) AS loose,
        CASE WHEN c.attempt > 0 THEN coalesce(queue_us, 0) + prefill_us END AS repeated_us
    FROM engine_requests AS s LEFT JOIN (
        SELECT * FROM calls WHERE served_us IS NOT NULL
        UNION ALL
        (SELECT DISTINCT ON (run, id) * FROM calls WHERE served_us IS NULL AND id IS NOT NULL
            ORDER BY run, id, attempt)
    ) AS c ON c.run = s.run AND c.id = s.engine_request_id AND coalesce(c.served_us = s.begin_us, true)
    -- A call that comes to a paused engine waits before it begins.
    LEFT JOIN (
        SELECT run, engine_request_id AS id, begin_us, max(end_us) AS end_us FROM engine_parked
        GROUP BY ALL
    ) AS p ON p.run = s.run AND p.id = s.engine_request_id AND p.begin_us = s.begin_us
    WHERE s.duration_us IS NOT NULL
    UNION ALL
    SELECT run, coalesce(server, 'unknown'), begin_us, end_us, validate, request_id, lost,
        request_id IS NULL, NULL
    FROM calls WHERE end_us IS NOT NULL AND run NOT IN (SELECT run FROM engine_requests)
), fates AS (
    SELECT r.run, r.request_id, any_value(r.uid) AS uid,
        any_value(s.consumed_step) AS consumed_step, bool_or(s.fate = 'dropped') AS dropped
    FROM requests AS r LEFT JOIN samples AS s
        ON s.run = r.run AND s.uid = r.uid AND (s.fate = 'dropped' OR s.session IS NOT DISTINCT FROM r.session)
    GROUP BY r.run, r.request_id
), charged AS (
    -- verl 0.8's fully asynchronous rollouter names its samples only after their requests.
    SELECT s.*, CASE WHEN s.validate THEN 'overhead'
        WHEN s.lost THEN 'generating_aborted'
        WHEN s.loose OR s.run NOT IN (SELECT run FROM samples)
            OR (f.request_id IS NOT NULL AND f.uid IS NULL) THEN 'generating'
        WHEN f.consumed_step IS NOT NULL THEN 'generating'
        WHEN f.dropped THEN 'generating_dropped'
        ELSE 'generating_unconsumed' END AS account
    FROM served AS s LEFT JOIN fates AS f ON f.run = s.run AND f.request_id = s.request_id
)
SELECT run, replica, account, least(begin_us + coalesce(repeated_us, 0), end_us) AS begin_us, end_us
FROM charged
UNION ALL
SELECT run, replica, 'generating_aborted', begin_us, least(begin_us + repeated_us, end_us)
FROM charged WHERE repeated_us > 0
"""
