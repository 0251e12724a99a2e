"""Where the time of a step goes, by the trainer's own timers, and what follows the last request."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.derivations import SYNCHRONOUS
from verl_profiler.reading.tables.tables import Tables

__all__ = ["step_phases", "step_tail", "step_times"]


def step_times(tables: Tables, steps: Steps = None) -> Rows:
    """List the steps.

    Returns:
        One row per run and step: finished, begin_us, duration_s (None for a step without end),
        seen_s (the span of what was recorded), gen_s (the sum of its `gen`), unaccounted_s, requests,
        unfinished_requests, validation_requests, generated_tokens_per_s (of finished training
        requests, by the whole step), testing_s, to_next_s (from its begin to the
        next step's).
    """
    return tables.rows(
        f"""
        WITH tests AS (
            SELECT run, step, max(duration_us) AS testing_us FROM phases
            WHERE phase IN ('testing', 'validation') GROUP BY run, step
        ), ordered AS (
            SELECT *, lead(begin_us) OVER (PARTITION BY run ORDER BY step) AS next_us FROM steps
        )
        SELECT s.run, s.step, s.finished, s.begin_us,
            CASE WHEN s.finished THEN s.duration_us / 1e6 END AS duration_s,
            s.duration_us / 1e6 AS seen_s,
            g.duration_us / 1e6 AS gen_s, s.unaccounted_us / 1e6 AS unaccounted_s,
            s.requests, s.unfinished_requests, s.validation_requests,
            s.generated_tokens_per_s,
            testing_us / 1e6 AS testing_s, (next_us - s.begin_us) / 1e6 AS to_next_s
        FROM ordered AS s
        LEFT JOIN gens AS g USING (run, step)
        LEFT JOIN tests USING (run, step)
        WHERE {in_steps(steps, "s.step")} ORDER BY s.run, s.step
        """
    )


def step_phases(tables: Tables, steps: Steps = None) -> Rows:
    """Cut each step into its phases and the rest that no timer covers.

    Returns:
        One row per run, step and phase, longest first, with `unaccounted` last: duration_s, share
        (of the step; the shares of a finished step add up to 1), count.  Where the trainer was not
        recorded: the phases of the slowest rollout worker, and share is None.
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


def step_tail(tables: Tables, steps: Steps = None) -> Rows:
    """Show how long the last requests kept a step waiting.

    Returns:
        One row per run and step with finished training requests: requests, after_p80_s, after_p95_s and
        after_p99_s (from that quantile of their ends to the last one; None with too few, see
        `quantiles`), spread_s
        (from the first begin to the last end), poll_s (from the last request's end to the end of
        `gen`; verl's replay buffer looks every 2 s), None where `gen` was not recorded.
    """
    return tables.rows(
        f"""
        WITH ends AS (
            SELECT run, step, count(*) AS requests, min(begin_us) AS first_us,
                {quantiles("end_us", 0.8, 0.95, 0.99)} AS ends, max(end_us) AS last_us
            FROM requests WHERE finished AND NOT validate AND {SYNCHRONOUS} AND {in_steps(steps)}
            GROUP BY run, step
        ), ended AS (
            SELECT g.run, g.step, g.end_us AS gen_end_us
            FROM gens AS g JOIN processes AS o USING (run, name) WHERE o.role = 'trainer'
        )
        SELECT e.run, e.step, e.requests,
            (last_us - ends[1]) / 1e6 AS after_p80_s,
            (last_us - ends[2]) / 1e6 AS after_p95_s,
            (last_us - ends[3]) / 1e6 AS after_p99_s,
            (last_us - first_us) / 1e6 AS spread_s,
            CASE WHEN gen_end_us >= last_us THEN (gen_end_us - last_us) / 1e6 END AS poll_s
        FROM ends AS e LEFT JOIN ended USING (run, step) ORDER BY e.run, e.step
        """
    )
