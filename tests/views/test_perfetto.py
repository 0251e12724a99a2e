"""The Perfetto encoder against the classes that Perfetto ships."""

import io
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from views.perfetto_reading import read_trace

from verl_profiler.exports.perfetto import PerfettoTrace

plain = (
    st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
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


def both_ends(lane, begin_ns, end_ns, fields, sources=(), targets=()):
    return [
        (lane, begin_ns, ("span", "family", False), fields, sources, targets),
        (lane, end_ns, None, None, (), ()),
    ]


@settings(max_examples=60, deadline=None)
@given(
    fields=st.dictionaries(st.text(min_size=1), values, max_size=4),
    begin_ns=st.integers(0, (1 << 63) - 1),
    flows=st.lists(st.integers(0, (1 << 64) - 1), max_size=3),
)
def test_what_is_written_is_read(written, fields, begin_ns, flows):
    """Names, times, fields of every kind and arrows."""

    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))

    def fill(trace):
        lane = trace.track("lane", trace.track("folder"))
        for _ in range(2):
            trace.write(both_ends(lane, begin_ns, begin_ns, text, flows[:1], flows[1:]))

    reading = written(fill)

    assert [] == reading.faults
    assert 2 == len(reading.spans)
    for span in reading.spans:
        assert ("span", "family") == (span.name, span.category)
        assert (begin_ns, begin_ns) == (span.begin_ns, span.end_ns)
        assert kinds_apart(fields) == kinds_apart(span.fields)
        assert tuple(flows) == span.flows
        assert ("folder", "lane") == reading.path(span.track)


def kinds_apart(value):
    """Keep kinds apart that compare equal."""
    if isinstance(value, dict):
        return {key: kinds_apart(item) for key, item in value.items()}
    if isinstance(value, list):
        return [kinds_apart(item) for item in value]
    if isinstance(value, str):
        return value
    return (type(value).__name__, math.copysign(1, value), value)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('{"a":["x","y"],"b":{"c":1,"d":[]}}', {"a": ["x", "y"], "b": {"c": 1, "d": None}}),
        ("{}", {}),
        ("[1]", {"extra": "[1]"}),
        ('{"a":1,"b"}', {"extra": '{"a":1,"b"}'}),
    ],
)
def test_fields_are_split_as_json(written, text, fields):
    """Whatever stands in texts and lists; what is no object is shown as it is."""

    def fill(trace):
        lane = trace.track("lane")
        for known in ('{"a":1,"b":2}', text, text):
            trace.write([(lane, 5, ("moment", "family", True), known, (), ())])

    assert [fields, fields] == [moment.fields for moment in written(fill).instants[1:]]


@pytest.mark.parametrize("value", [0, 3, -3, 0.25, 80 << 30])
def test_counters_keep_their_value(written, value):
    """Bytes of a device's memory are exact."""
    reading = written(lambda trace: trace.count(trace.track("memory", unit="bytes"), [(5, value)]))

    (track,) = reading.counters
    assert "bytes" == reading.tracks[track].counter.unit_name
    assert [(5, value)] == reading.counters[track]


def test_large_traces_are_written_in_blocks(written):
    """More than one block, and annotations that repeat."""
    count = 30_000

    def fill(trace):
        lane = trace.track("lane")
        for number in range(count):
            fields = f'{{"number":{number},"request":"{"q" * 40}"}}'
            trace.write(both_ends(lane, number, number + 1, fields))

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
