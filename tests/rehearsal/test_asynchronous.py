"""What real runs of verl's asynchronous trainers leave behind; two are recorded, one is run here."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from verl_profiler.analysis import critical_segments, step_replays
from verl_profiler.reading.reader import load

DATA = Path(__file__).parents[1] / "data"


class Run:
    """The lines of a run by event, each with its file's name; times in seconds are not needed."""

    def __init__(self, directory):
        self.directory = directory
        self.events = defaultdict(list)
        for file in sorted(directory.glob("step_*/*.jsonl")):
            for text in file.read_text().splitlines():
                line = json.loads(text)
                line["file"] = file.stem
                line["extra"] = line.get("extra") or {}
                self.events[line["event"]].append(line)

    def training(self, event):
        """Return the lines of an event that are not of a validation."""
        return [line for line in self.events[event] if not line["extra"].get("validate")]


def _live(folder):
    output = folder / "run"
    if any(importlib.util.find_spec(name) is None for name in ("verl", "ray", "transfer_queue")):
        pytest.skip("needs verl")
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "verl-profiler"), "rehearse"),
            *("--engine", "standin", "--trainer", "separate_async", "--steps", "2"),
            *("--ranks", "1", "--workers", "1", "--output", str(output)),
            *("actor_rollout_ref.rollout.n=2", "rehearsal.poll_interval_s=0.5"),
            *("trainer.v1.separate_async.parameter_sync_step=2", "trainer.val_before_train=false"),
            "trainer.test_freq=-1",
        ],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=840,
    )
    assert 0 == done.returncode, done.stdout[-6000:]
    return output


@pytest.fixture(
    scope="module",
    params=[
        "colocate_async",
        "separate_async",
        pytest.param("live", marks=[pytest.mark.rehearsal, pytest.mark.timeout(900)]),
    ],
)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "live":
        return Run(_live(folder))
    shutil.unpack_archive(DATA / f"{request.param}_run.tar.gz", folder)
    return Run(next(folder.iterdir()))


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
    """Which logs it for each step."""
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
    """And the reader reports it."""
    with load(run.directory) as read:
        assert any("trains asynchronously" in problem for problem in read.problems)
        assert [] == critical_segments(read.tables)
        assert [] == step_replays(read.tables)
