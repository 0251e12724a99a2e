"""Runs with very many distinct names: every command ends, and its output stays small."""

import contextlib
import io

import pytest
from many_names import many_names

from verl_profiler.cli import main

COUNT = 2_000
OUTPUT_BYTES = 100_000


def call(*arguments):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main([str(argument) for argument in arguments])
    return status, printed.getvalue()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["tools", "events"])
def test_diff_of_two_runs_with_many_names_says_how_many_were_left_out(tmp_path, kind):
    """Each name was once looked for among all rows of all names."""
    run = many_names(tmp_path, kind, COUNT)

    status, printed = call("diff", run, run, "--no-cache")

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
        "summary --no-cache",
        "why --no-cache",
        "requests --no-cache",
        "tq --no-cache",
        "watch --once",
    ],
)
@pytest.mark.parametrize(("kind", "count"), [("events", 10 * COUNT), ("everything", COUNT)])
def test_a_run_with_many_names_is_read(tmp_path, kind, count, command):
    """Spans that begin and end together were once each held against all the others."""
    run = many_names(tmp_path, kind, count)

    status, printed = call(*command.split(), run)

    assert 0 == status, printed
    assert len(printed) < OUTPUT_BYTES


@pytest.mark.timeout(60)
def test_diff_compares_a_name_that_a_condition_asks_for(tmp_path):
    """Also one that has too little time to be among those compared by default."""
    run = many_names(tmp_path, "events", COUNT)

    _, printed = call("diff", run, run, "--no-cache", "--fail-if", "own_worker_0_7.count > 5")

    assert "passed: own_worker_0_7.count at most 5" in printed
