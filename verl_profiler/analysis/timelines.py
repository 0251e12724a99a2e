"""The steps and requests whose spans the report draws, and the lanes of their processes.

A small run is drawn whole.  Of a large one, steps are chosen (the longest, and others spread
evenly), and requests within them: the slowest, those that failed or never ended, the slowest of
each worker, and every n-th of the rest.

Times are in units of `UNIT_US` after the start of their step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from verl_profiler.analysis.selection import Rows, Steps, grouped, in_steps, spread
from verl_profiler.reading.tables.schemas import REQUEST_PARTS
from verl_profiler.reading.tables.tables import Tables

UNIT_US = 10
_SPANS = 75_000
_FAILED = 20
_DRAWN = (
    "prompt_build",
    "turn",
    "server_acquire",
    "engine_call",
    "tool_parsing",
    "tool_call",
    "tool_execution",
    "token_merge",
    "postprocess",
    "reward",
)
# Lanes of a role, by their kind.
_LANES = {"spans": 16, "count": 64}
_LANE_SPANS = 60
_LANE_STALLS = 30
# Parts of a scene in which open calls are counted.
_PARTS = 160


class Bounds(NamedTuple):
    """How much is drawn."""

    # So many timelines of large steps, and more of small ones; at most a quarter of validation passes.
    scenes: int = 12
    small_scenes: int = 40
    requests: int = 2_400
    slowest: int = 20
    # At least so many of the others in each timeline.
    each: int = 30
    # Of steps that are not drawn, the table still has the slowest requests.
    other_steps_requests: int = 300


@dataclass(frozen=True)
class Timelines:
    """What is drawn of a run.

    Args:
        of: How many requests there are in all.
        scenes: run, step, validate, requests (how many there are), begin and end.
        requests: scene (None in a step that is not drawn), begin and length, and columns of `requests`.
        spans: Of requests: number (the place of the request), event, tool, failed, turn (or -1), begin after
            the request's, and length.
        calls: Generate calls of requests: number, turn, begin, length, server, and what the engine reported.
        lanes: scene, kind, name and role of each lane, from the trainer down to the trainer workers; `role_of`
            (how many of how many) where not all of a role are there.  `spans`: the longest spans (event,
            failed, begin, length), and of how many.  `requests`: drawn, of how many, and when the last one
            ended.  `count`: most, and counts: of each part of the scene in which something changed, its
            number, the highest and the last count of open calls.
        stalls: The longest event-loop stalls: scene, name, begin, length, during.
    """

    of: int
    scenes: Rows
    requests: Rows
    spans: Rows
    calls: Rows
    lanes: Rows
    stalls: Rows


def chosen_timelines(
    tables: Tables,
    steps: Steps = None,
    bounds: Bounds = Bounds(),  # noqa: B008  immutable
) -> Timelines:
    """Choose steps and requests, and return what is drawn of them."""
    scenes = _scenes(tables, steps, bounds)
    total = tables.row(f"SELECT count(*) AS requests FROM requests WHERE {in_steps(steps)}")
    try:
        _choose_requests(tables, steps, scenes, bounds)
        return Timelines(
            of=total["requests"],
            scenes=tables.rows(
                f"""
                SELECT run, step, validate, requests, (begin_us - base_us) // {UNIT_US} AS begin,
                    (end_us - base_us) // {UNIT_US} AS "end"
                FROM drawn_scenes ORDER BY scene
                """
            ),
            requests=_requests(tables),
            spans=_request_spans(tables),
            calls=_request_calls(tables),
            lanes=_lanes(tables),
            stalls=_stalls(tables),
        )
    finally:
        for name in ("drawn_scenes", "drawn_requests"):
            tables.connection.execute(f"DROP TABLE IF EXISTS {name}")


_SCENE_COLUMNS = {
    "run": "VARCHAR",
    "step": "INTEGER",
    "validate": "BOOLEAN",
    "requests": "BIGINT",
    "begin_us": "BIGINT",
    "end_us": "BIGINT",
    "base_us": "BIGINT",
}


def _scenes(tables: Tables, steps: Steps, bounds: Bounds) -> Rows:
    """Choose what is drawn: training steps, and validation passes.

    An unfinished step spans everything that was seen in it; steps without requests still have phases.
    """
    scenes = tables.rows(
        f"""
        WITH passes AS (
            SELECT run, step, validate, count(*) AS requests, min(begin_us) AS begin_us,
                max(coalesce(end_us, last_us)) AS end_us
            FROM requests WHERE step IS NOT NULL GROUP BY run, step, validate
        ), alone AS (
            SELECT run, step, false AS validate, 0 AS requests, begin_us, end_us FROM steps AS s
            WHERE finished AND NOT EXISTS (FROM passes AS p
                WHERE p.run = s.run AND p.step = s.step AND NOT p.validate)
        ), every AS (
            SELECT *, greatest((end_us - begin_us) // 50, 1000) AS margin_us
            FROM (FROM passes UNION ALL FROM alone)
        )
        SELECT e.run, e.step, e.validate, e.requests,
            CASE WHEN validate THEN e.begin_us - margin_us ELSE least(e.begin_us, s.begin_us) END
                AS begin_us,
            CASE WHEN validate THEN e.end_us + margin_us
                WHEN s.finished THEN greatest(e.end_us, s.end_us) ELSE e.end_us END AS end_us,
            s.begin_us AS base_us
        FROM every AS e JOIN steps AS s USING (run, step)
        WHERE {in_steps(steps, "s.step")} ORDER BY e.run, e.step, e.validate
        """
    )
    largest = max((scene["requests"] for scene in scenes), default=1)
    count = max(bounds.scenes, min(bounds.small_scenes, bounds.requests // max(1, largest)))
    validation, training = (
        {
            n: each["end_us"] - each["begin_us"]
            for n, each in enumerate(scenes)
            if each["validate"] == wanted
        }
        for wanted in (True, False)
    )
    chosen = spread(validation, count // 4)
    chosen += spread(training, count - len(chosen))
    return [scenes[n] for n in sorted(chosen)]


def _choose_requests(tables: Tables, steps: Steps, scenes: Rows, bounds: Bounds) -> None:
    """Make the tables of the chosen scenes and of the chosen requests."""
    connection = tables.connection
    columns = ", ".join(f"{name} {kind}" for name, kind in _SCENE_COLUMNS.items())
    connection.execute(f"CREATE OR REPLACE TEMP TABLE drawn_scenes (scene INTEGER, {columns})")
    if scenes:
        marks = ", ".join("?" * (1 + len(_SCENE_COLUMNS)))
        values = [[n, *map(scene.get, _SCENE_COLUMNS)] for n, scene in enumerate(scenes)]
        connection.executemany(f"INSERT INTO drawn_scenes VALUES ({marks})", values)
    tables.make("requests", "steps")
    turns = tables.row("SELECT avg(turns) AS turns FROM requests WHERE finished")["turns"]
    # A turn is about six spans, and a request three more.
    limit = min(bounds.requests, round(_SPANS / (3 + 6 * (turns or 1))))
    each = max(bounds.each, limit // max(1, len(scenes)) - bounds.slowest)
    others = tables.row(
        "SELECT count(*) AS groups FROM (SELECT DISTINCT run, step, validate FROM requests)"
    )["groups"]
    slowest_of_others = max(1, min(3, bounds.other_steps_requests // max(1, others)))
    connection.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE drawn_requests AS
        WITH selected AS NOT MATERIALIZED (
            SELECT * FROM requests WHERE step IS NOT NULL AND {in_steps(steps)}
        ), numbered AS MATERIALIZED (
            SELECT r.*, scene, row_number() OVER () AS id
            FROM selected AS r JOIN drawn_scenes AS d USING (run, step, validate)
        ), ranked AS (
            SELECT id, status,
                row_number() OVER (PARTITION BY scene
                    ORDER BY duration_us DESC NULLS LAST, begin_us, request_id) AS slow,
                row_number() OVER (PARTITION BY scene, name
                    ORDER BY duration_us DESC NULLS LAST, begin_us, request_id) AS slow_in_worker,
                row_number() OVER (PARTITION BY scene
                    ORDER BY begin_us, request_id, sample, session) AS place,
                row_number() OVER (PARTITION BY scene,
                    status IN ('error', 'unfinished', 'cancelled')
                    ORDER BY begin_us, request_id, sample, session) AS odd,
                count(*) OVER (PARTITION BY scene) AS count
            FROM numbered
        ), others AS NOT MATERIALIZED (
            SELECT * FROM selected ANTI JOIN drawn_scenes USING (run, step, validate)
        ), bounds AS (
            SELECT run, step, validate, max(duration_us, {slowest_of_others}) AS longest_us
            FROM others GROUP BY run, step, validate
        ), chosen AS (
            SELECT * EXCLUDE (id) FROM numbered SEMI JOIN (
                SELECT id FROM ranked
                -- The slowest of a worker may be any number.
                WHERE slow <= {bounds.slowest} OR (slow_in_worker = 1 AND slow <= {each // 2})
                    OR (status IN ('error', 'unfinished', 'cancelled') AND odd <= {_FAILED})
                    OR place * least({each}, count) // count
                        <> (place - 1) * least({each}, count) // count
            ) USING (id)
            UNION ALL BY NAME
            -- The bound leaves a few rows of each step to be sorted.
            SELECT o.* FROM others AS o JOIN bounds AS b USING (run, step, validate)
            WHERE duration_us >= longest_us[-1]
                OR (duration_us IS NULL AND coalesce(len(longest_us), 0) < {slowest_of_others})
            QUALIFY row_number() OVER (PARTITION BY run, step, validate
                ORDER BY duration_us DESC NULLS LAST, begin_us, request_id) <= {slowest_of_others}
        )
        SELECT row_number() OVER (ORDER BY c.run, c.step, c.validate,
                c.begin_us, c.request_id, c.sample, c.session) - 1 AS number,
            t.begin_us AS base_us, c.*
        FROM chosen AS c JOIN steps AS t USING (run, step)
        """
    )


