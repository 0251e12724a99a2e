"""How long each step took, what its time went to, by tokens, too; the tail of its rollout; what lies between steps, validation."""

from __future__ import annotations

from collections.abc import Mapping

from verl_profiler.analysis.requests import summed_requests
from verl_profiler.analysis.selection import Rows, Steps, in_steps, rows_of
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.derivations import SYNCHRONOUS
from verl_profiler.reading.tables.tables import Tables

# A step is unusual when it is this many spreads (1.4826 times the median distance to the median)
# away from the median, and three tenths of it: verl polls for finished samples every 2 s, so that
# gen of most steps may have the very same length.
_SPREADS = 4

# verl's timers of rewards, log-probabilities, values, advantages and updates.
_TRAINING = "'reward', 'old_log_prob', 'ref', 'values', 'adv', 'update_critic', 'update_actor'"

# Around `update_weights` in asynchronous trainers.
_SYNCS = "'update_weights', 'sync_rollout_weights', 'param_sync'"

VALIDATIONS = """
    SELECT run, step, testing_us, testing_between_us FROM (
        SELECT run, step, name, sum(duration_us) AS testing_us,
            sum(duration_us) FILTER (parent IS NULL) AS testing_between_us
        FROM phases WHERE phase IN ('testing', 'validation')
            AND coalesce(parent, '') NOT IN ('testing', 'validation')
        GROUP BY run, step, name
    ) QUALIFY row_number() OVER (PARTITION BY run, step ORDER BY testing_us DESC, name) = 1
"""
"""SQL of the length of each step's validation; `testing_between_us` is what is outside the step.

A trainer waits while its rollouter validates: of several processes, it is that of the one with most.
"""

WITH_NEXT = """
    SELECT * EXCLUDE (next_step, next_us),
        CASE WHEN next_step = step + 1 THEN next_us END AS next_us
    FROM (
        SELECT *, lead(step) OVER run_order AS next_step, lead(begin_us) OVER run_order AS next_us
        FROM steps WINDOW run_order AS (PARTITION BY run ORDER BY step)
    )
"""
"""SQL of the steps with `next_us`, the start of the next one: null where that was not recorded.

The time from step to step is `next_us - begin_us`: `to_next_s` of `step_times`, `step_to_step` of diff.
"""


OWN_SPANS = """
SELECT run, step, name, event AS phase, begin_us, end_us FROM event_fields
WHERE family = 'user' AND role = 'trainer' AND duration_us IS NOT NULL
"""
"""SQL of the user's own spans in the trainer."""

TIMED = f"""
    SELECT run, step, name, phase, begin_us, end_us FROM phases
    WHERE parent IS NULL AND phase <> 'step'
    UNION ALL {OWN_SPANS}
"""
"""SQL of what the trainer times outside of steps."""

# What follows the last step is a gap like others if it is at most so many times as long as the longest of them.
_ALIKE = 1.25


def step_gaps(chosen: str) -> str:
    """Return the SQL of what lies between the end of each step of synchronous training and the start of the next.

    The gap after the last step ends with its last timer, if it has one there; or with the trainer's process,
    if an earlier gap took about as long.  Otherwise its end is null.

    Args:
        chosen: SQL condition on the steps `s`.
    """
    return f"""
    WITH ended AS (
        SELECT run, name, epoch_us(try_cast(ended AS TIMESTAMPTZ)) + coalesce(shift_us, 0) AS ended_us
        FROM processes WHERE role = 'trainer'
    ), known AS (
        SELECT s.run, s.step, any_value(p.name) AS name, any_value(s.end_us) AS begin_us,
            any_value(s.next_us) AS next_us, max(t.end_us) AS timed_us
        FROM ({WITH_NEXT}) AS s JOIN phases AS p
            ON p.run = s.run AND p.step = s.step AND p.phase = 'step'
        LEFT JOIN ({TIMED}) AS t ON t.run = s.run AND t.step = s.step AND t.name = p.name
            AND t.begin_us >= s.end_us
        WHERE s.finished AND s.step > 0 AND s.{SYNCHRONOUS} AND {chosen}
        GROUP BY s.run, s.step
    )
    SELECT run, step, name, begin_us, coalesce(next_us, greatest(timed_us, CASE
            WHEN ended_us - begin_us <= {_ALIKE} * max(next_us - begin_us) OVER (PARTITION BY run)
            THEN ended_us END)) AS end_us
    FROM known LEFT JOIN ended USING (run, name)
    """


