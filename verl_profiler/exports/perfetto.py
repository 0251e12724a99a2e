"""Write a timeline in Perfetto's own format: protobuf packets, encoded here by hand.

Only the messages that a timeline needs are known, by their field numbers; the tests read what comes
out with the classes that Perfetto ships.  Those would be a dependency, and take 1.2 to 1.8 times as
long.

All times are nanoseconds since 1970; as the clock snapshot at the beginning declares.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, BinaryIO

import msgspec

from verl_profiler.events.json_values import is_list, is_mapping, is_object, shallow

# Name and family of a span, and whether it is a moment.
Kind = tuple[str, str, bool]
# The numbers of arrows.
Arrows = Iterable[int]
# Track, time, kind (None where the span that began last on the track ends), fields as a JSON object,
# arrows that come from here and that end here.
Event = tuple[int, int, "Kind | None", "str | None", Arrows, Arrows]
# Times and numbers of a counter.
Points = Iterable[tuple[int, float]]

_MASK = (1 << 14) - 1
_SHORT = [bytes((n,)) if n < 128 else bytes((n & 127 | 128, n >> 7)) for n in range(1 << 14)]
# The low 14 bits of a longer number.
_MORE = [bytes((n & 127 | 128, n >> 7 | 128)) for n in range(1 << 14)]

_SEQUENCE = b"\x50\x01"
_NEEDS_STATE = _SEQUENCE + b"\x68\x02"
_CLEARED_STATE = _SEQUENCE + b"\x68\x01"
_FLOW = b"\xf9\x02"
_DOUBLE_COUNTER = b"\xe1\x02"
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_REALTIME, _BOOTTIME = 1, 6
_EXPLICIT_ORDER = 3
_BLOCK_BYTES = 1 << 20
# Annotations and times that were encoded before are kept, up to so many.
_KEPT = 200_000
_decode = msgspec.json.Decoder().decode
_double = struct.Struct("<d").pack
_fixed64 = struct.Struct("<Q").pack


def _varint(number: int) -> bytes:
    if number <= _MASK:
        return _SHORT[number] if number >= 0 else _varint(number + (1 << 64))
    return _MORE[number & _MASK] + _varint(number >> 14)


def _number(field: int, value: int) -> bytes:
    return _SHORT[field << 3] + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _SHORT[field << 3 | 2] + _varint(len(content)) + content


def _text(field: int, content: str) -> bytes:
    return _bytes(field, content.encode("utf-8", "replace"))


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return _text(6, value)
    if isinstance(value, bool):
        return _number(2, value)
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return _number(4, value)
    if isinstance(value, float):
        return b"\x29" + _double(value)
    if is_mapping(value):
        return b"".join(_bytes(11, _text(10, key) + _value(item)) for key, item in value.items())
    if is_list(value):
        return b"".join(_bytes(12, _value(item)) for item in value)
    return _text(6, "null" if value is None else str(value))


def fields_of(text: str) -> dict[str, Any]:
    """Return the fields of a JSON object, deep values cut; what is none is one field, `extra`."""
    try:
        fields = _decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {"extra": text}
    if not is_object(fields):
        return {"extra": text}
    is_nested = "[" in text or text.rfind("{") > 0
    return shallow(fields) if is_nested else fields


class PerfettoTrace:
    """A trace that is being written.

    Args:
        file: Where the packets go.
        origin_ns: A time at which the run was under way.
    """

    def __init__(self, file: BinaryIO, origin_ns: int) -> None:
        self._file = file
        self._block = bytearray()
        # How many there are.
        self.tracks = 0
        self._ranks: dict[tuple[int, str], int] = {}
        self._names: dict[tuple[int, str], int] = {}
        self._heads: dict[tuple[int, Kind], bytes] = {}
        self._tails: dict[int, bytes] = {}
        # What precedes an event, by its size.
        self._before: dict[int, bytes] = {}
        self._high: dict[int, bytes] = {}
        self._annotation = lru_cache(_KEPT, typed=True)(self._annotated)
        clocks = b"".join(
            _bytes(1, _number(1, clock) + _number(2, origin_ns)) for clock in (_REALTIME, _BOOTTIME)
        )
        self._packet(_bytes(6, clocks + _number(2, _BOOTTIME)) + _number(8, origin_ns) + _SEQUENCE)
        self._packet(_CLEARED_STATE)

    def track(self, name: str, parent: int = 0, *, about: str = "", unit: str = "") -> int:
        """Make a track of spans or other tracks, or of numbers with a unit; return its number.

        The viewer shows tracks of spans of one name as one.
        """
        self.tracks += 1
        track = _number(1, self.tracks) + _text(2, name)
        if unit:
            track += _bytes(8, _text(6, unit))
        # Made in the order in which they are to be shown; lanes of one name are shown as one.
        rank = self._ranks.setdefault((parent, name), self.tracks)
        track += _number(11, _EXPLICIT_ORDER) + _number(12, rank)
        if parent:
            track += _number(5, parent)
        if about:
            track += _text(14, about)
        self._packet(_SEQUENCE + _bytes(60, track))
        return self.tracks

    def write(self, events: Iterable[Event]) -> None:
        """Begin and end spans, and mark moments.

        Args:
            events: Those of a track are in the order of time, and its spans nested.
        """
        block, heads, sizes, tails = self._block, self._heads, self._before, self._tails
        annotation, time_of = self._annotation, self._time
        for track, time_ns, kind, fields, sources, targets in events:
            if kind is None:
                block += (tails.get(track) or self._tail(track)) + time_of(time_ns)
                continue
            event = heads.get((track, kind)) or self._head(track, kind)
            for key, value in fields_of(fields).items() if fields is not None else ():
                # Lists and objects cannot be looked up.
                known = isinstance(value, (str, int, float))
                event += annotation(key, value) if known else self._annotated(key, value)
            for flows in (sources, targets):
                for flow in flows:
                    event += _FLOW + _fixed64(flow)
            size = len(event)
            block += (sizes.get(size) or self._sized(size)) + event + b"\x40" + time_of(time_ns)
            if len(block) > _BLOCK_BYTES:
                self._flush()

    def count(self, track: int, points: Points) -> None:
        """Set the number of a counter from each of some moments on, which are in order."""
        event = _number(9, _COUNTER) + _number(11, track)
        # The number takes 2 and 8 bytes, the time 1 and 9.
        event = _SEQUENCE + b"\x5a" + _varint(len(event) + 10) + event + _DOUBLE_COUNTER
        # Fields may come in any order, but those of one message stay together.
        head = b"\x0a" + _varint(len(event) + 8 + 10) + event
        block, time_of = self._block, self._time
        for time_ns, value in points:
            block += head + _double(value) + b"\x40" + time_of(time_ns)
            if len(block) > _BLOCK_BYTES:
                self._flush()

    def close(self) -> None:
        """Write what is left; the file stays open."""
        self._flush()

    def _head(self, track: int, kind: Kind) -> bytes:
        name, category, moment = kind
        head = _number(9, _INSTANT if moment else _BEGIN) + _number(11, track)
        if (2, name) in self._names or len(self._names) < _KEPT:
            head += _number(10, self._interned(2, name))
        else:
            head += _text(23, name)
        head += _number(3, self._interned(1, category))
        if len(self._heads) >= _KEPT:
            self._heads.clear()
        self._heads[track, kind] = head
        return head

    def _tail(self, track: int) -> bytes:
        event = _number(9, _END) + _number(11, track)
        tail = _SEQUENCE + _bytes(11, event) + b"\x40"
        # A time takes 9 bytes.
        tail = self._tails[track] = b"\x0a" + _varint(len(tail) + 9) + tail
        return tail

    def _sized(self, size: int) -> bytes:
        size_bytes = _varint(size)
        # Five bytes of flags and tags, and ten for the time.
        whole = b"\x0a" + _varint(5 + len(size_bytes) + size + 10)
        before = self._before[size] = whole + _NEEDS_STATE + b"\x5a" + size_bytes
        return before

    def _annotated(self, key: str, value: Any) -> bytes:
        return _bytes(4, _number(1, self._interned(3, key)) + _value(value))

    def _interned(self, kind: int, name: str) -> int:
        """Return the number of a category (1), event name (2) or annotation name (3)."""
        number = self._names.get((kind, name))
        if number is None:
            number = self._names[kind, name] = len(self._names) + 1
            entry = _bytes(kind, _number(1, number) + _text(2, name))
            self._packet(_NEEDS_STATE + _bytes(12, entry))
        return number

    def _packet(self, content: bytes) -> None:
        self._block += _bytes(1, content)
        if len(self._block) > _BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._file.write(self._block)
        self._block.clear()

    def _time(self, time_ns: int) -> bytes:
        """Encode a time in 9 bytes, whatever its size."""
        high = self._high.get(time_ns >> 28)
        if high is None:
            if len(self._high) > _KEPT:
                self._high.clear()
            high = _MORE[time_ns >> 28 & _MASK] + _MORE[time_ns >> 42 & _MASK]
            high = self._high[time_ns >> 28] = high + _SHORT[time_ns >> 56]
        return _MORE[time_ns & _MASK] + _MORE[time_ns >> 14 & _MASK] + high
