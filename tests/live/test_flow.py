"""What `watch` shows of asynchronous runs: recorded ones, and simulated ones with known waits."""

import json
import re
import tarfile
from collections import Counter, defaultdict
from datetime import datetime, timezone
from pathlib import Path

import pytest
from truth.asynchronous_runs import Plan, Simulation, events_of

from verl_profiler.live.follow import Line
from verl_profiler.live.screen import frame
from verl_profiler.live.state import Live

DATA = Path(__file__).parent.parent / "data"
RUNS = ("colocate_async", "separate_async", "one_step_off", "fully_async")


def ordered_lines(name):
    """Return (time, process, line) of a recorded run, in the order of time."""
    found = []
    with tarfile.open(DATA / f"{name}_run.tar.gz") as files:
        for member in files:
            if "step_" in member.name and member.name.endswith(".jsonl"):
                for text in files.extractfile(member).read().splitlines():
                    line = json.loads(text)
                    found.append((line["timestamp"], Path(member.name).stem, line))
    return sorted(found, key=lambda each: each[0])


def take(live, process, line):
    fields = ("timestamp", "event", "duration_sec", "extra", "step")
    live.take(process, line["step"], Line(**{key: line.get(key) for key in fields}))


def screen(live, launch=None):
    return frame(live, launch or {}, {}, title="run", now_s=live.newest_s)


@pytest.fixture(scope="module", params=RUNS)
def played(request):
    """The lines of a recorded run, and the state after them; every screen on the way fits."""
    lines, live = ordered_lines(request.param), Live()
    for place, (_, process, line) in enumerate(lines):
        take(live, process, line)
        if place % 40 == 0:
            shown = screen(live)
            assert len(shown) <= 24
            assert max(map(len, shown)) <= 80
    return [(process, line) for _, process, line in lines], live


def test_samples_versions_and_queues_are_those_of_the_files(played):
    """Counted here from the lines alone."""
    lines, live = played
    samples, behind, dropped = Counter(), defaultdict(list), Counter()
    versions, queues = {}, {}
    for _, line in lines:
        extra = line.get("extra") or {}
        if line["event"] == "sample_consumed":
            samples[extra["consumed_step"]] += 1
            behind[extra["consumed_step"]].append(
                extra["trainer_version"] - extra["min_weight_version"]
            )
        elif line["event"] == "sample_dropped":
            dropped[extra["dropped_step"]] += 1
        elif line["event"] == "weight_sync":
            versions |= dict.fromkeys(extra["replicas"], extra["weight_version"])
        elif line["event"] == "queue_depth":
            queues[extra["queue"]] = {key: count for key, count in extra.items() if key != "queue"}
    flow = live.flow

    assert {step: each.samples for step, each in flow.taken.items() if each.samples} == samples
    assert {step: each.behind for step, each in flow.taken.items() if each.behind} == behind
    assert {
        step: sum(each.dropped.values()) for step, each in flow.taken.items() if each.dropped
    } == dropped
    assert {replica: version for replica, (_, version) in flow.versions.items()} == versions
    assert {name: counts for name, (_, counts) in flow.queues.items()} == queues


def test_the_screen_has_pools_instead_of_a_steps_requests(played):
    """No request of a step is counted as finished of so many."""
    _, live = played
    text = "\n".join(screen(live))

    assert re.search(r"^trainer    step \d", text, re.MULTILINE)
    assert re.search(r"^rollout    \d+ requests? in flight", text, re.MULTILINE)
    assert re.search(r"^versions   trainer \d+, replica 0: \d+", text, re.MULTILINE)
    assert re.search(
        r"^staleness  step \d: \d+ samples, \d\.\d\d versions behind", text, re.MULTILINE
    )
    assert "finished (" not in text
    assert "longest phase" not in text


def test_synchronous_runs_have_their_step_lines():
    """Their samples are of the step that consumes them."""
    live = Live()
    for _, process, line in ordered_lines("rehearsal"):
        take(live, process, line)
    text = "\n".join(screen(live))

    assert "32 of 32 finished (100 %)" in text
    assert "versions" not in text


