"""The culprits in a rollout: requests, workers, tools, replicas, event loops and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from verl_profiler.analysis.explain.concentration import Culprit, Place, concentration, identity
from verl_profiler.analysis.explain.replica_speed import SLOWER
from verl_profiler.analysis.explain.stragglers import REASONS
from verl_profiler.analysis.selection import Rows, Steps, estimated, in_steps
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import seconds

__all__ = [
    "Found",
    "calls_of",
    "late_s",
    "replicas",
    "requests",
    "rewards",
    "shares_of",
    "slow_replica",
    "stalls",
    "tools",
    "workers",
]

# Errors caused by the model, not by a tool.
_OF_THE_MODEL = "('unknown_tool', 'bad_arguments')"
# Minimum number of failures, and minimum share of a tool's calls, for a finding.
_FAILURES, _FAILING = 5, 0.1
_EXAMPLES = 5
Found = dict[str, dict[str, tuple[Culprit, float | None]]]


def late_s(row: Mapping[str, Any]) -> float:
    """Return how much later the last of a group ended than the last but one."""
    return max(row["last_us"] - (row["next_us"] or row["last_us"]), 0) / 1e6


def requests(tables: Tables, steps: Steps) -> Found:
    """Find the prompt group, worker, replica or host whose requests end last."""
    lasts = tables.rows(
        f"""
        WITH lasts AS (
            SELECT run, step, name, request_id, sample, behind_us FROM request_caused_wait
            WHERE place = many AND many > 1 AND {in_steps(steps)}
        ), served AS (
            SELECT l.run, l.step, mode(c.engine_name) AS replica
            FROM lasts AS l JOIN engine_calls AS c USING (run, step, name, request_id)
            GROUP BY l.run, l.step
        )
        SELECT l.*, s.replica, p.host FROM lasts AS l LEFT JOIN served AS s USING (run, step)
        LEFT JOIN processes AS p USING (run, name) ORDER BY run, step
        """
    )
    shares = {
        "prompt group": shares_of(tables, "sample", "requests", steps),
        "worker": shares_of(tables, "name", "requests", steps),
        "replica": shares_of(tables, "engine_name", "engine_calls", steps),
    }
    columns = {"prompt group": "sample", "worker": "name", "replica": "replica"}
    found: Found = {}
    for run in dict.fromkeys(row["run"] for row in lasts):
        own = [row for row in lasts if row["run"] == run]
        candidates: list[Culprit] = []
        for kind, column in columns.items():
            known = [row for row in own if row[column] is not None]
            members = shares[kind].get(run, {})
            if len(members) > 1 and known:
                places = [
                    Place(
                        row["step"], {str(row[column]): row["behind_us"] / 1e6}, row["request_id"]
                    )
                    for row in known
                    if row["behind_us"] > 0
                ]
                candidates.append(concentration(kind, places, members))
        named = [each for each in candidates if each.who is not None]
        best = min(named, key=lambda each: each.chance or 0.0, default=None)
        if best is None:
            text = "no single prompt group, worker or replica"
            evidence = [
                {
                    "step": row["step"],
                    "who": row["name"],
                    "seconds": row["behind_us"] / 1e6,
                    "what": row["request_id"],
                }
                for row in sorted(own, key=lambda row: -row["behind_us"])[:_EXAMPLES]
            ]
            best = Culprit("request", None, text, evidence=evidence)
        found[run] = {"tail": (best, None)}
    return found


def shares_of(tables: Tables, column: str, table: str, steps: Steps) -> dict[str, dict[str, float]]:
    """Return each member's share of a run's requests or calls."""
    rows = tables.rows(
        f"SELECT run, {column}::VARCHAR AS who, count(*) AS many FROM {table} "
        f"WHERE NOT validate AND {column} IS NOT NULL AND {in_steps(steps)} GROUP BY ALL"
    )
    sums: dict[str, float] = {}
    for row in rows:
        sums[row["run"]] = sums.get(row["run"], 0) + row["many"]
    shares: dict[str, dict[str, float]] = {}
    for row in rows:
        shares.setdefault(row["run"], {})[row["who"]] = row["many"] / sums[row["run"]]
    return shares


def workers(tables: Tables, steps: Steps) -> Found:
    """Find the worker whose requests end after all others'."""
    rows = tables.rows(
        f"""
        WITH ends AS (
            SELECT run, step, name, max(end_us) AS end_us FROM requests
            WHERE finished AND NOT validate AND {in_steps(steps)} GROUP BY run, step, name
        )
        SELECT run, step, count(*) AS many, arg_max(name, (end_us, name)) AS who,
            max(end_us) AS last_us, max(end_us, 2)[2] AS next_us
        FROM ends GROUP BY run, step HAVING count(*) > 1 ORDER BY run, step
        """
    )
    members = shares_of(tables, "name", "requests", steps)
    found: Found = {}
    for run in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == run]
        places = [Place(row["step"], {row["who"]: late_s(row)}) for row in own]
        culprit = concentration("worker", places, members.get(run, {}))
        lost = sum(late_s(row) for row in own if row["who"] == culprit.who)
        named = culprit.who is not None
        because = _later_because(tables, run, culprit.who, steps) if named else ""
        found[run] = {
            "slow_worker": (replace(culprit, because=because), lost if named else None),
            "uneven_workers": (culprit, None),
        }
    return found


