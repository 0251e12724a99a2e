"""Validation, apart from training."""

from verl_profiler.analysis.steps import validation_times


def test_a_validation_by_its_requests_and_timer(tables, conversation, span):
    """`testing` contains `validation`, which is not counted again."""
    events = [
        span("step", 0, 20, name="trainer_0"),
        span("testing", 20, 35, name="trainer_0"),
        span("validation", 20.5, 35, name="trainer_0", validate=True),
        span("step", 40, 60, name="trainer_0", step=2),
        *conversation("t"),
        *conversation("a", begin=21.0, validate=True),
        *conversation("b", begin=23.0, scale=0.5, validate=True),
    ]

    (row,) = validation_times(tables(events))

    assert (1, 2, 15.0, 10.0, 7.5, 10.0, 2.0, 60, 0.5, 0.375) == tuple(
        row[key]
        for key in (
            "step",
            "requests",
            "testing_s",
            "rollout_s",
            "mean_s",
            "max_s",
            "turns",
            "generated_tokens",
            "reward",
            "share",
        )
    )


def test_a_step_without_validation_has_no_row(tables, conversation):
    """Training alone is not a validation."""
    assert [] == validation_times(tables(conversation()))