def step_times(tables: Tables, steps: Steps = None) -> Rows:
    """List the steps.

    Returns:
        Table `step_times`: one row per run and step.
    """
    return tables.rows(
        f"""
        SELECT s.run, s.step, s.finished, s.begin_us,
            CASE WHEN s.finished THEN s.duration_us / 1e6 END AS duration_s,
            s.duration_us / 1e6 AS seen_s,
            g.duration_us / 1e6 AS gen_s, s.unaccounted_us / 1e6 AS unaccounted_s,
            s.requests, s.unfinished_requests, s.validation_requests,
            s.generated_tokens_per_s,
            testing_us / 1e6 AS testing_s, (next_us - s.begin_us) / 1e6 AS to_next_s
        FROM ({WITH_NEXT}) AS s
        LEFT JOIN gens AS g USING (run, step)
        LEFT JOIN ({VALIDATIONS}) USING (run, step)
        WHERE {in_steps(steps, "s.step")} ORDER BY s.run, s.step
        """
    )


def step_phases(tables: Tables, steps: Steps = None) -> Rows:
    """Cut each step into its phases and the rest that no timer covers.

    Returns:
        Table `step_phases`: one row per run, step and phase, longest first, with `unaccounted`
        last.  Where the trainer was not recorded: the phases of the slowest rollout worker.
    """
    return tables.rows(
        f"""
        WITH parts AS (
            SELECT run, step, phase, sum(duration_us) AS duration_us, count(*) AS count,
                false AS rest
            FROM phases WHERE parent = 'step' GROUP BY run, step, phase
            UNION ALL
            SELECT run, step, 'unaccounted', unaccounted_us, 1, true FROM steps WHERE finished
            UNION ALL
            SELECT run, step, phase, max(duration_us), try_cast(sum(count) AS BIGINT), false
            FROM (
                SELECT run, step, phase, p.name, sum(p.duration_us) AS duration_us,
                    count(*) AS count
                FROM phases AS p JOIN steps AS s USING (run, step)
                WHERE NOT s.finished AND phase <> 'step' AND NOT validate
                    AND (parent IS NULL OR parent = 'gen')
                GROUP BY run, step, phase, p.name
            ) GROUP BY run, step, phase
        )
        SELECT p.run, p.step, p.phase, p.duration_us / 1e6 AS duration_s,
            CASE WHEN s.finished AND s.duration_us > 0
                THEN p.duration_us / s.duration_us END AS share,
            p.count
        FROM parts AS p JOIN steps AS s USING (run, step)
        WHERE {in_steps(steps, "p.step")}
        ORDER BY p.run, p.step, p.rest, p.duration_us DESC, p.phase
        """
    )


_DURATIONS = f"""
WITH parts AS (
    SELECT run, step,
        sum(duration_us) FILTER (phase IN ({_SYNCS})) AS weights_us,
        sum(duration_us) FILTER (phase = 'save_checkpoint') AS checkpoint_us,
        sum(duration_us) FILTER (phase IN ({_TRAINING})) AS training_us,
        sum(duration_us) FILTER (phase NOT IN ({_TRAINING}, {_SYNCS}, 'gen',
            'save_checkpoint')) AS other_us
    FROM phases WHERE parent = 'step' GROUP BY run, step
), seen AS (
    SELECT run, step, max(end_us) - min(begin_us) AS requests_us FROM requests
    WHERE finished AND NOT validate GROUP BY run, step
), joined AS (
    SELECT s.run, s.step, s.finished, s.begin_us, s.validation_requests > 0 AS validated,
        CASE WHEN s.finished THEN s.duration_us END AS step_us,
        coalesce(g.duration_us, r.requests_us) AS gen_us,
        CASE WHEN s.finished THEN coalesce(p.training_us, 0) END AS training_us,
        CASE WHEN s.finished THEN coalesce(p.other_us, 0) END AS other_us,
        CASE WHEN s.finished THEN coalesce(p.weights_us, 0) END AS weights_us,
        CASE WHEN s.finished THEN coalesce(p.checkpoint_us, 0) END AS checkpoint_us,
        s.unaccounted_us, t.testing_between_us AS testing_us,
        CASE WHEN next_us >= s.end_us AND s.finished THEN next_us - s.end_us END AS between_us,
        next_us - s.begin_us AS to_next_us
    FROM ({WITH_NEXT}) AS s
    LEFT JOIN parts AS p USING (run, step)
    LEFT JOIN gens AS g USING (run, step)
    LEFT JOIN seen AS r USING (run, step)
    LEFT JOIN ({VALIDATIONS}) AS t USING (run, step)
    WHERE s.finished OR coalesce(g.duration_us, r.requests_us) IS NOT NULL
)
"""