def _requests(tables: Tables) -> Rows:
    parts = ", ".join(f"{part}_us / 1e6 AS {part}_s" for part in (*REQUEST_PARTS, "other"))
    return tables.rows(
        f"""
        SELECT run, step, scene, validate, name, request_id, sample, session, agent,
            status, error, (begin_us - base_us) // {UNIT_US} AS begin,
            (coalesce(end_us, last_us) - begin_us) // {UNIT_US} AS length,
            duration_us / 1e6 AS duration_s, turns, tool_calls, prompt_tokens, generated_tokens,
            reward, {parts}
        FROM drawn_requests ORDER BY number
        """
    )


def _request_spans(tables: Tables) -> Rows:
    listed = ", ".join(f"'{event}'" for event in _DRAWN)
    return tables.rows(
        f"""
        SELECT r.number, e.event,
            CASE WHEN e.event = 'tool_call' THEN coalesce(e.tool, '(no name)') END AS tool,
            e.status IS NOT NULL AS failed, coalesce(e.turn, -1) AS turn,
            (e.begin_us - r.begin_us) // {UNIT_US} AS begin, e.duration_us // {UNIT_US} AS length
        FROM event_fields AS e JOIN drawn_requests AS r
            ON e.run = r.run AND e.step = r.step AND e.name = r.name
            AND e.validate = r.validate AND e.request_id = r.request_id
        WHERE e.family = 'rollout' AND e.event IN ({listed}) AND e.duration_us IS NOT NULL
        ORDER BY number, begin, length DESC, turn, event, tool, failed
        """
    )


