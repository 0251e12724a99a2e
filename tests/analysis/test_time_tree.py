"""The tree of a step's time adds up, and its numbers are those of the raw events."""

from collections import defaultdict

import pytest
from cached_runs import SMALL
from reading_back import lines_with_files

from verl_profiler.analysis.time_tree import time_tree, whole_time_tree
from verl_profiler.reading.reader import load


@pytest.fixture(scope="module")
def rows():
    with load(SMALL) as run:
        return time_tree(run.tables)


def keys(row):
    return [row[key] for key in ("phase", "component", "tool") if row[key] is not None]


def below(rows, row):
    """Return the rows right below one, of the same step."""
    own = keys(row)
    return [
        each
        for each in rows
        if each.get("step") == row.get("step")
        and keys(each)[: len(own)] == own
        and len(keys(each)) == len(own) + 1
    ]


def raw(step, pattern):
    """Return the finished training events of a step."""
    return [
        line
        for line in lines_with_files(SMALL, f"{pattern}_*")
        if (line["step"], line["extra"].get("validate", False)) == (step, False)
        and "duration_sec" in line
    ]


def test_what_lies_below_a_row_adds_up_to_it(rows):
    """In each step, and in the sum of all."""
    whole = whole_time_tree(rows)
    checked = 0
    for tree in (rows, whole):
        for row in tree:
            parts = below(tree, row)
            if parts:
                checked += 1
                total_s = sum(part["duration_s"] for part in parts)
                assert total_s == pytest.approx(row["duration_s"], abs=1e-9)
    assert checked == 3 * 3
    assert [each["duration_s"] for each in whole if not keys(each)] == [
        pytest.approx(sum(row["duration_s"] for row in rows if not keys(row)))
    ]


@pytest.mark.parametrize("step", [1, 2])
def test_its_numbers_are_those_of_the_events(rows, step):
    """Phases as timed; engine and tool time over the most requests that were open at once."""
    own = {tuple(keys(row)): row["duration_s"] for row in rows if row["step"] == step}
    timed = {event["event"]: event["duration_sec"] for event in raw(step, "trainer")}
    assert own[()] == pytest.approx(timed["step"], abs=2e-6)
    for phase in ("gen", "update_actor", "ref"):
        assert own[phase,] == pytest.approx(timed[phase], abs=2e-6)

    events = raw(step, "worker")
    borders = sorted(
        border
        for event in events
        if event["event"] == "request"
        for border in ((_end(event) - event["duration_sec"], 1), (_end(event), -1))
    )
    peak = open_now = 0
    for _, change in borders:
        open_now += change
        peak = max(peak, open_now)
    engine_s = sum(e["duration_sec"] for e in events if e["event"] == "engine_call")
    assert own["gen", "engine"] == pytest.approx(engine_s / peak, rel=1e-5)

    tools = defaultdict(float)
    for event in events:
        if event["event"] == "tool_call":
            tools[event["extra"]["tool"]] += event["duration_sec"]
    executed_s = sum(e["duration_sec"] for e in events if e["event"] == "tool_execution")
    assert own["gen", "tool"] == pytest.approx(executed_s / peak, rel=1e-5)
    scale = executed_s / max(executed_s, sum(tools.values()))
    for tool, total_s in tools.items():
        assert own["gen", "tool", tool] == pytest.approx(total_s * scale / peak, rel=1e-5)


def _end(event):
    hours, minutes, seconds = event["timestamp"][11:26].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
