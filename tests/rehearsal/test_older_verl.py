"""Whole rehearsals on older versions of verl and with a critic: recorded runs, and nightly new ones, from wheels."""

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest
import verl_drift
from cached_runs import cached
from reading_back import lines_with_files
from tq_lines import ON, traced_lines

from verl_profiler.analysis.explain.ledger import account_totals, bubble_ledger
from verl_profiler.reading.reader import load

STEPS = 3
# Recorded run, or trainer and packages of a new one.
RUNS = ("verl_0_8_v0_run", "verl_0_8_sync_run", "verl_0_8_fully_async_run", "critic_run")
CRITIC = "algorithm.adv_estimator=gae"
NEW = (
    ("sync", {"verl": "0.8.0"}),
    ("main_ppo_sync", {"verl": "0.8.0", "TransferQueue": "0.1.7"}),
    ("fully_async", {"verl": "0.8.0"}),
    ("sync", {"verl": "0.9.0"}, CRITIC),
)


def _name(given):
    return given if isinstance(given, str) else f"{given[0]}-{given[1]['verl']}"


def _rehearsed(trainer, packages, *overrides, output):
    try:
        folders = [verl_drift.folder_of(version, name) for name, version in packages.items()]
    except verl_drift.NoWheel as error:
        pytest.skip(str(error))
    command = [Path(sys.executable).parent / "verl-profiler", "rehearse", "--engine", "standin"]
    path = os.pathsep.join(map(str, folders))
    done = subprocess.run(
        [*command, "--trainer", trainer, "--steps", str(STEPS), "--output", output, *overrides],
        check=False,
        # Where the trainer uses TransferQueue, it is traced.
        env={**os.environ, **ON, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return output


@pytest.fixture(
    scope="module",
    params=[
        *RUNS,
        *(pytest.param(each, marks=(pytest.mark.nightly, pytest.mark.rehearsal)) for each in NEW),
    ],
    ids=_name,
)
def run(request, tmp_path_factory):
    """Return the directory of a run."""
    if isinstance(request.param, str):
        return cached(request.param)
    return _rehearsed(*request.param, output=tmp_path_factory.mktemp("older") / "run")


@pytest.fixture
def lines(run):
    """Return the lines of all its event files, with the file that each is in."""
    return lines_with_files(run)


def of(lines, event):
    return [line for line in lines if line["event"] == event]


def test_each_request_of_each_step_is_recorded(lines):
    """Eight prompts, each sampled four times."""
    requests = [line for line in of(lines, "request") if not line["extra"].get("validate")]

    assert 32 * STEPS == len(requests)
    if not of(lines, "dispatch"):
        assert {32} == set(Counter(line["step"] for line in requests).values())


def test_every_engine_call_is_joined_with_its_engine_request(lines):
    """verl 0.8 makes the ids in the middle of `generate`."""
    calls = Counter(line["extra"]["engine_request_id"] for line in of(lines, "engine_call"))
    served = Counter(line["extra"]["engine_request_id"] for line in of(lines, "engine_request"))

    assert len(calls) > 200
    assert calls == served
    assert {1} == set(calls.values())


def test_phases_are_verls_own_timings(lines):
    """What verl logs as `timing_s/*` of a step, but for timers that run more than once in it."""
    logged = {}
    for line in of(lines, "metrics"):
        for name, value in line["extra"]["metrics"].items():
            if name.startswith("timing_s/") and line["step"] > 0:
                key = line["step"], name.removeprefix("timing_s/")
                logged[key] = logged.get(key, 0) + value
    compared = 0
    for (step, name), seconds in logged.items():
        spans = [
            line["duration_sec"]
            for line in of(lines, name)
            if line["step"] == step and line["file"].startswith("trainer")
        ]
        if len(spans) == 1:
            compared += 1
            assert seconds == pytest.approx(spans[0], abs=0.01), (step, name)
    assert compared >= 4 * STEPS or of(lines, "dispatch")


def test_ranks_replicas_and_weights_are_recorded(lines, run):
    """Each rank's update of each step, and the sync of the weights that follows."""
    updates = {(line["file"], line["step"]) for line in of(lines, "update_actor")}
    syncs = {line["step"] for line in of(lines, "update_weights")}
    headers = [json.loads(file.read_bytes()) for file in (run / "processes").glob("*.json")]

    assert updates >= {(f"actor_{rank}", step) for rank in (0, 1) for step in range(1, STEPS + 1)}
    assert syncs >= set(range(1, STEPS + 1))
    for header in headers:
        assert {} == header["probes"]["errors"]
        assert 0 == header["counters"]["dropped"]


def test_a_critic_is_recorded_in_phases_and_ranks(lines, run):
    """Its rank gets TransferQueue's metadata, not the batch, whose tokens are those that verl logs."""
    if CRITIC not in json.loads((run / "run.json").read_bytes())["command"]:
        pytest.skip("no critic")
    logged = {line["step"]: line["extra"]["metrics"] for line in of(lines, "metrics")}
    for step in range(1, STEPS + 1):
        own = [line for line in lines if line["step"] == step]
        (values,) = of(own, "values")
        end = datetime.fromisoformat(values["timestamp"]).timestamp()
        passes = [
            line
            for line in of(own, "infer_batch")
            if 0
            < end - datetime.fromisoformat(line["timestamp"]).timestamp()
            < values["duration_sec"]
        ]
        assert ["actor_0", "actor_1"] == sorted(line["file"] for line in passes)
        tokens = sum(line["extra"]["tokens"] for line in passes)
        assert tokens == logged[step]["perf/total_num_tokens"]
        assert {"timing_s/values", "timing_s/update_critic"} <= logged[step].keys()
        # Of the critic and of the actor.
        assert 2 == sum(line["file"] == "actor_1" for line in of(own, "train_mini_batch"))


def test_generation_counts_as_consumed_unless_it_is_known_not_to_be(lines, run):
    """The requests of verl 0.8's rollouter have no names of their samples, which all were consumed."""
    consumed = {
        (line["extra"]["uid"], line["extra"]["session"]) for line in of(lines, "sample_consumed")
    }
    accounts = account_totals(bubble_ledger(load(run).tables))

    assert accounts["generating"] > 1
    if len(consumed) == 32 * STEPS:
        assert "generating_unconsumed" not in accounts


def test_transfers_of_the_trainer_that_uses_transfer_queue_are_recorded(lines, run):
    """Of each step, in trainer, ranks and agent loops."""
    if "main_ppo_sync" not in " ".join(json.loads((run / "run.json").read_bytes())["command"]):
        pytest.skip("another trainer")
    for event, role in (("tq_get", "trainer"), ("tq_get", "actor"), ("tq_put", "worker")):
        steps = {line["step"] for line in of(lines, event) if line["file"].startswith(role)}
        assert steps >= set(range(1, STEPS + 1)), (event, role)
    # The recorded run was not traced.
    if of(lines, "tq_function"):
        functions = {line["extra"]["func"]: line for line in of(lines, "tq_function")}
        # The trainer's own, a rank's that verl bridges, and an agent loop's.
        assert {"_compute_old_log_prob", "update_actor", "_run_agent_loop"} <= functions.keys()
        assert "N/A" not in {line["extra"]["trace_id"] for line in functions.values()}
        console = traced_lines((run / "console.log").read_text(errors="replace"))
        assert {"ok"} == {line["status"] for line in console if "status" in line}


def test_each_choice_of_a_replica_is_recorded(lines):
    """By the load balancer, and the pool of which it chooses."""
    assert len(of(lines, "server_route")) == len(of(lines, "server_acquire")) > 200
    assert [2] == [line["extra"]["trainer_devices"] for line in of(lines, "replica_pool")]