def _request_calls(tables: Tables) -> Rows:
    return tables.rows(
        f"""
        SELECT r.number, c.turn, (c.begin_us - r.begin_us) // {UNIT_US} AS begin,
            c.duration_us // {UNIT_US} AS length, coalesce(c.engine_name, c.server) AS server,
            (c.engine_begin_us - r.begin_us) // {UNIT_US} AS engine_begin,
            c.engine_duration_us // {UNIT_US} AS engine_length,
            c.queue_us // {UNIT_US} AS queue, c.prefill_us // {UNIT_US} AS prefill,
            c.decode_us // {UNIT_US} AS decode,
            c.prompt_tokens, c.response_tokens, c.cached_tokens
        FROM engine_calls AS c JOIN drawn_requests AS r
            USING (run, step, name, validate, request_id)
        ORDER BY r.number, c.begin_us, c.turn
        """
    )


# Spans that overlap a drawn stretch of time, whatever step they were written under: an engine
# counts its step by the weights that it has.
_OVERLAP = "x.run = s.run AND x.begin_us < s.end_us AND x.end_us > s.begin_us"


def _lanes(tables: Tables) -> Rows:
    """List the lanes; of a role at most so many: the busiest, and others spread evenly."""
    trainers = _span_lanes(
        tables,
        "SELECT s.scene, s.base_us, x.name, 'trainer' AS role, x.rank, x.phase AS event, "
        "NULL AS status, x.begin_us, x.duration_us "
        f"FROM phases AS x JOIN drawn_scenes AS s ON {_OVERLAP} WHERE x.phase <> 'step'",
    )
    ranks = _span_lanes(
        tables,
        "SELECT s.scene, s.base_us, x.name, x.role, x.rank, x.event, x.status, x.begin_us, "
        f"x.duration_us FROM rank_spans AS x JOIN drawn_scenes AS s ON {_OVERLAP}",
    )
    kept: Rows = []
    for lanes in (trainers, _request_lanes(tables), _count_lanes(tables), ranks):
        for own in grouped(lanes, "scene", "role").values():
            most = _LANES.get(own[0]["kind"], len(own))
            chosen = spread({lane["name"]: lane["total"] for lane in own}, most)
            some = [lane for lane in own if lane["name"] in chosen]
            if len(some) < len(own):
                some[0]["role_of"] = [len(some), len(own)]
            kept += some
    return kept


