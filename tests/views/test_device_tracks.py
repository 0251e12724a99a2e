"""The counters of devices in a timeline."""

from truth.device_readings import reading, sampler
from truth.synthetic import Request, Step, events_of
from views.perfetto_reading import read_trace
from views.test_tracks import write

from verl_profiler.reading.tables.tables import Tables


def counters_of(tmp_path, hosts):
    """Return the points of each device's counters."""
    events, _ = events_of(Step((Request(),)))
    first = min(event["begin_us"] for event in events)
    processes = [sampler(f"actor_{number}", host, run="made") for number, host in enumerate(hosts)]
    for number in range(len(hosts)):
        for after, utilization, power in ((0, 0, 70), (1_000_000, 90, 600)):
            events.append(
                reading(
                    first + after,
                    utilization + number,
                    name=f"actor_{number}",
                    power_w=power,
                    used_bytes=10,
                )
            )
    tables = Tables.of({"events": events, "processes": processes})
    trace = read_trace(write(tables, tmp_path / "run.pftrace"))
    assert not [each for each in trace.instants if each.name == "device"]
    found = {}
    for track, points in trace.counters.items():
        name = trace.path(track)[-1]
        if name.startswith("device "):
            found[name] = [value for _, value in points]
    return found


def test_readings_are_counters_of_the_run(tmp_path):
    """By the number of the device; of several hosts with the host's name, also one that is no plain name."""
    assert {
        "device 0 utilization": [0, 90],
        "device 0 power": [70, 600],
        "device 0 memory used": [10, 10],
    } == counters_of(tmp_path, ["one"])
    found = counters_of(tmp_path, ["one", "it's {two}"])
    assert [0, 90] == found["device 0 on one utilization"]
    assert [1, 91] == found["device 0 on it's {two} utilization"]
