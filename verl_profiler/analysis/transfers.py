"""What went through TransferQueue and into the engines, and how fast."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.reading.quantiles import quantiles
from verl_profiler.reading.tables.tables import Tables


def transfer_totals(tables: Tables, steps: Steps = None) -> Rows:
    """Sum up TransferQueue calls, training and validation together.

    Returns:
        Table `transfer_totals`: one row per run, step, role and event, most time first.
    """
    return tables.rows(
        f"""
        SELECT run, step, role, event, count(*) AS calls,
            count(*) FILTER (status IS NOT NULL) AS failed, sum(duration_us) / 1e6 AS total_s,
            ({quantiles("duration_us", 0.95)})[1] / 1e6 AS p95_s, max(duration_us) / 1e6 AS max_s,
            try_cast(sum(size_bytes) AS BIGINT) AS size_bytes,
            try_cast(sum("rows") AS BIGINT) AS "rows"
        FROM transfers WHERE {in_steps(steps)} GROUP BY run, step, role, event
        ORDER BY run, step, sum(duration_us) DESC, role, event
        """
    )


def weight_sync(tables: Tables, steps: Steps = None) -> Rows:
    """Summarize the weight syncs.

    Returns:
        Table `weight_sync`: one row per run and step.
    """
    return tables.rows(
        f"""
        WITH ranks AS (
            SELECT run, step, name, event, sum(duration_us) AS total_us
            FROM rank_spans WHERE family = 'weights' AND {in_steps(steps)} GROUP BY ALL
        ), slowest AS (
            SELECT run, step,
                max(total_us) FILTER (event = 'update_weights') AS rank_us,
                arg_max(name, (total_us, name)) FILTER (event = 'update_weights') AS slowest_rank,
                max(total_us) FILTER (event = 'weight_transfer') AS transfer_us,
                max(total_us) FILTER (event = 'memory_release') AS release_us,
                max(total_us) FILTER (event = 'memory_resume') AS resume_us
            FROM ranks GROUP BY run, step
        ), trainer AS (
            SELECT run, step, sum(duration_us) AS trainer_us FROM phases
            WHERE phase = 'update_weights' AND {in_steps(steps)} GROUP BY run, step
        )
        SELECT run, step, trainer_us / 1e6 AS trainer_s, rank_us / 1e6 AS slowest_rank_s,
            slowest_rank, transfer_us / 1e6 AS transfer_s, release_us / 1e6 AS release_s,
            resume_us / 1e6 AS resume_s
        FROM slowest FULL JOIN trainer USING (run, step)
        WHERE coalesce(trainer_us, rank_us) IS NOT NULL ORDER BY run, step
        """
    )


def weight_transfers(tables: Tables, steps: Steps = None) -> Rows:
    """Sum up what each process moves in weight syncs, and who waits for whom.

    All ranks of a checkpoint engine take part in each bucket, which begins to move when the last of
    them has come: the others have waited until then.

    Returns:
        Table `weight_transfers`: one row per run, step, process and way, most time first.
    """
    return tables.rows(
        f"""
        WITH moves AS (SELECT * FROM weight_moves WHERE {in_steps(steps)}), buckets AS (
            SELECT *, max(begin_us) OVER sync AS all_us,
                arg_max(name, (begin_us, name)) OVER sync AS last_name,
                count(*) OVER sync AS participants
            FROM moves WHERE event = 'weight_bucket' AND buckets IS NULL AND status IS NULL
            WINDOW sync AS (PARTITION BY run, step, bucket)
        ), waits AS (
            SELECT run, step, name, sum(least(all_us, end_us) - begin_us) AS waited_us
            FROM buckets GROUP BY ALL
        ), caused AS (
            SELECT run, step, last_name AS name,
                sum(least(all_us, end_us) - begin_us) FILTER (name <> last_name) AS caused_us
            FROM buckets GROUP BY ALL
        ), bucket_times AS (
            SELECT run, step, name, sum(coalesce(transfer_s * 1e6, duration_us)) AS bucket_us,
                try_cast(sum(size_bytes) AS BIGINT) AS bucket_bytes,
                try_cast(sum(coalesce(buckets, 1)) AS BIGINT) AS bucket_count
            FROM moves WHERE event = 'weight_bucket' GROUP BY ALL
        ), loads AS (
            SELECT run, step, name, sum(coalesce(transfer_s * 1e6, duration_us)) AS bucket_us
            FROM moves WHERE event = 'weight_load' GROUP BY ALL
        ), ways AS (
            SELECT run, step, name, any_value(role) AS role,
                CASE event WHEN 'weight_send' THEN 'send' WHEN 'weight_receive' THEN 'receive'
                    ELSE 'load' END AS way,
                sum(duration_us) AS total_us, try_cast(sum(buckets) AS BIGINT) AS buckets,
                try_cast(sum(tensors) AS BIGINT) AS tensors,
                try_cast(sum(size_bytes) AS BIGINT) AS size_bytes
            FROM moves WHERE event IN ('weight_send', 'weight_receive', 'weight_transfer')
            GROUP BY run, step, name, event
        ), found AS (
            SELECT y.* REPLACE (
                    CASE WHEN way = 'load' THEN size_bytes ELSE coalesce(size_bytes, bucket_bytes)
                        END AS size_bytes,
                    CASE WHEN way = 'load' THEN buckets ELSE coalesce(buckets, bucket_count) END
                        AS buckets),
                CASE way WHEN 'load' THEN l.bucket_us ELSE b.bucket_us - waited_us END
                AS moving_us,
                CASE way WHEN 'load' THEN NULL ELSE waited_us END AS waited_us,
                CASE WHEN way = 'load' OR waited_us IS NULL THEN NULL
                    ELSE coalesce(caused_us, 0) END AS caused_wait_us
            FROM ways AS y LEFT JOIN bucket_times AS b USING (run, step, name)
            LEFT JOIN waits USING (run, step, name) LEFT JOIN caused USING (run, step, name)
            LEFT JOIN loads AS l USING (run, step, name)
        )
        SELECT run, step, name, role, way, buckets, tensors, size_bytes, total_us / 1e6 AS total_s,
            moving_us / 1e6 AS moving_s, waited_us / 1e6 AS waited_s,
            caused_wait_us / 1e6 AS caused_wait_s,
            size_bytes / nullif(coalesce(moving_us, total_us), 0) * 1e6 AS bytes_per_s
        FROM found ORDER BY run, step, total_us DESC, name, way
        """
    )
