"""The culprits in a rollout: requests, workers, tools, replicas, event loops and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median

from verl_profiler.analysis.explain.concentration import (
    Culprit,
    Named,
    Place,
    concentration,
    identity,
    lost_in,
    lost_to,
    places_of,
)
from verl_profiler.analysis.explain.engine_speed import (
    MUCH_SLOWER,
    ReplicaLoads,
    Speeds,
    by_load,
    in_work,
    worker_slowness,
)
from verl_profiler.analysis.explain.over_time import CALLS_OF, FIRST_STEPS, Shape, shape_of
from verl_profiler.analysis.explain.replica_speed import SLOWER
from verl_profiler.analysis.explain.stragglers import REASONS
from verl_profiler.analysis.explain.work import (
    LATER,
    Earlier,
    tails,
    tool_work,
)
from verl_profiler.analysis.selection import (
    Rows,
    Steps,
    by_run,
    estimated,
    grouped,
    in_steps,
    nested,
)
from verl_profiler.reading.tables.derivations import IN_ENGINE, STALL_NOTICED_US, SYNCHRONOUS
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import counted, seconds, share

# Errors caused by the model, not by a tool.
_OF_THE_MODEL = "('unknown_tool', 'bad_arguments')"
# Minimum number of failures and share of a tool's calls, or their minimum share of the step, for a finding.
_FAILURES, _FAILING, _COSTLY = 5, 0.1, 0.03
_EXAMPLES = 5
# Prefill is mostly of tokens that were cached before, and last requests are mostly of one worker, from this part on.
_MOSTLY = 0.5
# Of a request's reasons for being late, those that each place may have.
_REASONS_OF = {
    "prompt group": ("long", "tool"),
    "worker": ("late", "slow", "other"),
    "replica": ("queued", "cold", "prefill", "recomputed", "undivided", "slow"),
}


def requests(earlier: Earlier) -> Iterator[Named]:
    """Find the prompt group, worker or replica whose requests end last."""
    tables, steps = earlier.tables, earlier.steps
    lasts = tables.rows(
        f"""
        WITH lasts AS (
            SELECT run, step, name, request_id, sample, behind_us, because FROM request_caused_wait
            WHERE place = many AND many > 1 AND {in_steps(steps)}
        ), served AS (
            SELECT l.run, l.step, mode(c.engine_name) AS replica
            FROM lasts AS l JOIN engine_calls AS c USING (run, step, name, request_id)
            GROUP BY l.run, l.step
        )
        SELECT l.*, s.replica FROM lasts AS l LEFT JOIN served AS s USING (run, step) ORDER BY run, step
        """
    )
    kinds = (
        ("prompt group", "sample", shares_of(tables, "sample", "requests", steps)),
        ("worker", "name", shares_of(tables, "name", "requests", steps)),
        ("replica", "replica", shares_of(tables, "engine_name", "engine_calls", steps)),
    )
    longer, of_run = tails(earlier), by_run(lasts)
    for run in {**of_run, **longer}:
        own = of_run.get(run, [])
        candidates: list[Culprit] = []
        for kind, column, shares in kinds:
            known = [
                row
                for row in own
                if row[column] is not None and row["because"] in _REASONS_OF[kind]
            ]
            members = shares.get(run, {})
            if len(members) > 1 and 2 * len(known) >= len(own) > 0:
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
            latest = sorted(own, key=lambda row: -row["behind_us"])[:_EXAMPLES]
            evidence: Rows = [
                {"step": row["step"], "who": row["name"], "seconds": row["behind_us"] / 1e6,
                 "what": row["request_id"]}
                for row in latest
            ]  # fmt: skip
            best = Culprit("request", None, text, evidence=evidence)
        # Measured where few requests have much longer responses; else from a replay.
        tail = longer.get(run)
        if tail is None:
            yield Named(run, "tail", best)
            continue
        if tail.who is not None and best.who is None:
            best = replace(best, who=tail.who, text=tail.who)
        yield Named(run, "tail", replace(best, because=tail.sentence), tail.sooner_s)


def shares_of(tables: Tables, column: str, table: str, steps: Steps) -> dict[str, dict[str, float]]:
    """Return each member's share of a run's requests or calls."""
    rows = tables.rows(
        f"SELECT run, {column}::VARCHAR AS who, count(*) / sum(count(*)) OVER (PARTITION BY run) AS share "
        f"FROM {table} WHERE NOT validate AND {column} IS NOT NULL AND {in_steps(steps)} GROUP BY run, who"
    )
    return nested(rows, "share", "run", "who")


def workers(earlier: Earlier) -> Iterator[Named]:
    """Find the worker whose requests end after all others', and the one whose requests start after all others'."""
    tables, steps = earlier.tables, earlier.steps
    late_starts = [*_late_workers(earlier)]
    yield from late_starts
    late_ones = {(each.run, each.culprit.who) for each in late_starts}
    rows = tables.rows(
        f"""
        WITH ends AS (
            SELECT run, step, name, max(end_us) AS end_us FROM requests
            WHERE finished AND NOT validate AND {SYNCHRONOUS} AND {in_steps(steps)}
            GROUP BY run, step, name
        )
        SELECT run, step, count(*) AS many, arg_max(name, (end_us, name)) AS who,
            (max(end_us) - max(end_us, 2)[2]) / 1e6 AS late_s
        FROM ends GROUP BY run, step HAVING count(*) > 1 ORDER BY run, step
        """
    )
    members = shares_of(tables, "name", "requests", steps)
    for run, own in by_run(rows).items():
        places = [Place(row["step"], {row["who"]: row["late_s"]}) for row in own]
        culprit = concentration("worker", places, members.get(run, {}))
        lost = sum(row["late_s"] for row in own if row["who"] == culprit.who)
        named = culprit.who is not None
        reason, because = _later_because(tables, run, culprit.who, steps) if named else ("", "")
        if reason == "long" and run in tails(earlier):
            # Few requests have many times the tokens of all others, wherever they run.
            continue
        if reason == "tool" and not _slower_calls(tables, run, culprit.who, steps):
            # Their tools explain it: they take as long elsewhere, or are called nowhere else.
            continue
        if reason == "late" and (run, culprit.who) in late_ones:
            continue
        late = replace(culprit, because=because)
        yield Named(run, "slow_worker", late, lost if named else None)
        yield Named(run, "uneven_workers", culprit)


_BEGUN = f"""
SELECT r.run, r.step, r.name, r.request_id, greatest(r.begin_us - g.begin_us, 0) AS late_us
FROM requests AS r JOIN gens AS g ON g.run = r.run AND g.step = r.step AND g.in_step
WHERE NOT r.validate AND r.{SYNCHRONOUS}
"""


def _late_workers(earlier: Earlier) -> Iterator[Named]:
    """Find the worker of a synchronous run whose requests start much later than those of all others."""
    cuts = f"""
        WITH begun AS ({_BEGUN} AND {in_steps(earlier.steps, "r.step")}), means AS (
            SELECT run, name AS who, avg(late_us) AS own_us FROM begun GROUP BY run, name
        ), late AS (
            SELECT a.run, a.who, median(b.own_us) AS others_us FROM means AS a JOIN means AS b
                ON b.run = a.run AND b.who <> a.who
            GROUP BY a.run, a.who, a.own_us HAVING a.own_us >= {LATER} * others_us
        ), mostly AS (
            -- Half of what the last requests start late is of its own.
            SELECT run, name AS who FROM last_requests
            WHERE begin_us > gen_begin_us AND {in_steps(earlier.steps)} GROUP BY run, name
            QUALIFY sum(begin_us - gen_begin_us)
                >= {_MOSTLY} * sum(sum(begin_us - gen_begin_us)) OVER (PARTITION BY run)
        )
        SELECT run, step, name, request_id, who, greatest(late_us - others_us, 0) AS cut_us
        FROM begun JOIN late USING (run) SEMI JOIN mostly USING (run, who) WHERE name = who
    """
    for (run, who), places in earlier(cuts, "other").items():
        yield lost_to(run, "late_start", "worker", who, places, fixable=False)


def _later_because(tables: Tables, run: str, worker: str | None, steps: Steps) -> tuple[str, str]:
    """Return what the last requests of a worker take longer for than those of the next one: its name and a sentence."""
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
        return "", ""
    return most, (
        f"Its last requests end later than those of the other workers mostly because {REASONS[most]}: "
        f"{seconds(known[most] / row['steps'])} per step."
    )


def _slower_calls(tables: Tables, run: str, worker: str | None, steps: Steps) -> bool:
    """Return whether a worker's tool calls take much longer than calls of the same tools elsewhere."""
    (row,) = tables.rows(
        f"""
        WITH calls AS (SELECT tool, name, duration_us FROM tool_calls
            WHERE run = $run AND NOT validate AND duration_us IS NOT NULL AND {in_steps(steps)}
        ), elsewhere AS (SELECT tool, median(duration_us) AS us FROM calls WHERE name <> $worker GROUP BY tool)
        SELECT sum(duration_us) > {MUCH_SLOWER} * sum(coalesce(us, duration_us)) AS slower
        FROM calls LEFT JOIN elsewhere USING (tool) WHERE name = $worker
        """,
        {"run": run, "worker": worker},
    )
    return bool(row["slower"])


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


