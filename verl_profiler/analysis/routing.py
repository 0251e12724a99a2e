"""How the load balancer spread generate calls over the replicas."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, estimated, rows_of
from verl_profiler.reading.tables.tables import Tables

# run, server (its address) and replica (the process that served the first call sent to it).
REPLICA_NAMES = """
    SELECT r.run, r.server, any_value(c.engine_name) AS replica
    FROM (SELECT run, server, unnest(arg_min({'request_id': request_id, 'turn': turn}, begin_us))
        FROM event_fields WHERE event = 'server_acquire' AND server IS NOT NULL GROUP BY run, server) AS r
        JOIN engine_calls AS c USING (run, request_id, turn)
    GROUP BY r.run, r.server"""


def routes(
    tables: Tables, steps: Steps = None, *, worker: int | None = None, validate: bool = False
) -> Rows:
    """Count the generate calls of each replica, why they went there, and those that another was freer for.

    Loads are the load balancer's own counts of calls in flight, before the call.

    Returns:
        Table `routes`: one row per run, step and server, most calls first.
    """
    where = rows_of(steps, worker=worker, validate=validate)
    return tables.rows(
        f"""
        WITH chosen AS MATERIALIZED (
            SELECT * FROM {estimated("server_routes")}
        ), names AS ({REPLICA_NAMES}), recorded AS (
            SELECT DISTINCT run, true AS loads FROM chosen WHERE in_flight IS NOT NULL
        ), counted AS (
            SELECT run, step, server, count(*) AS calls, count(*) FILTER (sticky) AS sticky,
                count(*) FILTER (reason = 'least_loaded') AS least_loaded,
                count(*) FILTER (reason = 'hash') AS by_hash,
                count(*) FILTER (reason = 'only_one') AS only_one,
                count(*) FILTER (in_flight > least_in_flight) AS unbalanced,
                sum(in_flight - least_in_flight) AS excess,
                max(in_flight - least_in_flight) AS max_excess, bool_or(sampled > 1) AS estimated
            FROM chosen WHERE {where} GROUP BY run, step, server
        )
        SELECT run, step, server, replica, calls,
            calls / sum(calls) OVER (PARTITION BY run, step) AS share, sticky,
            CASE WHEN loads THEN least_loaded END AS least_loaded,
            CASE WHEN loads THEN by_hash END AS by_hash, CASE WHEN loads THEN only_one END AS only_one,
            CASE WHEN loads THEN unbalanced END AS unbalanced,
            CASE WHEN loads THEN coalesce(excess, 0) / calls END AS excess,
            CASE WHEN loads THEN coalesce(max_excess, 0) END AS max_excess, estimated
        FROM counted LEFT JOIN names USING (run, server) LEFT JOIN recorded USING (run)
        ORDER BY run, step, calls DESC, server
        """
    )
