"""The Perfetto encoder against the classes that Perfetto ships."""

import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report.perfetto_reading import read_trace

from verl_profiler.report.perfetto import PerfettoTrace

plain = (
    st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | st.text()
)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.text(), inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A function that writes a trace and reads it back."""
    path = tmp_path_factory.mktemp("trace") / "trace.pftrace"

    def write(fill):
        with path.open("wb") as file:
            trace = PerfettoTrace(file, 1_795_000_000_000_000_000)
            fill(trace)
            trace.close()
        return read_trace(path)

    return write


@settings(max_examples=60, deadline=None)
@given(
    fields=st.dictionaries(st.text(min_size=1), values, max_size=4),
    begin_ns=st.integers(0, (1 << 63) - 1),
    flows=st.lists(st.integers(0, (1 << 64) - 1), max_size=3),
)
def test_what_is_written_is_read(written, fields, begin_ns, flows):
    """Names, times, fields of every kind and arrows."""

    def fill(trace):
        lane = trace.lane("lane", trace.folder("folder"))
        for _ in range(2):
            trace.begin(lane, begin_ns, ("span", "family", fields), flows[:1], flows[1:])
            trace.end(lane, begin_ns)

    reading = written(fill)

    assert [] == reading.faults
    assert 2 == len(reading.spans)
    for span in reading.spans:
        assert ("span", "family") == (span.name, span.category)
        assert (begin_ns, begin_ns) == (span.begin_ns, span.end_ns)
        assert encoded(fields) == encoded(span.fields)
        assert tuple(flows) == span.flows
        assert ("folder", "lane") == reading.path(span.track)


def encoded(value):
    """Keep kinds apart that compare equal, and texts as they can be written."""
    if isinstance(value, dict):
        return {encoded(key): encoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [encoded(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return (type(value).__name__, math.copysign(1, value), value)


@pytest.mark.parametrize("value", [0, 3, -3, 0.25, 80 << 30])
def test_counters_keep_their_value(written, value):
    """Bytes of a device's memory are exact."""
    reading = written(lambda trace: trace.count(trace.counter("memory", 0, "bytes"), 5, value))

    (track,) = reading.counters
    assert "bytes" == reading.tracks[track].counter.unit_name
    assert [(5, value)] == reading.counters[track]


def test_large_traces_are_written_in_blocks(written):
    """More than one block, and annotations that repeat."""
    count = 30_000

    def fill(trace):
        lane = trace.lane("lane", 0)
        for number in range(count):
            trace.begin(lane, number, ("span", "family", {"number": number, "request": "q" * 40}))
            trace.end(lane, number + 1)

    reading = written(fill)

    assert list(range(count)) == [span.fields["number"] for span in reading.spans]
    assert {1} == {span.end_ns - span.begin_ns for span in reading.spans}


def test_times_are_of_the_day():
    """The snapshot says that the clock of the trace is the time of day."""
    file = io.BytesIO()
    PerfettoTrace(file, 7).close()

    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = protos.Trace()
    trace.ParseFromString(file.getvalue())
    snapshot = trace.packet[0].clock_snapshot
    names = protos.BuiltinClock.Name
    assert {"BUILTIN_CLOCK_REALTIME": 7, "BUILTIN_CLOCK_BOOTTIME": 7} == {
        names(clock.clock_id): clock.timestamp for clock in snapshot.clocks
    }
    assert "BUILTIN_CLOCK_BOOTTIME" == names(snapshot.primary_trace_clock)
