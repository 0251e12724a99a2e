"""The critical path of a step: every moment attributed to one category, from start to finish.

Backwards from the end, the trainer waits for its own timers; in `gen` for the request that ended
last, and that request for its turns; in the other phases for the rank that finished last.  Concurrent
activity does not lengthen the step and is left out.  A moment belongs to the innermost interval
of this chain; time that no event covers is `unexplained`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from verl_profiler.analysis.engine import REPLICA_NAMES
from verl_profiler.analysis.explain.calls import ENGINE_TIMES
from verl_profiler.analysis.explain.device_time import swept
from verl_profiler.analysis.explain.rules import BETWEEN, UNEXPLAINED
from verl_profiler.analysis.selection import Rows, Steps, grouped, in_steps
from verl_profiler.analysis.steps import OWN_SPANS, TIMED, step_gaps
from verl_profiler.events.vocabulary import depth
from verl_profiler.reading.tables.derivations import STALL_NOTICED_US, SYNCHRONOUS
from verl_profiler.reading.tables.tables import Tables

_MIDDLE = "(r.begin_us + r.end_us) // 2"

# Precedence of overlapping intervals: the highest level, then the latest start.
_STEP, _TIMER, _WAIT, _TRANSFER, _RANK, _REQUEST, _LAG, _ENGINE, _PART, _STALL = range(10)

# Time inside the engine comes from `_engine_parts`; the remainder is transport.
_CATEGORY = f"""
    WHEN e.event IN ('request', 'agent_loop', 'turn') THEN '{UNEXPLAINED}'
    WHEN e.event IN ('tool_execution', 'tool_call') THEN 'tool'
    WHEN e.event = 'engine_call' THEN 'transport'
