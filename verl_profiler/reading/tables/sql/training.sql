-- Tokens that the workers processed in each phase of the trainer, and verl's own estimate of FLOPs.  A batch
-- belongs to the phase in which the middle of it lies.  Ranks that share a batch count it once; verl's
-- estimate is of all ranks, and each of them records it.
CREATE TABLE phase_tokens AS
WITH top AS MATERIALIZED (
    SELECT run, step, phase, begin_us, end_us FROM phases
    WHERE (parent = 'step' OR (parent IS NULL AND phase <> 'step')) AND NOT validate
), lengths AS (
    SELECT run, step, phase, sum(end_us - begin_us) AS duration_us FROM top
    GROUP BY run, step, phase
), work AS (
    SELECT run, name, event, (coalesce(begin_us, end_us) + end_us) // 2 AS at_us, tokens,
        integer_of(rest, 'sequences') AS sequences, number_of(rest, 'compute_s') AS compute_s,
        number_of(rest, 'tflops') AS tflops, number_of(rest, 'promised_tflops') AS promised_tflops,
        integer_of(rest, 'ranks') AS ranks, (rest->>'forward_only') = 'true' AS forward_only
    FROM event_fields
    WHERE event IN ('train_batch', 'infer_batch', 'batch_flops') AND family = 'workers'
        AND tokens IS NOT NULL
), placed AS (
    SELECT t.step, t.phase, w.* FROM work AS w ASOF JOIN top AS t
        ON t.run = w.run AND t.begin_us <= w.at_us
    WHERE w.at_us <= t.end_us
), counted AS (
    SELECT run, step, phase, name, count(*) AS batches, sum(tokens) AS tokens,
        sum(sequences) AS sequences
    FROM placed WHERE event <> 'batch_flops' GROUP BY run, step, phase, name
), estimated AS (
    SELECT run, step, phase, name, count(*) AS batches, sum(tokens) AS tokens,
        sum(sequences) AS sequences, sum(compute_s) AS compute_s,
        sum(tflops * compute_s / CASE WHEN forward_only THEN 3 ELSE 1 END) AS tflop,
        max(promised_tflops) AS promised_tflops, max(ranks) AS ranks
    FROM placed WHERE event = 'batch_flops' GROUP BY run, step, phase, name
), summed AS (
    SELECT run, step, phase, max(batches) AS batches, sum(tokens)::BIGINT AS tokens,
        sum(sequences)::BIGINT AS sequences
    FROM counted GROUP BY run, step, phase
), of_verl AS (
    SELECT run, step, phase, max(batches) AS batches, max(tokens)::BIGINT AS tokens,
        max(sequences)::BIGINT AS sequences, avg(compute_s) AS compute_s, max(tflop) AS tflop,
        max(promised_tflops) AS promised_tflops, max(ranks) AS ranks
    FROM estimated GROUP BY run, step, phase
)
SELECT run, step, phase, l.duration_us, coalesce(s.batches, v.batches) AS batches,
    coalesce(s.tokens, v.tokens) AS tokens, coalesce(s.sequences, v.sequences) AS sequences,
    micros(v.compute_s) AS estimated_us, v.tflop, v.promised_tflops, v.ranks,
    v.tflop / nullif(v.promised_tflops * v.ranks * v.compute_s, 0) AS mfu
FROM summed AS s FULL JOIN of_verl AS v USING (run, step, phase)
JOIN lengths AS l USING (run, step, phase);
