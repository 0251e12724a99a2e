"""The summary: the conclusion first, problems last, and nothing made up in between."""

import argparse
import io
import json
import shutil
from pathlib import Path

import pytest
from cached_runs import SMALL

from verl_profiler.analysis import EXPLANATIONS, SUMMARY
from verl_profiler.cli import summary
from verl_profiler.errors import ReadingError

DATA = Path(__file__).parents[1] / "data"


def run(*arguments):
    parser = argparse.ArgumentParser()
    summary.add_arguments(parser)
    return summary.run(parser.parse_args([*map(str, arguments)]))


def run_verbose(*arguments):
    return run("-v", *arguments)


def event(number, name="request", **more):
    extra = {"request_id": f"q{number}", "sample": number, "session": 0, **more.pop("extra", {})}
    return {
        "timestamp": f"2026-11-21T02:33:{22 + number}.000000+00:00",
        "event": name,
        "duration_sec": 1.5,
        "extra": extra,
        "workid": 0,
        "step": 1,
        **more,
    }


def write(folder, events, name="worker_0", step=1):
    path = folder / f"step_{step}" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in events))
    return folder


def test_the_conclusion_comes_first_and_the_problems_last(capsys):
    """A tired reader needs the first lines only."""
    status = run_verbose(SMALL)

    lines = capsys.readouterr().out.splitlines()
    assert 0 == status
    assert lines[0].startswith("small_run: 2 finished steps, 16 requests; ")
    assert "Findings of 2 steps (mean per step)" == lines[2]
    assert "1. The trainer noticed rollout completion 1.55 s late." == lines[3]
    assert any(line.startswith("step 1: 6.67 s, 60 % gen; slowest request ") for line in lines)
    assert "No problems found in the files." == lines[-1]


def test_every_part_of_a_step_is_there(capsys):
    """Phases, requests, tail, engine, tools, workers, transfers, memory, cost."""
    run_verbose(SMALL, "--step", "2")

    text = capsys.readouterr().out
    for word in (
        "gen ",
        "update_actor",
        "unaccounted",
        "requests ",
        "turns ",
        "components",
        "tail ",
        "slowest ",
        "engine ",
        "tools ",
        "workers ",
        "ranks ",
        "weight sync",
        "TransferQueue",
        "event loop    worker_0 stalled 1 time, longest 1.50 s",
        "memory peak",
        "profiler ",
        "validation (apart from the steps above)",
    ):
        assert word in text
    assert "step 1" not in text


def test_what_was_not_recorded_is_said_and_never_zero(tmp_path, capsys):
    """A run of which only one event is left."""
    write(tmp_path, [event(0)])

    run_verbose(tmp_path)

    text = capsys.readouterr().out
    assert "step 1: not finished or trainer not recorded, 1.50 s seen" in text
    assert "phases  not recorded (no trainer events)" in text
    assert "engine        not recorded" in text
    assert "tools         no tool call recorded" in text
    assert "profiler      its cost was not recorded" in text
    assert "engine 0 %" not in text


def test_accounts_that_cannot_be_read_are_not_summed_up(tmp_path, capsys):
    """A line of the profiler's own without its fields is survived, and is not 0."""
    write(tmp_path, [event(0), event(0, "profiler_cost", extra={"events": "many"})])

    run_verbose(tmp_path)

    assert "profiler      - in worker_0; - in all 1 processes\n" in capsys.readouterr().out


def test_engine_times_that_the_engine_does_not_report_are_said(tmp_path, capsys):
    """Queue, prefill and decode need an engine that measures them."""
    call = event(0, "engine_call", extra={"turn": 0, "engine_request_id": "e"})
    write(tmp_path, [call, event(0)])
    write(tmp_path, [event(0, "engine_request", extra={"engine_request_id": "e"})], "engine_0")

    run_verbose(tmp_path)

    assert "queue, prefill, decode time not reported by the engine" in capsys.readouterr().out


def test_a_run_that_never_began_its_first_step_shows_what_there_is(tmp_path, capsys):
    """Start-up is all that was recorded."""
    write(tmp_path, [event(0, "init", step=0)], "trainer_0", step=0)

    run_verbose(tmp_path)

    assert "step 0 (before the first step): 1.50 s recorded." in capsys.readouterr().out


def test_many_steps_get_a_line_each_and_the_longest_a_block(tmp_path, capsys):
    """A long run stays readable, and says what it leaves out."""
    for step in range(1, 9):
        write(tmp_path, [event(number, step=step) for number in range(step)], step=step)

    run_verbose(tmp_path)

    text = capsys.readouterr().out
    assert "The 5 longest of 8 steps follow; --step N shows any other." in text
    assert 8 == sum(
        line.split()[:1] == [str(step)] for step in range(1, 9) for line in text.splitlines()
    )
    assert "\nstep 8" in text
    assert "\nstep 1 " not in text