def _later_because(tables: Tables, run: str, worker: str | None, steps: Steps) -> str:
    """Return what the last requests of a worker take longer for than those of the next one."""
    parts = ", ".join(
        f"sum(a.{each}_us - b.{each}_us) / 1e6 AS {each}" for each in REASONS if each != "other"
    )
    (row,) = tables.rows(
        f"""
        WITH lasts AS (
            SELECT *, name = ? AS own FROM request_caused_wait WHERE run = ? AND {in_steps(steps)}
            QUALIFY row_number() OVER (PARTITION BY step, own ORDER BY place DESC) = 1
        )
        SELECT count(*) AS steps, sum(a.behind_us - b.behind_us) / 1e6 AS whole, {parts}
        FROM lasts AS a JOIN lasts AS b USING (step)
        WHERE a.own AND NOT b.own AND a.place > b.place
        """,
        [worker, run],
    )
    known = {each: row[each] or 0.0 for each in REASONS if each != "other"}
    most = max(known, key=lambda each: known[each])
    if not row["steps"] or known[most] < (row["whole"] or 0.0) / 2 or known[most] <= 0:
        return ""
    return (
        f"Its last requests end later than those of the other workers mostly because {REASONS[most]}: "
        f"{seconds(known[most] / row['steps'])} per step."
    )


def calls_of(tables: Tables, run: str, tool: str | None, steps: Steps) -> str:
    """Return how long a tool's calls took; empty without one."""
    (row,) = tables.rows(
        "SELECT count(*) AS calls, median(duration_us) / 1e6 AS typical_s, "
        f"max(duration_us) / 1e6 AS longest_s FROM {estimated('tool_calls')} WHERE run = ? "
        f"AND tool = ? AND NOT validate AND {in_steps(steps)} AND duration_us IS NOT NULL",
        [run, tool],
    )
    if not row["calls"]:
        return ""
    return (
        f"Of {row['calls']:,} calls of {tool}, the median took {seconds(row['typical_s'])} and the "
        f"longest {seconds(row['longest_s'])}."
    )


def tools(tables: Tables, steps: Steps) -> Found:
    """Find the tool that requests wait for, and the tools that fail."""
    charged = tables.rows(
        f"SELECT run, step, coalesce(tool, 'tool') AS tool, caused_wait_us FROM tool_caused_wait "
        f"WHERE caused_wait_us > 0 AND {in_steps(steps)} ORDER BY run, step, tool"
    )
    found: Found = {}
    for run in dict.fromkeys(row["run"] for row in charged):
        lost: dict[int, dict[str, float]] = {}
        for row in charged:
            if row["run"] == run:
                lost.setdefault(row["step"], {})[row["tool"]] = row["caused_wait_us"] / 1e6
        culprit = identity("tool", [Place(step, each) for step, each in lost.items()])
        because = calls_of(tables, run, culprit.who, steps)
        slowest = tables.rows(
            "SELECT step, tool AS who, duration_us / 1e6 AS seconds, request_id AS what "
            f"FROM tool_calls WHERE run = ? AND tool = ? AND NOT validate AND {in_steps(steps)} "
            f"AND duration_us IS NOT NULL ORDER BY duration_us DESC, step LIMIT {_EXAMPLES}",
            [run, culprit.who],
        )
        found.setdefault(run, {})["slow_tools"] = (
            replace(culprit, leads=0.0, evidence=slowest, because=because),
            None,
        )
    failing = tables.rows(
        f"""
        WITH calls AS (
            SELECT *, status = 'error' AND coalesce(error, '') NOT IN {_OF_THE_MODEL} AS failed
            FROM {estimated("tool_calls")} WHERE NOT validate AND {in_steps(steps)}
        ), lasts AS (
            SELECT c.run, c.tool, sum(c.duration_us) AS lost_us
            FROM calls AS c JOIN last_requests AS l USING (run, step, name, request_id)
            WHERE c.failed GROUP BY c.run, c.tool
        )
        SELECT c.run, coalesce(c.tool, 'tool') AS tool, count(*) AS calls,
            count(*) FILTER (failed) AS failures, count(DISTINCT step) FILTER (failed) AS steps,
            mode(error) FILTER (failed) AS error, any_value(l.lost_us) AS lost_us,
            arg_min(step, begin_us) FILTER (failed) AS first_step,
            arg_min(request_id, begin_us) FILTER (failed) AS first_request
        FROM calls AS c LEFT JOIN lasts AS l
            ON l.run = c.run AND l.tool IS NOT DISTINCT FROM c.tool
        GROUP BY c.run, c.tool
        HAVING failures >= {_FAILURES} AND failures >= {_FAILING} * count(*)
        ORDER BY c.run, failures / count(*) DESC, c.tool
        """
    )
    for row in failing:
        if "failing_tools" in found.get(row["run"], {}):
            continue
        text = f"{row['tool']}: {row['failures']:,} of {row['calls']:,} calls ({row['error']})"
        example = {
            "step": row["first_step"],
            "who": row["tool"],
            "seconds": (row["lost_us"] or 0) / 1e6,
            "what": row["first_request"],
        }
        where = f"in {row['steps']} step{'s' * (row['steps'] != 1)}"
        culprit = Culprit("tool", row["tool"], text, where, evidence=[example])
        found.setdefault(row["run"], {})["failing_tools"] = culprit, (row["lost_us"] or 0) / 1e6
    return found


