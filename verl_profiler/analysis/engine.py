"""What generate calls consist of, how fast they returned tokens, where they went, and how full the engines were."""

from __future__ import annotations

import heapq
from typing import Any

from verl_profiler.analysis.selection import (
    Rows,
    Steps,
    after_warm_up,
    estimated,
    in_steps,
    rows_of,
)
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables

_TOKENS = "prompt_tokens, generated_tokens, cached_tokens"
_PARTS = f"""calls, served, total_us / 1e6 AS total_s, q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p95_s,
    max_us / 1e6 AS max_s, queue_us / 1e6 AS queue_s, prefill_us / 1e6 AS prefill_s,
    decode_us / 1e6 AS decode_s, outside_us / 1e6 AS outside_s, {_TOKENS},
    generated_tokens / nullif(busy_s, 0) AS engine_tokens_per_s, retractions,
    accepted_draft_tokens / nullif(draft_tokens, 0) AS draft_acceptance, estimated"""
_RATES = f"""calls, {_TOKENS}, busy_s, generated_tokens / nullif(busy_s, 0) AS engine_tokens_per_s,
    timed_tokens / nullif(total_us / 1e6, 0) AS call_tokens_per_s, estimated"""


def _calls(group: str, where: str) -> str:
    """Return the SQL of generate calls, summed up by `group`, for `_PARTS` and `_RATES`.

    Args:
        group: Columns, `place` among them or not: the engine's process, else the server's address.
        where: Which calls.
    """
    return f"""(
        SELECT {group}, count(*) AS calls, count(engine_duration_us) AS served,
            sum(duration_us) AS total_us, {quantiles("duration_us", 0.5, 0.95)} AS q,
            max(duration_us) AS max_us, sum(queue_us) AS queue_us, sum(prefill_us) AS prefill_us,
            sum(decode_us) AS decode_us, sum(outside_us) AS outside_us,
            try_cast(sum(prompt_tokens) AS BIGINT) AS prompt_tokens,
            try_cast(sum(response_tokens) AS BIGINT) AS generated_tokens,
            try_cast(sum(cached_tokens) AS BIGINT) AS cached_tokens,
            try_cast(sum(retractions) AS BIGINT) AS retractions,
            sum(draft_tokens) AS draft_tokens, sum(accepted_draft_tokens) AS accepted_draft_tokens,
            -- Of sampled calls nobody can tell when others ran.
            CASE WHEN coalesce(max(sampled), 1) = 1
                THEN sum(greatest(end_us - greatest(begin_us, covered_us), 0)) / 1e6 END AS busy_s,
            sum(response_tokens) FILTER (duration_us IS NOT NULL) AS timed_tokens,
            bool_or(sampled > 1) AS estimated
        FROM (
            SELECT *, coalesce(max(end_us) OVER (
                PARTITION BY {group} ORDER BY begin_us, end_us
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_us) AS covered_us
            FROM (
                SELECT *, coalesce(engine_name, server, '(not recorded)') AS place
                FROM {estimated("engine_calls")}
            ) WHERE {where}
        ) GROUP BY {group}
    )"""


