"""What is reported of nodes whose events did not all arrive; the counts are by hand."""

import json
from datetime import datetime, timedelta, timezone

import pytest

from verl_profiler.reading.reader import load

# worker_1 is of another node, and 3 of its lines did not come.
LOST = 3


@pytest.fixture(autouse=True)
def lost(run):
    path = run / "step_2" / "worker_1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-LOST]))
    header = run / "processes" / "worker_1.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), "ended": None}))


def problems(run, *, updated="2026-11-21T02:34:00+00:00", **node):
    """Return the problems about the node after writing shipping.json; times are of 2026-11-21."""
    content = {
        "format": 1,
        "directory": "/local/run",
        "every_s": 60.0,
        "updated": updated,
        "ended": None,
        "nodes": [
            {
                "host": "node-2", "disk": "ab", "state": "shipping", "problem": "", "bytes": 1,
                "shipped": "2026-11-21T02:33:10.000000+00:00",
                "seen": "2026-11-21T02:33:30.000000+00:00",
                "left": None, "processes": {"worker_1": "worker_1"},
                **node,
            }
        ],
    }  # fmt: skip
    (run / "shipping.json").write_text(json.dumps(content))
    with load(run, cache=False) as opened:
        return [each for each in opened.problems if "worker_1" in each or "node-2" in each]


def test_a_node_that_died_has_a_count_and_a_bound(run):
    """Instead of what is reported of a process that was killed on the driver's own disk."""
    assert [
        (
            "node-2 left the cluster by 02:33:42 UTC; its events were last shipped at 02:33:10 UTC: "
            f"{LOST} events that its processes had written by 02:33:30 UTC did not arrive, and up to 12 s "
            "of later events are lost with its disk (worker_1)"
        )
    ] == problems(run, state="left", left="2026-11-21T02:33:42.000000+00:00")


def test_a_killed_driver_has_the_command_that_continues(run):
    """The events are still there."""
    (about,) = problems(run)
    assert about.startswith(
        "node-2 did not send all of its events; its events were last shipped at"
    )
    assert f"{LOST} events that its processes had written by 02:33:30 UTC did not arrive" in about
    assert about.endswith("run: verl-profiler collect --ray /local/run")


def test_while_the_run_goes_on_they_are_on_their_way(run):
    """No loss is reported."""
    lately = datetime.now(timezone.utc) - timedelta(seconds=20)

    assert [
        f"{LOST} events of worker_1 are still on node-2; they are shipped every 60 s"
    ] == problems(run, updated=lately.isoformat(timespec="microseconds"))


def test_a_node_that_sent_everything_is_no_problem(run):
    """Then a missing line is reported as on any disk."""
    (first, *_) = problems(run, state="ended")
    assert first.startswith("worker_1 wrote ")
    assert "the rest is missing" in first


def test_a_damaged_account_costs_only_itself(run):
    """As any file of a run."""
    (run / "shipping.json").write_text('{"nodes": [{"processes": {"worker_1": 3}}, 7]}')
    with load(run, cache=False) as opened:
        assert opened.rows("SELECT count(*) AS n FROM events")[0]["n"] > 0
        assert opened.problems