"""
# Waits for replies of other processes.  A stall of the event loop takes the overlapping part of such a
# wait if the wait ends soon after the stall; otherwise the reply had not arrived yet.
_ANSWERED = "(e.family = 'transfer_queue' OR e.event IN ('server_acquire', 'reward'))"
# Tools have work of their own: a stall takes their time only if another request is known to cause it.
_TOOL = "e.event IN ('tool_call', 'tool_execution')"


class _Span(NamedTuple):
    begin_us: int
    end_us: int
    level: int
    category: str
    phase: str | None = None
    event: str = ""
    name: str = ""
    request_id: str | None = None
    turn: int | None = None
    what: str | None = None


def critical_segments(tables: Tables, steps: Steps = None) -> Rows:
    """List the segments of the critical path in order, from start to finish.

    Returns:
        Table `critical_segments`: one row per run, step and segment with one category, a key of
        `rules.CATEGORIES`.  Only steps that finished, of runs whose steps consume their own requests
        (synchronous).
    """
    return _segments(_chains(tables, steps))


def between_segments(tables: Tables, steps: Steps) -> Rows:
    """List what lies between the end of each step and the start of the next.

    The gap after the last step ends with its last timer, if it has one there; or with the trainer's process,
    if an earlier gap took about as long.  Otherwise it is unknown.

    Returns:
        Rows like those of `critical_segments`; `phase` is `BETWEEN`, and so is the category of time
        that no timer of the trainer covers.
    """
    chains: dict[tuple[str, int], list[_Span]] = {}
    for row in tables.rows(
        f"""
        WITH gaps AS MATERIALIZED ({step_gaps(in_steps(steps, "s.step"))}), timed AS ({TIMED})
        SELECT run, step, NULL AS phase, name, begin_us, end_us FROM gaps WHERE end_us > begin_us
        UNION ALL
        SELECT g.run, g.step, t.phase, t.name, greatest(t.begin_us, g.begin_us),
            least(t.end_us, g.end_us)
        FROM gaps AS g JOIN timed AS t ON t.run = g.run AND t.name = g.name
            AND t.begin_us < g.end_us AND t.end_us > g.begin_us
        ORDER BY run, step, phase NULLS FIRST, begin_us, end_us DESC
        """
    ):
        category = row["phase"] or BETWEEN
        level = _STEP if row["phase"] is None else _TIMER
        span = _span(row, level=level, category=category, phase=BETWEEN, event=category)
        chains.setdefault((row["run"], row["step"]), []).append(span)
    return _segments(chains.items())


def _segments(chains: Iterable[tuple[tuple[str, int], list[_Span]]]) -> Rows:
    rows: Rows = []
    for (run, step), spans in chains:
        first, last = spans[0].begin_us, spans[0].end_us
        inside = (
            (max(begin, first), min(end, last), span)
            for begin, end, span in swept(spans, _order, lambda span: span[3:])
            if begin < last and end > first
        )
        rows += (
            {
                "run": run,
                "step": step,
                "place": place,
                "begin_s": (begin - first) / 1e6,
                "duration_s": (end - begin) / 1e6,
                **{key: getattr(span, key) for key in _Span._fields[3:]},
            }
            for place, (begin, end, span) in enumerate(inside)
        )
    return rows


def _order(span: _Span) -> tuple[int, int, int, int]:
    """Return what spans are ordered by, the innermost first."""
    return -span.level, -span.begin_us, span.end_us - span.begin_us, -depth(span.event)


def critical_path(tables: Tables, steps: Steps = None) -> Rows:
    """Attribute every second of a step to one category.

    Returns:
        Table `critical_path`: one row per run, step and category, most time first,
        `unexplained` last.  The categories are the keys of `rules.CATEGORIES`.
    """
    return path_categories(critical_segments(tables, steps))


def path_categories(segments: Rows) -> Rows:
    """Add up the rows of `critical_segments` by category, as `critical_path` returns them."""
    rows: Rows = []
    for (run, step), chain in grouped(segments, "run", "step").items():
        whole = sum(row["duration_s"] for row in chain)
        own: Rows = []
        for category, group in grouped(chain, "category").items():
            longest = max(group, key=lambda row: (row["duration_s"], -row["begin_s"]))
            total = sum(row["duration_s"] for row in group)
            own.append(
                {
                    "run": run,
                    "step": step,
                    "category": category,
                    "duration_s": total,
                    "share": total / whole if whole else None,
                    "segments": len(group),
                    "longest_s": longest["duration_s"],
                    "longest_what": longest["what"] or longest["event"],
                }
            )
        own.sort(
            key=lambda row: (row["category"] == UNEXPLAINED, -row["duration_s"], row["category"])
        )
        rows += own
    return rows


def _chains(tables: Tables, steps: Steps) -> Iterator[tuple[tuple[str, int], list[_Span]]]:
    """Yield the chain of each finished step: the step itself first, then all intervals inside it."""
    chains: dict[tuple[str, int], list[_Span]] = {}
    for row in tables.rows(
        f"SELECT s.run, s.step, s.begin_us, s.end_us, p.name FROM steps AS s JOIN phases AS p "
        f"ON p.run = s.run AND p.step = s.step AND p.phase = 'step' "
        f"WHERE s.finished AND s.{SYNCHRONOUS} AND {in_steps(steps, 's.step')} "
        "ORDER BY s.run, s.step, p.name"
    ):
        whole = _span(row, level=_STEP, category=UNEXPLAINED, event="step")
        chains.setdefault((row["run"], row["step"]), [whole])
    if not chains:
        return
    for query in (_timers(steps), _ranks(steps), _requests(steps), _engine_parts(steps)):
        for row in tables.rows(f"FROM ({query}) ORDER BY run, step, begin_us, end_us DESC, event"):
            if (row["run"], row["step"]) in chains:
                chains[row["run"], row["step"]].append(_span(row))
    yield from chains.items()


def _span(row: Mapping[str, Any], **more: Any) -> _Span:
    """Return the span of a row, with some columns replaced."""
    return _Span(**{key: row[key] for key in _Span._fields if key in row} | more)


def _timers(steps: Steps) -> str:
    """Return the SQL of the trainer's timers and user spans, its waits in `gen`, and its TransferQueue calls."""
    chosen = in_steps(steps)
    return f"""
        SELECT run, step, {_TIMER} AS level, phase, phase AS event, begin_us, end_us, name,
            CASE WHEN phase IN ('gen', 'sample_wait') THEN 'gen'
                -- The others wait for engines, not for ranks.
                WHEN phase NOT IN ('sleep_replicas', 'update_weights') AND EXISTS (
                    SELECT 1 FROM rank_spans AS r WHERE r.run = p.run AND r.step = p.step
                        AND r.role <> 'trainer' AND {_MIDDLE} BETWEEN p.begin_us AND p.end_us)
                THEN 'handover' ELSE phase END AS category
        FROM phases AS p WHERE phase <> 'step' AND NOT validate AND {chosen}
        UNION ALL BY NAME
        SELECT *, {_TIMER} AS level, phase AS event, phase AS category FROM ({OWN_SPANS}) WHERE {chosen}
        UNION ALL BY NAME
        SELECT run, step, {_RANK} AS level, 'gen' AS phase, 'dispatch' AS event, gen_begin_us AS begin_us,
            l.begin_us AS end_us, trainer AS name, 'dispatch' AS category
        FROM last_requests AS l WHERE l.begin_us > gen_begin_us AND {chosen}
        UNION ALL BY NAME
        SELECT run, step, {_WAIT} AS level, 'gen' AS phase, 'polling' AS event, l.end_us AS begin_us,
            least(wait_end_us, gen_end_us) AS end_us, trainer AS name, 'polling' AS category
        FROM last_requests AS l
        WHERE wait_end_us > l.end_us AND gen_end_us > l.end_us AND {chosen}
        UNION ALL BY NAME
        SELECT run, step, {_TRANSFER} AS level, event, begin_us, end_us, name, op AS what,
            'transfer' AS category
        FROM transfers WHERE role = 'trainer' AND duration_us IS NOT NULL AND {chosen}
    """