def tools(earlier: Earlier) -> Iterator[Named]:
    """Find the tool that requests wait for, and the tools that fail."""
    tables, steps = earlier.tables, earlier.steps
    failed_s: dict[str, float] = {}
    for each in tool_work(earlier):
        if each.finding == "failing_tools":
            failed_s[each.run] = each.lost_s or 0.0
        else:
            yield each
    failing = tables.rows(
        f"""
        SELECT run, coalesce(tool, 'tool') AS tool, count(*) AS calls,
            count(*) FILTER (failed) AS failures, count(DISTINCT step) FILTER (failed) AS steps,
            mode(error) FILTER (failed) AS error, max(duration_us) FILTER (failed) / 1e6 AS longest_s,
            arg_min(step, begin_us) FILTER (failed) AS first_step,
            arg_min(request_id, begin_us) FILTER (failed) AS first_request,
            coalesce(any_value(length_s), 0) AS length_s
        FROM (SELECT *, status = 'error' AND coalesce(error, '') NOT IN {_OF_THE_MODEL} AS failed
            FROM {estimated("tool_calls")} WHERE NOT validate AND {in_steps(steps)})
            LEFT JOIN (SELECT run, sum(duration_us) / 1e6 AS length_s FROM steps
                WHERE finished AND {in_steps(steps)} GROUP BY run) USING (run)
        GROUP BY run, tool HAVING failures > 0 ORDER BY run, failures / count(*) DESC, tool
        """
    )
    for run, every in by_run(failing).items():
        lost_s = failed_s.get(run, 0.0)
        costly = lost_s >= _COSTLY * every[0]["length_s"] > 0
        own = [
            row
            for row in every
            if costly or row["failures"] >= max(_FAILURES, _FAILING * row["calls"])
        ]
        if not own:
            continue
        text = "; ".join(
            f"{row['tool']}: {row['failures']:,} of {row['calls']:,} calls ({row['error']})"
            for row in own
        )
        most = max(own, key=lambda row: row["failures"])
        example = {
            "step": most["first_step"],
            "who": most["tool"],
            "seconds": most["longest_s"] or 0.0,
            "what": most["first_request"],
        }
        where = f"in {counted(most['steps'], 'step')}"
        culprit = Culprit("tool", most["tool"], text, where, evidence=[example])
        yield Named(run, "failing_tools", culprit, lost_s)


