"""How many versions of the weights behind the samples of an asynchronous run were when they were consumed."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, grouped, in_steps
from verl_profiler.reading.tables.tables import Tables

# Prompts that are named.
_PROMPTS = 10


def staleness(tables: Tables, steps: Steps = None) -> Rows:
    """Count how many weight versions each sample was behind the trainer that consumed it.

    Only of asynchronous runs; `steps` are those that consumed. A sample is `waited` versions behind
    because it lay in the queue after its last token, and `spanned` versions more because its tokens
    were made by several. A token is off-policy if older weights than the trainer's made it.

    Returns:
        Table `staleness`: one row per run, step, part and what.
    """
    if not tables.row("SELECT run FROM asynchronous LIMIT 1"):
        return []
    return tables.rows(_ROWS.replace("{chosen}", in_steps(steps, "consumed_step")))


_ROWS = f"""
WITH taken AS (
    SELECT row_number() OVER (ORDER BY run, consumed_step, uid, session) AS number, run,
        consumed_step AS step, uid, session, trainer_version AS version,
        min_weight_version = max_weight_version AS single,
        trainer_version - max_weight_version AS waited,
        max_weight_version - min_weight_version AS spanned,
        trainer_version - min_weight_version AS behind
    FROM samples WHERE fate = 'consumed' AND {{chosen}} AND run IN (SELECT run FROM asynchronous)
        AND trainer_version IS NOT NULL AND min_weight_version IS NOT NULL
), calls AS (
    SELECT run, request_id, attempt, weight_version, response_tokens FROM engine_attempts
    UNION ALL
    SELECT run, request_id, 0, weight_version, response_tokens
    FROM engine_calls ANTI JOIN engine_attempts USING (run, request_id, turn)
    UNION ALL
    SELECT run, request_id, 0, NULL, generated_tokens FROM requests WHERE NOT detailed
), made AS (
    -- A version without tokens changes nothing.
    SELECT t.number, c.attempt, coalesce(c.response_tokens, 0) AS tokens,
        CASE WHEN t.single THEN t.behind
            ELSE t.version - try_cast(c.weight_version AS BIGINT) END AS behind
    FROM taken AS t
    JOIN requests AS r ON r.run = t.run AND r.uid = t.uid AND NOT r.validate
        AND r.session IS NOT DISTINCT FROM t.session
    JOIN calls AS c ON c.run = r.run AND c.request_id = r.request_id
), whole AS (
    SELECT t.*, coalesce(m.tokens, 0) AS tokens, coalesce(m.off, 0) AS off,
        coalesce(m.unknown, 0) AS unknown, coalesce(m.resumed, false) AS resumed
    FROM taken AS t LEFT JOIN (
        SELECT number, sum(tokens) AS tokens, sum(tokens) FILTER (behind > 0) AS off,
            sum(tokens) FILTER (behind IS NULL) AS unknown, bool_or(attempt > 0) AS resumed
        FROM made GROUP BY number
    ) AS m USING (number)
), sized AS (
    SELECT number, 'length' AS part, tokens, ' tokens' AS unit FROM whole
    UNION ALL
    SELECT t.number, 'prompt_length', max(r.prompt_tokens), ' prompt tokens'
    FROM taken AS t JOIN requests AS r ON r.run = t.run AND r.uid = t.uid AND NOT r.validate
        AND r.session IS NOT DISTINCT FROM t.session
    WHERE r.prompt_tokens IS NOT NULL GROUP BY t.number
), quartiles AS (
    SELECT run, part, quantile_disc(s.tokens, [0.25, 0.5, 0.75]) AS ends
    FROM sized AS s JOIN taken USING (number) GROUP BY run, part
), binned AS (
    SELECT w.*, s.part, s.tokens AS size, s.unit,
        len(list_filter(q.ends, lambda each: each < s.tokens)) AS bin
    FROM whole AS w JOIN sized AS s USING (number) JOIN quartiles AS q ON q.run = w.run
        AND q.part = s.part
), stalest AS (
    SELECT run, uid FROM whole GROUP BY run, uid
    QUALIFY row_number() OVER (PARTITION BY run ORDER BY avg(behind) DESC, sum(tokens) DESC, uid)
        <= {_PROMPTS}
), grouped AS (
    SELECT *, 'all' AS part, 0 AS place, 'all' AS what FROM whole
    UNION ALL
    SELECT * EXCLUDE (part, size, unit, bin), part, bin,
        concat_ws(' to ', min(size) OVER bins, nullif(max(size) OVER bins, min(size) OVER bins)) || unit
    FROM binned WINDOW bins AS (PARTITION BY run, part, bin)
    UNION ALL SELECT *, 'attempts', resumed::INT,
        if(resumed, 'aborted and resumed', 'not aborted') FROM whole
    UNION ALL SELECT *, 'prompt', 0, uid FROM whole SEMI JOIN stalest USING (run, uid)
), counted AS (
    SELECT run, step, part, place, what, count(*) AS samples, avg(waited) AS waited,
        avg(spanned) AS spanned, avg(behind) AS behind, max(behind) AS max_behind,
        sum(tokens) AS tokens, sum(off) AS off, sum(unknown) AS unknown
    FROM grouped GROUP BY run, step, part, place, what
    UNION ALL BY NAME
    SELECT run, step, 'versions' AS part, behind AS place, behind::VARCHAR AS what,
        sum(samples) AS samples, behind AS max_behind, sum(tokens) AS tokens,
        if(behind > 0, sum(tokens), 0) AS off, 0 AS unknown
    FROM (
        SELECT run, step, behind, 1 AS samples, 0 AS tokens FROM whole
        UNION ALL
        SELECT run, step, m.behind, 0, m.tokens FROM made AS m JOIN taken USING (number)
        WHERE m.behind IS NOT NULL AND m.tokens > 0
    ) GROUP BY run, step, behind
), logged AS (
    SELECT run, step,
        max(number_of(rest, '$.metrics."training/off_policy/trajectory_staleness/mean"')) AS waited,
        max(number_of(rest, '$.metrics."training/off_policy/trajectory_staleness_worst/mean"')) AS behind
    FROM event_fields WHERE event = 'metrics' GROUP BY run, step
)
SELECT c.run, c.step, part, what, samples::BIGINT AS samples, c.waited, spanned, c.behind, max_behind,
    tokens::BIGINT AS tokens, off::BIGINT AS off_policy_tokens, unknown::BIGINT AS unknown_tokens,
    CASE WHEN tokens > unknown THEN off / (tokens - unknown) END AS off_policy_share,
    CASE part WHEN 'all' THEN l.waited END AS logged_waited,
    CASE part WHEN 'all' THEN l.behind END AS logged_behind
FROM counted AS c LEFT JOIN logged AS l USING (run, step)
ORDER BY run, array_position(['all', 'versions', 'length', 'prompt_length', 'attempts', 'prompt'], part),
    if(part = 'prompt', -c.behind, 0), step, place, what
"""


def staleness_of(rows: Rows, part: str) -> Rows:
    """Return the rows of `staleness` of one part, over all steps: means over samples, sums of samples and tokens."""
    found: Rows = []
    for what, own in grouped((row for row in rows if row["part"] == part), "what").items():
        sums = {
            name: sum(row[name] for row in own)
            for name in ("samples", "tokens", "off_policy_tokens", "unknown_tokens")
        }
        known = sums["tokens"] - sums["unknown_tokens"]
        means = {
            name: sum((row[name] or 0) * row["samples"] for row in own) / max(sums["samples"], 1)
            for name in ("waited", "spanned", "behind")
        }
        found.append(
            {
                "what": what,
                **sums,
                **means,
                "max_behind": max(row["max_behind"] for row in own),
                "off_policy_share": sums["off_policy_tokens"] / known if known else None,
            }
        )
    return found
