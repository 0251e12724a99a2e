"""`keep_steps` on a real Ray cluster whose nodes have disks of their own: the trainer decides, all follow."""

import hashlib
import json

import pytest
from shipping.on_nodes import run_on_nodes

from verl_profiler.reading.reader import load

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

SPANS, STEPS = 50, 13
PRUNED = {2, 4, 5, 6, 7}


@pytest.fixture(scope="module")
def pruned(namespaces):
    """What the script prints, and the run."""
    pytest.importorskip("ray")
    with run_on_nodes(namespaces, "pruning_nodes.py") as (found, logs):
        yield found, logs / "run"


def steps_of(names, worker):
    return {
        int(name.split("/")[0].removeprefix("step_"))
        for name in names
        if name.startswith("step_") and name.endswith(f"/{worker}.jsonl")
    }


def test_the_decision_reaches_the_nodes_and_the_files_are_deleted_there_and_here(pruned):
    """All but the first step, the slowest and the latest."""
    found, run = pruned
    two, three = found["names"]
    here = [str(path.relative_to(run)) for path in run.glob("step_*/*")]

    assert 7 == found["until"]
    assert not PRUNED & steps_of(found["three_pruned"], three)
    assert 8 == found["decided_there"]
    # Step 8, which is over by now, was on node-three when it was killed.
    assert 8 in steps_of(found["three_before"], three)
    assert steps_of(found["two"], two) == steps_of(here, two) == {1, 3, *range(9, STEPS + 2)}
    assert steps_of(here, three) == {1, 3, *range(8, STEPS + 1)}


def test_what_is_kept_and_the_totals_arrive_byte_for_byte(pruned):
    """Of the node that lived to the end."""
    found, run = pruned
    there = {name: digest for name, digest in found["two"].items() if name != "run.json"}

    assert f"pruned/{found['names'][0]}.jsonl" in there
    here = {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in there}
    assert there == here


def test_each_request_of_each_step_is_counted_once(pruned):
    """In files that were kept, and in totals of those that were not."""
    _, run = pruned
    with load(run, cache=False) as opened:
        steps = opened.rows("SELECT step, pruned, requests FROM steps ORDER BY step")
        kept = opened.rows(
            "SELECT step, count(*) AS n FROM event_fields WHERE event = 'looked' GROUP BY step"
        )
        totals = opened.rows("SELECT step, rest FROM event_fields WHERE event = 'step_pruned'")
        problems = opened.problems

    looked = {row["step"]: row["n"] for row in kept}
    for row in totals:
        count, _ = json.loads(row["rest"])["totals"].get("looked", (0, 0))
        looked[row["step"]] = looked.get(row["step"], 0) + count
    expected = {**dict.fromkeys(range(1, STEPS + 1), 2 * SPANS), STEPS + 1: SPANS}
    assert expected == {step: count for step, count in looked.items() if count}
    requests = {row["step"]: row["requests"] for row in steps if row["requests"]}
    assert expected == requests
    # Of step 8, one node's files are pruned, and the other's are not.
    assert PRUNED | {8} == {row["step"] for row in steps if row["pruned"]}
    assert not [each for each in problems if "the rest is missing" in each]
