"""What the timeline of an asynchronous run adds: versions, queues and the way of each sample."""

from collections import Counter
from datetime import datetime

import pytest
from cached_runs import cached
from reading_back import lines_with_files
from views.perfetto_reading import read_trace
from views.test_tracks import write

from verl_profiler.reading.reader import load

RUNS = ("colocate_async", "fully_async")


def ended_ns(event):
    """Return the end in ns; to a microsecond, since the files have no more."""
    return round(datetime.fromisoformat(event["timestamp"]).timestamp() * 1e6) * 1000


class Run:
    """A recorded run: the events of its files by name, and its trace."""

    def __init__(self, name, folder):
        folder_of_run = cached(f"{name}_run")
        self.events = {}
        for line in sorted(lines_with_files(folder_of_run), key=lambda each: each["timestamp"]):
            self.events.setdefault(line["event"], []).append((line["file"], line))
        with load([folder_of_run], cache=False) as run:
            self.trace = read_trace(write(run.tables, folder / f"{name}.pftrace"))

    def extras(self, event):
        return [each["extra"] for _, each in self.events.get(event, ())]

    def counters(self, name):
        """Return the points of the counters of that name, by process."""
        return {
            self.trace.path(track)[-2]: points
            for track, points in self.trace.counters.items()
            if self.trace.path(track)[-1] == name
        }


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    return Run(request.param, tmp_path_factory.mktemp("trace"))


def test_each_replica_has_its_weight_version(run):
    """From the end of each sync on, and of that replica alone."""
    expected = {}
    for _, event in run.events["weight_sync"]:
        for replica in event["extra"]["replicas"]:
            point = ended_ns(event), event["extra"]["weight_version"]
            expected.setdefault(f"engine_{replica}", []).append(point)

    assert expected == run.counters("weight version")


def test_queues_have_their_depth_and_capacity(run):
    """Of each state that the queue notes, in the process that holds the queue."""
    for state in ("ready", "running", "pending", "failed", "capacity"):
        expected = {}
        for process, event in run.events.get("queue_depth", ()):
            if state in event["extra"]:
                point = ended_ns(event), event["extra"][state]
                expected.setdefault(process, {}).update([point])

        shown = run.counters(f"queue: {state}")
        assert {process: dict(points) for process, points in shown.items()} == expected


def requests_of(run):
    """Return the ids of finished requests by uid and session; only their first line has the uid."""
    starts = {}
    for process, event in run.events["request_start"]:
        extra = event["extra"]
        if not extra.get("validate"):
            place = process, event["step"], extra["sample"], extra["session"]
            starts.setdefault(place, []).append(extra["uid"])
    found = {}
    for process, event in run.events["request"]:
        extra = event["extra"]
        if not extra.get("validate"):
            (uid,) = starts[process, event["step"], extra["sample"], extra["session"]]
            found[uid, extra["session"]] = extra["request_id"]
    return found


def test_arrows_lead_from_the_request_to_the_step_that_consumed_it(run):
    """One for each consumed sample, to the line that has its uid and session, or to its drop."""
    requests = requests_of(run)
    expected = Counter()
    for each in run.extras("sample_consumed"):
        expected[requests[each["uid"], each["session"]], each["uid"], each["consumed_step"]] += 1
    for each in run.extras("sample_dropped"):
        for (uid, _), request in requests.items():
            if uid == each["uid"]:
                expected[request, uid, None] += 1
    drawn = Counter()
    for ends in run.trace.arrows().values():
        source, target = sorted(ends, key=lambda span: span.begin_ns)
        if target.name in ("sample_consumed", "sample_dropped"):
            assert source.name.partition(" ")[0] == "request"
            drawn[
                source.fields["request_id"],
                target.fields["uid"],
                target.fields.get("consumed_step"),
            ] += 1
            if target.name == "sample_consumed":
                assert source.end_ns <= target.begin_ns

    assert expected
    assert expected == drawn
