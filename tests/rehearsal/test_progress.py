"""What is told of a console: milestones, steps, and the end of one that failed."""

import json
from collections import deque

import pytest

from verl_profiler.rehearsal.progress import Progress, plain, relevant_tail

STEP = (
    "\x1b[36m(TaskRunnerV1 pid=11)\x1b[0m step:{} - training/num_turns/mean:np.float64(3.75) - "
    "timing_s/gen:4.02 - timing_s/update_actor:np.float64(2.25) - timing_s/step:7.5{}\n"
)


def test_colors_and_rays_prefix_are_removed():
    """Ray colors the name of the process that a line comes from."""
    assert plain("\x1b[36m(TaskRunnerV1 pid=11)\x1b[0m hello\n") == "hello"
    assert plain("\x1b[36m(WorkerDict pid=1, ip=10.0.0.1)\x1b[0m hello\n") == "hello"


def test_only_the_last_state_of_a_progress_bar_is_read():
    """Tqdm writes one over the other."""
    assert plain("0%\r50%\r100%\n") == "100%"


def test_a_step_is_told_with_its_phases():
    """Numbers are read with and without numpy's names around them."""
    progress = Progress()
    progress.read("(TaskRunnerV1 pid=11) INFO:…:Total training steps: 3\n")

    told = progress.read(STEP.format(1, ""))

    assert told == "step 1 of 3: 7.5 s (gen 4.0, update_actor 2.2), 1.9 turns per request"
    assert progress.steps_done == 1
    assert progress.stage == "step 2 of 3"


def test_the_v0_trainer_names_its_turns_otherwise():
    """And its validation's turns are not those of the step."""
    line = "(TaskRunner pid=11) step:2 - val-aux/num_turns/mean:9 - num_turns/mean:3.0 - a:1\n"

    assert Progress().read(line) == "step 2 of 0, 1.5 turns per request"


def test_the_validation_of_a_step_is_told():
    """It is not part of the step's own time."""
    progress = Progress()

    assert progress.read(STEP.format(3, " - timing_s/testing:2.1")).endswith(
        "; then validation, 2.1 s"
    )


def test_the_validation_before_training_is_told_apart():
    """Verl logs it as step 0."""
    line = "(TaskRunnerV1 pid=11) step:0 - val-aux/num_turns/mean:np.float64(3.0)\n"

    assert Progress().read(line) == "validation before training, 1.5 turns per request"


@pytest.mark.parametrize(
    "line",
    ["step:1 - fully_async/rollouter/idle_ratio:0.5\n", "step:3 - rollouter/validate_time:2.1\n"],
)
def test_the_rollouters_own_lines_end_no_step(line):
    """Fully asynchronous training logs several lines for a step."""
    assert Progress().read(line) is None


def test_a_milestone_is_told_once():
    """Two ranks may print the same line."""
    progress = Progress()
    line = "2026-11-21 INFO worker.py:2038 -- Started a local Ray instance.\n"

    assert progress.read(line) is not None
    assert progress.read(line) is None


@pytest.mark.parametrize("line", ["", "\n", "dataset len: 64\n", "step:x - \n", "a step:1 - b\n"])
def test_other_lines_are_not_told(line):
    """A console has a thousand lines."""
    assert Progress().read(line) is None


def test_lines_of_the_rehearsal_itself_are_told_as_they_are():
    """Teaching a model is told by the process that does it."""
    assert Progress().read("[rehearsal] teaching\n") == "teaching"


def test_the_tail_begins_at_the_last_traceback():
    """What came before it is not why the run ended."""
    lines = deque(
        ["early\n", "Traceback (most recent call last):\n", "  File …\n", "ValueError: a\n"]
    )

    assert relevant_tail(lines) == [
        "Traceback (most recent call last):",
        "  File …",
        "ValueError: a",
    ]


def test_a_tail_without_a_traceback_is_the_last_lines():
    """A process that was killed leaves none."""
    lines = deque(f"line {number}\n" for number in range(100))

    assert [f"line {number}" for number in range(90, 100)] == relevant_tail(lines, limit=10)


def test_the_tail_leaves_noise_out():
    """Repetitions and blank lines hide the reason."""
    lines = deque(["", "x [repeated 3x across cluster]\n", "   ^^^^\n", "reason\n"])

    assert relevant_tail(lines) == ["reason"]


def test_a_step_whose_console_line_was_dropped_is_told_from_its_events(tmp_path):
    """Ray drops the last lines of a program that ends, at times; those that came are not repeated."""
    progress = Progress()
    progress.read("(TaskRunnerV1 pid=11) INFO:…:Total training steps: 2\n")
    progress.read(STEP.format(1, ""))
    metrics = {"perf/x": 1, "num_turns/mean": 5.0, "timing_s/step": 7.25, "timing_s/gen": 4}
    for step in (1, 2):
        (tmp_path / f"step_{step}").mkdir()
        line = {"event": "metrics", "extra": {"metrics": metrics}, "step": step}
        text = json.dumps(line, separators=(",", ":"))
        (tmp_path / f"step_{step}" / "trainer_0.jsonl").write_text(f'{{"event":"step"}}\n{text}\n')

    assert ["step 2 of 2: 7.2 s (gen 4.0), 2.5 turns per request"] == [*progress.recorded(tmp_path)]
    assert [] == [*progress.recorded(tmp_path)]


def test_where_the_run_was_uploaded_to_is_told():
    """A name that was taken has a number."""
    progress = Progress()
    line = "[verl-profiler] the run was uploaded to s3://bucket/my-run-2\n"

    assert progress.uploaded is None
    assert "the run was uploaded to s3://bucket/my-run-2" == progress.read(line)
    assert "s3://bucket/my-run-2" == progress.uploaded