def replicas(earlier: Earlier) -> Iterator[Named]:
    """Find the replica that gets the most generate calls, and the one whose calls queue longest."""
    rows = earlier.tables.rows(
        f"""
        SELECT run, step, engine_name AS who, sum(sampled) AS calls,
            coalesce(sum(queue_us * sampled), 0) / 1e6 AS queue_s,
            -- In time, or else in tokens.
            coalesce(sum(prefill_us * sampled), sum((prompt_tokens - cached_tokens) * sampled), 0) AS prefilled,
            coalesce(sum(cold_us * sampled), sum(lost_tokens * sampled), 0) AS cold,
            count(*) FILTER (retractions > 0) AS retracted, count(*) AS recorded, count(queue_us) AS timed
        FROM engine_calls LEFT JOIN (
            SELECT run, name, request_id, turn, begin_us, sum(lost_tokens) AS lost_tokens, sum(cold_us) AS cold_us
            FROM engine_call_times WHERE lost_tokens > 0 GROUP BY ALL) USING (run, name, request_id, turn, begin_us)
        WHERE engine_name IS NOT NULL AND NOT validate AND {in_steps(earlier.steps)}
        GROUP BY ALL ORDER BY run, step, who
        """
    )
    waited = earlier(
        "SELECT run, step, name, request_id, 'queue' AS who, sum(queue_us) AS cut_us FROM engine_calls "
        f"WHERE queue_us > 0 AND NOT validate AND NOT {SYNCHRONOUS} AND {in_work(earlier.steps)} GROUP BY ALL",
        "queue",
    )
    for run, own in by_run(rows).items():
        calls = _most(own, "calls", "most calls")
        counted = sum(row["calls"] for row in own if row["who"] == calls.who)
        if calls.who is not None:
            text = f"{calls.who}: {counted:,.0f} of {sum(row['calls'] for row in own):,.0f} calls"
            calls = replace(calls, text=text, evidence=[])
        queue = _most(own, "queue_s", "longest queue")
        queued = [row for row in own if queue.who in (None, row["who"])]
        retracted, every = (sum(row[each] for row in queued) for each in ("retracted", "recorded"))
        if retracted:
            of = f"of {queue.who}" if queue.who else "of all replicas"
            seen = "recorded calls" if sum(row["calls"] for row in queued) > every else "calls"
            because = (
                f"{retracted:,} of the {every:,} {seen} {of} were retracted: the KV cache is full."
            )
            queue = replace(queue, because=because)
        prefilled, cold = (sum(row[each] for row in own) for each in ("prefilled", "cold"))
        if cold > _MOSTLY * prefilled:
            # More requests at once would make this worse.
            because = (
                f"{share(cold / prefilled)} of the prefill is of tokens that each call's previous one had cached "
                "(enable_prefix_caching)."
            )
            because = f"{queue.because} {because}".strip()
            queue = replace(queue, because=because, fixable=False)
        yield Named(run, "uneven_replicas", calls)
        later = waited.get((run, "queue"))
        yield Named(run, "engine_queue", queue, None if later is None else lost_in(later))
        if queue.because and run not in earlier.cycles and not any(row["timed"] for row in own):
            # What is known of the calls without the engines' times.
            yield Named(
                run, "engine_bound", Culprit("phase", None, "engine", because=queue.because)
            )


