"""Readings of devices integrated over phases, against sums by hand."""

import pytest
from cached_runs import cached
from picked import picked
from truth.device_readings import process, reading, sampler

from verl_profiler.analysis.device_use import device_times, device_use
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables

SECOND = 1_000_000


def run_of(span, readings, processes=None):
    """A step from 10 to 20 s: `gen` until 14, nothing until 15, `update_actor` until 20; then a test."""
    events = [
        span("step", 10, 20, name="trainer_0"),
        span("gen", 10, 14, name="trainer_0"),
        span("sample_wait", 10, 13, name="trainer_0"),
        span("update_actor", 15, 20, name="trainer_0"),
        span("testing", 21, 23, name="trainer_0"),
        *readings,
    ]
    processes = processes or [sampler(run="r")]
    return Tables.of({"events": events, "processes": [process("trainer_0", run="r"), *processes]})


def at(moment_s, utilization, **fields):
    """A reading at so many seconds."""
    return reading(round(moment_s * SECOND), utilization, run="r", **fields)


def columns(rows, *names):
    """The rows as tuples."""
    return [tuple(row[name] for name in names) for row in rows]


# Each second: 100 % until 12, 50 % until 16, 0 % until 18, 80 % until 25.
EVERY_SECOND = [
    at(moment, 100 if moment <= 12 else 50 if moment <= 16 else 0 if moment <= 18 else 80)
    for moment in range(10, 26)
]


def test_idle_time_is_integrated_by_phase(span):
    """`gen`: 2 s at 100 %, 2 s at 50 %. Update: 1 s at 50 %, 2 s at 0 %, 2 s at 80 %."""
    rows = device_use(run_of(span, EVERY_SECOND))

    assert [
        ("gen", 4.0, 0.75, 1.0),
        ("unaccounted", 1.0, 0.5, 0.5),
        ("update_actor", 5.0, pytest.approx(0.42), pytest.approx(2.9)),
        ("testing", 2.0, pytest.approx(0.8), pytest.approx(0.4)),
    ] == columns(rows, "phase", "covered_s", "busy_share", "idle_s")


def test_of_phases_that_overlap_the_one_that_began_last_counts(span):
    """An update that begins in `generate_async` and ends after it."""
    events = [
        span("step", 10, 20, name="trainer_0"),
        span("generate_async", 10, 15, name="trainer_0"),
        span("update_actor", 12, 18, name="trainer_0"),
        span("update_weights", 18, 20, name="trainer_0"),
        *EVERY_SECOND,
    ]
    processes = [process("trainer_0", run="r"), sampler(run="r")]
    tables = Tables.of({"events": events, "processes": processes})

    found = {row["phase"]: row["covered_s"] for row in device_use(tables)}

    assert {"generate_async": 2.0, "update_actor": 6.0, "update_weights": 2.0} == found


def test_energy_power_clock_and_memory(span):
    """100 W for 2 s and 300 W for 2 s in `gen`; lowered clocks in one of four seconds."""
    readings = [
        at(9, 0),
        at(12, 100, power_w=100, sm_mhz=2000, used_bytes=5),
        at(13, 100, power_w=300, sm_mhz=1000, used_bytes=7, slowed_by=["thermal", "power_cap"]),
        at(14, 100, power_w=300, sm_mhz=2000, used_bytes=6),
    ]
    readings.insert(1, at(11, 100, power_w=100, sm_mhz=2000, used_bytes=5))
    (row,) = [row for row in device_use(run_of(span, readings)) if row["phase"] == "gen"]

    assert (800.0, 200.0, 1750.0, 7, 0.25) == picked(
        row, "energy_j power_w sm_mhz max_used_bytes slowed_share"
    )


def test_time_without_readings_is_neither_idle_nor_busy(span):
    """The sampling process was killed at 11 s, and the next one began too late."""
    rows = device_use(run_of(span, [at(10, 0), at(11, 0), at(30, 100)]))

    assert [("gen", 1.0, 1.0)] == columns(rows, "phase", "covered_s", "idle_s")


def test_a_device_without_a_value_has_none(span):
    """Not 0: MIG instances have no utilization."""
    readings = [at(moment, 0, used_bytes=3) for moment in range(10, 15)]
    for each in readings:
        del each["extra"]["utilization"]
    (row,) = [row for row in device_use(run_of(span, readings)) if row["phase"] == "gen"]

    assert (4.0, None, None, None, 3, None) == tuple(
        row[key]
        for key in (
            *("covered_s", "busy_share", "idle_s", "energy_j", "max_used_bytes"),
            "slowed_share",
        )
    )


def test_devices_are_those_of_the_run_with_their_users(span):
    """Device 0 is another job's."""
    processes = [
        sampler(run="r", devices=2),
        process("actor_3", run="r", devices=[{"uuid": "GPU-1"}]),
    ]
    readings = [at(moment, 10, device=device) for device in (0, 1) for moment in range(10, 26)]
    tables = run_of(span, readings, processes)

    assert {(1, "actor_3")} == {(row["device"], row["users"]) for row in device_use(tables)}


@pytest.fixture(scope="module")
def on_an_h100():
    """A recorded run: two steps, the second captured with torch (tests/data/README.md)."""
    with load(cached("h100")) as run:
        yield run


def test_power_is_that_of_nvidia_smi(on_an_h100):
    """Its means over the same phases, read every 0.2 s; the trace of the step was written at 0 %."""
    rows = {(row["step"], row["phase"]): row for row in device_use(on_an_h100.tables)}
    truth = {
        (1, "gen"): 117.5,
        (1, "old_log_prob"): 117.9,
        (1, "update_actor"): 119.6,
        (2, "gen"): 118.6,
        (2, "old_log_prob"): 118.9,
        (2, "stop_profile"): 118.7,
    }

    assert truth == {key: pytest.approx(rows[key]["power_w"], abs=1) for key in truth}
    written = rows[2, "stop_profile"]
    assert 0 == written["busy_share"]
    # Of 17.6 s; the sampler could not read for 6.
    assert written["covered_s"] == pytest.approx(13.2, abs=0.1)


def test_device_times_are_those_of_the_trace(on_an_h100):
    """From each call's begin to the end of its last kernel, as torch.profiler recorded them."""
    rows = {row["event"]: row for row in device_times(on_an_h100.tables, (2, 2))}

    for event, of_calls in (
        ("forward_backward", (1.586207, 0.559710, 1.431227)),
        ("infer_batch", (1.617489, 0.565722)),
        ("optimizer_step", (0.014396,)),
    ):
        assert len(of_calls) == rows[event]["calls"]
        assert rows[event]["device_s"] == pytest.approx(sum(of_calls), rel=0.01)


def test_steps_are_chosen_by_the_trainers_time(span):
    """Not by the step of the process that sampled."""
    readings = [dict(each, step=7) for each in EVERY_SECOND]
    tables = run_of(span, readings)

    assert {"gen", "unaccounted", "update_actor", "testing"} == {
        row["phase"] for row in device_use(tables, (1, 1))
    }
    assert [] == device_use(tables, (7, 7))