def phases(step, seconds, gen_s):
    """The trainer's lines of a step that took so long, from 02:33:20 on."""
    begin = {"timestamp": "2026-11-21T02:33:20.000000+00:00", "step": step, "duration_sec": 0.0}
    at = {**begin, "workid": 0}
    lines = []
    for name, length in (("gen", gen_s), ("update_actor", seconds - gen_s), ("step", seconds)):
        end = 20 + (gen_s if name == "gen" else seconds)
        stamp = f"2026-11-21T02:33:{end:09.6f}+00:00"
        lines.append({**at, "event": name, "duration_sec": length, "timestamp": stamp})
    return lines


def test_steps_of_a_long_run_share_lines_with_their_means(tmp_path, capsys):
    """A thousand lines are not read: at most 40, of as many steps each; figures are by hand."""
    for step in range(1, 202):
        slow = 20.0 if step == 58 else 10.0
        write(tmp_path, phases(step, slow, slow - 4), "trainer_0", step)
        write(tmp_path, [event(step % 5, step=step)], step=step)

    run_verbose(tmp_path)

    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    begins = [line for line in lines if line and line[0].startswith("51-60")]
    # Nine steps of 10 s and one of 20 s; generation takes 4 s less.
    assert [["51-60", "11.0", "s", "20.0", "s", "(step", "58)", "7.00", "s", "10"]] == [
        line[:10] for line in begins
    ]
    assert "gen 64 %" in text
    assert 21 == sum(bool(line) and "-" in line[0] and line[0][0].isdigit() for line in lines) + (
        ["201", "10.0", "s"] in [line[:3] for line in lines]
    )
    assert "--steps 51:60" in text
    assert len(lines) < 200
    run_verbose(tmp_path, "--steps", "51:60")
    assert ["58", "20.0", "s"] in [
        line.split()[:3] for line in capsys.readouterr().out.splitlines()
    ]


def test_of_many_validations_the_last_are_shown(tmp_path, capsys):
    """And how many there were."""
    for step in range(1, 23):
        write(tmp_path, [event(0, step=step, extra={"validate": True})], step=step)

    run_verbose(tmp_path)

    text = capsys.readouterr().out.split("validation (apart")[1].split("\n\n")[0]
    assert "the last 20 of 22" in text
    assert [f"step {step}" for step in range(3, 23)] == [
        line[:9].strip() for line in text.splitlines()[2:]
    ]


def test_json_holds_every_table_and_all_problems(capsys):
    """Programs get the numbers without rounding."""
    run_verbose(SMALL, "--json")

    content = json.loads(capsys.readouterr().out)
    assert ["small_run"] == content["runs"]
    assert [] == content["problems"]
    assert {*SUMMARY, *EXPLANATIONS} <= content["tables"].keys()


def test_summarize_writes_to_any_stream(tmp_path):
    """The rehearsal ends with it."""
    stream = io.StringIO()
    copy = tmp_path / "small_run"
    shutil.copytree(SMALL, copy, ignore=shutil.ignore_patterns(".cache"))

    summary.summarize(copy, stream)

    assert stream.getvalue().startswith("small_run: 2 steps, 13.0 s; ")


def test_control_characters_from_the_run_do_not_reach_the_terminal(tmp_path, capsys):
    """Names come from models and users; escape sequences stay text."""
    hostile = "\x1b[2J\x1b]0;owned\x07\r\n"
    tool = event(0, "tool_call", extra={"turn": 0, "tool": hostile})
    write(tmp_path, [tool, event(0, extra={"request_id": hostile}), event(1, hostile)])

    run_verbose(tmp_path)

    text = capsys.readouterr().out
    assert "owned" in text
    assert not set(text) & {"\x1b", "\x07", "\r"}


def test_nothing_to_report_is_status_1(tmp_path, capsys):
    """The message goes to stderr, with what was wrong."""
    write(tmp_path, [])

    assert 1 == run_verbose(tmp_path)
    captured = capsys.readouterr()
    assert "" == captured.out
    assert "no events were found" in captured.err


def test_a_step_that_is_not_there_is_named_with_those_that_are():
    """The message ends with a line that can be copied."""
    with pytest.raises(ReadingError, match=r"it has 0 to 2\.\nFor example --step 2") as caught:
        run_verbose(SMALL, "--step", "9")

    assert 2 == caught.value.exit_code


@pytest.mark.parametrize(("text", "expected"), [("3", (3, 3)), ("3:10", (3, 10)), (" 0 ", (0, 0))])
def test_steps_are_one_or_a_range(text, expected):
    """Both ends are included."""
    assert expected == summary.step_range(text)


@pytest.mark.parametrize("text", ["", "a", "3:", "-1", "5:2", "1:2:3", "1.5"])
def test_a_wrong_step_is_refused(text):
    """With how to write it."""
    with pytest.raises(argparse.ArgumentTypeError, match=r"write|ends before"):
        summary.step_range(text)