def replicas(tables: Tables, steps: Steps) -> Found:
    """Find the replica that gets the most generate calls."""
    rows = tables.rows(
        f"SELECT run, step, engine_name AS who, sum(sampled) AS calls FROM engine_calls "
        f"WHERE engine_name IS NOT NULL AND NOT validate AND {in_steps(steps)} "
        "GROUP BY ALL ORDER BY run, step, who"
    )
    found: Found = {}
    for run in dict.fromkeys(row["run"] for row in rows):
        calls: dict[int, dict[str, float]] = {}
        for row in rows:
            if row["run"] == run:
                calls.setdefault(row["step"], {})[row["who"]] = row["calls"]
        names = {who for each in calls.values() for who in each}
        places = [
            # Calls of a replica above its equal share.
            Place(
                step,
                {w: max(n - sum(each.values()) / len(names), 0.0) for w, n in each.items()},
            )
            for step, each in calls.items()
        ]
        shares = dict.fromkeys(names, 1 / len(names))
        culprit = concentration("replica", places, shares, verb="most calls")
        counted = {who: sum(each.get(who, 0) for each in calls.values()) for who in names}
        whole = sum(counted.values())
        if culprit.who is not None:
            text = f"{culprit.who}: {counted[culprit.who]:,.0f} of {whole:,.0f} calls"
            culprit = Culprit("replica", culprit.who, text, culprit.where, culprit.chance)
        found[run] = {"uneven_replicas": (culprit, None), "engine_queue": (culprit, None)}
    return found


def slow_replica(
    tables: Tables, segments: Rows, run: str, steps: Steps
) -> dict[str, tuple[Culprit, float | None]]:
    """Find the replica with the highest time per token, and its cost on the critical path."""
    rows = tables.rows(
        f"""
        SELECT step, engine_name AS who,
            sum(decode_us) / sum(response_tokens - 1) AS token_us
        FROM {estimated("engine_calls")}
        WHERE run = ? AND engine_name IS NOT NULL AND response_tokens > 1
            AND decode_us > 0 AND NOT validate AND {in_steps(steps)}
        GROUP BY ALL ORDER BY step, who
        """,
        [run],
    )
    on_path: dict[tuple[int, str], float] = {}
    for row in segments:
        if row["category"] == "decode":
            key = row["step"], row["name"]
            on_path[key] = on_path.get(key, 0.0) + row["duration_s"]
    speeds: dict[int, dict[str, float]] = {}
    for row in rows:
        speeds.setdefault(row["step"], {})[row["who"]] = row["token_us"]
    places: list[Place] = []
    for step, each in speeds.items():
        slowest = max(each, key=lambda who: (each[who], who))
        others = [speed for who, speed in each.items() if who != slowest]
        if not others or each[slowest] < SLOWER * median(others):
            continue
        lost = on_path.get((step, slowest), 0.0) * (1 - median(others) / each[slowest])
        places.append(Place(step, {slowest: lost}))
    names = {who for each in speeds.values() for who in each}
    if not places or 2 * len(places) < len(speeds):
        return {}
    shares = dict.fromkeys(names, 1 / len(names))
    culprit = concentration("replica", places, shares, verb="slowest per token")
    if culprit.who is None:
        return {}
    own = [each[culprit.who] for each in speeds.values() if culprit.who in each]
    rest = [speed for each in speeds.values() for who, speed in each.items() if who != culprit.who]
    text = (
        f"{culprit.who}: {median(own) / 1e3:.1f} ms per token, others {median(rest) / 1e3:.1f} ms"
    )
    lost_s = sum(place.lost_s.get(culprit.who, 0.0) for place in places)
    named = Culprit(
        "replica", culprit.who, text, culprit.where, culprit.chance, evidence=culprit.evidence
    )
    return {"slow_replica": (named, lost_s)}


