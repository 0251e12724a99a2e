"""How long requests took, what they and their turns spent it on, and which were the slowest."""

from __future__ import annotations

from verl_profiler.analysis.selection import (
    Rows,
    Steps,
    estimated,
    grouped,
    in_steps,
    rows_of,
)
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.schemas import REQUEST_PARTS
from verl_profiler.reading.tables.tables import Tables

_PERCENTILES = (50.0, 80.0, 90.0, 95.0, 99.0, 99.9)
# Beyond this many requests the curve has a point per this part of them, and every one of the last.
_POINTS, _LAST = 1000, 100
_TURN_PARTS = ("engine", "tool", "tool_parsing", "token_merge", "other")


def summed_requests(group: str, where: str) -> str:
    """Return the SQL of requests, summed up by `group`.

    Args:
        group: Columns of `requests`.
        where: Which requests.

    Returns:
        A query with the columns of `request_times` in microseconds, `q` with their quantiles, and
        rollout_us (from the first request's begin to the last one's end) and reward (mean).
    """
    return f"""
        SELECT {group}, count(*) AS requests, count(*) FILTER (NOT finished) AS unfinished,
            count(*) FILTER (status IN ('error', 'cancelled')) AS failed,
            max(end_us) - min(begin_us) AS rollout_us, avg(duration_us) AS mean_us,
            {quantiles("duration_us", 0.5, 0.8, 0.9, 0.95, 0.99, 0.999)} AS q,
            max(duration_us) AS max_us, avg(turns) FILTER (finished) AS mean_turns,
            max(turns) AS max_turns,
            try_cast(sum(prompt_tokens) AS BIGINT) AS prompt_tokens,
            try_cast(sum(response_tokens) AS BIGINT) AS response_tokens,
            try_cast(sum(generated_tokens) AS BIGINT) AS generated_tokens,
            try_cast(sum(tool_tokens) AS BIGINT) AS tool_tokens, avg(reward) AS reward
        FROM requests WHERE {where} GROUP BY {group}
    """