def step_durations(tables: Tables, steps: Steps = None) -> Rows:
    """List what each step's time went to, and the time until the next one.

    Returns:
        Table `step_durations`: one row per run and step.
    """
    return tables.rows(
        f"""
        {_DURATIONS}, measured AS (
            SELECT *, coalesce(step_us, gen_us) AS measure_us,
                median(coalesce(step_us, gen_us)) OVER (PARTITION BY run, finished) AS middle_us
            FROM joined
        ), spread AS (
            SELECT *, 1.4826 * median(abs(measure_us - middle_us))
                OVER (PARTITION BY run, finished) AS spread_us
            FROM measured
        )
        SELECT run, step, finished, validated, step_us / 1e6 AS step_s,
            gen_us / 1e6 AS gen_s, training_us / 1e6 AS training_s,
            weights_us / 1e6 AS weights_s, checkpoint_us / 1e6 AS checkpoint_s,
            other_us / 1e6 AS other_s,
            unaccounted_us / 1e6 AS unaccounted_s, between_us / 1e6 AS between_s,
            testing_us / 1e6 AS testing_s,
            CASE WHEN between_us >= coalesce(testing_us, 0)
                THEN (between_us - coalesce(testing_us, 0)) / 1e6 END AS between_other_s,
            to_next_us / 1e6 AS to_next_s,
            CASE WHEN NOT finished AND to_next_us >= gen_us
                THEN (to_next_us - gen_us) / 1e6 END AS outside_gen_s,
            abs(measure_us - middle_us) > {_SPREADS} * spread_us
                AND abs(measure_us - middle_us) > 0.3 * middle_us AS unusual
        FROM spread WHERE {in_steps(steps)} ORDER BY run, step
        """
    )


