"""Who makes others wait, how much, and why: requests, tools, workers, replicas and ranks.

Whoever is done waits until the last of its kind is done.  Each moment of that waiting is charged in
equal parts to those that are not done yet; so all blame adds up to all waiting.
"""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.tables import Tables

__all__ = ["REASONS", "straggler_requests", "stragglers"]

# Why a request ended later than the median one of its step.
REASONS: dict[str, str] = {
    "late": "it began later",
    "queued": "it waited in the engine or on the way there",
    "long": "it had more to generate, or longer prompts",
    "slow": "it took longer per token",
    "tool": "it waited for tools",
    "other": "reward, post-processing and what no event explains",
}

# Waiting of those that are done, charged to those that are not: for the k-th of n to end, the sum
# over the gaps before its end of (number done) / (number not done).
_BLAME = """
    SELECT *, sum(gap_us * (place - 1) / (many - place + 1)) OVER (
            PARTITION BY run, step, kind, part ORDER BY place
            ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS blame_us
    FROM (
        SELECT *, row_number() OVER ordered AS place,
            count(*) OVER (PARTITION BY run, step, kind, part) AS many,
            coalesce(end_us - lag(end_us) OVER ordered, 0) AS gap_us
        FROM {ends}
        WINDOW ordered AS (PARTITION BY run, step, kind, part ORDER BY end_us, who)
    )
"""

# What a request's time after the step's first begin consists of, and the median request's.  Decoding
# is tokens times time per token; each of the two is charged with what it adds.
_REASONS = """
    calls AS (
        SELECT run, step, name, request_id, sum(duration_us) AS call_us,
            sum(coalesce(engine_duration_us, duration_us) - coalesce(queue_us, 0)
                - coalesce(prefill_us, 0)) AS decode_us,
            sum(coalesce(prefill_us, 0)) AS prefill_us, sum(response_tokens) AS tokens
        FROM engine_calls WHERE duration_us IS NOT NULL AND NOT validate AND {within} GROUP BY ALL
    ), parts AS (
        SELECT r.run, r.step, r.name, r.request_id, r.sample, r.begin_us, r.end_us,
            r.end_us - min(r.begin_us) OVER of_step AS whole_us,
            r.begin_us - min(r.begin_us) OVER of_step AS late_us,
            coalesce(c.call_us - c.decode_us - c.prefill_us, 0) AS queued_us,
            coalesce(c.prefill_us, 0) AS prefill_us, coalesce(c.decode_us, 0) AS decode_us,
            greatest(coalesce(c.tokens, 0), 1) AS tokens, coalesce(r.tool_us, 0) AS tool_us
        FROM requests AS r LEFT JOIN calls AS c USING (run, step, name, request_id)
        WHERE r.finished AND NOT r.validate AND {of_requests}
        WINDOW of_step AS (PARTITION BY r.run, r.step)
    ), typical AS (
        SELECT run, step, median(whole_us) AS whole_us, median(late_us) AS late_us,
            median(queued_us) AS queued_us, median(prefill_us) AS prefill_us,
            median(tool_us) AS tool_us, median(tokens) AS tokens,
            median(decode_us / tokens) AS token_us
        FROM parts GROUP BY run, step
    ), excess AS (
        SELECT p.run, p.step, p.name, p.request_id, p.sample, p.end_us,
            p.whole_us - t.whole_us AS behind_us, p.late_us - t.late_us AS late_us,
            p.queued_us - t.queued_us AS queued_us,
            p.prefill_us - t.prefill_us + (p.tokens - t.tokens) * t.token_us AS long_us,
            p.tokens * (p.decode_us / p.tokens - t.token_us) AS slow_us,
            p.tool_us - t.tool_us AS tool_us
        FROM parts AS p JOIN typical AS t USING (run, step)
    ), reasons AS (
        SELECT *, behind_us - late_us - queued_us - long_us - slow_us - tool_us AS other_us
        FROM excess
    ), ends AS (
        SELECT *, 'request' AS kind, '' AS part, coalesce(request_id, name) AS who FROM reasons
    ), blamed AS (
        {blame}
    ), told AS (
        SELECT *, CASE greatest(late_us, queued_us, long_us, slow_us, tool_us, other_us)
            WHEN late_us THEN 'late' WHEN queued_us THEN 'queued' WHEN long_us THEN 'long'
            WHEN slow_us THEN 'slow' WHEN tool_us THEN 'tool' ELSE 'other' END AS because
        FROM blamed
    )
"""


def _reasons(steps: Steps) -> str:
    return _REASONS.format(
        within=in_steps(steps),
        of_requests=in_steps(steps, "r.step"),
        blame=_BLAME.format(ends="ends"),
    )


