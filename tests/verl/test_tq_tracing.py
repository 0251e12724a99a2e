"""TransferQueue tracing on the real TransferQueue and verl's real bridge, over processes and nodes."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from tq_lines import ON, of, traced_lines

HERE = Path(__file__).parent
SAMPLES = 12

# On each push, SGLang's rehearsal traces on a cluster of one node (tests/rehearsal/test_recorded.py).
pytestmark = [pytest.mark.ray, pytest.mark.nightly]


def run(environment, **switches):
    """Run the driver; return its report and the printed lines as dicts."""
    done = subprocess.run(
        [sys.executable, str(HERE / "tq_tracing_driver.py")],
        env={**environment, **switches},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found[0].partition(" ")[2]), traced_lines(done.stdout + done.stderr)


@pytest.fixture(scope="module")
def off(verl_environment):
    """The run without tracing."""
    return run(verl_environment)


@pytest.fixture(scope="module")
def traced(verl_environment):
    """The run with everything on, by the environment alone, on nodes that do not have it."""
    return run(verl_environment, **ON)


def test_training_sees_the_same_with_tracing_on_and_off(off, traced):
    """Every TensorDict, every tag, every field and extra_info that comes back, and the failure.

    tests/transfer_queue/test_safety.py has on each push what needs no cluster of it.
    """
    assert [] == off[1]
    assert off[0]["training"] == traced[0]["training"]
    assert off[0]["tags"] == traced[0]["tags"]
    assert (2, [None, None]) == (off[0]["nodes"], off[0]["switches"])


def test_the_switches_reach_both_nodes(traced):
    """With `ray.init`, since the raylets do not have our environment; a failure is the worker's own."""
    assert (2, ["1", "1"]) == (traced[0]["nodes"], traced[0]["switches"])
    assert ["ValueError"] == traced[0]["training"][3]


def test_every_bridged_call_has_all_its_lines(traced):
    """Two workers, sync and async; a failing one ends with its status."""
    calls = defaultdict(list)
    for line in of(traced[1], mark="TQ-TRACE"):
        calls[line["func"], line["call"]].append(line["stage"])
    by_function = defaultdict(list)
    for (function, _), stages in calls.items():
        by_function[function].append(stages)
    got = ["FUNCTION_START", "GET_START", "GET_END", "COMPUTE_START", "COMPUTE_END"]
    whole = [*got, "PUT_START", "PUT_END", "FUNCTION_END"]

    assert {
        "compute_log_prob": [whole, whole],
        "infer_batch": [whole, whole],
        "update_actor": [[*got, "FUNCTION_END"]] * 2,
        "broken": [[*got, "FUNCTION_END"]],
    } == by_function
    assert ["error"] == [
        line["status"] for line in of(traced[1], func="broken", stage="FUNCTION_END")
    ]


def test_one_id_joins_rollout_and_update(traced):
    """All that handled the batch, in all processes, and nothing else has it."""
    lines = traced[1]
    rollouts = [
        line for line in of(lines, stage="TQ_CLIENT_PUT_END", batch_size=None) if "func" not in line
    ]
    ids = {line["trace_id"] for line in lines}

    assert 1 == len(ids)
    assert "N/A" not in ids
    assert SAMPLES == len(rollouts)
    assert {line["trace_id"] for line in of(lines, func="update_actor")} == ids
    assert len({line["pid"] for line in lines if "pid" in line}) >= 5


def test_bytes_are_those_of_the_samples(traced):
    """1 MB in twelve samples, and a quarter as much text; each rank gets half, nested on the way back."""
    gets = of(traced[1], func="compute_log_prob", stage="TQ_CLIENT_GET_END")
    puts = of(traced[1], func="compute_log_prob", stage="TQ_CLIENT_PUT_END")

    assert [0.625, 0.625] == pytest.approx(
        [float(line["data_size_mb"]) for line in gets], abs=0.006
    )
    # Half as much: floats instead of 64-bit integers.
    assert ["0.25", "0.25"] == [line["data_size_mb"] for line in puts]
    for line in gets + puts:
        speed = float(line["data_size_mb"]) / float(line["duration"].rstrip("s"))
        assert float(line["throughput_mbps"]) == pytest.approx(speed, rel=0.05)


def test_metrics_of_all_processes_arrive_once_a_step(traced):
    """Next to the trainer's own, which keep their values."""
    first, again, second = traced[0]["logged"]
    lines = traced[1]

    assert {1.0} == {data["loss"] for data in (first, again, second)}
    assert not [key for data in (again, second) for key in data if key.startswith("tq/")]
    assert len(of(lines, stage="FUNCTION_END")) == first["tq/function_count"]
    assert 1 == first["tq/function_errors"]
    assert len(of(lines, stage="TQ_CLIENT_GET_END")) == first["tq/client_get_count"]
    assert len(of(lines, stage="TQ_CLIENT_PUT_END")) == first["tq/client_put_count"]
    printed = sum(
        float(line["duration"].rstrip("s")) for line in of(lines, stage="TQ_CLIENT_GET_END")
    )
    assert first["tq/client_get_time_total"] == pytest.approx(printed, rel=1e-3)
    assert 0 < first["tq/overhead_share"] < 1