def engine_times(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize generate calls by step.

    Returns:
        Table `engine_times`: one row per run, step and validate.
    """
    keys = "run, step, validate"
    return tables.rows(
        f"SELECT {keys}, {_PARTS} FROM {_calls(keys, in_steps(steps))} ORDER BY {keys}"
    )


def replica_balance(tables: Tables, steps: Steps = None) -> Rows:
    """Compare the replicas in training.

    Returns:
        Table `replica_balance`: one row per run, step and server, most time first.
    """
    calls = _calls("run, step, place", f"NOT validate AND {in_steps(steps)}")
    return tables.rows(
        f"SELECT run, step, nullif(place, '(not recorded)') AS server, {_PARTS} FROM {calls} "
        "ORDER BY run, step, total_s DESC, server"
    )


def token_rates(tables: Tables, steps: Steps = None) -> Rows:
    """Count the tokens of each step, as generate calls report them.

    A conversation's tokens are prompt tokens again in every later turn of it.

    Returns:
        Table `token_rates`: one row per run and step.
    """
    return tables.rows(
        f"""
        SELECT c.run, c.step, {_RATES}, generated_tokens_per_s
        FROM {_calls("run, step", rows_of(steps, validate=False))} AS c
        LEFT JOIN (
            SELECT run, step, generated_tokens_per_s FROM steps WHERE finished AND {in_steps(steps)}
        ) AS s ON s.run = c.run AND s.step = c.step
        ORDER BY c.run, c.step
        """
    )


def request_token_rates(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize the tokens of finished requests.

    Returns:
        Table `request_token_rates`: one row per run and step.
    """
    return tables.rows(
        f"""
        SELECT run, step, requests, prompt_p50, prompt_max, generated_q[1] AS generated_p50,
            generated_q[2] AS generated_p95, generated_max, rates[1] AS rate_p5, rates[2] AS rate_p50,
            rates[3] AS rate_p95
        FROM (
            SELECT run, step, count(*) AS requests,
                {quantiles("prompt_tokens", 0.5)}[1] AS prompt_p50, max(prompt_tokens) AS prompt_max,
                {quantiles("generated_tokens", 0.5, 0.95)} AS generated_q,
                max(generated_tokens) AS generated_max,
                {quantiles("generated_tokens * 1e6 / nullif(engine_us, 0)", 0.05, 0.5, 0.95)}
                    AS rates
            FROM requests
            WHERE finished AND generated_tokens IS NOT NULL
                AND {rows_of(steps, validate=False)}
            GROUP BY run, step
        ) ORDER BY run, step
        """
    )


# Parts of generate calls, in the order in which a call goes through them.
CALL_PARTS: dict[str, str] = {
    "outside": "outside the engine",
    "parked": "while the engine was paused",
    "queue": "in the engine's queue",
    "cold": "prefill of tokens that were cached before",
    "prefill": "prefill of new tokens",
    "recomputed": "retracted or aborted, and recomputed",
    "decode": "decoding",
    "undivided": "not divided: times not recorded",
}
# Of calls with undivided time.
UNRECORDED = (
    "queue, prefill and decode times were not recorded (SGLang and vLLM report them with "
    "profiler.events.engine_timing=true)"
)


def request_engine_time(
    tables: Tables,
    steps: Steps = None,
    count: int = 20,
    *,
    worker: int | None = None,
    validate: bool = False,
) -> Rows:
    """Split the generate calls' time of the requests with the most of it.

    Returns:
        Table `request_engine_time`: at most `count` rows, one per request, most time first.
        The parts of the time are the keys of `CALL_PARTS`.
    """
    where = rows_of(steps, worker=worker, validate=validate)
    sums = {part: f"sum({part}_us)" for part in CALL_PARTS}
    # One unknown is in the prefill of its call.
    sums["cold"] = "CASE WHEN count(cold_us) = count(*) THEN sum(cold_us) END"
    parts = ", ".join(f"{sums[part]} / 1e6 AS {part}_s" for part in CALL_PARTS)
    largest = f"greatest({', '.join(f'{part}_s' for part in CALL_PARTS)})"
    mostly = " ".join(f"WHEN {part}_s THEN '{part}'" for part in reversed(CALL_PARTS))
    return tables.rows(
        f"""
        WITH summed AS (
            SELECT run, step, name, request_id, count(DISTINCT turn) AS calls,
                count(DISTINCT engine_name) AS replicas, sum(call_us) / 1e6 AS engine_s, {parts},
                sum(decoded_tokens)::BIGINT AS tokens,
                sum(batch * decode_us)
                    / nullif(sum(decode_us) FILTER (batch IS NOT NULL), 0) AS batch,
                count(*) FILTER (moved) AS moved,
                CASE WHEN count(lost_tokens) = count(*) THEN sum(lost_tokens)::BIGINT END AS cold_tokens,
                sum(retractions)::BIGINT AS retractions
            FROM engine_call_times WHERE {where} GROUP BY run, step, name, request_id
            ORDER BY engine_s DESC, run, step, name, request_id LIMIT {int(count)}
        )
        SELECT run, step, name, request_id, calls, replicas, engine_s,
            {", ".join(f"{part}_s" for part in CALL_PARTS)},
            CASE WHEN engine_s > 0 THEN CASE {largest} {mostly} END END AS mostly,
            tokens, CASE WHEN undivided_s = 0 THEN decode_s / nullif(tokens, 0) END AS token_s, batch, moved, cold_tokens, retractions
        FROM summed ORDER BY engine_s DESC, run, step, name, request_id
        """
    )


def engine_load(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize the load of each engine by step.

    An engine receives no step: a reading belongs to the step whose weights it has.  Means and
    shares are by time, each reading until the next one.

    Returns:
        Table `engine_load`: one row per run, step, engine process and data-parallel rank.
    """
    return tables.rows(
        f"""
        WITH readings AS (
            SELECT *, coalesce(held_us, 0) AS us
            FROM engine_states WHERE {in_steps(steps)}
        )
        SELECT run, step, name, dp_rank, replica, count(*) AS readings, sum(us) / 1e6 AS covered_s,
            {_mean("running_requests")} AS running, max(running_requests) AS max_running,
            {_mean("waiting_requests")} AS waiting, max(waiting_requests) AS max_waiting,
            max(running_limit) AS running_limit,
            {_mean("kv_share")} AS kv_share, max(kv_share) AS max_kv_share,
            {_mean("(running_requests = 0)::INTEGER")} AS idle_share,
            {_mean("(waiting_requests > 0)::INTEGER")} AS waiting_share,
            sum(iterations)::BIGINT AS iterations, sum(prefill_tokens)::BIGINT AS prefill_tokens,
            sum(decode_tokens)::BIGINT AS decode_tokens, sum(retractions)::BIGINT AS retractions,
            sum(prefix_hit_tokens) / nullif(sum(prefix_queried_tokens), 0) AS prefix_hit_share
        FROM readings GROUP BY run, step, name, dp_rank, replica
        ORDER BY run, step, name, dp_rank
        """
    )


def _mean(value: str) -> str:
    """Return the SQL of a mean by time, over the readings that have the value."""
    return f"sum({value} * us) / nullif(sum(us) FILTER ({value} IS NOT NULL), 0)"


def engine_load_over_time(tables: Tables, steps: Steps = None) -> Rows:
    """Return the readings of each engine in order.

    Returns:
        Table `engine_load_over_time`: one row per run, engine process, data-parallel rank and
        reading.
    """
    return tables.rows(
        f"""
        SELECT run, name, dp_rank, step, (at_us - min(at_us) OVER (PARTITION BY run)) / 1e6 AS at_s,
            held_us / 1e6 AS held_s, running_requests, waiting_requests, running_limit,
            kv_share
        FROM engine_states WHERE {in_steps(steps)} ORDER BY run, name, dp_rank, at_us
        """
    )


# Parts of a call inside the engine, in the order in which they are drawn.
LANE_PARTS = ("parked", "queue", "cold", "prefill", "recomputed", "decode", "undivided")


def engine_lanes(tables: Tables, steps: Steps = None) -> Rows:
    """Lay the calls of each engine out in lanes, so that calls of one lane do not overlap.

    A call takes the lowest lane that is free when it arrives at the engine: the number of lanes is the
    highest number of calls that were there at once, those in the queue included.  Seconds are counted from
    the first reading of the engines in these steps (as in `engine_load_over_time`); without readings from
    the first call.

    Returns:
        Table `engine_lanes`: one row per run, engine process and generate call (or attempt of one) that
        the engine served.
    """
    parts = ", ".join(f"{part}_us" for part in LANE_PARTS)
    rows = tables.rows(
        f"""
        WITH served AS (
            SELECT *, greatest(queue_from_us - coalesce(parked_us, 0), begin_us)::BIGINT AS arrived_us
            FROM engine_call_times WHERE engine_name IS NOT NULL AND {in_steps(steps)}
        ), origins AS (
            SELECT run, coalesce(read_us, arrived_us) AS from_us
            FROM (SELECT run, min(arrived_us) AS arrived_us FROM served GROUP BY run) LEFT JOIN (
                SELECT run, min(at_us) AS read_us FROM engine_states WHERE {in_steps(steps)}
                GROUP BY run) USING (run)
        )
        SELECT run, engine_name AS name, step, request_id, turn, attempt, validate, retractions,
            arrived_us, arrived_us - from_us AS since_us, {parts}
        FROM served JOIN origins USING (run)
        ORDER BY run, engine_name, arrived_us, request_id, turn, attempt
        """
    )
    lanes: dict[tuple[str, str], _Lanes] = {}
    found: Rows = []
    for row in rows:
        lengths = {
            part: None if row[f"{part}_us"] is None else max(row[f"{part}_us"], 0) / 1e6
            for part in LANE_PARTS
        }
        begin_s = row["since_us"] / 1e6
        engine = lanes.setdefault((row["run"], row["name"]), _Lanes())
        kept = ("run", "name", "step", "request_id", "turn", "attempt", "validate")
        made: dict[str, Any] = {key: row[key] for key in kept}
        made |= {
            "lane": engine.place(begin_s, begin_s + sum(filter(None, lengths.values()))),
            "begin_s": begin_s,
            **{f"{part}_s": length for part, length in lengths.items()},
            "retractions": row["retractions"],
        }
        found.append(made)
    return found


def longest_step(tables: Tables, steps: Steps = None) -> Steps:
    """Return the longest step of these with event files, without the warm-up; None if none has finished."""
    rows = tables.rows(
        "SELECT step FROM steps WHERE finished AND step > 0 AND "
        f"{in_steps(after_warm_up(tables, steps))} ORDER BY duration_us DESC, step LIMIT 1"
    )
    return (rows[0]["step"], rows[0]["step"]) if rows else None


class _Lanes:
    """Gives each interval the lowest lane that is free; intervals come by their begins."""

    def __init__(self) -> None:
        self.busy: list[tuple[float, int]] = []
        self.free: list[int] = []
        self.count = 0

    def place(self, begin_s: float, end_s: float) -> int:
        while self.busy and self.busy[0][0] <= begin_s:
            heapq.heappush(self.free, heapq.heappop(self.busy)[1])
        if self.free:
            lane = heapq.heappop(self.free)
        else:
            lane = self.count
            self.count += 1
        heapq.heappush(self.busy, (end_s, lane))
        return lane


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
