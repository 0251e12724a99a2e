"""The requests command: a table of the slowest, and one request from its begin to its end."""

import json
import re

import pytest
from cached_runs import REHEARSED, SMALL
from commands import command
from event_files import ended, write_lines

from verl_profiler.cli import requests
from verl_profiler.errors import ReadingError
from verl_profiler.views.request_text import request_lines, request_table

run = command(requests)


def on_terminal(monkeypatch, columns):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))


def listed(capsys, *arguments):
    run(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def test_the_table_lists_the_slowest_first(capsys):
    """With the ids that --request takes."""
    rows = listed(capsys, SMALL, "--slowest", 5)["requests"]

    assert 0 == run(SMALL, "--slowest", 5)
    printed = capsys.readouterr().out
    lines = printed.splitlines()[2:8]
    assert ["request", *(row["request_id"][:8] for row in rows)] == [
        line.split()[0] for line in lines
    ]
    assert rows == sorted(rows, key=lambda row: -row["duration_s"])
    assert "The 5 slowest of 16 requests." in printed
    assert "queue, prefill and decode are components of engine." in printed


def test_the_selection_narrows_the_table(capsys):
    """To a step, a worker, or validation."""
    rows = listed(capsys, SMALL, "--step", 2, "--worker", 1)["requests"]
    validation = listed(capsys, SMALL, "--validate")["requests"]

    assert {(2, "worker_1", False)} == {(r["step"], r["name"], r["validate"]) for r in rows}
    assert {True} == {row["validate"] for row in validation}


def test_one_request_is_shown_by_the_beginning_of_its_id(capsys, monkeypatch):
    """Every turn and call of it, each with its begin and duration, and the engine's side."""
    request = listed(capsys, REHEARSED, "--slowest", 1)["requests"][0]

    on_terminal(monkeypatch, 120)
    assert 0 == run(REHEARSED, "--request", request["request_id"][:10])
    printed = capsys.readouterr().out

    lines = printed.splitlines()
    assert lines[0].startswith(f"request {request['request_id']}: {request['name']}, step ")
    assert request["turns"] == sum(line.startswith("    turn ") for line in lines)
    for word in ("engine_request", "queue", "prefill", "decode", "tool_call", "reward"):
        assert word in printed
    assert max(map(len, lines)) <= 120


def test_an_ambiguous_beginning_lists_what_it_could_mean(capsys):
    """So that more of the id can be given; an empty one is none."""
    ids = [row["request_id"] for row in listed(capsys, REHEARSED, "--slowest", 64)["requests"]]
    begin = next(each[0] for each in ids if sum(other[0] == each[0] for other in ids) > 1)

    with pytest.raises(ReadingError, match="Give a longer prefix") as caught:
        run(REHEARSED, "--request", begin)
    assert "several-requests" == caught.value.slug
    assert 0 == run(SMALL, "--request", "")
    assert "slowest of" in capsys.readouterr().out


def test_no_request_is_nothing_to_report(tmp_path, capsys):
    """Status 1: a trainer alone has no requests."""
    write_lines(tmp_path, trainer_0=[ended("step", 2, 1.0)])

    assert 1 == run(tmp_path)
    assert "no training requests" in capsys.readouterr().err


UNKNOWN = (
    "prompt_build_s engine_s tool_s tool_parsing_s token_merge_s postprocess_s reward_s other_s "
    "overlap_s queue_s prefill_s decode_s outside_s stalled_s duration_s seen_s sample session "
    "status error turns tool_calls prompt_tokens response_tokens generated_tokens tool_tokens reward"
)


def row(**more):
    own = {"run": "r", "step": 1, "name": "worker_0", "validate": False, "request_id": "q" * 32}
    return {**dict.fromkeys(UNKNOWN.split()), **own, "finished": True, **more}


def test_an_unfinished_request_has_no_end():
    """How long it was seen is a lower bound, and is shown as one."""
    unfinished = row(finished=False, seen_s=90.0)

    table = request_table([unfinished], {"finished": 3, "unfinished": 1})
    lines = request_lines(unfinished, [], width=80)

    assert re.search(r"seen.*\n.* 90\.0 s", table)
    assert "1 unfinished, listed last" in table
    assert "unfinished; last event 90.0 s after its start" in lines


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_list_fits_the_terminal(width, capsys, monkeypatch):
    """Columns that do not fit are named, those that identify a request stay; a pipe gets all."""
    assert 0 == run(SMALL, "--slowest", 5)
    whole = capsys.readouterr().out
    on_terminal(monkeypatch, width)
    assert 0 == run(SMALL, "--slowest", 5)
    printed = capsys.readouterr().out

    head = next(line for line in printed.splitlines() if line.startswith("  request "))
    assert max(map(len, printed.splitlines())) <= width
    assert head.split()[:3] == ["request", "name", "step"]
    assert "duration" in head.split()
    # A list of components without a component was the list of a terminal with 80 columns.
    assert "engine" in head.split()
    names = next(line for line in whole.splitlines() if line.startswith("  request ")).split()
    missing = [name for name in names if name not in head.split()]
    assert missing or width >= len(whole.splitlines()[2])
    assert all(name in printed.replace("\n", " ") for name in missing)
