"""Runs with very many distinct names: every command ends, and its output stays small."""

import contextlib
import functools
import io
import json

import pytest
from many_names import many_names

from verl_profiler.cli import main
from verl_profiler.cli.output import JSON_ROWS

COUNT = 2_000
OUTPUT_BYTES = 100_000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that makes a run once: the commands after the first read its cache."""
    return functools.cache(
        lambda kind, count: many_names(tmp_path_factory.mktemp(kind), kind, count)
    )


def call(*arguments):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main([str(argument) for argument in arguments])
    return status, printed.getvalue()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["tools", "events"])
def test_diff_of_two_runs_with_many_names_says_how_many_were_left_out(made, kind):
    """Each name was once looked for among all rows of all names."""
    run = made(kind, COUNT)

    status, printed = call("diff", run, run)

    assert 0 == status
    left_out = [line for line in printed.splitlines() if "were not compared" in line]
    assert 1 == len(left_out)
    assert int(left_out[0].split()[0].replace(",", "")) > COUNT - 300
    assert len(printed) < OUTPUT_BYTES
    assert "step.mean" in printed
    assert "engine_call.p50" in printed or kind == "events"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "command",
    [
        "summary",
        "why",
        "requests",
        "tq",
        "watch --once",
    ],
)
@pytest.mark.parametrize(("kind", "count"), [("events", 10 * COUNT), ("everything", COUNT)])
def test_a_run_with_many_names_is_read(made, kind, count, command):
    """Spans that begin and end together were once each held against all the others."""
    run = made(kind, count)

    status, printed = call(*command.split(), run)

    assert 0 == status, printed
    assert len(printed) < OUTPUT_BYTES


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "count", "command"),
    [
        ("requests", 10 * COUNT, "summary"),
        ("requests", 10 * COUNT, "requests"),
        ("tools", 10 * COUNT, "summary"),
        ("roles", COUNT, "summary"),
    ],
)
def test_many_requests_tools_and_processes_are_summarized(made, kind, count, command):
    """Each process is a header and a file of its own, so there are fewer of them."""
    status, printed = call(command, made(kind, count))

    assert 0 == status, printed
    assert len(printed) < OUTPUT_BYTES


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "command", "cut"),
    [("events", "summary", "recorded"), ("tools", "summary", "tool_latencies")],
)
def test_lists_of_json_are_bounded_and_the_rest_is_counted(made, kind, command, cut):
    """It was 46 MB once."""
    status, printed = call(command, made(kind, 10 * COUNT), "--json")
    content = json.loads(printed)
    lengths = {name: len(rows) for name, rows in content["tables"].items()}
    lengths["recorded"] = len(content["recorded"])

    assert 0 == status
    assert JSON_ROWS == lengths[cut]
    assert content["left_out"][cut] >= 10 * COUNT - JSON_ROWS
    assert max(lengths.values()) <= JSON_ROWS


@pytest.mark.timeout(60)
def test_diff_compares_a_name_that_a_condition_asks_for(made):
    """Also one that has too little time to be among those compared by default."""
    run = made("events", COUNT)

    _, printed = call("diff", run, run, "--fail-if", "own_worker_0_7.count > 5")

    assert "passed: own_worker_0_7.count at most 5" in printed
