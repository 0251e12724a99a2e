"""Devices and their readings as tables: who uses which, and what time a reading stands for."""

import pytest
from truth.device_readings import process, reading, sampler

from verl_profiler.reading.tables.tables import Tables

SECOND = 1_000_000


def tables_of(processes, events=()):
    """Tables of these headers and readings."""
    return Tables.of({"processes": list(processes), "events": list(events)})


def test_users_are_found_by_uuid_bus_or_number():
    """On their own host only; a device that nobody of the run uses is of another job."""
    tables = tables_of(
        [
            sampler("actor_0", devices=4),
            process("actor_1", devices=[{"uuid": "GPU-1"}]),
            process("actor_2", devices=[{"uuid": "MIG-x", "bus_id": "0000:02:00.0"}]),
            process("engine_0", devices=[{"device": 1}]),
            process("actor_9", "two", devices=[{"uuid": "GPU-3"}]),
        ]
    )

    assert [
        (0, None, False),
        (1, "actor_1, engine_0", True),
        (2, "actor_2", True),
        (3, None, False),
    ] == [
        (row["device"], row["users"], row["of_run"])
        for row in tables.rows("SELECT * FROM devices ORDER BY device")
    ]


def test_without_known_users_all_devices_count():
    """Torch may not have used any yet; a device that a second process took over is one."""
    tables = tables_of([sampler("actor_0", devices=2), sampler("actor_1", devices=2)])

    assert [True, True] == [row["of_run"] for row in tables.rows("SELECT * FROM devices")]


@pytest.mark.parametrize(
    ("events", "spans", "interval_s"),
    [
        # What follows without lines did not change.
        (
            [
                reading(10 * SECOND, 100),
                reading(11 * SECOND, 50),
                reading(20 * SECOND, 50),
                reading(21 * SECOND, 0),
            ],
            [(100, 9, 10), (50, 10, 19), (50, 19, 20), (0, 20, 21)],
            1.0,
        ),
        # On an H100, 13 % of `update_actor` stood for 8 s of writing a trace, in which nvidia-smi read 0.
        (
            [
                reading(10 * SECOND, 13),
                reading(19 * SECOND, 0, gap_s=9.0),
                reading(28 * SECOND, 5, gap_s=4.0),
            ],
            [(13, 9, 10), (0, 18, 24), (5, 27, 28)],
            1.0,
        ),
        # Another process takes over two seconds later.
        (
            [reading(10 * SECOND, 100), reading(13 * SECOND, 50, name="actor_1")],
            [(100, 9, 12), (50, 12, 13)],
            1.0,
        ),
        (
            [reading(10 * SECOND, 100), reading(round(10.2 * SECOND), 50)],
            [(100, 9.8, 10.0), (50, 10.0, 10.2)],
            0.2,
        ),
    ],
)
def test_a_reading_stands_for_the_interval_before_it(events, spans, interval_s):
    """Of the header's length, and for no time in which none could be taken."""
    samplers = [sampler(name, interval_s=interval_s) for name in ("actor_0", "actor_1")]
    rows = tables_of(samplers, events).rows(
        "SELECT * FROM device_readings ORDER BY host, device, at_us"
    )

    assert spans == [
        (row["utilization"], row["begin_us"] / SECOND, row["end_us"] / SECOND) for row in rows
    ]