def _ranks(steps: Steps) -> str:
    """Return the SQL of the work of the rank that finished last in each of the trainer's phases.

    In `gen`, of what all of them do before the last request starts: until verl 0.7 engines wake up there.
    """
    return f"""
        WITH timers AS (
            SELECT run, step, phase, begin_us, end_us,
                row_number() OVER (ORDER BY run, step, begin_us, phase) AS timer
            FROM (SELECT run, step, phase, begin_us, end_us FROM phases
                WHERE parent = 'step' AND phase <> 'gen'
                UNION ALL SELECT run, step, 'gen', gen_begin_us, begin_us FROM last_requests
            ) WHERE {in_steps(steps)}
        ), inside AS MATERIALIZED (
            SELECT t.timer, t.run, t.step, t.phase, r.name, r.event,
                CASE WHEN r.event IN ('load', 'offload') THEN 'offload'
                    WHEN r.event IN ('memory_release', 'memory_resume') THEN 'engine_memory'
                    WHEN r.event = 'optimizer_step' THEN r.event
                    WHEN t.phase = 'gen' THEN 'update_weights' ELSE t.phase END AS category,
                NULL AS what,
                greatest(r.begin_us, t.begin_us) AS begin_us, least(r.end_us, t.end_us) AS end_us
            FROM timers AS t JOIN rank_spans AS r ON r.run = t.run AND r.step = t.step
                AND r.role <> 'trainer' AND {_MIDDLE} BETWEEN t.begin_us AND t.end_us
            WHERE t.phase <> 'gen' OR r.family = 'weights' OR r.event IN ('load', 'offload')
        ), last AS (
            SELECT timer, max_by(name, (end_us, begin_us, name)) AS name FROM inside GROUP BY timer
        ), moved AS (
            SELECT t.timer, t.run, t.step, t.phase, q.name, q.event, 'transfer' AS category,
                q.op AS what, q.begin_us, q.end_us
            FROM timers AS t JOIN last AS l USING (timer) JOIN transfers AS q
                ON q.run = t.run AND q.step = t.step AND q.name = l.name
                AND within(q.begin_us, q.end_us, t.begin_us, t.end_us)
            WHERE q.duration_us IS NOT NULL AND q.role <> 'agent_loop'
        )
        SELECT *, {_RANK} AS level FROM (
            SELECT i.* FROM inside AS i JOIN last AS l USING (timer)
            WHERE i.name = l.name OR i.phase = 'gen'
            UNION ALL FROM moved)
    """


