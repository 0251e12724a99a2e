"""The diff command: tables, conditions and exit status."""

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest

from verl_profiler.cli import diff
from verl_profiler.conditions import condition
from verl_profiler.errors import ReadingError

DATA = Path(__file__).parent.parent / "data"
REHEARSED = DATA / "rehearsal_run.tar.gz"


def run(*arguments):
    parser = argparse.ArgumentParser()
    diff.add_arguments(parser)
    return diff.run(parser.parse_args([*map(str, arguments), "--no-cache"]))


def make_run(folder, steps, *, gen=4.0, tool=0.5):
    """Write a run whose steps take `gen` and an update of 1 s, with one request each."""
    for step in range(1, steps + 1):
        # Steps differ, in every run in the same way.
        spread = 1 + 0.1 * (step * 7 % 5)
        length = gen * spread
        lines = {
            "trainer_0": [
                ("gen", length, length, {}),
                ("update_actor", length + 1, 1, {}),
                ("step", length + 1, length + 1, {}),
            ],
            "worker_0": [
                ("tool_call", tool * spread, tool * spread, {"tool": "search", "turn": 0}),
                ("request", length, length, {"response_tokens": 100, "turns": 1}),
            ],
        }
        (folder / f"step_{step}").mkdir(parents=True)
        for name, events in lines.items():
            with (folder / f"step_{step}" / f"{name}.jsonl").open("w") as file:
                for event, end, duration, extra in events:
                    second = step * 40 + end
                    moment = f"2026-11-21T02:{second // 60:02.0f}:{second % 60:09.6f}+00:00"
                    identity = {"request_id": f"q{step}"} if name == "worker_0" else {}
                    line = {"timestamp": moment, "event": event, "duration_sec": round(duration, 6)}
                    line |= {"extra": {**identity, **extra}, "workid": 0, "step": step}
                    file.write(json.dumps(line) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, the same again, and one whose generation takes 20 % longer."""
    folder = tmp_path_factory.mktemp("runs")
    return (
        make_run(folder / "base", 12),
        make_run(folder / "again", 12),
        make_run(folder / "slow", 12, gen=4.8),
    )


def figures_of(capsys, *arguments):
    run(*arguments, "--json")
    document = json.loads(capsys.readouterr().out)
    return document, {row["figure"]: row for row in document["figures"]}


def test_the_same_run_twice_differs_by_nothing(capsys, runs):
    """No figure, and the sentence says so."""
    document, figures = figures_of(capsys, *runs[:2])

    assert {0} == {row["difference"] for row in document["figures"]}
    assert {False} == {row["certain"] for row in document["figures"]}
    assert 0 == run(*runs[:2], "--fail-if", "step.p50 > +1%")
    printed = capsys.readouterr().out
    assert "Nothing changed that is more than noise" in printed
    assert "passed: step.p50 > +1% is not so" in printed


def test_a_slower_generation_is_found(capsys, runs):
    """In the figures that it is in, and no others; the first step is left out."""
    document, figures = figures_of(capsys, runs[0], runs[2])

    assert [list(range(2, 13))] * 2 == [each["steps"] for each in document["runs"]]
    assert pytest.approx(0.2) == figures["gen.mean"]["share"]
    assert figures["gen.mean"]["certain"]
    assert figures["step.mean"]["certain"]
    assert figures["request.p95"]["certain"]
    assert not figures["update_actor.mean"]["certain"]
    assert not figures["tool_call:search.mean"]["certain"]
    assert figures["gen.mean"]["low"] <= 0.8 * 1.2 <= figures["gen.mean"]["high"]


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ("step.p50 > +5%", 1),
        ("step.p50 > +30%", 0),
        ("gen > +0.5s", 1),
        ("gen.p95 > +800ms", 1),
        ("gen.max > 5 s", 1),
        ("gen.max > 50s", 0),
        ("response_tokens_per_s.mean < -5%", 1),
        ("response_tokens_per_s.mean < -50%", 0),
        ("tool_call:search.p95 > +1%", 0),
        ("request.count > 0.5", 1),
    ],
)
def test_conditions_set_the_status(runs, asked, status):
    """A change has to be beyond the limit; a limit is of B alone."""
    assert status == run(runs[0], runs[2], "--fail-if", asked)


def test_one_condition_of_several_is_enough(runs, capsys):
    """Each is reported."""
    assert 1 == run(runs[0], runs[2], "--fail-if", "step.p50 > +90%", "--fail-if", "gen.p50 > +5%")
    assert ["passed", "FAILED"] == re.findall(
        "^(passed|FAILED)", capsys.readouterr().out, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step.p50", "is not a condition"),
        ("step.p50 > ", "is not a condition"),
        ("step.p50 = 3", "is not a condition"),
        ("step.p50 > +5 minutes", "is not a condition"),
        ("step.p50 > 5%", r"Write \+5% or -5%"),
    ],
)
def test_what_is_no_condition_is_refused(text, words):
    """With a line that can be copied."""
    with pytest.raises(ReadingError, match=words) as raised:
        condition(text)
    assert "bad-condition" == raised.value.slug


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("generation.p50 > +5%", "no figure generation"),
        ("update_actr.p50 > +5%", "did you mean update_actor"),
        ("step.total > +5%", "occurs once per step"),
    ],
)
def test_figures_that_are_not_there_are_refused(runs, asked, words):
    """A misspelt condition must not pass for ever."""
    with pytest.raises(ReadingError, match=words) as raised:
        run(*runs[:2], "--fail-if", asked)
    assert "no-such-figure" == raised.value.slug


def test_few_steps_tell_nothing_and_say_so(capsys, runs):
    """Two against two: a condition on a change cannot be judged, and does not pass quietly."""
    sides = (f"{runs[0]}@2:3", f"{runs[2]}@2:3")

    assert 0 == run(*sides)
    assert "with so few steps nothing can be told" in capsys.readouterr().out
    with pytest.raises(ReadingError, match="too few to tell") as raised:
        run(*sides, "--fail-if", "step.p50 > +5%")
    assert "too-few-steps" == raised.value.slug
    assert 1 == run(*sides, "--fail-if", "step.p50 > 1s")
    # Three against three can be certain to 5 %, and not to the half of it.
    sides = (f"{runs[0]}@2:4", f"{runs[2]}@2:4")
    change = ("--fail-if", "gen.max > +1%")
    assert 0 == run(*sides, *change)
    with pytest.raises(ReadingError, match="with 2 conditions"):
        run(*sides, *change, *change)


def test_ranges_of_one_run_are_compared(capsys, runs):
    """With the steps that were asked for, the first one too."""
    document, _ = figures_of(capsys, f"{runs[0]}@1:6", f"{runs[0]}@7:12")

    assert [list(range(1, 7)), list(range(7, 13))] == [each["steps"] for each in document["runs"]]


def test_an_at_sign_in_a_path_is_part_of_the_path(tmp_path, runs):
    """When the path exists."""
    folder = tmp_path / "run@3"
    shutil.copytree(runs[0], folder)

    assert (folder, None) == (diff.side(str(folder)).path, diff.side(str(folder)).steps)
    assert (2, 4) == diff.side(f"{folder}@2:4").steps
    assert folder == diff.side(f"{folder}@2:4").path


def test_no_step_left_is_an_error(runs, tmp_path):
    """A run of one step is warm-up alone."""
    one = make_run(tmp_path / "one", 1)

    with pytest.raises(ReadingError, match="left out as warm-up") as raised:
        run(one, runs[0])
    assert "too-few-steps" == raised.value.slug
    assert 0 == run(one, runs[0], "--warmup", 0)
    with pytest.raises(ReadingError, match="no-such-step"):
        run(f"{runs[0]}@20:30", runs[0])


def test_a_real_run_is_compared(capsys):
    """Engine parts are compared by the step that asked; a rank's update is told from the phase."""
    _, figures = figures_of(capsys, f"{REHEARSED}@1:1", f"{REHEARSED}@2:2")

    assert {"queue.mean", "decode.mean", "gen.mean", "tail_p95.mean"} <= set(figures)
    assert {"update_actor.mean", "workers:update_actor.mean"} <= set(figures)


def test_the_page_shows_the_table(runs, tmp_path, capsys):
    """Escaped, with nothing fetched and no script; not replaced by accident."""
    named = tmp_path / "<b>&'"
    shutil.copytree(runs[0], named)
    page = tmp_path / "diff.html"
    run(named, runs[2], "--html", page, "--fail-if", "step.p50 > +5%")

    text = page.read_text()
    assert f"Wrote {page}" in capsys.readouterr().err
    assert "&lt;b&gt;&amp;&#39;" in text
    assert "<b>" not in text
    assert "<script" not in text
    assert not re.search(r"https?://", text)
    table = text[text.index("Certain changes") :]
    assert table.index("gen.mean") < table.index("Not certain")
    assert "FAILED: step.p50 &gt; +5%" in text
    with pytest.raises(ReadingError, match="--force"):
        run(named, runs[2], "--html", page)