def _most(rows: Rows, column: str, verb: str) -> Culprit:
    """Test whether one replica has more than its equal share of a sum in each step."""
    by_step: dict[int, dict[str, float]] = nested(rows, column, "step", "who")
    names = {row["who"] for row in rows}
    places = [
        Place(step, {who: max(n - sum(each.values()) / len(names), 0.0) for who, n in each.items()})
        for step, each in by_step.items()
    ]
    return concentration("replica", places, len(names), verb=verb)


def slow_replicas(earlier: Earlier) -> Iterator[Named]:
    """Find replicas that take longer per token than others at their load, and how much later requests end.

    Calls of one worker that are slow among those of other workers on the same replicas are no reason to
    blame a replica.
    """
    for run, cells in earlier.cells.items():
        speeds = worker_slowness(cells)
        worker = _slower(earlier, run, "slow_calls", "worker", speeds, MUCH_SLOWER)
        loads = earlier.loads[run]
        if worker is not None and worker.culprit.who is not None:
            yield worker
            loads = by_load([cell for cell in cells if cell["worker"] != worker.culprit.who])
        replica = _slower(earlier, run, "slow_replica", "replica", loads.slowness(), SLOWER)
        if replica is not None:
            yield replica


def _slower(
    earlier: Earlier, run: str, finding: str, kind: str, speeds: Speeds, least: float
) -> Named | None:
    """Find those that take `least` times as long per token as the others at their load."""
    names = list(dict.fromkeys(who for each in speeds.values() for who in each))
    cells: Rows = []
    at_times, always = "", kind == "replica"
    for who in names:
        own = {step: each[who] for step, each in speeds.items() if who in each}
        out = {step: (us, alike) for step, (us, alike) in own.items() if us >= least * alike}
        often = 2 * len(out) >= len(speeds)
        these = own if often else out
        part = median(1 - alike / us for us, alike in these.values()) if these else 0.0
        if often or (len(out) >= _AT_TIMES and part >= 1 - 1 / MUCH_SLOWER):
            at_times = "" if often else f" in {len(out)} of {len(speeds)} steps"
            always = always and 2 * len(out) >= len(own)
            cells += [
                {"step": step, "who": who, "us": us, "alike_us": alike_us, "part": part}
                for step, (us, alike_us) in these.items()
            ]
    lost = places_of((row["step"], row["who"], row["us"] - row["alike_us"]) for row in cells)
    places = [place for place in lost if max(place.lost_s.values()) > 0]
    if not places:
        return None
    # Each step has many calls of each.
    culprit = concentration(kind, places, len(names), verb="slowest per token", clear=True)
    slow = sorted({row["who"] for row in cells})
    # The load balancer avoids a replica that is always slow.
    replicas = slow if always else ()
    cuts = f"""
        SELECT run, step, name, request_id, 'slow' AS who, sum({_TAKES[kind]} * part) AS cut_us
        FROM engine_call_times JOIN (SELECT unnest($steps) AS step,
            unnest($whos) AS {_COLUMN[kind]}, unnest($parts) AS part) USING ({_COLUMN[kind]}, step)
        WHERE run = $run AND NOT validate AND {in_work(earlier.steps)}
            AND ({SYNCHRONOUS} OR {not replicas}) GROUP BY ALL
    """
    columns = {f"{each}s": [row[each] for row in cells] for each in ("step", "who", "part")}
    parameters = {"run": run, **columns}
    later = earlier(cuts, "decoding", parameters, {(run, "slow"): replicas}).get((run, "slow"), [])
    text = (
        f"{', '.join(slow)}: {median(row['us'] for row in cells) / 1e3:.1f} ms per token, others at "
        f"this load {median(row['alike_us'] for row in cells) / 1e3:.1f} ms{at_times}"
    )
    if len(slow) > 1 or at_times:
        # Few steps say little, but each has many calls.
        culprit = replace(culprit, who=slow[0] if len(slow) == 1 else None)
    cost = lost_to(run, finding, kind, text, later)
    named = replace(culprit, text=text, evidence=cost.culprit.evidence)
    return cost._replace(culprit=named)


# The column of `engine_call_times` that has who was slow.
_COLUMN = {"replica": "engine_name", "worker": "name"}
# What takes longer there: a replica's queue moves on as fast as the calls before it.
_TAKES = {"replica": f"({IN_ENGINE} + coalesce(queue_us, 0))", "worker": IN_ENGINE}

# One is slow at times if it is much slower in so many steps.
_AT_TIMES = 2


# A host is slow if so many kinds of work are, each with so many calls there; or a single kind by so much, with so
# many calls, in all of its workers.
_KINDS_OF_WORK, _HOST_CALLS = 2, 5
_MUCH, _MANY_CALLS = 3, 20
# Medians differ if they are so many standard errors apart.
_ERRORS = 4


