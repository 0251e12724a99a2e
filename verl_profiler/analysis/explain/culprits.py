"""The culprit of each finding: rank, worker, replica, host, tool or phase.

Each function collects lost time by place and member; `concentration` tests whether one member stands
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from verl_profiler.analysis.explain.concentration import (
    Culprit,
    Place,
    concentration,
    identity,
)
from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.analysis.steps import VALIDATIONS
from verl_profiler.reading.tables.tables import Tables

__all__ = ["culprits"]

# A replica is slower than the others if its time per token is higher by this factor.
_SLOWER = 1.2
# Errors caused by the model, not by a tool.
_OF_THE_MODEL = "('unknown_tool', 'bad_arguments')"
# Minimum number of failures, and minimum share of a tool's calls, for a finding.
_FAILURES, _FAILING = 5, 0.1
_EXAMPLES = 5
_MIDDLE = "(r.begin_us + r.end_us) // 2"


def culprits(tables: Tables, segments: Rows, steps: Steps = None) -> Rows:
    """Determine the culprit of each possible finding.

    Args:
        tables: Of a run.
        segments: The rows of `critical_segments` for the same steps.
        steps: First and last step; None for all.

    Returns:
        One row per run and finding: run, finding (a key of `rules.RULES`), kind, culprit (None if no
        single one), text (the culprit, or why there is none), where, lost_s (in all steps together, due
        to the culprit alone: the saving if it were as fast as the next of its kind;
        None if not measured), evidence (rows of step, who, seconds, what).
    """
    by_run: dict[str, Rows] = {}
    for row in segments:
        by_run.setdefault(row["run"], []).append(row)
    rows: Rows = []
    gathered = {name: gather(tables, steps) for name, gather in _GATHERED.items()}
    for run, own in by_run.items():
        found: dict[str, tuple[Culprit, float | None]] = {}
        for name, owners in _BY_OWNER.items():
            places = _of_owners(own, *owners)
            if places:
                found[name] = (identity(*_kind_of(name), places), None)
        for gather in gathered.values():
            for name, (culprit, lost_s) in gather.get(run, {}).items():
                if culprit.evidence or name not in found:
                    found[name] = culprit, lost_s
        found.update(_slow_replica(tables, own, run, steps))
        rows += [
            {
                "run": run,
                "finding": name,
                "kind": culprit.kind,
                "culprit": culprit.who,
                "text": culprit.text,
                "where": culprit.where,
                "lost_s": lost_s,
                "evidence": culprit.evidence,
            }
            for name, (culprit, lost_s) in found.items()
        ]
    return rows


_Found = dict[str, dict[str, tuple[Culprit, float | None]]]

# Findings whose culprit is a label of the critical path: the categories, and the label.
_BY_OWNER: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], str]]] = {
    "tool_time": (("tool",), lambda row: str(row["what"] or "tool")),
    "transfer": (("transfer",), lambda row: f"{row['event']} {row['what'] or ''}".rstrip()),
    "engine_sleep": (("sleep_replicas",), lambda _: "sleep_replicas"),
    "handover": (("handover",), lambda row: str(row["phase"] or "between timers")),
    "unexplained": (("unexplained",), lambda row: str(row["phase"] or "between timers")),
    "late_start": (("dispatch", "prepare_step"), lambda row: str(row["owner"])),
    "way_to_engine": (("server_acquire", "transport"), lambda row: str(row["owner"])),
    "checkpoint": (("save_checkpoint",), lambda _: "save_checkpoint"),
    "polling": (("polling",), lambda _: "poll interval of the replay buffer"),
    "reward": (("reward",), lambda _: "the reward function"),
}
_KINDS = {
    "tool_time": "tool",
    "transfer": "operation",
    "polling": "setting",
    "checkpoint": "phase",
}


def _kind_of(name: str) -> tuple[str]:
    return (_KINDS.get(name, "phase"),)


def _of_owners(
    segments: Iterable[Mapping[str, Any]],
    owners: Sequence[str],
    label: Callable[[Mapping[str, Any]], str],
) -> list[Place]:
    lost: dict[int, dict[str, float]] = {}
    for row in segments:
        if row["owner"] in owners:
            own = lost.setdefault(row["step"], {})
            own[label(row)] = own.get(label(row), 0.0) + row["duration_s"]
    return [Place(step, each) for step, each in lost.items()]


def _ranks(tables: Tables, steps: Steps) -> _Found:
    """Find the rank, or the host, that the others wait for in the trainer's phases."""
    rows = tables.rows(
        f"""
        WITH ends AS MATERIALIZED (
            SELECT p.run, p.step, p.phase, p.begin_us AS at_us, r.name,
                coalesce(o.host, '') AS host, max(r.end_us) AS end_us
            FROM phases AS p JOIN rank_spans AS r ON r.run = p.run AND r.step = p.step
                AND r.role NOT IN ('trainer', 'engine') AND {_MIDDLE} BETWEEN p.begin_us AND p.end_us
                LEFT JOIN processes AS o ON o.run = r.run AND o.name = r.name
            WHERE p.parent = 'step' AND p.phase <> 'gen' AND {in_steps(steps, "p.step")}
            GROUP BY ALL
        ), hosts AS (
            SELECT run, step, phase, at_us, host, max(end_us) AS end_us FROM ends GROUP BY ALL
        )
        SELECT run, step, phase, at_us, 'rank' AS kind, count(*) AS many,
            arg_max(name, (end_us, name)) AS who, max(end_us) AS last_us,
            max(end_us, 2)[2] AS next_us
        FROM ends GROUP BY run, step, phase, at_us
        UNION ALL
        SELECT run, step, phase, at_us, 'host', count(*), arg_max(host, (end_us, host)),
            max(end_us), max(end_us, 2)[2]
        FROM hosts GROUP BY run, step, phase, at_us
        ORDER BY run, step, at_us, kind
        """
    )
    found: _Found = {}
    for run in dict.fromkeys(row["run"] for row in rows):
        for name, synced in (("slow_ranks", False), ("weight_sync", True)):
            best: tuple[Culprit, float | None] | None = None
            for kind in ("rank", "host"):
                own = [
                    row
                    for row in rows
                    if row["run"] == run
                    and row["kind"] == kind
                    and row["many"] > 1
                    and (row["phase"] == "update_weights") == synced
                ]
                if not own:
                    continue
                shares = _alike(max(row["many"] for row in own), (row["who"] for row in own))
                places = [
                    Place(row["step"], {row["who"]: _late_s(row)}, row["phase"]) for row in own
                ]
                culprit = concentration(kind, places, shares, unit="phase")
                lost = sum(_late_s(row) for row in own if row["who"] == culprit.who)
                better = (
                    best is None
                    or (culprit.who is not None and best[0].who is None)
                    or (culprit.who is not None and culprit.leads > best[0].leads)
                )
                if better:
                    best = culprit, lost if culprit.who is not None else None
            if best is not None:
                found.setdefault(run, {})[name] = best
    return found


