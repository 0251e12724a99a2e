"""How long gen and training took in each step, what lies between steps, and the trend."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.tables.tables import Tables

__all__ = ["step_durations", "step_trend"]

# A step is unusual when it is this many spreads (1.4826 times the median distance to the median)
# away from the median, and three tenths of it: verl looks for finished samples every 2 s, so that
# gen of most steps may have the very same length.
_SPREADS = 4

_DURATIONS = """
WITH parts AS (
    SELECT run, step,
        sum(duration_us) FILTER (phase = 'update_weights') AS weights_us,
        sum(duration_us) FILTER (phase = 'save_checkpoint') AS checkpoint_us,
        sum(duration_us) FILTER (phase NOT IN ('gen', 'update_weights', 'save_checkpoint'))
            AS training_us
    FROM phases WHERE parent = 'step' GROUP BY run, step
), seen AS (
    SELECT run, step, max(end_us) - min(begin_us) AS requests_us FROM requests
    WHERE finished AND NOT validate GROUP BY run, step
), tests AS (
    SELECT run, step, sum(duration_us) AS testing_us FROM phases
    WHERE parent IS NULL AND phase IN ('testing', 'validation') GROUP BY run, step
), ordered AS (
    SELECT *, lead(step) OVER steps_in_order AS next_step,
        lead(begin_us) OVER steps_in_order AS next_us
    FROM steps WINDOW steps_in_order AS (PARTITION BY run ORDER BY step)
), joined AS (
    SELECT s.run, s.step, s.finished, s.begin_us, s.validation_requests > 0 AS validated,
        CASE WHEN s.finished THEN s.duration_us END AS step_us,
        coalesce(g.duration_us, r.requests_us) AS gen_us,
        CASE WHEN s.finished THEN coalesce(p.training_us, 0) END AS training_us,
        CASE WHEN s.finished THEN coalesce(p.weights_us, 0) END AS weights_us,
        CASE WHEN s.finished THEN coalesce(p.checkpoint_us, 0) END AS checkpoint_us,
        s.unaccounted_us, t.testing_us,
        CASE WHEN next_step = s.step + 1 AND next_us >= s.end_us AND s.finished
            THEN next_us - s.end_us END AS between_us,
        CASE WHEN next_step = s.step + 1 THEN next_us - s.begin_us END AS to_next_us
    FROM ordered AS s
    LEFT JOIN parts AS p USING (run, step)
    LEFT JOIN gens AS g USING (run, step)
    LEFT JOIN seen AS r USING (run, step)
    LEFT JOIN tests AS t USING (run, step)
    WHERE s.finished OR coalesce(g.duration_us, r.requests_us) IS NOT NULL
)
"""


def step_durations(tables: Tables, steps: Steps = None) -> Rows:
    """List what each step's time went to, and the time until the next one.

    Returns:
        One row per run and step: finished, step_s, gen_s (`gen`), training_s (rewards,
        log-probabilities, values, advantages and updates), weights_s (`update_weights`),
        checkpoint_s and unaccounted_s, which add up to step_s; between_s (from this step's end to
        the next one's begin), of which testing_s (validation) and between_other_s; to_next_s (from
        begin to begin, None when the next step is missing); validated (this step ran a validation);
        unusual (its step_s, or gen_s, is far from the run's median).  Where the trainer was not
        recorded, finished is False, gen_s is that of the slowest worker, and outside_gen_s
        is the rest of to_next_s, whatever it was; else outside_gen_s is None.
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


def step_trend(tables: Tables, steps: Steps = None) -> Rows:
    """Say whether steps became longer: the median of the slopes between every two steps.

    Single steps that are unusual do not move it (Theil and Sen).

    Returns:
        One row per run and measure (`step`, `gen`, `training`): steps, median_s,
        slope_s_per_step, change_s (the slope times the number of steps passed), change_share (of
        the median), rising (the share of pairs in which the later step is longer; 0.5 is no trend).
        Only measures with at least three steps.
    """
    return tables.rows(
        f"""
        {_DURATIONS}, chosen AS (
            SELECT * FROM joined WHERE {in_steps(steps)}
        ), measures AS (
            SELECT run, step, 'step' AS measure, step_us AS us FROM chosen
            UNION ALL SELECT run, step, 'gen', gen_us FROM chosen
            UNION ALL SELECT run, step, 'training', training_us FROM chosen
        ), known AS (
            SELECT * FROM measures WHERE us IS NOT NULL
        ), slopes AS (
            SELECT a.run, a.measure, median((b.us - a.us) / (b.step - a.step)) AS slope,
                avg(CASE WHEN b.us > a.us THEN 1.0 WHEN b.us = a.us THEN 0.5 ELSE 0.0 END) AS rising
            FROM known AS a JOIN known AS b
                ON a.run = b.run AND a.measure = b.measure AND a.step < b.step
            GROUP BY a.run, a.measure
        ), middles AS (
            SELECT run, measure, count(*) AS steps, median(us) AS middle_us,
                max(step) - min(step) AS passed
            FROM known GROUP BY run, measure
        )
        SELECT run, measure, steps, middle_us / 1e6 AS median_s, slope / 1e6 AS slope_s_per_step,
            slope * passed / 1e6 AS change_s,
            slope * passed / nullif(middle_us, 0) AS change_share, rising
        FROM middles JOIN slopes USING (run, measure) WHERE steps >= 3 ORDER BY run, measure
        """
    )
