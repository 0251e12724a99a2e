"""What is told of a console: milestones, steps, and the end of one that failed."""

import pytest

from verl_profiler.rehearsal.progress import Progress

STEP = (
    "\x1b[36m(TaskRunnerV1 pid=11)\x1b[0m step:{} - training/num_turns/mean:np.float64(3.75) - "
    "timing_s/gen:4.02 - timing_s/update_actor:np.float64(2.25) - timing_s/step:7.5{}\n"
)


def test_a_step_is_told_with_its_phases():
    """Numbers are read with and without numpy's names around them."""
    progress = Progress()
    progress.read("(TaskRunnerV1 pid=11) INFO:…:Total training steps: 3\n")

    told = progress.read(STEP.format(1, ""))

    assert told == "step 1 of 3: 7.5 s (gen 4.0, update_actor 2.2), 1.9 turns per request"
    assert progress.stage == "step 2 of 3"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        # The V0 trainer names its turns otherwise; a validation's are not those of the step.
        (
            "(TaskRunner pid=11) step:2 - val-aux/num_turns/mean:9 - num_turns/mean:3.0 - a:1\n",
            "step 2, 1.5 turns per request",
        ),
        # verl logs the validation before training as step 0.
        (
            "(TaskRunnerV1 pid=11) step:0 - val-aux/num_turns/mean:np.float64(3.0)\n",
            "validation before training, 1.5 turns per request",
        ),
        # Fully asynchronous training logs several lines for a step.
        ("step:1 - fully_async/rollouter/idle_ratio:0.5\n", None),
        ("step:3 - rollouter/validate_time:2.1\n", None),
        *(
            (line, None)
            for line in ("", "\n", "dataset len: 64\n", "step:x - \n", "a step:1 - b\n")
        ),
        ("[rehearsal] teaching\n", "teaching"),
    ],
)
def test_a_line_of_the_console_is_told_or_not(line, told):
    assert told == Progress().read(line)
