"""verl's step lines: what is there is read right, what is not there is said."""

import pprint
import re

import numpy as np
import pytest
from console_logs import FOLDER, FORMS, line, log, step_values
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiler.reading.formats.console_steps import FAMILIES, logged_runs, step_lines

NAMES = st.from_regex(r"[a-zA-Z][\w]{0,8}(/[\w@.()+\-]{1,10}){0,3}", fullmatch=True).filter(
    lambda name: not name.startswith("val-") and "timing_s/timing_s" not in name
)
TIMERS = st.builds(lambda head, tail: head + tail, st.sampled_from(FAMILIES), NAMES)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
WRITTEN = st.one_of(
    FLOATS.map(lambda value: (pprint.pformat(value), value)),
    FLOATS.map(lambda value: (pprint.pformat(np.float64(value)), value)),
    st.integers(-(10**12), 10**12).map(lambda value: (str(value), value)),
    st.integers(-1000, 1000).map(lambda value: (pprint.pformat(np.int64(value)), value)),
    st.floats(-1e6, 1e6).map(lambda value: (f"{value:.3f}", float(f"{value:.3f}"))),
    st.booleans().map(lambda value: (str(value), float(value))),
    st.sampled_from(["nan", "inf", "-inf", "np.float64(nan)"]).map(lambda text: (text, None)),
)
PREFIXES = st.sampled_from([form.prefix for form in FORMS.values()] + ["> (TaskRunner pid=7) "])


def read(text, folder, name="a.log"):
    """Return the step lines of a text, and the problems."""
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    problems = []
    return list(step_lines(path, problems)), problems


