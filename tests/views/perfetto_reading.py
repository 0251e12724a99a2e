"""Read a Perfetto trace with Perfetto's own classes, as a viewer would."""

import gzip
from dataclasses import dataclass, field

import pytest

trace_protos = pytest.importorskip(
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="pip install perfetto"
)


@dataclass
class Span:
    track: int
    name: str
    category: str
    begin_ns: int
    fields: dict
    flows: tuple
    depth: int
    end_ns: int | None = None


@dataclass
class Reading:
    """What a trace shows.

    Args:
        tracks: Descriptors by number.
        spans: In the order of their begin in the file.
        counters: (time, value) by track.
        faults: What a viewer would complain about.
    """

    tracks: dict = field(default_factory=dict)
    spans: list = field(default_factory=list)
    instants: list = field(default_factory=list)
    counters: dict = field(default_factory=dict)
    clocks: dict = field(default_factory=dict)
    faults: list = field(default_factory=list)

    def path(self, track):
        """Return the names from the top down to a track."""
        names = []
        while track:
            names.insert(0, self.tracks[track].name)
            track = self.tracks[track].parent_uuid
        return tuple(names)

    def arrows(self):
        """Return (source, target) spans, by their number."""
        ends = {}
        for span in (*self.spans, *self.instants):
            for flow in span.flows:
                ends.setdefault(flow, []).append(span)
        return ends


def value_of(annotation, texts=None):
    if annotation.dict_entries:
        return {entry.name: value_of(entry) for entry in annotation.dict_entries}
    if annotation.array_values:
        return [value_of(item) for item in annotation.array_values]
    kind = annotation.WhichOneof("value")
    if kind == "string_value_iid":
        return texts[annotation.string_value_iid]
    return None if kind is None else getattr(annotation, kind)


def read_trace(path):
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    trace = trace_protos.Trace()
    trace.ParseFromString(content)
    reading = Reading()
    names, categories, keys, texts = {}, {}, {}, {}
    open_spans, last = {}, {}
    event_type = trace_protos.TrackEvent
    for packet in trace.packet:
        if packet.HasField("clock_snapshot"):
            reading.clocks = {c.clock_id: c.timestamp for c in packet.clock_snapshot.clocks}
        for table, entries in (
            (categories, packet.interned_data.event_categories),
            (names, packet.interned_data.event_names),
            (keys, packet.interned_data.debug_annotation_names),
        ):
            table.update((entry.iid, entry.name) for entry in entries)
        for entry in packet.interned_data.debug_annotation_string_values:
            texts[entry.iid] = entry.str.decode()
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            if descriptor.parent_uuid and descriptor.parent_uuid not in reading.tracks:
                reading.faults.append(f"track {descriptor.uuid} before its parent")
            reading.tracks[descriptor.uuid] = descriptor
        if not packet.HasField("track_event"):
            continue
        event, time_ns = packet.track_event, packet.timestamp
        track = event.track_uuid
        if track not in reading.tracks:
            reading.faults.append(f"event on unknown track {track}")
        if time_ns < last.get(track, 0):
            reading.faults.append(f"{reading.path(track)} goes back in time")
        last[track] = time_ns
        if event.type == event_type.TYPE_COUNTER:
            value = event.counter_value
            if event.HasField("double_counter_value"):
                value = event.double_counter_value
            reading.counters.setdefault(track, []).append((time_ns, value))
            continue
        stack = open_spans.setdefault(track, [])
        if event.type == event_type.TYPE_SLICE_END:
            if stack:
                stack.pop().end_ns = time_ns
            else:
                reading.faults.append(f"end without begin on {reading.path(track)}")
            continue
        fields = {keys[a.name_iid]: value_of(a, texts) for a in event.debug_annotations}
        span = Span(
            track,
            event.name if event.HasField("name") else names[event.name_iid],
            categories[event.category_iids[0]],
            time_ns,
            fields,
            tuple(event.flow_ids),
            len(stack),
        )
        if event.type == event_type.TYPE_INSTANT:
            reading.instants.append(span)
            continue
        reading.spans.append(span)
        stack.append(span)
    return reading