def _late_s(row: Mapping[str, Any]) -> float:
    return max(row["last_us"] - (row["next_us"] or row["last_us"]), 0) / 1e6


def _alike(many: int, seen: Iterable[str]) -> dict[str, float]:
    """Return equal shares for all members; those that never led get placeholder names."""
    names = list(dict.fromkeys(seen))
    names += [f"another {number}" for number in range(many - len(names))]
    return dict.fromkeys(names, 1 / max(many, len(names)))


def _requests(tables: Tables, steps: Steps) -> _Found:
    """Find the prompt group, worker, replica or host whose requests end last."""
    lasts = tables.rows(
        f"""
        WITH lasts AS (
            SELECT run, step, name, request_id, sample, behind_us FROM request_blame
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
        "prompt group": _shares(tables, "sample", "requests", steps),
        "worker": _shares(tables, "name", "requests", steps),
        "replica": _shares(tables, "engine_name", "engine_calls", steps),
    }
    columns = {"prompt group": "sample", "worker": "name", "replica": "replica"}
    found: _Found = {}
    for run in dict.fromkeys(row["run"] for row in lasts):
        own = [row for row in lasts if row["run"] == run]
        candidates = []
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


def _shares(tables: Tables, column: str, table: str, steps: Steps) -> dict[str, dict[str, float]]:
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


def _workers(tables: Tables, steps: Steps) -> _Found:
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
    members = _shares(tables, "name", "requests", steps)
    found: _Found = {}
    for run in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == run]
        places = [Place(row["step"], {row["who"]: _late_s(row)}) for row in own]
        culprit = concentration("worker", places, members.get(run, {}))
        lost = sum(_late_s(row) for row in own if row["who"] == culprit.who)
        named = culprit.who is not None
        found[run] = {
            "slow_worker": (culprit, lost if named else None),
            "uneven_workers": (culprit, None),
        }
    return found


def _tools(tables: Tables, steps: Steps) -> _Found:
    """Find the tool that requests wait for, and the tools that fail."""
    blamed = tables.rows(
        f"SELECT run, step, coalesce(tool, 'tool') AS tool, blame_us FROM tool_blame "
        f"WHERE blame_us > 0 AND {in_steps(steps)} ORDER BY run, step, tool"
    )
    found: _Found = {}
    for run in dict.fromkeys(row["run"] for row in blamed):
        lost: dict[int, dict[str, float]] = {}
        for row in blamed:
            if row["run"] == run:
                lost.setdefault(row["step"], {})[row["tool"]] = row["blame_us"] / 1e6
        culprit = identity("tool", [Place(step, each) for step, each in lost.items()])
        slowest = tables.rows(
            "SELECT step, tool AS who, duration_us / 1e6 AS seconds, request_id AS what "
            f"FROM tool_calls WHERE run = ? AND tool = ? AND NOT validate AND {in_steps(steps)} "
            f"AND duration_us IS NOT NULL ORDER BY duration_us DESC, step LIMIT {_EXAMPLES}",
            [run, culprit.who],
        )
        found.setdefault(run, {})["slow_tools"] = (
            Culprit("tool", culprit.who, culprit.text, culprit.where, evidence=slowest),
            None,
        )
    failing = tables.rows(
        f"""
        WITH calls AS (
            SELECT *, status = 'error' AND coalesce(error, '') NOT IN {_OF_THE_MODEL} AS failed
            FROM tool_calls WHERE NOT validate AND {in_steps(steps)}
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


def _replicas(tables: Tables, steps: Steps) -> _Found:
    """Find the replica that gets the most generate calls."""
    rows = tables.rows(
        f"SELECT run, step, engine_name AS who, count(*) AS calls FROM engine_calls "
        f"WHERE engine_name IS NOT NULL AND NOT validate AND {in_steps(steps)} "
        "GROUP BY ALL ORDER BY run, step, who"
    )
    found: _Found = {}
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


def _slow_replica(
    tables: Tables, segments: Rows, run: str, steps: Steps
) -> dict[str, tuple[Culprit, float | None]]:
    """Find the replica with the highest time per token, and its cost on the critical path."""
    rows = tables.rows(
        f"""
        SELECT step, engine_name AS who,
            sum(coalesce(decode_us, engine_duration_us)) / sum(response_tokens - 1) AS token_us
        FROM engine_calls WHERE run = ? AND engine_name IS NOT NULL AND response_tokens > 1
            AND coalesce(decode_us, engine_duration_us) > 0 AND NOT validate AND {in_steps(steps)}
        GROUP BY ALL ORDER BY step, who
        """,
        [run],
    )
    on_path: dict[tuple[int, str], float] = {}
    for row in segments:
        if row["owner"] in ("decode", "engine"):
            key = row["step"], row["name"]
            on_path[key] = on_path.get(key, 0.0) + row["duration_s"]
    speeds: dict[int, dict[str, float]] = {}
    for row in rows:
        speeds.setdefault(row["step"], {})[row["who"]] = row["token_us"]
    places = []
    for step, each in speeds.items():
        slowest = max(each, key=lambda who: (each[who], who))
        others = [speed for who, speed in each.items() if who != slowest]
        if not others or each[slowest] < _SLOWER * median(others):
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


def _stalls(tables: Tables, steps: Steps) -> _Found:
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
    found: _Found = {}
    workers = _shares(tables, "name", "requests", steps)
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


def _rewards(tables: Tables, steps: Steps) -> _Found:
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
    found: _Found = {}
    for run in dict.fromkeys(row["run"] for row in rows):
        places = []
        for row in rows:
            if row["run"] == run and row["reward_s"]:
                scored = row["reward_s"] if row["scored_s"] is None else row["scored_s"]
                scored = min(max(scored, 0.0), row["reward_s"])
                lost = {
                    "the reward function": scored,
                    "waiting for a reward worker": row["reward_s"] - scored,
                }
                places.append(Place(row["step"], lost))
        if places:
            found[run] = {"reward": (identity("part", places), None)}
    return found


def _between(tables: Tables, steps: Steps) -> _Found:
    """Measure validation, and the time between steps outside all timers."""
    rows = tables.rows(
        f"""
        WITH gaps AS (
            SELECT run, step, end_us AS from_us,
                lead(begin_us) OVER (PARTITION BY run ORDER BY step) AS until_us
            FROM steps WHERE finished AND step > 0
        ), tops AS (
            SELECT run, phase, begin_us, end_us FROM phases
            WHERE parent IS NULL AND phase <> 'step'
        )
        SELECT g.run, g.step, g.until_us - g.from_us AS gap_us,
            coalesce(sum(least(t.end_us, g.until_us) - greatest(t.begin_us, g.from_us))
                FILTER (t.begin_us IS NOT NULL), 0)
                AS timed_us
        FROM gaps AS g LEFT JOIN tops AS t ON t.run = g.run AND t.begin_us < g.until_us
            AND t.end_us > g.from_us
        WHERE g.until_us IS NOT NULL AND {in_steps(steps, "g.step")}
        GROUP BY ALL ORDER BY ALL
        """
    )
    tests = tables.rows(
        f"SELECT run, step, testing_us / 1e6 AS lost_s FROM ({VALIDATIONS}) "
        f"WHERE step > 0 AND {in_steps(steps)} ORDER BY run, step"
    )
    found: _Found = {}
    for run in dict.fromkeys(row["run"] for row in tests):
        places = [
            Place(row["step"], {"validation": row["lost_s"]}) for row in tests if row["run"] == run
        ]
        culprit = identity("phase", places)
        lost = sum(place.lost_s["validation"] for place in places)
        where = f"in {len(places)} step{'s' * (len(places) != 1)}"
        named = Culprit("phase", "validation", "validation", where, evidence=culprit.evidence)
        found.setdefault(run, {})["validation"] = named, lost
    for run in dict.fromkeys(row["run"] for row in rows):
        places = [
            Place(
                row["step"],
                {"between steps": max(row["gap_us"] - max(row["timed_us"], 0), 0) / 1e6},
            )
            for row in rows
            if row["run"] == run
        ]
        culprit = identity("phase", places)
        lost = sum(place.lost_s["between steps"] for place in places)
        # The last step has no successor.
        per_step = lost / len(places) * (len(places) + 1)
        where = f"after {len(places)} step{'s' * (len(places) != 1)}"
        text = "between the end of a step and the start of the next"
        named = Culprit("phase", "between steps", text, where, evidence=culprit.evidence)
        found.setdefault(run, {})["between_steps"] = named, per_step
    return found


_GATHERED: dict[str, Callable[[Tables, Steps], _Found]] = {
    "ranks": _ranks,
    "requests": _requests,
    "workers": _workers,
    "tools": _tools,
    "replicas": _replicas,
    "stalls": _stalls,
    "rewards": _rewards,
    "between": _between,
}