def slow_hosts(earlier: Earlier) -> Iterator[Named]:
    """Find a host on which the same work takes longer than on others."""
    tables, steps = earlier.tables, earlier.steps
    hosts = {(row["run"], row["name"]): row["host"] for row in tables.rows("FROM processes")}
    if len({*hosts.values(), None}) <= 2:
        return
    own = f"NOT validate AND duration_us IS NOT NULL AND {in_steps(steps)}"
    calls = f"""
        SELECT run, step, name, request_id, host, work, kind, duration_us
        FROM (SELECT run, step, name, request_id, 'tool' AS work, coalesce(tool, 'tool') AS kind,
                greatest(duration_us - coalesce(stalled_us, 0), 0) AS duration_us
            FROM tool_calls WHERE status IS DISTINCT FROM 'error' AND {own}
            UNION ALL
            SELECT run, step, name, request_id, event, event, duration_us
            FROM event_fields WHERE event = 'prompt_build' AND {own}
            UNION ALL
            SELECT run, step, name, request_id, 'transfer', event, duration_us
            FROM transfers WHERE request_id IS NOT NULL AND {own}
        ) JOIN (SELECT run, name, host FROM processes) USING (run, name)
    """
    rows = tables.rows(
        f"""
        WITH calls AS (SELECT *, median(duration_us) OVER (PARTITION BY run, kind, name) AS worker_us
            FROM ({calls})
        ), rates AS (SELECT run, work, kind, host, median(duration_us) AS us, count(*) AS many,
                -- The standard error of a median is 0.93 times this.
                (quantile_cont(duration_us, 0.75) - quantile_cont(duration_us, 0.25)) / sqrt(many) AS error_us,
                min(worker_us) AS least_us, count(DISTINCT name) AS workers
            FROM calls GROUP BY ALL HAVING many >= {_HOST_CALLS}
        ), others AS (SELECT a.run, a.kind, a.host, median(b.us) AS others_us,
                max(b.error_us) AS others_error_us
            FROM rates AS a JOIN rates AS b ON a.run = b.run AND a.kind = b.kind AND a.host <> b.host
            GROUP BY ALL)
        SELECT run, work, kind, host, us / others_us AS slower,
            many >= {_MANY_CALLS} AND least_us >= {_MUCH} * others_us AND (work = 'tool' OR workers > 1)
                AS alone
        FROM rates JOIN others USING (run, kind, host)
        WHERE slower >= {SLOWER} AND (alone OR work <> 'transfer')
            AND us - others_us > {_ERRORS} * greatest(error_us, others_error_us) ORDER BY ALL
        """
    )
    for run, own in by_run(rows + _slow_at_decoding(hosts, earlier.loads)).items():
        found: list[tuple[bool, int, str]] = []
        for host, rates in grouped(own, "host").items():
            alone = any(row["alone"] for row in rates)
            if alone or len({row["work"] for row in rates}) >= _KINDS_OF_WORK:
                found.append((alone, len(rates), host))
        if not found:
            continue
        *_, host = max(found)
        kinds = {row["kind"]: row["slower"] for row in own if row["host"] == host}
        cuts = f"""
            SELECT run, step, name, request_id, $host AS who, sum(us * (1 - 1 / slower)) AS cut_us
            FROM (SELECT run, step, name, request_id, host, kind, duration_us AS us FROM ({calls})
                UNION ALL SELECT c.run, step, c.name, request_id, p.host, 'decoding',
                    -- A queue moves on as fast as the calls before it.
                    {IN_ENGINE} + coalesce(queue_us, 0)
                FROM engine_call_times AS c JOIN processes AS p USING (run)
                WHERE p.name = c.engine_name AND NOT validate AND {in_steps(steps)} AND {SYNCHRONOUS}
            ) JOIN (SELECT unnest($kinds) AS kind, unnest($slower) AS slower) USING (kind)
            WHERE run = $run AND host = $host GROUP BY ALL
        """
        parameters = {"run": run, "host": host, "kinds": [*kinds], "slower": [*kinds.values()]}
        decoding = "decoding" in kinds
        slow = [name for (_, name), of in hosts.items() if of == host] if decoding else []
        places = earlier(cuts, "all", parameters, {(run, host): slow}).get((run, host), [])
        listed = ", ".join(f"{kind} {times:.1f} times" for kind, times in sorted(kinds.items()))
        text = f"{host}: {listed} what it takes on the others"
        yield lost_to(run, "slow_host", "host", host, places, text=text)