def _requests(steps: Steps) -> str:
    """Return the SQL of the events of the request that ended last, and its worker's event-loop stalls."""
    return f"""
        WITH lasts AS (
            SELECT * FROM last_requests WHERE {in_steps(steps)}
        ), replicas AS ({REPLICA_NAMES}
        ), stalls AS (
            SELECT g.*, CASE WHEN g.of_host THEN 'host_stall' ELSE 'event_loop' END AS category
            FROM lasts AS l JOIN lags AS g ON g.run = l.run AND g.step = l.step AND g.name = l.name
        ), own AS (
            SELECT l.run, l.step, e.event, e.family, e.name, e.request_id, e.turn,
                coalesce(e.tool, s.replica, e.server, e.op) AS what,
                CASE WHEN e.family = 'transfer_queue' THEN 'transfer' {_CATEGORY} ELSE e.event END AS category,
                greatest(e.begin_us, l.begin_us) AS begin_us, least(e.end_us, l.end_us) AS end_us
            FROM lasts AS l JOIN event_fields AS e ON e.run = l.run AND e.step = l.step
                AND e.name = l.name AND NOT e.validate AND e.request_id = l.request_id
                LEFT JOIN replicas AS s ON s.run = e.run AND s.server = e.server
            WHERE e.duration_us IS NOT NULL AND {in_steps(steps, "e.step")}
                AND e.family IN ('rollout', 'transfer_queue', 'user')
                -- A whole function with what it computes, not a call of the queue.
                AND NOT starts_with(e.event, 'tq_function')
            UNION ALL
            SELECT l.run, l.step, 'event_loop_lag', 'event_loop', g.name, NULL, NULL, NULL, g.category,
                greatest(g.begin_us, l.gen_begin_us), least(g.end_us, l.end_us)
            FROM lasts AS l JOIN stalls AS g USING (run, step, name)
        ), stalled AS (
            SELECT e.* REPLACE ('event_loop_lag' AS event, 'event_loop' AS family, g.category AS category,
                greatest(e.begin_us, g.begin_us) AS begin_us, least(e.end_us, g.end_us) AS end_us)
            FROM own AS e JOIN stalls AS g USING (run, step, name)
            WHERE ({_ANSWERED} AND g.during IS DISTINCT FROM e.event
                    AND coalesce(g.request_id <> e.request_id, true)
                    OR {_TOOL} AND g.request_id <> e.request_id)
                AND g.end_us > e.begin_us AND e.end_us <= g.until_us + {STALL_NOTICED_US}
        )
        SELECT *, 'gen' AS phase FROM (
            SELECT *, CASE WHEN event IN ('request', 'agent_loop', 'turn', 'engine_call', 'postprocess')
                THEN {_REQUEST} WHEN event = 'event_loop_lag' THEN {_LAG} ELSE {_PART} END AS level
            FROM own UNION ALL SELECT *, {_STALL} FROM stalled
        ) WHERE end_us > begin_us
    """


def _engine_parts(steps: Steps) -> str:
    """Return the SQL of pause, queue, prefill and decode of the last request's engine calls, in sequence."""
    return f"""
        WITH served AS (
            SELECT *, {ENGINE_TIMES} FROM (
                SELECT l.run, l.step, c.begin_us, c.end_us, c.duration_us, c.turn, c.request_id,
                    coalesce(c.engine_name, c.name) AS name, coalesce(c.engine_name, c.server) AS what,
                    c.engine_begin_us, c.engine_duration_us, c.parked_us, c.queue_us, c.prefill_us, c.decode_us
                FROM last_requests AS l JOIN engine_calls AS c ON c.run = l.run AND c.step = l.step
                    AND c.name = l.name AND NOT c.validate AND c.request_id = l.request_id
                WHERE c.duration_us IS NOT NULL AND {in_steps(steps, "l.step")})
        )
        SELECT run, step, 'gen' AS phase, name, request_id, turn, what, event,
            if(event = 'engine_call', 'engine', event) AS category,
            if(event = 'engine_call', {_ENGINE}, {_PART}) AS level, from_us AS begin_us, until_us AS end_us
        FROM (
            SELECT *, 'engine_call' AS event FROM served
            UNION ALL SELECT * REPLACE (arrived_us AS until_us), 'parked' FROM served
            UNION ALL SELECT * REPLACE (arrived_us AS from_us, started_us AS until_us), 'queue' FROM served
            UNION ALL SELECT * REPLACE (started_us AS from_us, decoding_us AS until_us), 'prefill' FROM served
            UNION ALL SELECT * REPLACE (decoding_us AS from_us, ended_us AS until_us), 'decode' FROM served
                WHERE decode_us > 0
        ) WHERE until_us > from_us
    """
