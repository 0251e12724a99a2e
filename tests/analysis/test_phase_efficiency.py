"""Time by tokens, against batches written by hand."""

import pytest
from picked import picked

from verl_profiler.analysis.steps import phase_efficiency


@pytest.fixture
def step(span, instant):
    """A function that makes the events of a step."""
    return lambda *step, **flops: [*step_of(span, instant, *step, **flops)]


def step_of(span, instant, number, begin, update_s, tokens, **flops):
    """A step: 2 s of log-probabilities and an update; two ranks that share each batch of two.

    Of each pair of ranks the first counts: actors 0 and 2 have a batch of log-probabilities and two
    mini-batches, with `tokens` in each of four.
    """
    update = begin + 2
    yield span("step", begin, update + update_s, name="trainer_0", step=number)
    yield span("old_log_prob", begin, update, name="trainer_0", step=number)
    yield span("update_actor", update, update + update_s, name="trainer_0", step=number)
    for rank in range(4):
        counts = rank % 2 == 0
        name = f"actor_{rank}"
        # A worker may not have learned of the step.
        counted = {"tokens": 2 * tokens, "sequences": 4} if counts else {}
        yield span("infer_batch", begin + 0.5, begin + 1.5, name=name, step=0, **counted)
        for half in (0.0, 0.5):
            at = update + half * update_s
            counted = {"tokens": tokens, "sequences": 2} if counts else {}
            end = at + 0.4 * update_s
            yield span("train_batch", at, end, name=name, step=0, **counted)
            if counts and flops:
                sums = {"tokens": 2 * tokens, "sequences": 4, "ranks": 4, "forward_only": False}
                yield instant("batch_flops", end, name=name, step=0, **sums, **flops)


def test_tokens_are_those_of_the_ranks_that_count(step, tables):
    """Two of four, in the phase in which their batch lies: 4 × 100 in the update, 2 × 200 before."""
    rows = phase_efficiency(tables(step(1, 0, 4, 100), shuffled=1))

    assert [
        ("old_log_prob", 1, 8, 400, 50.0, 2.0, 200.0, 5.0),
        ("update_actor", 2, 8, 400, 50.0, 4.0, 100.0, 10.0),
    ] == [
        picked(
            row,
            "phase batches sequences tokens mean_length duration_s tokens_per_s s_per_1k_tokens",
        )
        for row in rows
    ]
    assert [(None, None)] * 2 == [(row["tflop"], row["mfu"]) for row in rows]


def test_flops_are_verls_and_mfu_is_weighted_by_time(step, tables):
    """Two batches of 1 s with 40 of 4 × 20 TFLOP/s: a half; the ranks' estimates are the same."""
    estimate = {"compute_s": 1.0, "tflops": 40.0, "promised_tflops": 20.0}
    rows = phase_efficiency(tables(step(1, 0, 4, 100, **estimate)))

    assert [None, (80.0, 0.5)] == [
        row["mfu"] and (row["tflop"], pytest.approx(row["mfu"])) for row in rows
    ]


def test_a_forward_pass_has_a_third_of_the_estimate(span, instant, tables):
    """As in verl's `_postprocess_output`."""
    events = [
        span("step", 0, 2, name="trainer_0"),
        span("old_log_prob", 0, 2, name="trainer_0"),
        instant(
            *("batch_flops", 1),
            name="actor_0",
            tokens=10,
            sequences=1,
            ranks=1,
            forward_only=True,
            compute_s=1.0,
            tflops=30.0,
            promised_tflops=20.0,
        ),
    ]
    (row,) = phase_efficiency(tables(events))

    assert (10, 10.0, 0.5) == (row["tokens"], row["tflop"], row["mfu"])


def test_of_an_unknown_device_there_is_no_mfu(step, tables):
    """verl promises infinity for it, and would log 0."""
    estimate = {"compute_s": 1.0, "tflops": 40.0}
    rows = phase_efficiency(tables(step(1, 0, 4, 100, **estimate)))

    assert [(None, None), (80.0, None)] == [(row["tflop"], row["mfu"]) for row in rows]