def kept(values):
    return {name: float(value) for name, value in values.items() if name.startswith(FAMILIES)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all examples of a property."""
    return tmp_path_factory.mktemp("logs")


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_every_version_is_read(name):
    """Each number comes back as verl wrote it, for each step, and the rest is no step."""
    form, problems = FORMS[name], []
    lines = list(step_lines(FOLDER / f"{name}.log", problems))
    expected = {step: kept(step_values(form, step)) for step in range(1, 9)}

    assert [] == problems
    assert [0, *expected] == [found.step for found in lines]
    assert [False] + [True] * 8 == [found.trained for found in lines]
    assert {0, 4, 8} == {found.step for found in lines if found.validated}
    for found in lines[1:]:
        assert expected[found.step] == pytest.approx(found.values, abs=0.0005 + 1e-12)
        assert found.rounded == (form.number(1.0) == "1.000")


@settings(deadline=None)
@given(st.integers(0, 10**6), st.dictionaries(TIMERS | NAMES, WRITTEN, min_size=1), PREFIXES)
def test_whatever_verl_may_write_is_read(folder, step, metrics, prefix):
    """Names with / @ . - ( ), every way of writing a number, every prefix."""
    text = " - ".join((f"step:{step}", *(f"{name}:{text}" for name, (text, _) in metrics.items())))
    (found,), problems = read(f"noise\n{prefix}{text}\nnoise - a:1\n", folder)
    expected = {
        name: value
        for name, (_, value) in metrics.items()
        if name.startswith(FAMILIES) and value is not None and abs(value) <= 1e100
    }

    assert (step, expected) == (found.step, found.values)
    lost = [name for name in metrics if name.startswith(FAMILIES) and name not in expected]
    assert min(len(lost), 6) == len(problems)


@given(st.data())
@settings(deadline=None)
def test_a_wrapped_line_is_read_as_if_it_were_whole(folder, data):
    """A terminal or an editor breaks long lines at its width, in the middle of a number too."""
    name = data.draw(st.sampled_from(sorted(FORMS)))
    form = FORMS[name]
    width = data.draw(st.integers(60, 240))
    text = line(form, 7, step_values(form, 7))
    wrapped = "\n".join(text[begin : begin + width] for begin in range(0, len(text), width))
    (whole,), _ = read(f"{text}\nnext line of something else\n", folder)
    (found,), problems = read(f"{wrapped}\n(A pid=1) next\n", folder)

    assert (whole.values, []) == (found.values, problems)


@pytest.mark.parametrize("joint", [" -\n", "\n- ", " - \n", " \n- "])
def test_a_line_that_was_broken_between_metrics_is_read(joint, tmp_path):
    """A mail program breaks at spaces and takes the space away."""
    text = f"step:3 - timing_s/gen:1.5{joint}timing_s/adv:0.25{joint}perf/throughput:7.0\nend\n"
    (found,), problems = read(text, tmp_path)

    assert {"timing_s/gen": 1.5, "timing_s/adv": 0.25, "perf/throughput": 7.0} == found.values
    assert [] == problems


@pytest.mark.parametrize(
    "following",
    [
        "5",
        "done",
        "2025-07-04 12:00:00 INFO x:1",
        "e-05",
        "loss:0.3 - lr:1",
        " - ",
        "0%| | 0/9",
        "epoch 1:",
    ],
)
def test_the_next_program_s_line_is_no_continuation(following, tmp_path):
    """A number is never made longer by what somebody else printed."""
    (found,), problems = read(f"step:3 - timing_s/gen:1.5\n{following}\n", tmp_path)

    assert ({"timing_s/gen": 1.5}, []) == (found.values, problems)


@given(st.data())
@settings(deadline=None)
def test_a_log_that_is_cut_anywhere_never_gives_a_wrong_number(folder, data):
    """A log is read while it grows, or what a killed job left of it."""
    form = FORMS[data.draw(st.sampled_from(sorted(FORMS)))]
    text = log(form, range(1, 4))
    lines, problems = read(text[: data.draw(st.integers(0, len(text)))], folder)
    truth = {step: kept(step_values(form, step)) for step in range(1, 4)}

    for found in lines:
        for name, value in found.values.items():
            assert value == pytest.approx(truth[found.step][name], abs=0.0005 + 1e-12)
    for found in lines[:-1]:
        assert found.step == 0 or set(truth[found.step]) == set(found.values)
    if lines and lines[-1].step and set(lines[-1].values) != set(truth[lines[-1].step]):
        assert problems


@settings(deadline=None)
@given(st.integers(0, 600))
def test_one_changed_line_changes_no_other_step(folder, at):
    """A fault stays where it is."""
    form = FORMS["verl-0.5-grpo"]
    lines = log(form, range(1, 4)).splitlines()
    places = [place for place, text in enumerate(lines) if "step:2 - " in text]
    broken = lines[places[0]]
    lines[places[0]] = broken[:at] + "\ufffd?" + broken[at + 2 :]
    found = {each.step: each.values for each in read("\n".join(lines) + "\n", folder)[0]}

    for step in (1, 3):
        assert found[step] == pytest.approx(kept(step_values(form, step)))


@pytest.mark.parametrize(
    ("text", "values", "problem"),
    [
        (
            "step:1 - timing_s/gen:1.5 - timing_s/ad",
            {"timing_s/gen": 1.5},
            "truncated at 'timing_s/ad'",
        ),
        ("step:1 - timing_s/gen:1.5 - timing_s/adv:", {"timing_s/gen": 1.5}, "truncated at"),
        ("step:1 - timing_s/gen:np.float64(1.", {}, "truncated at"),
        ("step:1 - timing_s/gen:abc - timing_s/adv:1", {"timing_s/adv": 1.0}, "not a number"),
        ("step:1 - torn - timing_s/adv:1", {"timing_s/adv": 1.0}, "'torn' is not a number"),
        ("step:1 - timing_s/gen:1.2.3 - timing_s/adv:1", {"timing_s/adv": 1.0}, "not a number"),
        (
            "step:1 - timing_s/gen:nan - timing_s/adv:1",
            {"timing_s/adv": 1.0},
            "timing_s/gen is nan",
        ),
        ("step:1 - perf/throughput:-inf - timing_s/adv:1", {"timing_s/adv": 1.0}, "is -inf"),
    ],
)
def test_what_cannot_be_read_is_said(text, values, problem, tmp_path):
    """With the file, the line and the step."""
    lines, problems = read(f"one\n{text}\n(A pid=1) x\n", tmp_path)

    assert [values] == [found.values for found in lines] or (not values and not lines)
    assert 1 == len(problems)
    assert problem in problems[0]
    assert re.search(r"a\.log, line 2: step 1\b", problems[0])


def test_many_problems_of_a_kind_are_counted(tmp_path):
    """A terminal has few lines."""
    text = "".join(f"step:{step} - timing_s/gen:?\n(A pid=1)\n" for step in range(1, 41))
    problems = read(text.replace("?", "? - timing_s/adv:1"), tmp_path)[1]

    assert 6 == len(problems)
    assert "35 more values that are not numbers." == problems[-1]


@pytest.mark.parametrize(
    "text",
    [
        "Training Progress:  3%|3  | 3/9 [00:01<00:02]step:3 - timing_s/gen:1.5\n",
        "Epoch 1/1:   0%|          | 0/9 [00:00<?, ?it/s](A pid=1) step:3 - timing_s/gen:1.5\n",
        "\rTraining:  3%|\rTraining:  4%|step:3 - timing_s/gen:1.5\n",
        "2025-07-04T12:00:00.123Z stdout F step:3 - timing_s/gen:1.5\n",
        "0: step:3 - timing_s/gen:1.5\r\n",
        "> (TaskRunner pid=1) step:3 - timing_s/gen:1.5\n",
        "(A pid=1) step:3 - timing_s/gen:1.5 [repeated 2x across cluster]\n",
        "(A pid=1) step:3 - timing_s/gen:np.float64(1.5)(B pid=2) INFO 2025-07-04: x:3\n",
        "step:3 - timing_s/gen:1.5Training Progress:  33%|###  | 1/3\n",
        "step:3 - a set - of names/mean@1:0.5 - timing_s/gen:1.5\n",
        "step:3 - timing_s/timing_s/gen:1.5\n",
    ],
)
def test_what_stands_around_a_step_line_does_not_matter(text, tmp_path):
    """Progress bars, schedulers, quotation marks, other processes."""
    (found,), problems = read(text, tmp_path)

    assert (3, {"timing_s/gen": 1.5}, []) == (found.step, found.values, problems)


@pytest.mark.parametrize(
    "text",
    [
        "training/global_step:3 - timing_s/gen:1.5",
        "timing_s/step:3 - timing_s/gen:1.5",
        "{'timing_s/gen': 1.5, 'step': 3}",
        "epoch 0, step 3",
        "wandb: timing_s/gen 1.5",
        "step: 3 - timing_s/gen:1.5",
        "step:3.5 - timing_s/gen:1.5",
    ],
)
def test_what_is_no_step_line_is_not_read(text, tmp_path):
    """Metrics occur in configurations, tables and names too."""
    assert ([], []) == read(f"{text}\n", tmp_path)


def runs_of(texts, folder):
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"log{number}.txt")
        paths[-1].write_text(text)
    problems = []
    return logged_runs(paths, problems), problems


def steps_of(run):
    return [found.step for found in run.lines]


FORM = FORMS["verl-0.6-agent-loop"]
UNNAMED = FORMS["verl-0.7-megatron"]


def test_a_resumed_training_is_one_run_and_the_later_steps_count(tmp_path):
    """What was done again after the checkpoint replaces what was lost."""
    again = log(FORM, range(4, 9), seed=1)
    (run,), problems = runs_of([log(FORM, range(1, 7)) + again], tmp_path)

    assert (list(range(1, 9)), [1, 4]) == (steps_of(run), run.begins)
    assert run.lines[4].values == pytest.approx(kept(step_values(FORM, 5, seed=1)))
    assert run.lines[2].values == pytest.approx(kept(step_values(FORM, 3)))
    assert "training resumes at step 4; what was logged earlier for steps 4 to 6" in problems[0]


def test_a_training_that_begins_again_is_a_run_of_its_own(tmp_path):
    """Two experiments in one file, and the first attempt that failed."""
    runs, problems = runs_of([log(FORM, range(1, 4)) + log(FORM, range(1, 6), seed=1)], tmp_path)

    assert ["log0-1", "log0-2"] == [run.label for run in runs]
    assert [[1, 2, 3], [1, 2, 3, 4, 5]] == [steps_of(run) for run in runs]
    assert [] == problems


def test_files_continue_each_other(tmp_path):
    """A log per launch is usual."""
    texts = [log(UNNAMED, range(1, 4)), log(UNNAMED, range(4, 6)), log(UNNAMED, range(2, 3))]
    together, _ = runs_of(texts, tmp_path)

    assert [[1, 2]] == [steps_of(run) for run in together]


def test_another_process_is_another_launch_even_where_steps_go_on(tmp_path):
    """The process id in Ray's prefix says so; the timers of each are placed on their own."""
    second = log(FORM, range(4, 6)).replace("pid=7743", "pid=9")
    (run,), problems = runs_of([log(FORM, range(1, 4)) + second], tmp_path)

    assert ([1, 4], [1, 2, 3, 4, 5]) == (run.begins, steps_of(run))
    assert ["training resumes at step 4." in problem for problem in problems] == [True]


def test_a_line_that_stands_there_twice_counts_once(tmp_path):
    """Some loggers print to two places that end in one file."""
    text = "".join(
        f"{each}\n{each}\n" if "step:2 -" in each else f"{each}\n"
        for each in log(FORM, range(1, 4)).splitlines()
    )
    (run,), problems = runs_of([text], tmp_path)

    assert ([1, 2, 3], [1]) == (steps_of(run), run.begins)
    assert ["1 step line occur twice; each is counted once."] == problems


def test_two_lines_of_a_step_with_different_metrics_are_one_step(tmp_path):
    """Older versions log the last validation apart, and so does code of one's own."""
    text = log(UNNAMED, range(1, 4)) + "step:3 - val/acc:0.5\nstep:3 - timing_s/mine:0.5\n"
    (run,), problems = runs_of([text], tmp_path)

    assert ([1, 2, 3], [1], []) == (steps_of(run), run.begins, problems)
    assert run.lines[2].validated
    assert run.lines[2].values == pytest.approx(
        {**kept(step_values(UNNAMED, 3)), "timing_s/mine": 0.5}
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no line `step:N"),
        ("step:0 - val/acc:0.5\n", "its 1 step line has no timers"),
        ("step:1 - train/loss:0.5\nstep:2 - train/loss:0.5\n", "its 2 step lines have no timers"),
    ],
)
def test_a_log_without_timers_gives_no_run_and_says_so(text, said, tmp_path):
    """Supervised fine-tuning has none, nor has a run that ended in its first validation."""
    runs, problems = runs_of([text], tmp_path)

    assert [] == runs
    assert said in problems[-1]


def parsed(text):
    """Read the step lines of a whole log with a parser of these tests' own: cut, and nothing else."""
    found = {}
    for printed in text.splitlines():
        step, separator, metrics = printed.partition("step:")[2].partition(" - ")
        if separator and step.isdigit():
            pairs = (metric.rsplit(":", 1) for metric in metrics.split(" - "))
            found.setdefault(int(step), {}).update(
                (name, float(value.rpartition("(")[2].removesuffix(")")))
                for name, value in pairs
                if name.startswith(FAMILIES)
            )
    return {step: values for step, values in found.items() if "timing_s/step" in values}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.log")), ids=lambda path: path.stem)
def test_a_parser_that_shares_no_code_reads_the_same(path):
    """The logs of every version; that of 0.9.1 is of a real run with SGLang on a CPU."""
    (run,) = logged_runs([path], problems := [])

    assert parsed(path.read_text()) == {line.step: line.values for line in run.lines}
    assert ([*range(1, 1 + len(run.lines))], []) == (steps_of(run), problems)
