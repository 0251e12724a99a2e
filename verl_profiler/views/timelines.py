"""What the page draws request by request: timelines of some steps, and the requests in them.

A small run is drawn whole.  Of a large one, steps are chosen (the longest, and others spread
evenly), and requests within them: the slowest, those that failed or never ended, the slowest of
each worker, and every n-th of the rest.  Each timeline has how many of how many it draws.

Times are in units of 10 us after the begin of their step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from verl_profiler.analysis.selection import Steps, in_steps, spread
from verl_profiler.reading.tables.schemas import REQUEST_PARTS
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.frames import frame, short_text
from verl_profiler.views.timeline_lanes import UNIT_US, Names, add_lanes

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


def timelines(
    tables: Tables,
    steps: Steps,
    places: Mapping[tuple[Any, Any], int],
    bounds: Bounds = Bounds(),  # noqa: B008  immutable
) -> dict[str, Any]:
    """Choose steps and requests, and gather what is drawn of them.

    Args:
        tables: The tables of the run.
        steps: First and last step to show.
        places: Place in the rows of `step_times` by run and step.
        bounds: How much is drawn.

    Returns:
        `names` (event, tool, failed, color) that spans refer to; `scenes` with their lanes;
        `requests` (columns and rows), with the spans and engine calls of each; `of`, how many
        requests there are in all.
    """
    scenes = _scenes(tables, steps, places, bounds)
    total = tables.row(f"SELECT count(*) AS requests FROM requests WHERE {in_steps(steps)}")[
        "requests"
    ]
    connection = tables.connection
    try:
        _choose_requests(tables, steps, scenes, bounds)
        names = Names()
        requests = _request_frame(tables, places, names)
        add_lanes(tables, scenes, names)
    finally:
        for name in ("drawn_scenes", "drawn_requests"):
            connection.execute(f"DROP TABLE IF EXISTS {name}")
    for scene in scenes:
        for lane in scene["lanes"]:
            lane["name"] = short_text(lane["name"])
        base = scene.pop("base_us")
        scene["begin"] = (scene.pop("begin_us") - base) // UNIT_US
        scene["end"] = (scene.pop("end_us") - base) // UNIT_US
        del scene["run"], scene["step"]
    return {
        "unit_s": UNIT_US / 1e6,
        "names": names.listed,
        "scenes": scenes,
        "requests": requests,
        "of": total,
    }


def _scenes(
    tables: Tables, steps: Steps, places: Mapping[tuple[Any, Any], int], bounds: Bounds
) -> list[dict[str, Any]]:
    """Choose what is drawn: training steps, and validation passes.

    An unfinished step spans everything that was seen in it; steps without requests still have phases.
    """
    rows = tables.rows(
        f"""
        WITH passes AS (
            SELECT run, step, validate, count(*) AS requests, min(begin_us) AS begin_us,
                max(coalesce(end_us, last_us)) AS end_us
            FROM requests WHERE step IS NOT NULL AND {in_steps(steps)}
            GROUP BY run, step, validate
        ), alone AS (
            SELECT run, step, false AS validate, 0 AS requests, begin_us, end_us FROM steps AS s
            WHERE finished AND NOT EXISTS (FROM passes AS p
                WHERE p.run = s.run AND p.step = s.step AND NOT p.validate)
        ), every AS (
            SELECT *, greatest((end_us - begin_us) // 50, 1000) AS margin_us
            FROM (FROM passes UNION ALL FROM alone)
        )
        SELECT e.run, e.step, e.validate, e.requests, s.begin_us AS base_us,
            CASE WHEN validate THEN e.begin_us - margin_us ELSE least(e.begin_us, s.begin_us) END
                AS begin_us,
            CASE WHEN validate THEN e.end_us + margin_us
                WHEN s.finished THEN greatest(e.end_us, s.end_us) ELSE e.end_us END AS end_us
        FROM every AS e JOIN steps AS s USING (run, step)
        """
    )
    scenes = [
        {"s": places[row["run"], row["step"]], **row}
        for row in rows
        if (row["run"], row["step"]) in places
    ]
    scenes.sort(key=lambda scene: (scene["s"], scene["validate"]))
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


def _choose_requests(
    tables: Tables, steps: Steps, scenes: Sequence[Mapping[str, Any]], bounds: Bounds
) -> None:
    """Make the tables of the chosen scenes and of the chosen requests."""
    connection = tables.connection
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE drawn_scenes (scene INTEGER, run VARCHAR, step INTEGER, "
        "validate BOOLEAN, begin_us BIGINT, end_us BIGINT, base_us BIGINT)"
    )
    keys = ("run", "step", "validate", "begin_us", "end_us", "base_us")
    if scenes:
        values = [[n, *map(scene.get, keys)] for n, scene in enumerate(scenes)]
        connection.executemany("INSERT INTO drawn_scenes VALUES (?, ?, ?, ?, ?, ?, ?)", values)
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


def _request_frame(
    tables: Tables, places: Mapping[tuple[Any, Any], int], names: Names
) -> dict[str, Any]:
    """Return the requests in `drawn_requests` as columns and rows, with spans, calls and servers."""
    parts = ", ".join(f"{part}_us / 1e6 AS {part}_s" for part in (*REQUEST_PARTS, "other"))
    rows = tables.rows(
        f"""
        SELECT run, step, scene, validate, name, request_id, sample, session, agent,
            status, error, (begin_us - base_us) // {UNIT_US} AS begin,
            (coalesce(end_us, last_us) - begin_us) // {UNIT_US} AS length,
            duration_us / 1e6 AS duration_s, turns, tool_calls, prompt_tokens, generated_tokens,
            reward, {parts}
        FROM drawn_requests ORDER BY number
        """
    )
    table = frame(
        [{"s": places.get((row["run"], row["step"]), -1), **row} for row in rows],
        drop=("run", "step"),
    )
    table["spans"] = _request_spans(tables, len(rows), names)
    table["calls"], table["servers"] = _request_calls(tables, len(rows))
    return table


def _request_spans(tables: Tables, count: int, names: Names) -> list[list[int]]:
    """List the spans of each request, flat: name, turn (or -1), begin after the request's, length."""
    listed = ", ".join(f"'{event}'" for event in _DRAWN)
    rows = tables.connection.execute(
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
    ).fetchall()
    spans: list[list[int]] = [[] for _ in range(count)]
    for number, event, tool, failed, *span in rows:
        spans[number] += [names.code(event, tool, failed=failed), *span]
    return spans


def _request_calls(tables: Tables, count: int) -> tuple[list[list[Any]], list[str]]:
    """List the engine calls of each request and the servers that they name.

    Each call: turn, begin, length, server, engine begin, engine length, queue, prefill, decode,
    prompt, response and cached tokens; the Nones at its end are left out.
    """
    rows = tables.rows(
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
    calls: list[list[Any]] = [[] for _ in range(count)]
    servers: dict[str, int] = {}
    for row in rows:
        if row["server"] is not None:
            row["server"] = servers.setdefault(row["server"], len(servers))
        number, *call = row.values()
        while call and call[-1] is None:
            call.pop()
        calls[number].append(call)
    return calls, [short_text(server) for server in servers]