def _slow_at_decoding(
    hosts: Mapping[tuple[str, str], str], loads_of: Mapping[str, ReplicaLoads]
) -> Rows:
    """Return the hosts whose replicas all take longer per token, as of other kinds of work."""
    found: Rows = []
    for run, loads in loads_of.items():
        slower_of: dict[str, dict[str, list[float]]] = {}
        for each in loads.slowness().values():
            for who, (us, alike_us) in each.items():
                own = slower_of.setdefault(hosts.get((run, who)) or "", {})
                own.setdefault(who, []).append(us / alike_us)
        for host, own in slower_of.items():
            # As slowly as the fastest of its replicas: one of several may be slow by itself.
            slower = min(map(median, own.values()))
            row = {"run": run, "work": "decoding", "kind": "decoding", "host": host}
            if slower >= SLOWER:
                found.append({**row, "slower": slower, "alone": len(own) > 1})
    return found


# How long each request waited for its event loop while others blocked it: stalls from the step's dispatch (of an
# asynchronous run, from its begin) to its end, but not while an engine, a tool or a reward worked for it, unless
# that ended with the stall.
_WAITED = """
WITH stalls AS (
    SELECT run, name, begin_us, end_us, sum(duration_us) OVER (
        PARTITION BY run, name ORDER BY begin_us, end_us) - duration_us AS before_us
    FROM lags WHERE NOT of_host
), chosen AS (
    SELECT run, step, name, request_id, least(g.begin_us, r.begin_us) AS begin_us, r.end_us
    FROM (SELECT * FROM requests WHERE finished AND NOT validate AND {own}) AS r
        LEFT JOIN (SELECT run, step, begin_us FROM gens WHERE in_step AND {synchronous}) AS g USING (run, step)
    WHERE (g.step IS NOT NULL OR NOT {synchronous}) AND (run, name) IN (SELECT (run, name) FROM stalls)
), waits AS (
    SELECT run, step, name, request_id, begin_us, end_us FROM event_fields
    WHERE event IN ('tool_call', 'reward') AND NOT validate AND duration_us IS NOT NULL AND {own}
), moments AS (
    SELECT run, step, name, request_id, unnest([begin_us, end_us]) AS at_us, unnest([-1, 1]) AS sign FROM chosen
    UNION ALL
    SELECT run, step, name, request_id, unnest([begin_us, end_us]), unnest([1, -1]) FROM waits
    UNION ALL
    SELECT run, step, name, request_id, unnest([coalesce(engine_begin_us, begin_us),
        coalesce(engine_end_us, end_us)]), unnest([1, -1]) FROM engine_calls
    WHERE NOT validate AND duration_us IS NOT NULL AND {own}
), passed AS (
    SELECT m.run, m.step, m.name, m.request_id,
        sum(sign * (before_us + least(at_us, s.end_us) - s.begin_us)) AS us
    FROM moments AS m ASOF JOIN stalls AS s ON s.run = m.run AND s.name = m.name AND s.begin_us <= m.at_us
    GROUP BY ALL
), answered AS (
    SELECT w.run, w.step, w.name, w.request_id,
        sum(least(w.end_us, g.end_us) - greatest(w.begin_us, g.begin_us)) AS us
    FROM waits AS w JOIN lags AS g ON g.run = w.run AND g.name = w.name
        AND g.begin_us < w.end_us AND g.end_us > w.begin_us AND w.end_us <= g.until_us + {noticed}
    -- What blocks for an unknown request is the tool itself if both began together.
    WHERE coalesce(g.request_id <> w.request_id, abs(g.begin_us - w.begin_us) > {noticed}) AND NOT g.of_host
    GROUP BY ALL
), mine AS (
    SELECT run, step, name, request_id, -sum(duration_us) AS us FROM lags
    WHERE tool IS NULL AND NOT of_host AND {own} GROUP BY ALL
)
SELECT run, step, name, request_id, 'event loop' AS who, greatest(sum(us), 0) AS cut_us FROM (
    FROM passed UNION ALL FROM answered UNION ALL FROM mine
) SEMI JOIN chosen USING (run, step, name, request_id) GROUP BY ALL
"""


