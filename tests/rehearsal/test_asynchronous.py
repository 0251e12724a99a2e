"""What real runs of verl's asynchronous trainers leave behind; some are recorded, three are run here."""

import importlib.util
import os
import sys
from collections import Counter, defaultdict
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest
from cached_runs import cached
from no_alarm import ended
from reading_back import lines_with_files

from verl_profiler.analysis.explain.critical_path import critical_segments
from verl_profiler.analysis.explain.ledger import bubble_ledger
from verl_profiler.analysis.explain.what_if import step_replays
from verl_profiler.reading.reader import load


class Run:
    """The lines of a run by event, each with its file's name; times in seconds are not needed."""

    def __init__(self, directory):
        self.directory = directory
        self.events = defaultdict(list)
        for line in lines_with_files(directory):
            self.events[line["event"]].append(line)

    @cached_property
    def read(self):
        """The run as the reader gives it, opened once for all tests."""
        return load(self.directory)

    @cached_property
    def ledger(self):
        """The rows of the device ledger."""
        return bubble_ledger(self.read.tables)

    @property
    def has_message_queue(self):
        """Whether the trainer is the fully asynchronous one."""
        return any(line["extra"]["queue"] == "message_queue" for line in self.events["queue_depth"])

    def training(self, event):
        """Return the lines of an event that are not of a validation."""
        return [line for line in self.events[event] if not line["extra"].get("validate")]


# Settings of the runs that are made here, by engine and trainer.
LIVE = {
    ("standin", "separate_async"): (
        "rehearsal.poll_interval_s=0.5",
        "trainer.v1.separate_async.parameter_sync_step=2",
    ),
    ("standin", "one_step_off"): (),
    # Its last sync is followed by a validation, in which all processes write what they have.
    ("standin", "fully_async"): (
        "async_training.staleness_threshold=3",
        "trainer.test_freq=2",
    ),
    # More batches in flight than a step takes, so that its sync finds requests in the engine.
    ("sglang", "colocate_async"): (
        "rehearsal.poll_interval_s=0.1",
        "trainer.v1.colocate_async.num_warmup_batches=2",
    ),
}


def _live(engine, trainer, folder):
    output = folder / "run"
    needed = ["verl", "ray", "transfer_queue", *([engine] if engine != "standin" else [])]
    if any(importlib.util.find_spec(name) is None for name in needed):
        pytest.skip(f"needs {', '.join(needed)}")
    command = [
        *(str(Path(sys.executable).parent / "verl-profiler"), "rehearse"),
        *("--engine", engine, "--trainer", trainer, "--steps", "2"),
        *("--ranks", "1", "--workers", "1", "--output", str(output)),
        *("actor_rollout_ref.rollout.n=2", "trainer.val_before_train=false"),
        *("trainer.test_freq=-1", *LIVE[engine, trainer]),
    ]
    ended(command, {**os.environ, "PYTHONUNBUFFERED": "1"}, output)
    return output


@pytest.fixture(
    scope="module",
    params=[
        "colocate_async",
        "separate_async",
        "one_step_off",
        "fully_async",
        "sglang_separate_async",
        "sglang_colocate_async",
        "vllm_separate_async",
        "vllm_colocate_async",
        *(
            pytest.param(
                f"live {engine} {trainer}",
                marks=[
                    pytest.mark.rehearsal,
                    pytest.mark.timeout(900),
                    *([] if trainer == "fully_async" else [pytest.mark.nightly]),
                ],
            )
            for engine, trainer in LIVE
        ),
    ],
)
def run(request, tmp_path_factory):
    if request.param.startswith("live "):
        directory = _live(*request.param.split()[1:], tmp_path_factory.mktemp("live"))
    else:
        directory = cached(f"{request.param}_run")
    made = Run(directory)
    with made.read:
        yield made


def _end(line):
    """Return the end of a line, in seconds since 1970."""
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def _seconds(line):
    """Return begin and end of a line."""
    return _end(line) - line["duration_sec"], _end(line)