def validation_times(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize each validation; it is listed under the step during which it ran.

    Returns:
        Table `validation_times`: one row per run and step with a validation.
    """
    return tables.rows(
        f"""
        SELECT run, step, requests, unfinished, testing_us / 1e6 AS testing_s,
            rollout_us / 1e6 AS rollout_s, mean_us / 1e6 AS mean_s, q[1] / 1e6 AS p50_s,
            q[4] / 1e6 AS p95_s, q[5] / 1e6 AS p99_s, max_us / 1e6 AS max_s, mean_turns AS turns,
            generated_tokens, reward, testing_us / nullif(next_us - begin_us, 0) AS share
        FROM ({summed_requests("run, step", f"validate AND {in_steps(steps)}")})
        LEFT JOIN ({VALIDATIONS}) USING (run, step)
        LEFT JOIN (SELECT run, step, begin_us, next_us FROM ({WITH_NEXT})) USING (run, step)
        ORDER BY run, step
        """
    )


def phase_efficiency(tables: Tables, steps: Steps = None) -> Rows:
    """Divide the time of each phase that trains or infers by the tokens that its workers processed.

    FLOPs and MFU are verl's own (`FlopsCounter`), where it has them: for updates in verl 0.9.1, of
    models and devices that it supports.

    Returns:
        Table `phase_efficiency`: one row per run, step and phase, in the order of a step.
    """
    return tables.rows(
        f"""
        WITH began AS (
            SELECT run, step, phase, min(begin_us) AS begin_us FROM phases GROUP BY ALL
        )
        SELECT run, step, phase, batches, sequences, tokens,
            tokens / nullif(sequences, 0) AS mean_length, duration_us / 1e6 AS duration_s,
            tokens * 1e6 / nullif(duration_us, 0) AS tokens_per_s,
            duration_us / 1e3 / nullif(tokens, 0) AS s_per_1k_tokens, tflop, mfu
        FROM phase_tokens JOIN began AS b USING (run, step, phase) WHERE {in_steps(steps)}
        ORDER BY run, step, b.begin_us, phase
        """
    )


_FLIGHTS = """flights AS (
    -- At one time all rows have the count after it.
    SELECT run, step, at_us, try_cast(sum(change) OVER (PARTITION BY run, step ORDER BY at_us
        RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS BIGINT) AS in_flight
    FROM (
        SELECT run, step, begin_us AS at_us, 1 AS change FROM chosen
        UNION ALL SELECT run, step, end_us, -1 FROM chosen
    )
)"""


def _rollouts(selection: str) -> str:
    """Return the SQL of the finished requests, `chosen`, and of each step's rollout, `ends`."""
    return f"""WITH chosen AS (
        SELECT run, step, name, request_id, begin_us, end_us, duration_us FROM requests
        WHERE finished AND {selection}
    ), ends AS (
        SELECT run, step, count(*) AS requests, sum(duration_us) AS total_us,
            min(begin_us) AS first_us, max(end_us) AS last_us,
            {quantiles("end_us", 0.8, 0.95, 0.99)} AS tails
        FROM chosen GROUP BY run, step
    )"""


def rollout_tail(tables: Tables, steps: Steps = None) -> Rows:
    """Measure how much of a rollout was spent on its last requests.

    Returns:
        Table `rollout_tail`: one row per run and step.  Only finished requests.
    """
    return tables.rows(
        f"""
        {_rollouts(rows_of(steps, validate=False))}, {_FLIGHTS}, peaks AS (
            SELECT run, step, max(in_flight) AS peak FROM flights GROUP BY run, step
        ), workers AS (
            SELECT run, step, name, max(end_us) AS end_us FROM chosen GROUP BY run, step, name
        ), idle AS (
            SELECT run, step, count(*) AS workers, max(end_us) * count(*) - sum(end_us) AS idle_us
            FROM workers GROUP BY run, step
        ), lasts AS (
            SELECT run, step, request_id, name FROM chosen JOIN ends USING (run, step)
            WHERE end_us = last_us
            QUALIFY row_number() OVER (PARTITION BY run, step
                ORDER BY duration_us DESC, name, request_id) = 1
        )
        SELECT e.run, e.step, requests, first_us AS begin_us, (last_us - first_us) / 1e6 AS rollout_s,
            (last_us - tails[1]) / 1e6 AS tail80_s, (last_us - tails[2]) / 1e6 AS tail95_s,
            (last_us - tails[3]) / 1e6 AS tail99_s,
            (last_us - tails[1]) / nullif(last_us - first_us, 0) AS tail80_share,
            (last_us - tails[2]) / nullif(last_us - first_us, 0) AS tail95_share,
            (last_us - tails[3]) / nullif(last_us - first_us, 0) AS tail99_share,
            peak, 1 - total_us / nullif(peak * (last_us - first_us), 0) AS bubble_share,
            workers, idle_us / nullif(workers * (last_us - first_us), 0) AS idle_share,
            l.request_id AS last_request_id, l.name AS last_name
        FROM ends AS e JOIN peaks USING (run, step) JOIN idle USING (run, step)
        JOIN lasts AS l USING (run, step) WHERE e.{SYNCHRONOUS} ORDER BY e.run, e.step
        """
    )


def step_tail(tables: Tables, steps: Steps = None) -> Rows:
    """Measure how long the last requests kept a step waiting.

    Returns:
        Table `step_tail`: one row per run and step with finished training requests.
    """
    return tables.rows(
        f"""
        {_rollouts(rows_of(steps, validate=False))}, gen_ends AS (
            SELECT g.run, g.step, g.end_us AS gen_end_us
            FROM gens AS g JOIN processes AS o USING (run, name) WHERE o.role = 'trainer'
        )
        SELECT e.run, e.step, requests, (last_us - tails[1]) / 1e6 AS after_p80_s,
            (last_us - tails[2]) / 1e6 AS after_p95_s, (last_us - tails[3]) / 1e6 AS after_p99_s,
            (last_us - first_us) / 1e6 AS spread_s,
            CASE WHEN gen_end_us >= last_us THEN (gen_end_us - last_us) / 1e6 END AS poll_s
        FROM ends AS e LEFT JOIN gen_ends USING (run, step)
        WHERE e.{SYNCHRONOUS} ORDER BY e.run, e.step
        """
    )


# What the list of steps has of other tables: their columns, and the names of these in the list.
_LISTED = {
    "request_times": {"p50_s": "p50_s", "p95_s": "p95_s", "max_s": "max_s"},
    "step_tail": {"after_p80_s": "after_p80_s", "poll_s": "poll_s"},
    "step_phases": {"phase": "longest_phase", "share": "longest_share"},
    "engine_times": {"engine_tokens_per_s": "engine_tokens_per_s"},
}


def step_rows(found: Mapping[str, Rows]) -> Rows:
    """Return the rows of `step_times`, each with its requests, tail, longest phase and rate."""
    rows = {
        (row["run"], row["step"]): {
            **row,
            **{name: None for columns in _LISTED.values() for name in columns.values()},
        }
        for row in found["step_times"]
    }
    for table, columns in _LISTED.items():
        # The first of a step's rows is its largest.
        for row in reversed(found[table]):
            step = rows.get((row["run"], row["step"]))
            if step is not None and not row.get("validate"):
                step |= {name: row[column] for column, name in columns.items()}
    return list(rows.values())
