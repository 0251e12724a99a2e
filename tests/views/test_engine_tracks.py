"""The counters of engines in a timeline: their readings, and how often they retracted requests."""

from truth.engine_readings import iterations, reading
from truth.synthetic import Request, Step, Turn, events_of, tables_of
from views.perfetto_reading import read_trace
from views.test_tracks import write

from verl_profiler.exports.tracks import origin_ns

READINGS = ((0, 3, 0, 300), (500_000, 8, 2, 950), (1_000_000, 1, 0, 0))


def readings(events, name, *, ranks=(0,), retracted=(None, None, None)):
    """Return an engine's readings from the first event on, and the time of that."""
    first = min(event["begin_us"] for event in events)
    for rank in ranks:
        for (after, running, waiting, used), many in zip(READINGS, retracted, strict=True):
            extra = {
                "dp_rank": rank,
                "running_requests": running + rank,
                "waiting_requests": waiting,
                "kv_used_tokens": used,
                "kv_capacity_tokens": 1_000,
                **({} if many is None else {"retractions": many}),
            }
            yield reading(name, first + after, step=1, **extra)


def counters_of(tables, path):
    """Return the points of each engine's own counters, in ns after the first one."""
    trace = read_trace(write(tables, path))
    found = {}
    for track, points in trace.counters.items():
        *_, process, name = trace.path(track)
        if name.startswith("engine ") and "in flight" not in name:
            found[process, name] = [(at_ns, value) for at_ns, value in points]
    assert not [each for each in trace.instants if each.name.startswith("engine_state")]
    assert not [each for each in trace.spans if each.name.startswith("engine_iterations")]
    return found


RETRACTED = Turn(retractions=2, lost_us=100_000)
STEP = Step((Request((RETRACTED, RETRACTED)), Request(replica=1)))


def test_readings_are_counters_of_their_engine(tmp_path):
    """Each value at its time, by the process."""
    events, _ = events_of(STEP)
    tables = tables_of([*events, *readings(events, "engine_1")])
    found = counters_of(tables, tmp_path / "run.pftrace")
    times = [at_us for at_us, *_ in READINGS]
    shown = {
        name: [value for _, value in points]
        for (process, name), points in found.items()
        if process.startswith("engine_1")
    }

    assert {
        "engine running": [3, 8, 1],
        "engine waiting": [0, 2, 0],
        "engine KV cache": [30, 95, 0],
    } == shown
    (points,) = (found[key] for key in found if key[1] == "engine running")
    assert times == [(at_ns - points[0][0]) // 1_000 for at_ns, _ in points]
    assert points[0][0] >= origin_ns(tables, None)


def test_iterations_are_counters_that_end_with_them(tmp_path):
    """Rows that follow each other without a gap, and one after a second of nothing to do."""
    events, _ = events_of(STEP)
    first = min(event["begin_us"] for event in events)
    rows = [
        iterations(
            "engine_1",
            first + begin_ms * 1_000,
            first + end_ms * 1_000,
            iterations=count,
            busy_s=(end_ms - begin_ms) / 1e3,
            decode_requests=decoded,
            prefill_tokens=prefilled,
            retracted_requests=retracted,
        )
        for begin_ms, end_ms, count, decoded, prefilled, retracted in (
            (0, 100, 10, 40, 0, 0),
            (100, 200, 5, 20, 300, 2),
            (1_200, 1_300, 20, 20, 0, 0),
        )
    ]
    found = counters_of(tables_of([*events, *rows]), tmp_path / "run.pftrace")
    shown = {name: points for (_, name), points in found.items()}
    times = [
        (at_ns - shown["engine batch"][0][0]) // 1_000_000 for at_ns, _ in shown["engine batch"]
    ]

    assert [0, 100, 200, 1_200, 1_300] == times
    assert {
        "engine batch": [4, 4, 0, 1, 0],
        "engine iteration": [10, 20, 0, 5, 0],
        "engine prefill": [0, 3_000, 0, 0, 0],
        "engine retracted": [0, 2, 0, 0, 0],
    } == {
        name: [value for _, value in shown[name]] for name in shown if name != "engine retractions"
    }


def test_retractions_so_far(tmp_path):
    """Of answers, twice two; where the readings count them, those and not both."""
    events, _ = events_of(STEP)
    by_answers = counters_of(tables_of(events), tmp_path / "answers.pftrace")
    counted = [*events, *readings(events, "engine_0", retracted=(0, 3, 1))]
    by_readings = counters_of(tables_of(counted), tmp_path / "readings.pftrace")

    def values(found):
        return [
            [value for _, value in points]
            for (_, name), points in found.items()
            if name == "engine retractions"
        ]

    assert [[2, 4]] == values(by_answers)
    assert [[3, 4]] == values(by_readings)