def _span_lanes(tables: Tables, source: str) -> Rows:
    return tables.rows(
        f"""
        WITH inside AS ({source}), ranked AS (
            SELECT *, row_number() OVER (PARTITION BY scene, name
                    ORDER BY duration_us DESC, begin_us, event) AS place,
                count(*) OVER (PARTITION BY scene, name) AS count,
                sum(duration_us) OVER (PARTITION BY scene, name) AS total_us
            FROM inside
        )
        SELECT scene, 'spans' AS kind, name, min(role) AS role, any_value(count) AS of,
            any_value(total_us) AS total, list({{'event': event, 'failed': status IS NOT NULL,
                'begin': (begin_us - base_us) // {UNIT_US}, 'length': duration_us // {UNIT_US}}}
                ORDER BY begin_us, duration_us DESC, event) AS spans
        FROM ranked WHERE place <= {_LANE_SPANS}
        GROUP BY scene, name ORDER BY scene, min(role), min(rank), name
        """
    )


def _request_lanes(tables: Tables) -> Rows:
    """List the agent-loop workers."""
    return tables.rows(
        f"""
        WITH drawn AS (
            SELECT scene, name, count(*) AS drawn FROM drawn_requests
            WHERE scene IS NOT NULL GROUP BY scene, name
        ), every AS (
            SELECT s.scene, r.name, min(r.rank) AS rank, count(*) AS requests,
                (max(r.begin_us + coalesce(r.duration_us, 0)) - any_value(s.base_us)) // {UNIT_US} AS last
            FROM requests AS r JOIN drawn_scenes AS s
                ON r.run = s.run AND r.step = s.step AND r.validate = s.validate
            GROUP BY s.scene, r.name
        )
        SELECT scene, 'requests' AS kind, name, 'agent_loop' AS role, coalesce(drawn, 0) AS drawn,
            requests AS of, requests AS total, last
        FROM every LEFT JOIN drawn USING (scene, name) ORDER BY scene, rank, name
        """
    )


def _count_lanes(tables: Tables) -> Rows:
    """Count the calls that are open at a time: in each engine, in the rewards, in the queue."""
    served = tables.row("SELECT count(*) AS rows FROM engine_requests")["rows"]
    engines = (
        "SELECT s.*, x.name AS lane, 'engine_request' AS event, x.begin_us AS from_us, "
        "x.end_us AS to_us FROM engine_requests AS x"
        if served
        else "SELECT s.*, coalesce(x.server, 'engine') AS lane, 'engine_call' AS event, "
        "x.begin_us AS from_us, x.end_us AS to_us FROM engine_calls AS x"
    )
    return tables.rows(
        f"""
        WITH spans AS MATERIALIZED (
            {engines} JOIN drawn_scenes AS s ON {_OVERLAP}
            UNION ALL
            SELECT s.*, 'reward functions', 'reward_score', x.begin_us, x.end_us
            FROM reward_scores AS x JOIN drawn_scenes AS s ON {_OVERLAP}
            UNION ALL
            SELECT s.*, 'TransferQueue', 'tq_get', x.begin_us, x.end_us
            FROM transfers AS x JOIN drawn_scenes AS s ON {_OVERLAP}
        ), changes AS (
            SELECT *, greatest(from_us, begin_us) AS at_us, 1 AS change FROM spans
            UNION ALL SELECT *, least(to_us, end_us), -1 FROM spans
        ), running AS (
            SELECT scene, lane, event, begin_us, end_us, at_us, sum(sum(change)) OVER (
                PARTITION BY scene, lane, event ORDER BY at_us ROWS UNBOUNDED PRECEDING) AS open
            FROM changes GROUP BY scene, lane, event, begin_us, end_us, at_us
        ), parts AS (
            SELECT scene, lane, event, least(floor((at_us - begin_us) * {_PARTS}.0
                / greatest(end_us - begin_us, 1)), {_PARTS - 1})::INTEGER AS part,
                max(open)::INTEGER AS most, arg_max(open, at_us)::INTEGER AS last
            FROM running GROUP BY scene, lane, event, part
        )
        SELECT scene, 'count' AS kind, lane AS name, event AS role, max(most) AS most,
            max(most) AS total, list([part, most, last] ORDER BY part) AS counts
        FROM parts GROUP BY scene, lane, event
        ORDER BY scene, event NOT IN ('engine_request', 'engine_call'), event, lane
        """
    )


def _stalls(tables: Tables) -> Rows:
    return tables.rows(
        f"""
        SELECT s.scene, x.name, (x.begin_us - s.base_us) // {UNIT_US} AS begin,
            x.duration_us // {UNIT_US} AS length, x.during
        FROM lags AS x JOIN drawn_scenes AS s ON {_OVERLAP}
        QUALIFY row_number() OVER (PARTITION BY s.scene, x.name ORDER BY x.duration_us DESC)
            <= {_LANE_STALLS}
        ORDER BY s.scene, x.name, x.begin_us
        """
    )