def _covered(spans):
    """Return the time in which at least one of these spans is open."""
    covered = last = 0.0
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, last))
        last = max(last, end)
    return covered


def _sample(line):
    return line["extra"]["uid"], line["extra"]["session"]


def _made(run):
    """Return the requests' lines by sample: their begin names the prompt."""

    def place(line):
        return line["file"], line["step"], line["extra"]["sample"], line["extra"]["session"]

    samples = {place(line): _sample(line) for line in run.training("request_start")}
    return {samples[place(line)]: line for line in run.training("request")}


def test_every_dispatched_prompt_begins(run):
    """The trainer counts prompts where it hands them over, the agent loops where requests begin."""
    dispatched = Counter()
    for line in run.events["dispatch"]:
        dispatched[line["step"]] += line["extra"]["prompts"]
    begun = defaultdict(set)
    for line in run.training("request_start"):
        begun[line["step"]].add(line["extra"]["uid"])

    assert {step: len(uids) for step, uids in begun.items()} == dispatched


def test_a_sample_ends_once(run):
    """Consumed, dropped, or in the queue; and it is one that a request made."""
    consumed = [_sample(line) for line in run.events["sample_consumed"]]
    dropped = {line["extra"]["uid"] for line in run.events["sample_dropped"]}
    made = {sample: line["step"] for sample, line in _made(run).items()}

    assert len(consumed) == len(set(consumed)) > 0
    assert set() == dropped & {uid for uid, _ in consumed}
    assert set(consumed) <= made.keys()
    for line in run.events["sample_consumed"]:
        assert made[_sample(line)] == line["step"] <= line["extra"]["consumed_step"]


def test_verl_and_the_agent_loops_name_the_same_versions(run):
    """verl's tags at consumption, and what each generate call returned."""
    made = {sample: line["extra"] for sample, line in _made(run).items()}
    for line in run.events["sample_consumed"]:
        consumed = [line["extra"][f"{which}_weight_version"] for which in ("min", "max")]
        versions = [made[_sample(line)].get(f"{which}_weight_version") for which in ("min", "max")]
        # Noted only where they differ; the recorded runs have both always.
        assert consumed[0] == consumed[1] if versions == [None, None] else consumed == versions


def test_staleness_is_that_of_verl(run):
    """V1's trainers log it for each step."""
    if not run.events["sample_wait"] or run.has_message_queue:
        pytest.skip("a trainer of verl.experimental")
    behind = defaultdict(list)
    for line in run.events["sample_consumed"]:
        extra = line["extra"]
        behind[extra["consumed_step"]].append(
            (
                extra["trainer_version"] - extra["max_weight_version"],
                extra["trainer_version"] - extra["min_weight_version"],
            )
        )
    logged = {
        line["step"]: line["extra"]["metrics"]
        for line in run.events["metrics"]
        if "training/off_policy/trajectory_staleness/mean" in line["extra"]["metrics"]
    }

    assert logged.keys() == behind.keys()
    for step, samples in behind.items():
        for place, name in enumerate(("trajectory_staleness", "trajectory_staleness_worst")):
            values = [each[place] for each in samples]
            metrics = logged[step]
            assert sum(values) / len(values) == pytest.approx(
                metrics[f"training/off_policy/{name}/mean"]
            )
            assert max(values) == metrics[f"training/off_policy/{name}/max"]


def test_stale_samples_are_those_that_the_fully_asynchronous_trainer_counts(run):
    """It logs how many samples were behind so far, up to the batch before the sync."""
    if not run.has_message_queue:
        pytest.skip("another trainer")
    # verl numbers the batches from 1.
    behind, steps = Counter(), defaultdict(set)
    for line in run.events["sample_consumed"]:
        extra = line["extra"]
        batch = extra["consumed_step"], extra.get("mini_batch", 1)
        steps[extra["consumed_step"]].add(batch)
        behind[batch] += extra["trainer_version"] - extra["max_weight_version"] >= 1
    batches = sorted(batch for own in steps.values() for batch in own)
    logged = [
        line["extra"]["metrics"]
        for line in run.events["metrics"]
        if "training/global_step" in line["extra"]["metrics"]
    ]

    assert logged
    for metrics in logged:
        before = batches[: int(metrics["training/global_step"])]
        assert (
            sum(behind[batch] for batch in before)
            == metrics["fully_async/count/stale_trajectory_processed"]
        )