def request_times(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize request durations.

    Returns:
        Table `request_times`: one row per run, step and validate.  Percentiles are of finished
        requests.
    """
    return tables.rows(
        f"""
        SELECT run, step, validate, requests, unfinished, failed, mean_us / 1e6 AS mean_s,
            q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p80_s, q[3] / 1e6 AS p90_s, q[4] / 1e6 AS p95_s,
            q[5] / 1e6 AS p99_s, q[6] / 1e6 AS p999_s, max_us / 1e6 AS max_s,
            mean_turns, max_turns, prompt_tokens, response_tokens, generated_tokens, tool_tokens
        FROM ({summed_requests("run, step, validate", in_steps(steps))})
        ORDER BY run, step, validate
        """
    )


def request_parts(tables: Tables, steps: Steps = None) -> Rows:
    """Divide the time of all finished requests into components that add up to it.

    Returns:
        Table `request_parts`: one row per run, step, validate and part, most time first.  Parts
        that were not recorded are left out.
    """
    parts = [*REQUEST_PARTS, "other"]
    listed = ", ".join(f"sum({part}_us) AS {part}" for part in parts)
    return tables.rows(
        f"""
        WITH sums AS (
            SELECT run, step, validate, count(*) AS requests, {listed}
            FROM requests WHERE finished AND {in_steps(steps)} GROUP BY run, step, validate
        ), long AS (
            UNPIVOT sums ON {", ".join(parts)} INTO NAME part VALUE total_us
        )
        SELECT run, step, validate, part, total_us / 1e6 AS total_s,
            total_us / nullif(sum(total_us) OVER (PARTITION BY run, step, validate), 0) AS share,
            total_us / requests / 1e6 AS mean_s
        FROM long ORDER BY run, step, validate, total_us DESC, part
        """
    )


def turns_per_request(tables: Tables, steps: Steps = None) -> Rows:
    """Count requests by how many turns they took.

    Returns:
        Table `turns_per_request`: one row per run, step, validate and turns.
    """
    return tables.rows(
        f"""
        SELECT run, step, validate, turns, count(*) AS requests,
            count(*) / sum(count(*)) OVER (PARTITION BY run, step, validate) AS share,
            avg(duration_us) / 1e6 AS mean_s
        FROM requests WHERE turns IS NOT NULL AND {in_steps(steps)}
        GROUP BY run, step, validate, turns ORDER BY run, step, validate, turns
        """
    )


def slowest_requests(
    tables: Tables, steps: Steps = None, count: int = 1, *, validate: bool = False
) -> Rows:
    """Find the slowest requests of each step, and the longest call of each.

    `count` is how many per step; `validate` selects validation instead of training.

    Returns:
        Table `slowest_requests`: one row per request, slowest first within its step.  The plot
        of this name shows rows of `request_breakdown`.
    """
    listed = ", ".join(f"{part}_us / 1e6 AS {part}_s" for part in (*REQUEST_PARTS, "other"))
    return tables.rows(
        f"""
        WITH selected AS NOT MATERIALIZED (
            SELECT * FROM requests WHERE finished AND validate = {validate} AND {in_steps(steps)}
        ), bounds AS (
            -- They leave a few rows of each step to be sorted.
            SELECT run, step, max(duration_us, {max(1, int(count))}) AS longest_us
            FROM selected GROUP BY run, step
        ), chosen AS MATERIALIZED (
            SELECT a.*, row_number() OVER (PARTITION BY a.run, a.step
                ORDER BY duration_us DESC, begin_us, request_id) AS place
            FROM selected AS a JOIN bounds AS b
                ON a.run = b.run AND a.step IS NOT DISTINCT FROM b.step
            WHERE duration_us >= longest_us[-1]
            QUALIFY place <= {int(count)}
        ), calls AS (
            SELECT run, step, name, validate, request_id, turn, duration_us, 'engine' AS what
            FROM engine_calls SEMI JOIN chosen USING (run, request_id)
            UNION ALL
            SELECT run, step, name, validate, request_id, turn, duration_us, coalesce(tool, 'tool')
            FROM tool_calls SEMI JOIN chosen USING (run, request_id) UNION ALL
            -- All tool calls of a turn together, where they are not there one by one.
            SELECT run, step, name, validate, request_id, turn, sum(duration_us)::BIGINT, 'tool'
            FROM event_fields SEMI JOIN chosen USING (run, request_id)
                ANTI JOIN tool_calls USING (run, name, request_id, turn)
            WHERE event = 'tool_execution' AND family = 'rollout' AND turn IS NOT NULL
            GROUP BY ALL HAVING sum(duration_us) > 0
        ), longest AS (
            SELECT run, step, name, validate, request_id,
                arg_max({{'what': what, 'turn': turn, 'duration_us': duration_us}},
                    (duration_us, -turn)) AS call
            FROM calls GROUP BY run, step, name, validate, request_id
        )
        SELECT c.run, c.step, c.name, c.request_id, c.sample, c.session, c.status, c.turns,
            c.duration_us / 1e6 AS duration_s, {listed},
            l.call.what AS longest, l.call.turn AS longest_turn,
            l.call.duration_us / 1e6 AS longest_s
        FROM chosen AS c LEFT JOIN longest AS l USING (run, step, name, validate, request_id)
        ORDER BY c.run, c.step, c.place
        """
    )


def request_duration_cdf(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Return the curve of request durations, for each step and for all of them.

    Returns:
        Table `request_duration_cdf`: one row per run, step (None for all steps together) and
        point, shortest first.  Every point is a finished request.  Up to 1,000 requests have a
        point each; of more requests, each thousandth part has one, and so have the 100 slowest.
    """
    return tables.rows(
        f"""
        WITH chosen AS (
            SELECT run, step, duration_us FROM requests
            WHERE finished AND {rows_of(steps, worker=worker, validate=validate)}
        ), placed AS (
            SELECT *, row_number() OVER (PARTITION BY run, step ORDER BY duration_us) AS place,
                count(*) OVER (PARTITION BY run, step) AS requests
            FROM (FROM chosen WHERE step IS NOT NULL
                UNION ALL SELECT * REPLACE (NULL AS step) FROM chosen)
        )
        SELECT run, step, requests, place / requests AS share, duration_us / 1e6 AS duration_s
        FROM placed
        WHERE requests <= {_POINTS} OR place > requests - {_LAST}
            OR place * {_POINTS} // requests > (place - 1) * {_POINTS} // requests
        ORDER BY run, step NULLS FIRST, place
        """
    )


def request_percentiles(
    tables: Tables,
    steps: Steps = None,
    *,
    worker: int | None = None,
    validate: bool = False,
) -> Rows:
    """Return percentiles of request durations, for each step and for all of them.

    Returns:
        Table `request_percentiles`: one row per run, step (None for all steps together) and
        percentile; of too few requests, without a duration.
    """
    names = ", ".join(map(str, _PERCENTILES))
    where = rows_of(steps, worker=worker, validate=validate)
    return tables.rows(
        f"""
        SELECT run, step, requests - unfinished AS requests, unfinished, mean_us / 1e6 AS mean_s,
            unnest([{names}]::DOUBLE[]) AS percentile, unnest(q) / 1e6 AS duration_s
        FROM (
            FROM ({summed_requests("run, step", where)}) WHERE step IS NOT NULL
            UNION ALL BY NAME FROM ({summed_requests("run", where)})
        ) WHERE requests > unfinished ORDER BY run, step NULLS FIRST, percentile
        """
    )


def request_breakdown(
    tables: Tables,
    steps: Steps = None,
    *,
    worker: int | None = None,
    validate: bool | None = False,
    request_id: str | None = None,
    count: int | None = 20,
    each_run: bool = True,
) -> Rows:
    """Divide the time of the slowest requests, over all selected steps and workers, into components.

    `validate` is None for training and validation; `request_id` narrows to ids that begin so; `count` is None for all,
    and is of each run with `each_run`.

    Returns:
        Table `request_breakdown`: one row per request, slowest first, unfinished ones last.
    """
    parts = ", ".join(
        f"{part}_us / 1e6 AS {part}_s" for part in (*REQUEST_PARTS, "other", "overlap")
    )
    same = " AND ".join(
        f"{{other}}.{key} IS NOT DISTINCT FROM c.{key}"
        for key in ("run", "step", "name", "validate", "request_id")
    )
    narrowed = "" if request_id is None else "AND starts_with(request_id, $request_id)"
    order = "finished DESC, duration_us DESC, begin_us, run, step, name, request_id"
    limit = "" if count is None else f"ORDER BY {order} LIMIT {int(count)}"
    if each_run and count is not None:
        limit = f"QUALIFY row_number() OVER (PARTITION BY run ORDER BY {order}) <= {int(count)}"
    return tables.rows(
        f"""
        WITH chosen AS (
            SELECT * FROM requests
            WHERE {rows_of(steps, worker=worker, validate=validate)} {narrowed} {limit}
        ), engines AS (
            SELECT run, step, name, validate, request_id, sum(queue_us) AS queue_us,
                sum(prefill_us) AS prefill_us, sum(decode_us) AS decode_us,
                sum(duration_us - queue_us - prefill_us - decode_us) AS outside_us
            FROM engine_calls WHERE request_id IN (SELECT request_id FROM chosen)
            GROUP BY ALL HAVING count(queue_us + prefill_us + decode_us) = count(*)
        ), stalls AS (
            SELECT c.run, c.step, c.name, c.validate, c.request_id,
                sum(least(c.last_us, g.end_us) - greatest(c.begin_us, g.begin_us)) AS stalled_us
            FROM chosen AS c JOIN lags AS g ON g.run = c.run AND g.name = c.name
                AND g.begin_us < c.last_us AND g.end_us > c.begin_us
            GROUP BY ALL
        )
        SELECT c.run, c.step, c.name, c.validate, c.request_id, sample, session, agent, status,
            error, finished, turns, tool_calls, prompt_tokens, response_tokens, generated_tokens,
            tool_tokens, reward, begin_us, duration_us / 1e6 AS duration_s,
            (last_us - begin_us) / 1e6 AS seen_s, {parts}, e.queue_us / 1e6 AS queue_s,
            e.prefill_us / 1e6 AS prefill_s, e.decode_us / 1e6 AS decode_s,
            e.outside_us / 1e6 AS outside_s, coalesce(s.stalled_us, 0) / 1e6 AS stalled_s
        FROM chosen AS c LEFT JOIN engines AS e ON {same.format(other="e")}
            LEFT JOIN stalls AS s ON {same.format(other="s")}
        ORDER BY finished DESC, c.duration_us DESC, begin_us, c.run, c.step, c.name, c.request_id
        """,
        {} if request_id is None else {"request_id": request_id},
    )


def request_timeline(
    tables: Tables, request_id: str, step: int | None = None, *, validate: bool | None = None
) -> Rows:
    """List everything that happened in one request, in order.

    Ids can repeat from step to step and in validation: then `step` and `validate` distinguish them.

    Returns:
        Table `request_timeline`: one row per interval.  Events of other processes (the
        engine's) have those processes' names.
    """
    steps = None if step is None else (step, step)
    return tables.rows(
        f"""
        WITH every AS (
            SELECT run, step, name, validate, event, turn,
                coalesce(tool, server, "of", op) AS what, status, error, begin_us, end_us,
                duration_us, response_tokens AS tokens,
                NULL::BIGINT AS queue_us, NULL::BIGINT AS prefill_us, NULL::BIGINT AS decode_us
            FROM event_fields WHERE request_id = $1 AND duration_us IS NOT NULL
                AND role = 'agent_loop' AND {rows_of(steps, validate=validate)}
            UNION ALL
            SELECT run, step, engine_name, validate, 'engine_request', turn, server, status, error,
                engine_begin_us, engine_end_us, engine_duration_us, response_tokens, queue_us,
                prefill_us, decode_us
            FROM engine_calls WHERE request_id = $1 AND engine_name IS NOT NULL
                AND {rows_of(steps, validate=validate)}
        ), starts AS (
            SELECT run, step, validate, min(begin_us) AS start_us FROM requests
            WHERE request_id = $1 AND {rows_of(steps, validate=validate)}
            GROUP BY run, step, validate
        )
        SELECT e.run, e.step, e.name, e.validate, event, turn, what, status, error,
            (begin_us - start_us) / 1e6 AS begin_s, (end_us - start_us) / 1e6 AS end_s,
            duration_us / 1e6 AS duration_s, tokens, queue_us / 1e6 AS queue_s,
            prefill_us / 1e6 AS prefill_s, decode_us / 1e6 AS decode_s
        FROM every AS e JOIN starts AS s ON e.run = s.run AND e.step IS NOT DISTINCT FROM s.step
            AND e.validate IS NOT DISTINCT FROM s.validate
        ORDER BY e.run, e.step, begin_us, end_us DESC, event
        """,
        [request_id],
    )


def turn_times(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Summarize turns by their index, from 0.

    Returns:
        Table `turn_times`: one row per run and turn.
    """
    means = ", ".join(f"avg({part}_us) FILTER (finished) / 1e6 AS {part}_s" for part in _TURN_PARTS)
    listed = ", ".join(f"{part}_s" for part in _TURN_PARTS)
    known = " + ".join(f"{part}_us" for part in _TURN_PARTS)
    return tables.rows(
        f"""
        SELECT run, turn, turns, unfinished, total_us / 1e6 AS total_s,
            total_us / nullif(sum(total_us) OVER (PARTITION BY run), 0) AS share,
            mean_us / 1e6 AS mean_s, q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p80_s, q[3] / 1e6 AS p95_s,
            q[4] / 1e6 AS p99_s, max_us / 1e6 AS max_s, {listed}, overlap_s, prompt_tokens,
            response_tokens, estimated
        FROM (
            SELECT run, turn, count(*) FILTER (finished) AS turns,
                count(*) FILTER (NOT finished) AS unfinished,
                coalesce(sum(duration_us), 0) AS total_us, avg(duration_us) AS mean_us,
                {quantiles("duration_us", 0.5, 0.8, 0.95, 0.99)} AS q, max(duration_us) AS max_us,
                {means}, avg({known} - duration_us) FILTER (finished) / 1e6 AS overlap_s,
                avg(prompt_tokens) FILTER (finished) AS prompt_tokens,
                avg(response_tokens) FILTER (finished) AS response_tokens,
                bool_or(sampled > 1) AS estimated
            FROM {estimated("turns")} WHERE {rows_of(steps, worker=worker, validate=validate)}
            GROUP BY run, turn
        ) ORDER BY run, turn
        """
    )


def duration_band(curve: Rows) -> Rows:
    """Return the fastest and the slowest step's duration at each share of the requests.

    Args:
        curve: Of `request_duration_cdf`.

    Returns:
        One row per percent: share, low and high.
    """
    steps = grouped((row for row in curve if row["step"] is not None), "step").values()
    band: Rows = []
    for percent in range(1, 101):
        share = percent / 100
        reached = [
            next(row["duration_s"] for row in own if row["share"] >= share - 1e-9) for own in steps
        ]
        band.append({"share": share, "low": min(reached), "high": max(reached)})
    return band