def stalls(tables: Tables, steps: Steps) -> Found:
    """Find the worker whose event loop stalls, and the call that blocks it."""
    rows = tables.rows(
        f"""
        SELECT g.run, g.step, g.name, coalesce(g.function, g.during) AS during, p.host,
            sum(least(g.end_us, l.end_us) - greatest(g.begin_us, l.begin_us)) / 1e6 AS lost_s
        FROM lags AS g JOIN last_requests AS l ON l.run = g.run AND l.step = g.step
            AND l.name = g.name AND g.end_us > l.begin_us AND g.begin_us < l.end_us
            LEFT JOIN processes AS p ON p.run = g.run AND p.name = g.name
        WHERE {in_steps(steps, "g.step")} GROUP BY ALL ORDER BY ALL
        """
    )
    found: Found = {}
    workers = shares_of(tables, "name", "requests", steps)
    for run in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == run]
        blocked: dict[int, dict[str, float]] = {}
        stalled: dict[int, dict[str, float]] = {}
        hosts: dict[int, dict[str, float]] = {}
        for row in own:
            for places, who in (
                (stalled, row["name"]),
                (blocked, row["during"]),
                (hosts, row["host"]),
            ):
                if who is not None:
                    each = places.setdefault(row["step"], {})
                    each[who] = each.get(who, 0.0) + row["lost_s"]
        call = identity("call", [Place(step, each) for step, each in blocked.items()])
        lists = [Place(step, each) for step, each in stalled.items()]
        worker = concentration("worker", lists, workers.get(run, {}), verb="stalled")
        if blocked and call.who is not None:
            also = f" in {worker.who}" if worker.who is not None else ""
            named = Culprit(
                "call", call.who, f"{call.who}{also}", call.where, evidence=call.evidence
            )
        else:
            named = worker
        # Upper bound of the saving if the event loop were never blocked.
        found[run] = {"event_loop": (named, sum(row["lost_s"] for row in own))}
        if hosts:
            places = [Place(step, each) for step, each in hosts.items()]
            found[run]["host_stall"] = (identity("host", places, verb="stalled"), None)
    return found


_WAITING = "waiting for a reward worker"


def rewards(tables: Tables, steps: Steps) -> Found:
    """Split the last requests' reward time into the reward function and waiting for a reward worker."""
    rows = tables.rows(
        f"""
        SELECT l.run, l.step, any_value(r.reward_us) / 1e6 AS reward_s,
            max(coalesce(s.compute_us,
                least(s.end_us, r.end_us) - greatest(s.begin_us, r.begin_us))) / 1e6 AS scored_s
        FROM last_requests AS l JOIN requests AS r USING (run, step, name, request_id)
            LEFT JOIN reward_scores AS s ON s.run = r.run AND s.uid = r.uid
                AND s.end_us > r.begin_us AND s.begin_us < r.end_us
                AND coalesce(s.request_id = r.request_id, true)
                AND coalesce(s.session = r.session, true)
        WHERE {in_steps(steps, "l.step")} GROUP BY l.run, l.step ORDER BY l.run, l.step
        """
    )
    found: Found = {}
    for run in dict.fromkeys(row["run"] for row in rows):
        places: list[Place] = []
        for row in rows:
            if row["run"] == run and row["reward_s"]:
                scored = row["reward_s"] if row["scored_s"] is None else row["scored_s"]
                scored = min(max(scored, 0.0), row["reward_s"])
                lost = {
                    "the reward function": scored,
                    _WAITING: row["reward_s"] - scored,
                }
                places.append(Place(row["step"], lost))
        if places:
            culprit = identity("part", places)
            culprit = replace(culprit, fixable=culprit.who == _WAITING)
            found[run] = {"reward": (culprit, None)}
    return found