def test_a_run_is_asynchronous_from_its_launch_on():
    """Before any sample was consumed; a configuration of any type is no error."""
    live = Live()
    moment = datetime.fromtimestamp(1e9, timezone.utc).isoformat()
    take(live, "trainer_0", {"timestamp": moment, "event": "init", "duration_sec": 1, "step": 0})

    assert any("trainer" in line for line in screen(live, {"training": {"asynchronous": {"a": 1}}}))
    for training in (None, [], {"asynchronous": None}):
        assert not live.flow.is_asynchronous({"training": training})


def simulated(plan):
    run, live = Simulation(plan), Live()
    for event in sorted(events_of(run), key=lambda each: each["end_us"]):
        extra = {key: event[key] for key in ("request_id", "turn", "session") if key in event}
        extra |= event["extra"] or {}
        if event["event"] in ("request", "request_start"):
            extra["sample"] = extra["uid"]
        moment = datetime.fromtimestamp(event["end_us"] / 1e6, timezone.utc).isoformat()
        length = event["duration_us"]
        line = {"timestamp": moment, "event": event["event"], "extra": extra, "step": event["step"]}
        take(live, event["name"], line | {"duration_sec": length and length / 1e6})
    live.flow.is_separate = plan.separate
    return run, live


@pytest.mark.parametrize(
    ("plan", "bound"),
    [
        (Plan(train_ms=2700, ahead=4), "bounded by the trainer"),
        (Plan(ahead=2, train_ms=360, sync_ms=20, replicas=1), "bounded by the rollout"),
        (Plan(ahead=1, steps=6, train_ms=900, sync_ms=20), "in turn"),
        (Plan(separate=False, ahead=8), ""),
    ],
)
def test_who_waited_in_the_last_step(plan, bound):
    """Shares of the step's time, counted millisecond by millisecond."""
    run, live = simulated(plan)
    step = plan.steps
    begin, end = next(
        (begin, end) for event, at, begin, end in run.timers if (event, at) == ("step", step)
    )
    waited = sum(
        end - begin for event, at, begin, end in run.timers if (event, at) == ("gen", step)
    )
    idle = sum(
        not any(s.begin <= now < (run.now if s.end is None else s.end) for s in run.samples)
        for now in range(begin, end)
    )
    (line,) = [line for line in screen(live) if line.startswith("waits ")]
    shares = [float(found) for found in re.findall(r"(\d+(?:\.\d+)?) %", line)]

    expected = [waited, idle] if plan.separate else [waited]
    assert shares == pytest.approx([100 * each / (end - begin) for each in expected], abs=0.5)
    assert bound in line


def test_idle_rollouts_are_not_made_up_of_requests_that_were_not_read():
    """A run that was long when it was opened: only its latest steps' requests are read."""
    run, live = simulated(Plan(train_ms=2700, ahead=8))
    assert any("rollout" in line for line in screen(live) if line.startswith("waits "))
    for number in (0, 1, 2, 3):
        for name in ("ends", "seconds"):
            getattr(live.steps.get(number, live.steps[4]), name).clear()
        live.steps.get(number, live.steps[4]).started = 0

    assert not any("rollout" in line for line in screen(live) if line.startswith("waits "))


def test_damaged_lines_are_no_error():
    """Values of other types, and any number of names."""
    live = Live()
    moment = datetime.fromtimestamp(1e9, timezone.utc).isoformat()
    values = (None, -1, 1 << 40, "x", [1], {"a": 1}, True)
    for event in ("queue_depth", "weight_sync", "sample_consumed", "sample_dropped"):
        for value in values:
            keys = ("queue", "ready", "replicas", "weight_version", "consumed_step", "reason")
            extra = dict.fromkeys((*keys, "dropped_step", "trainer_version"), value)
            line = {"timestamp": moment, "event": event, "extra": extra, "step": 1}
            take(live, "trainer_0", line)
    for number in range(1000):
        extra = {"queue": f"q{number}", "ready": 1, "replicas": [number], "weight_version": 1}
        for event in ("queue_depth", "weight_sync"):
            line = {"timestamp": moment, "event": event, "extra": extra, "step": 1}
            take(live, "trainer_0", line)

    assert len(screen(live, {"training": {"asynchronous": {"a": 1}}})) <= 24
    assert len(live.flow.queues) <= 64
    assert len(live.flow.versions) <= 64