def stalls(earlier: Earlier) -> Iterator[Named]:
    """Find the worker whose event loop stalls, and the call that blocks it."""
    tables, steps = earlier.tables, earlier.steps
    rows = tables.rows(
        f"""
        SELECT g.run, g.step, g.name, coalesce(g.function, g.during) AS during, p.host,
            max(concat(g.file, ':', g.line)) FILTER (g.line IS NOT NULL) AS code,
            sum(least(g.end_us, l.end_us) - greatest(g.begin_us, l.gen_begin_us)) / 1e6 AS lost_s
        FROM lags AS g JOIN last_requests AS l ON l.run = g.run AND l.step = g.step
            AND l.name = g.name AND g.end_us > l.gen_begin_us AND g.begin_us < l.end_us
            LEFT JOIN processes AS p ON p.run = g.run AND p.name = g.name
        WHERE {in_steps(steps, "g.step")} GROUP BY ALL
        UNION ALL
        SELECT run, step, name, coalesce(function, during, 'unknown'), NULL,
            max(concat(file, ':', line)) FILTER (line IS NOT NULL), sum(duration_us) / 1e6
        FROM lags WHERE NOT of_host AND (run, name) IN (SELECT (run, name) FROM requests)
            AND NOT {SYNCHRONOUS} AND {in_work(steps)} GROUP BY ALL ORDER BY ALL
        """
    )
    workers = shares_of(tables, "name", "requests", steps)
    waited = _WAITED.format(own=in_work(steps), synchronous=SYNCHRONOUS, noticed=STALL_NOTICED_US)
    sooner = earlier(waited, "loop") if rows else {}
    for run, own in by_run(rows).items():
        blocked, stalled, hosts = (
            places_of((r["step"], r[who], r["lost_s"]) for r in own if r[who] is not None)
            for who in ("during", "name", "host")
        )
        call = identity("call", blocked)
        worker = concentration("worker", stalled, workers.get(run, {}), verb="stalled")
        if blocked and call.who is not None:
            also = f" in {worker.who}" if worker.who is not None else ""
            code = max((row["code"] or "" for row in own if row["during"] == call.who), default="")
            text = f"{call.who}{code and f' ({code})'}{also}"
            named = replace(call, text=text, code=code)
        else:
            named = worker
        # At most what the last requests' loops are blocked: what blocks may itself take less time.
        if run not in earlier.cycles:
            named = replace(named, most_s=sum(row["lost_s"] for row in own))
        yield Named(run, "event_loop", named, lost_in(sooner.get((run, "event loop"), ())))
        if hosts:
            yield Named(run, "host_stall", identity("host", hosts, verb="stalled"))


# A kind of work that requests do: its time, how much work it is, and its amount per unit of that; by call.
_WORK_OF_REQUESTS = f"""
SELECT run, step, name, request_id, 'tools' AS of, concat('{CALLS_OF}', coalesce(tool, 'tool')) AS who,
    duration_us AS us, duration_us / 1e6 AS amount, 1 AS units
FROM tool_calls WHERE duration_us IS NOT NULL AND NOT validate
UNION ALL
SELECT run, step, name, request_id, 'decoding', 'decoding', {IN_ENGINE}, {IN_ENGINE} / 1e6, decoded_tokens
FROM engine_call_times WHERE {IN_ENGINE} > 0 AND decoded_tokens > 0 AND NOT validate
UNION ALL
SELECT run, step, name, request_id, 'tokens', 'tokens per request', engine_us, generated_tokens, 1
FROM requests WHERE engine_us > 0 AND generated_tokens > 0 AND NOT validate
"""


def changing_work(earlier: Earlier) -> Iterator[Named]:
    """Find the kind of work of requests that takes longer, or is more, from step to step, or since a step.

    Of asynchronous runs also their tokens, and decoding with what the requests of several steps add to each other's.
    """
    series: dict[tuple[str, str, str], dict[int, float]] = {
        (run, "decoding", "decoding"): loads.by_step()
        for run, loads in earlier.loads.items()
        if run not in earlier.cycles
    }
    for row in earlier.tables.rows(
        f"SELECT run, of, who, step, sum(amount) / sum(units) AS unit FROM ({_WORK_OF_REQUESTS}) "
        # Those of a step that have ended when the run ends are its shorter ones.
        "SEMI JOIN (SELECT run, step FROM requests WHERE NOT validate GROUP BY ALL HAVING bool_and(finished)) "
        f"USING (run, step) WHERE (of = 'tools' OR NOT {SYNCHRONOUS}) AND {in_work(earlier.steps)} "
        "GROUP BY ALL ORDER BY ALL"
    ):
        series.setdefault((row["run"], row["of"], row["who"]), {})[row["step"]] = row["unit"]
    first = {row["run"]: row["step"] for row in earlier.tables.rows(FIRST_STEPS)}
    # What changes at once may have one cause, and delays the same requests.
    together: dict[tuple[str, str, int | None], dict[str, Shape]] = {}
    for (run, of, who), own in series.items():
        shape = shape_of(own, min(own) if run in earlier.cycles else first[run])
        if shape is not None:
            together.setdefault((run, of, shape.since), {})[who] = shape
    for (run, of, since_step), shapes in together.items():
        cuts = f"""
            SELECT run, step, name, request_id, 'more' AS who, sum(us * part) AS cut_us
            FROM ({_WORK_OF_REQUESTS}) AS w JOIN (
                SELECT unnest($steps) AS step, unnest($whos) AS who, unnest($parts) AS part) USING (step, who)
            WHERE run = $run GROUP BY ALL
        """
        parts = [
            (step, who, 1 - each)
            for who, shape in shapes.items()
            for step, each in shape.kept.items()
        ]
        columns = dict(
            zip(("steps", "whos", "parts"), map(list, zip(*parts, strict=True)), strict=True)
        )
        places = earlier(cuts, of, {"run": run, **columns}).get((run, "more"), [])
        of_those = ", of those dispatched" if run in earlier.cycles else ""
        since = f"{of_those} since step {since_step}" if since_step is not None else ""
        finding = "more_tokens" if of == "tokens" else "changed" if since else "grows"
        unit = " per token" if of == "decoding" else ""
        texts = [
            f"{shape.first:,.0f} to {shape.last:,.0f} {who}"
            if of == "tokens"
            else f"{who}: {seconds(shape.first)} to {seconds(shape.last)}{unit}"
            for who, shape in shapes.items()
        ]
        if places:
            named = ", ".join(who.removeprefix(CALLS_OF) for who in shapes)
            yield lost_to(run, finding, "work", named, places, text="; ".join(texts) + since)


