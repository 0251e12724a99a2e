"""Devices that are idle while they should compute: the finding, its culprit and its seconds, planned here."""

from pathlib import Path

import pytest
from truth.device_readings import process, reading, sampler
from truth.rows import event_row
from truth.synthetic import EPOCH, Request, Step, events_of

from verl_profiler.analysis.registry import explained
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables

_EVERY_US = 100_000
STEPS = 8
DEVICES = 4
# The part of a phase in which a device is idle, by phase.
BUSY = {"update_actor": 0.02, "old_log_prob": 0.02, "gen": 0.7}


def found_in(idle_of, *, hosts=("one",), offloads=0.0):
    """Return the findings of a run whose devices are idle as planned.

    `idle_of` gives the idle share by host, device and phase; ranks offload during the last share `offloads` of the
    update.  A reading every 0.1 s has the mean of the
    phases of its interval, which is what a driver reports.
    """
    events, _ = events_of(
        *[Step(tuple(Request(worker=n % 2, replica=n % 2) for n in range(8)))] * STEPS
    )
    spans = [
        (event["begin_us"], event["end_us"], event["event"])
        for event in events
        if event["name"] == "trainer_0" and event["event"] in BUSY
    ]
    last = max(event["end_us"] for event in events)
    events += [
        event_row(
            event["name"],
            "offload",
            round(event["end_us"] - offloads * event["duration_us"]),
            event["end_us"],
            step=event["step"],
        )
        for event in events
        if event["event"] == "update_actor" and event["role"] == "actor" and offloads
    ]
    idle_us = {}
    processes = [
        {"run": "made", "name": event, "role": event.rpartition("_")[0], "rank": 0, "host": "one"}
        for event in dict.fromkeys(event["name"] for event in events)
        if not event.startswith("actor")
    ]
    processes += [process("actor_1")]
    for number, host in enumerate(hosts):
        name = f"actor_{10 * number}"
        processes.append(sampler(name, host, devices=DEVICES, interval_s=_EVERY_US / 1e6))
        for device in range(DEVICES):
            for at_us in range(EPOCH + _EVERY_US, last + _EVERY_US, _EVERY_US):
                busy = 0.0
                for begin, end, phase in spans:
                    shared = min(end, at_us) - max(begin, at_us - _EVERY_US)
                    if shared > 0:
                        share = idle_of(host, device, phase)
                        busy += shared * (1 - share)
                        if phase != "gen":
                            idle_us[device] = idle_us.get(device, 0) + shared * share
                utilization = round(100 * busy / _EVERY_US)
                events.append(reading(at_us, utilization, device=device, name=name))
    rows = explained(Tables.of({"events": events, "processes": processes}))["findings"]
    mean_s = sum(idle_us.values()) / 1e6 / STEPS / DEVICES / len(hosts)
    return {row["finding"]: row for row in rows}, mean_s


def as_planned(plan=BUSY, **more):
    """Every device alike."""
    return found_in(lambda _host, _device, phase: plan[phase], **more)


def test_busy_devices_are_no_finding():
    """Idle devices in `gen` are found by other means."""
    found, _ = as_planned()

    assert "gpu_idle" not in found


def test_a_phase_with_idle_devices_is_found_with_its_seconds():
    """Half of the update; phases end between readings, so that a tenth is left open."""
    found, idle_s = as_planned({**BUSY, "update_actor": 0.5})
    row = found["gpu_idle"]

    assert ("phase", "update_actor") == (row["culprit_kind"], row["culprit"])
    assert pytest.approx(idle_s, rel=0.1) == row["recoverable_s"]
    assert idle_s > 0.4
    assert "use_dynamic_bsz" in row["advice"]
    assert "device_use" in row["shows"]


def test_devices_that_are_idle_while_ranks_offload_are_part_of_that_finding():
    found, _ = as_planned({**BUSY, "update_actor": 0.6}, offloads=0.55)

    assert "gpu_idle" not in found
    assert "offload" == next(iter(found))


def test_a_device_that_is_idle_longer_than_the_others_is_named():
    """In every phase of every step."""
    found, _ = found_in(lambda _host, device, phase: 0.9 if device == 2 else BUSY[phase])
    row = found["gpu_idle"]

    assert ("device", "2") == (row["culprit_kind"], row["culprit"])
    assert "most idle in 14 of 14 phases of 7 steps" == row["where"]


def test_a_host_whose_devices_are_idle_is_named():
    """All four of them."""
    found, _ = found_in(
        lambda host, _device, phase: 0.5 if host == "two" else BUSY[phase], hosts=("one", "two")
    )
    row = found["gpu_idle"]

    assert ("host", "two") == (row["culprit_kind"], row["culprit"])


def test_only_finished_steps_count_for_the_idle_time_of_one():
    """A recorded run on an H100 that was ended in its second step (tests/data/README.md).

    nvidia-smi, read every 0.2 s: 8.80 s idle in old_log_prob, 4.60 s in ref and 31.83 s in update_actor.
    """
    archive = Path(__file__).parents[1] / "data" / "h100_sglang.tar.gz"
    with load(archive) as run:
        found = {row["finding"]: row for row in explained(run.tables)["findings"]}
    row = found["gpu_idle"]

    assert pytest.approx(8.80 + 4.60 + 31.83, rel=0.02) == row["recoverable_s"]
    assert "most idle in 1 of 1 step" == row["where"]