def test_the_rollouter_pauses_at_the_staleness_limit(run):
    """And dispatches no more before a sync has made room."""
    for line in run.events["dispatch_pause"]:
        extra = line["extra"]
        assert "staleness_limit" == extra["reason"]
        assert extra["staleness_samples"] >= extra["max_required_samples"]
        begin, end = _seconds(line)
        assert not [each for each in run.events["dispatch"] if begin < _end(each) < end]


def test_what_the_queue_holds_follows_from_what_comes_and_goes(run):
    """The message queue: one more or one less at a time, and never more than it can hold."""
    depths = [
        line["extra"]
        for line in sorted(run.events["queue_depth"], key=lambda each: each["timestamp"])
        if line["extra"]["queue"] == "message_queue"
    ]
    for before, after in pairwise(depths):
        assert 1 == abs(after["ready"] - before["ready"])
        assert after["ready"] <= after["capacity"]


def test_the_time_of_all_devices_is_accounted_for(run):
    """Each pool's accounts add up to its devices times the steps' time, which the pools share."""
    rows = run.ledger
    lasted = {
        row["step"]: row["duration_us"] / 1e6
        for row in run.read.tables.rows("SELECT step, duration_us FROM steps WHERE finished")
    }
    seconds = defaultdict(float)
    for row in rows:
        seconds[row["pool"], row["step"]] += row["device_s"] / row["devices"]

    pools = {pool for pool, _ in seconds}
    standalone = any(line["extra"]["pool"] == "standalone" for line in run.events["replica_pool"])
    assert {"rollout"} & pools == ({"rollout"} if standalone else set())
    assert lasted.keys() == {step for _, step in seconds}
    for (_, step), spent in seconds.items():
        whole = next(seconds[pool, step] for pool in sorted(pools))
        assert spent == pytest.approx(whole, rel=0.01)
        assert spent >= lasted[step] * 0.99


def _open_samples(run):
    """Return begin and end of each dispatched sample that some request made."""
    dispatched = {
        line["extra"]["uid"]: _end(line)
        for line in run.events["dispatch"]
        if "uid" in line["extra"]
    }
    uids = {
        (line["step"], line["extra"]["sample"], line["extra"]["session"]): line["extra"]["uid"]
        for line in run.training("request_start")
    }
    found = []
    for line in run.training("request"):
        extra = line["extra"]
        uid = uids.get((line["step"], extra["sample"], extra["session"]))
        if uid in dispatched:
            found.append((dispatched[uid], _end(line)))
    return found


def test_a_replica_is_not_ahead_while_dispatched_samples_are_open(run):
    """They may wait for their agent loop, whose worker starts late, as in the first step here."""
    spans = _open_samples(run)
    if not spans:
        pytest.skip("dispatches without uids")
    ahead = sum(row["device_s"] for row in run.ledger if row["account"] == "staleness_limit")
    (times,) = run.read.tables.rows(
        "SELECT min(begin_us) AS begin_us, max(end_us) AS end_us FROM phases "
        "WHERE step IN (SELECT step FROM steps WHERE finished)"
    )
    covered = _covered(spans)

    assert covered > 1
    assert ahead <= (times["end_us"] - times["begin_us"]) / 1e6 - covered + 0.1


def test_each_turn_has_one_engine_call(run):
    """However often the engine aborted it."""
    for event in ("turn", "engine_call"):
        named = [(x["extra"]["request_id"], x["extra"]["turn"]) for x in run.events[event]]
        assert len(named) == len(set(named)) > 0


