"""`verl-profiler tq`: findings first, numbers that are scaled say so, and errors that help."""

import json
import re
from pathlib import Path

import pytest
from tq_lines import Writer

from verl_profiler.cli import main

DATA = Path(__file__).parent.parent / "data"
PARTS = [("get", 0.052), ("compute", 0.8), ("put", 0.062024)]

# The report that the guide shows, as it stands there but for its numbers.
GUIDE = """\
================================================================================
TransferQueue Performance Analysis Report
================================================================================

Total Traces: N

────────────────────────────────────────────────────────────────────────────────
Function: rollout
────────────────────────────────────────────────────────────────────────────────
  调用次数:           N
  平均总耗时:         Ns
  平均GET耗时:        Ns (N%)
  平均COMPUTE耗时:    Ns (N%)
  平均PUT耗时:        Ns (N%)
  TQ总开销:           N%

================================================================================
全局汇总
================================================================================
  总执行时间:         Ns
  总TQ时间:           Ns
  全局TQ开销占比:     N%
================================================================================
"""


def run(*arguments):
    return main(["tq", *map(str, arguments), "--no-cache"])


@pytest.fixture
def log(tmp_path):
    """A log of the guide's example: 50 calls of one function."""
    writer = Writer()
    for number in range(50):
        writer.call(number, PARTS, func="rollout", trace_id=f"t{number % 5}", mb=15.2, step=1)
    path = tmp_path / "training.log"
    path.write_text(writer.text())
    return path


def test_the_guides_report_is_printed_in_its_form(log, capsys):
    """Line by line, with the numbers of the guide's example."""
    assert 0 == run(log, "--lang", "zh")

    text = capsys.readouterr().out
    assert re.sub(r"\d+(\.\d+)?", "N", text).startswith(GUIDE)
    for line in (
        "  调用次数:           50\n",
        "  平均总耗时:         0.914024s\n",
        "  平均GET耗时:        0.052000s (5.69%)\n",
        "  平均PUT耗时:        0.062024s (6.79%)\n",
        "  TQ总开销:           12.47%\n",
        "  总执行时间:         45.701200s\n",
        "  总TQ时间:           5.701200s\n",
    ):
        assert line in text


def test_the_conclusion_comes_first_and_what_is_missing_last(log, capsys):
    """A tired reader needs the first lines only."""
    assert 0 == run(log)

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "training.log: 50 calls of rollout; 45.7 s in total, 12 % of it get and put"
    )
    assert "Gets moved 760 MiB at 292 MiB/s; puts moved 760 MiB at 245 MiB/s." == lines[1]
    assert lines[3].startswith("No findings by the guide's thresholds: get and put at most 30 %")
    assert "No data-quality warnings." == lines[-2]


def test_findings_say_what_they_rest_on_and_what_to_try(tmp_path, capsys):
    """Also below the guide's report in Chinese."""
    writer = Writer()
    for number in range(12):
        parts = [("get", 3.0 if number == 7 else 0.3), ("compute", 0.1), ("put", 0.01)]
        writer.call(number * 5, parts, func="update_actor", mb=20, step=number)
    path = tmp_path / "training.log"
    path.write_text(writer.text())

    assert 0 == run(path)
    english = capsys.readouterr().out
    assert 0 == run(path, "--lang", "zh")
    chinese = capsys.readouterr().out

    assert "! update_actor: get and put take 84 % of its time" in english
    assert "! update_actor: GET times vary: p50 300 ms" in english
    assert "longest in step 7: 3.00 s on average" in english
    assert "! tq_get: 38 MiB/s over 12 calls" in english
    assert 3 == english.count("      try: ")
    assert english[english.index("findings\n") : english.index("functions\n")] in chinese


def test_numbers_that_are_scaled_say_so(tmp_path, capsys):
    """Every tenth call was traced."""
    writer = Writer(sampled=10)
    writer.call(0, PARTS)
    path = tmp_path / "training.log"
    path.write_text(writer.text())

    assert 0 == run(path)

    text = capsys.readouterr().out
    assert "10 calls of generate (estimated from 1 traced ones)" in text
    assert "generate: 1 in 10 calls was traced." in text


def test_one_function_some_steps_or_one_trace(tmp_path, capsys):
    """Each narrows what is shown."""
    writer = Writer()
    for step in (1, 2, 3):
        writer.call(step * 10, PARTS, func="f", trace_id=f"id{step}", step=step)
        writer.call(step * 10 + 5, PARTS, func="g", trace_id=f"id{step}", step=step)
    path = tmp_path / "training.log"
    path.write_text(writer.text())

    assert 0 == run(path, "--function", "g", "--steps", "2:3", "--json")
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert 0 == run(path, "--trace", "id2")
    shown = capsys.readouterr().out

    assert [("g", 2)] == [(row["func"], row["calls"]) for row in tables["tq_functions"]]
    assert [2, 3] == [row["step"] for row in tables["tq_steps"]]
    assert "id2" in shown
    assert re.search(r"id2 .* f, g$", shown, re.MULTILINE)
    assert re.search(r"5.00 s +914 ms +52 ms +800 ms +62 ms +2 +g +AgentLoopWorker pid=7", shown)
    assert "id1" not in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--function", "rolout"], "did you mean rollout?"),
        (["--steps", "9"], "step 9 is not in this run; it has 1 to 1"),
    ],
)
def test_arguments_that_cannot_be_used_say_what_can(log, capsys, arguments, said):
    """Status 2, nothing printed beside."""
    assert 2 == run(log, *arguments)

    captured = capsys.readouterr()
    assert ("", True) == (captured.out, said in captured.err)


def test_nothing_about_transferqueue_is_status_1(tmp_path, capsys):
    """It says what is needed."""
    path = tmp_path / "training.log"
    path.write_text("step:1 - actor/loss:0.1\n")

    assert 1 == run(path)
    assert "TQ_TRACE_ENABLED=1" in capsys.readouterr().err