def straggler_requests(tables: Tables, steps: Steps = None, count: int = 10) -> Rows:
    """Find the requests that others waited for most, and why.

    Returns:
        At most `count` rows, most blame first: run, step, name, request_id, sample, blame_s (the
        others' waiting that is charged to it), share (of all waiting for requests in the step),
        behind_s (how much later than the median request it ended), because (a key of `REASONS`: the
        largest part of that), and the parts late_s, queued_s, long_s, slow_s, tool_s and other_s,
        which add up to behind_s.  Only finished training requests.
    """
    return tables.rows(
        f"""
        WITH {_reasons(steps)}
        SELECT run, step, name, request_id, sample, blame_us / 1e6 AS blame_s,
            blame_us / nullif(sum(blame_us) OVER (PARTITION BY run, step), 0) AS share,
            behind_us / 1e6 AS behind_s, because,
            {", ".join(f"{reason}_us / 1e6 AS {reason}_s" for reason in REASONS)}
        FROM told QUALIFY blame_us > 0
        ORDER BY blame_us DESC, run, step, name, request_id LIMIT {int(count)}
        """
    )


def stragglers(tables: Tables, steps: Steps = None) -> Rows:
    """Say who makes others wait, over all chosen steps.

    Returns:
        One row per run, kind and who, most blame first within a kind: kind (`request`, whose who is
        the reason, a key of `REASONS`; `tool`, which is charged with a request's blame in
        proportion to its part of what the request was behind; `worker` and `replica`, by when the
        last request or generate call of each was done; or a phase of the trainer, whose who is a
        rank's process), steps (in which it was charged), of_steps, last (steps in which it was the
        last), blame_s (others' waiting charged to it, in all steps), per_step_s (blame_s by
        of_steps), share (of the blame of its kind).
    """
    tables.make("requests", "engine_calls", "phases")
    return tables.rows(
        f"""
        WITH {_reasons(steps)}, by_tool AS (
            SELECT t.run, t.step, t.tool, t.name, t.request_id, sum(t.duration_us) AS tool_us
            FROM tool_calls AS t WHERE NOT validate AND t.duration_us IS NOT NULL
                AND {in_steps(steps, "t.step")} GROUP BY ALL
        ), tools AS (
            SELECT b.run, b.step, 'tool' AS kind, coalesce(t.tool, 'tool') AS who,
                bool_or(b.place = b.many) AS last,
                sum(b.blame_us * least(b.tool_us / b.behind_us, 1)
                    * t.tool_us / nullif(all_us, 0)) AS blame_us
            FROM told AS b JOIN (
                SELECT *, sum(tool_us) OVER (PARTITION BY run, step, name, request_id) AS all_us
                FROM by_tool
            ) AS t USING (run, step, name, request_id)
            WHERE b.tool_us > 0 AND b.behind_us > 0
            GROUP BY b.run, b.step, t.tool
        ), others AS (
            SELECT run, step, 'worker' AS kind, '' AS part, name AS who, max(end_us) AS end_us
            FROM requests WHERE finished AND NOT validate AND {in_steps(steps)} GROUP BY ALL
            UNION ALL
            SELECT run, step, 'replica', '', engine_name, max(engine_end_us)
            FROM engine_calls WHERE engine_name IS NOT NULL AND NOT validate AND {in_steps(steps)}
            GROUP BY ALL
            UNION ALL
            SELECT p.run, p.step, p.phase, p.begin_us::VARCHAR, r.name, max(r.end_us)
            FROM phases AS p JOIN rank_spans AS r ON r.run = p.run AND r.step = p.step
                AND r.role NOT IN ('trainer', 'engine')
                AND (r.begin_us + r.end_us) // 2 BETWEEN p.begin_us AND p.end_us
            WHERE p.parent = 'step' AND p.phase <> 'gen' AND {in_steps(steps, "p.step")}
            GROUP BY ALL
        ), charged AS (
            SELECT run, step, kind, who, place = many AND many > 1 AS last, blame_us
            FROM ({_BLAME.format(ends="others")})
            UNION ALL
            SELECT run, step, kind, because, place = many AND many > 1, blame_us FROM told
            UNION ALL
            SELECT run, step, kind, who, last, blame_us FROM tools
        ), summed AS (
            SELECT run, kind, who, count(DISTINCT step) FILTER (blame_us > 0) AS steps,
                count(DISTINCT step) FILTER (last) AS last, sum(blame_us) AS blame_us
            FROM charged GROUP BY run, kind, who
        ), counted AS (
            SELECT run, kind, count(DISTINCT step) AS of_steps FROM charged GROUP BY run, kind
        )
        SELECT s.run, s.kind, who, steps, of_steps, last, blame_us / 1e6 AS blame_s,
            blame_us / of_steps / 1e6 AS per_step_s,
            blame_us / nullif(sum(blame_us) OVER (PARTITION BY s.run, s.kind), 0) AS share
        FROM summed AS s JOIN counted AS c ON c.run = s.run AND c.kind = s.kind
        WHERE blame_us > 0
        ORDER BY s.run, s.kind NOT IN ('request', 'tool', 'worker', 'replica'), s.kind,
            blame_us DESC, who
        """
    )