def test_attempts_make_up_their_call(run):
    """Their tokens are the call's; a pause lies between each two."""
    attempts, pauses = defaultdict(list), Counter()
    for line in run.events["engine_attempt"]:
        attempts[line["extra"]["request_id"], line["extra"]["turn"]].append(line["extra"])
    for line in run.events["parked"]:
        pauses[line["extra"]["request_id"], line["extra"]["turn"]] += 1
    for line in run.events["engine_call"]:
        own = attempts.pop((line["extra"]["request_id"], line["extra"]["turn"]), [])
        if line["extra"].get("status"):
            continue
        key = line["extra"]["request_id"], line["extra"]["turn"]
        assert len(own) == line["extra"].get("attempts", 0)
        assert list(range(len(own))) == [each["attempt"] for each in own]
        assert pauses[key] == max(0, len(own) - 1)
        if own:
            aborted = sum(each["response_tokens"] for each in own[:-1])
            assert aborted == line["extra"]["aborted_tokens"]
            assert aborted + own[-1]["response_tokens"] == line["extra"]["response_tokens"]


def test_sglang_aborts_and_keeps_requests_waiting():
    """The recorded run with more in flight than a step takes; SGLang calls its reason `abort`."""
    with load(cached("sglang_colocate_async_run")) as read:
        counts = {
            row["event"]: row["events"]
            for row in read.tables.rows(
                "SELECT event, sum(events)::BIGINT AS events FROM event_counts GROUP BY event"
            )
        }
        (aborted,) = read.tables.rows(
            """
            SELECT count(*) AS attempts, count(*) FILTER (finish_reason = 'abort') AS aborted,
                count(DISTINCT weight_version) AS versions
            FROM event_fields WHERE event = 'engine_attempt'
            """
        )

    # Each aborted attempt is followed by a pause in its client.
    assert counts["parked"] == aborted["aborted"] == 38
    assert counts["engine_abort"] == counts["engine_resume"] == 3
    assert counts["engine_parked"] == 54
    assert aborted["versions"] > 1


def test_a_replica_does_not_generate_while_its_calls_wait_for_the_end_of_a_pause(run):
    """A call that comes to a paused engine begins where the pause ends; before, the device is idle."""
    waited = {
        (line["file"], line["extra"]["engine_request_id"]): _seconds(line)[1]
        for line in run.events["engine_parked"]
    }
    spans = defaultdict(list)
    for line in run.events["engine_request"]:
        begin, end = _seconds(line)
        begin = waited.get((line["file"], line["extra"]["engine_request_id"]), begin)
        spans[line["file"]].append((begin, end))
    busy = sum(map(_covered, spans.values()))
    rows = run.ledger
    devices = {row["pool"]: row["devices"] for row in rows}
    replicas = len({line["file"] for line in run.events["engine_request"]})
    generating = sum(row["device_s"] for row in rows if row["account"].startswith("generating"))

    # A replica has as many devices as each other, here one.
    assert sum(devices.values()) >= replicas
    assert generating <= busy + 0.01


def test_what_a_replica_receives_was_sent(run):
    """By a checkpoint engine; the colocated trainer has none."""
    sent, received, buckets = Counter(), Counter(), Counter()
    for line in run.events["weight_bucket"]:
        (sent if line["extra"]["sender"] else buckets)[line["step"]] += line["extra"]["size_bytes"]
    for line in run.events["weight_receive"]:
        received[line["step"]] += line["extra"]["size_bytes"]

    assert sent == received == buckets
    pools = {line["extra"]["pool"] for line in run.events["replica_pool"]}
    assert bool(sent) == ("standalone" in pools)


def test_explanations_that_need_synchronous_steps_are_left_out(run):
    """And the reader notes it; it is no defect of the files."""
    assert ["trains asynchronously" in note for note in run.read.notes] == [True]
    assert not any("asynchronous" in problem for problem in run.read.problems)
    assert [] == critical_segments(run.read.tables)
    assert [] == step_replays(run.read.tables)
