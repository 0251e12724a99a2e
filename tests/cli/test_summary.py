"""The summary: the conclusion first, problems last, and nothing made up in between."""

import argparse
from pathlib import Path

import pytest
from cached_runs import SMALL
from commands import command
from event_files import ended, phases, write_lines

from verl_profiler.cli import options, summary

DATA = Path(__file__).parents[1] / "data"


run = command(summary)


def run_verbose(*arguments):
    return run("-v", *arguments)


def event(number, name="request", *, step=1, **extra):
    about = {"request_id": f"q{number}", "sample": number, "session": 0, **extra}
    return ended(name, 2 + number, 1.5, step=step, **about)


def test_the_conclusion_comes_first_and_the_problems_last(capsys):
    """A tired reader needs the first lines only."""
    status = run_verbose(SMALL)

    lines = capsys.readouterr().out.splitlines()
    assert 0 == status
    assert lines[0].startswith("small_run: 2 steps, 13.0 s; mean ")
    assert "Findings of 2 steps (mean per step; shares of 7.07 s from step to step)" == lines[2]
    assert "1. The trainer noticed rollout completion 1.55 s late." == lines[3]
    (step,) = [line.split() for line in lines if line.split()[:3] == ["1", "6.67", "s"]]
    assert ["gen", "60", "%"] == step[-3:]
    assert "No data-quality warnings." == lines[-1]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"worker_0": [event(0)]},
            (
                "     1         1  1.50 s  too few  1.50 s  1.50 s\n",
                "without a duration: the step has no end, or its trainer was not recorded",
            ),
        ),
        (
            {"trainer_0": [event(0, "init", step=0)]},
            ("no finished steps; 1.50 s were recorded",),
        ),
    ],
    ids=["one event", "no step"],
)
def test_what_was_not_recorded_is_said_and_never_zero(files, expected, tmp_path, capsys):
    """Each part by itself."""
    folder = write_lines(tmp_path, **files)
    run_verbose(folder)

    text = capsys.readouterr().out
    assert [] == [sentence for sentence in expected if sentence not in text]


def test_of_a_long_run_the_longest_steps_have_a_line(tmp_path, capsys):
    """Two hundred lines are not read: sixty, in their order; --steps has a line for each."""
    for step in range(1, 202):
        length = 20.0 if step % 4 == 2 else 10.0
        write_lines(tmp_path, trainer_0=phases(step, length - 4, length))

    run_verbose(tmp_path)

    text = capsys.readouterr().out
    assert "the 60 longest of 201, --steps FIRST:LAST has a line for each" in text
    lines = [line.split()[:3] for line in text.split("has a line for each")[1].splitlines()]
    shown = [line for line in lines if line and line[0].isdecimal()]
    # Fifty of 20 s, and ten of 10 s.
    assert 60 == len(shown)
    assert shown == sorted(shown, key=lambda line: int(line[0]))
    assert 50 == sum(line[1:] == ["20.0", "s"] for line in shown)


def test_nothing_to_report_is_status_1(tmp_path, capsys):
    """The message goes to stderr, with what was wrong."""
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "worker_0.jsonl").touch()

    assert 1 == run_verbose(tmp_path)
    captured = capsys.readouterr()
    assert "" == captured.out
    assert "no events were found" in captured.err


def test_steps_are_one_or_a_range():
    """Both ends are included; anything else is refused with how to write it."""
    assert [(3, 3), (3, 10), (0, 0)] == [options.step_range(each) for each in ("3", "3:10", " 0 ")]
    for text in ("", "a", "3:", "-1", "5:2", "1:2:3", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"write|ends before"):
            options.step_range(text)