# Calls of one worker are slow if they take so many times what those of the others take.
_SLOWER_PUT = 3


def transfers(earlier: Earlier) -> Iterator[Named]:
    """Find the worker whose TransferQueue calls take many times as long as those of the others.

    Of an asynchronous run also what the calls of all requests cost.
    """
    tables = earlier.tables
    calls = (
        "SELECT run, step, name, request_id, event, duration_us FROM transfers WHERE NOT validate "
        f"AND request_id IS NOT NULL AND duration_us IS NOT NULL AND {in_work(earlier.steps)}"
    )
    cuts = f"""
        WITH calls AS ({calls}), rates AS (
            SELECT run, event, name, median(duration_us) AS us FROM calls GROUP BY ALL
        ), slow AS (
            SELECT a.run, a.event, a.name, concat(a.event, ' in ', a.name) AS who,
                median(b.us) AS others_us
            FROM rates AS a JOIN rates AS b
                ON b.run = a.run AND b.event = a.event AND b.name <> a.name
            GROUP BY a.run, a.event, a.name, a.us HAVING a.us >= {_SLOWER_PUT} * others_us
        )
        SELECT run, step, name, request_id, who, sum(greatest(duration_us - others_us, 0)) AS cut_us
        FROM calls JOIN slow USING (run, event, name) GROUP BY ALL
    """
    for (run, who), places in earlier(cuts, "other").items():
        yield lost_to(run, "slow_transfers", "worker", who, places)
    # Of a synchronous run, those of the last request are a category of the critical path.
    every = (
        "SELECT run, step, name, request_id, 'transfers' AS who, sum(duration_us) AS cut_us "
        f"FROM ({calls}) WHERE NOT {SYNCHRONOUS} GROUP BY ALL"
    )
    for (run, _), places in earlier(every, "other").items():
        events = tables.rows(
            f"SELECT step, event, sum(duration_us) / 1e6 AS s FROM ({calls}) WHERE run = ? GROUP BY ALL ORDER BY ALL",
            [run],
        )
        called = identity("operation", places_of((r["step"], r["event"], r["s"]) for r in events))
        yield Named(run, "transfer", called, lost_in(places))


_WAITING = "waiting for a reward worker"


def rewards(earlier: Earlier) -> Iterator[Named]:
    """Split the reward time of the last requests into the reward function and waiting for a reward worker.

    Of an asynchronous run, that of all requests.
    """
    tables, steps = earlier.tables, earlier.steps
    rows = tables.rows(
        f"""
        SELECT l.run, l.step, any_value(r.reward_us) / 1e6 AS reward_s,
            max(coalesce(s.compute_us,
                least(s.end_us, r.end_us) - greatest(s.begin_us, r.begin_us))) / 1e6 AS scored_s
        FROM (SELECT run, step, name, request_id FROM last_requests
            UNION ALL SELECT run, step, name, request_id FROM requests
            WHERE reward_us > 0 AND NOT validate AND NOT {SYNCHRONOUS}
        ) AS l JOIN requests AS r USING (run, step, name, request_id)
            LEFT JOIN reward_scores AS s ON s.run = r.run AND s.uid = r.uid
                AND s.end_us > r.begin_us AND s.begin_us < r.end_us
                AND coalesce(s.request_id = r.request_id, true)
                AND coalesce(s.session = r.session, true)
        WHERE {in_steps(steps, "l.step")} GROUP BY l.run, l.step, l.name, l.request_id ORDER BY ALL
        """
    )
    cuts = (
        "SELECT run, step, name, request_id, 'reward' AS who, reward_us AS cut_us FROM requests "
        f"WHERE reward_us > 0 AND NOT validate AND {in_work(steps)}"
    )
    sooner = earlier(cuts, "other")
    for run, own in by_run(rows).items():
        parts: list[tuple[int, str, float]] = []
        for row in own:
            if row["reward_s"]:
                scored = row["reward_s"] if row["scored_s"] is None else row["scored_s"]
                scored = min(max(scored, 0.0), row["reward_s"])
                parts.append((row["step"], "the reward function", scored))
                parts.append((row["step"], _WAITING, row["reward_s"] - scored))
        places = places_of(parts)
        if places:
            culprit = identity("part", places)
            culprit = replace(culprit, fixable=culprit.who == _WAITING)
            yield Named(run, "reward", culprit, lost_in(sooner.get((run, "reward"), [])))
