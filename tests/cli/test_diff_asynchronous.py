"""`diff` of recorded runs of which at least one is asynchronous."""

import json
from collections import Counter

import pytest
from cached_runs import cached
from commands import command
from reading_back import lines_of

from verl_profiler.cli import diff
from verl_profiler.errors import ReadingError

SYNCHRONOUS = "rehearsal_run"

run = command(diff)


def compared(capsys, first, second):
    run(cached(first), cached(second), "--json")
    return json.loads(capsys.readouterr().out)


def consumed(name):
    """Count the samples that each step took, in the lines of the event files."""
    lines = lines_of(cached(name))
    taken = [line["extra"] for line in lines if line["event"] == "sample_consumed"]
    return Counter(extra["consumed_step"] for extra in taken)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("one_step_off_run", "fully_async_run"),
        ("separate_async_run", "colocate_async_run"),
        (SYNCHRONOUS, "separate_async_run"),
        ("fully_async_run", SYNCHRONOUS),
    ],
)
def test_asynchronous_runs_are_compared_by_what_they_consumed(capsys, first, second):
    """And by device time; nothing of a step's own rollout is compared or called missing."""
    document = compared(capsys, first, second)
    metrics = {row["metric"]: row for row in document["metrics"]}

    for side, name, read in zip("ab", (first, second), document["runs"], strict=True):
        assert read["asynchronous"] == (name != SYNCHRONOUS)
        if name != SYNCHRONOUS:
            counts = [consumed(name)[step] for step in read["steps"]]
            assert metrics["requests.mean"][side] == pytest.approx(sum(counts) / len(counts))
        else:
            assert metrics["versions_behind.mean"][side] == 0
    rest = {"gen.mean", "rollout.mean", "tail_p80.mean", "tail_p95.mean"}
    assert not rest & set(metrics)
    assert not {"gen", "rollout", "tail_p80", "tail_p95"} & {
        each["name"] for each in document["only_in_one"]
    }
    assert metrics["samples_per_s.mean"]["headline"]
    devices = [name for name in metrics if name.startswith("device:")]
    assert all(name.count(":") == devices[0].count(":") for name in devices)
    by_pool = devices[0].count(":") == 2
    assert by_pool == ((first, second) == ("one_step_off_run", "fully_async_run"))


def test_the_mode_is_stated_first(capsys):
    """In one paragraph, with what bounds each run."""
    run(cached(SYNCHRONOUS), cached("separate_async_run"))
    printed = capsys.readouterr().out

    assert printed.startswith("A is synchronous; B is asynchronous: compare rates and device time.")
    assert "B: bounded by the trainer" in printed
    assert "Device-seconds and staleness per step" in printed
    assert "gen.mean" not in printed


def test_synchronous_runs_are_compared_as_before(capsys):
    """No device time, no staleness, and gen is a headline."""
    document = compared(capsys, SYNCHRONOUS, SYNCHRONOUS)
    metrics = {row["metric"]: row for row in document["metrics"]}

    assert metrics["gen.mean"]["headline"]
    assert not {name for name in metrics if name.startswith("device:")}
    assert not {"versions_behind.mean", "samples_per_s.mean"} & set(metrics)
    run(cached(SYNCHRONOUS), cached(SYNCHRONOUS))
    assert "synchronous" not in capsys.readouterr().out


def test_conditions_reach_device_time(capsys):
    """A limit on an account of a pool, and the refusal of what an asynchronous run lacks."""
    runs = cached("one_step_off_run"), cached("fully_async_run")

    assert 1 == run(*runs, "--fail-if", "device:rollout:staleness_limit.mean > 1s")
    assert 0 == run(*runs, "--fail-if", "versions_behind.mean > 9")
    with pytest.raises(ReadingError, match="rollout"):
        run(*runs, "--fail-if", "rollout.mean > 1s")
