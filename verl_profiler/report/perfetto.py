"""Write a timeline in Perfetto's own format: protobuf packets, encoded here by hand.

Only the messages that a timeline needs are known, by their field numbers; the tests read what comes
out with the classes that Perfetto ships.  Those would be a dependency, and take 1.2 to 1.8 times as
long.

All times are nanoseconds since 1970; the clock snapshot at the beginning says so.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

__all__ = ["About", "Arrows", "PerfettoTrace"]

# Name, family and fields of a span; the numbers of arrows.
About = tuple[str, str, Mapping[str, Any]]
Arrows = Iterable[int]

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
# Annotations that were encoded before are kept, up to so many.
_KEPT = 200_000
_double = struct.Struct("<d").pack
_fixed64 = struct.Struct("<Q").pack


def _varint(number: int) -> bytes:
    if number <= _MASK:
        return _SHORT[number] if number >= 0 else _varint(number + (1 << 64))
    return _MORE[number & _MASK] + _varint(number >> 14)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, content: str) -> bytes:
    return _bytes(field, content.encode("utf-8", "replace"))


class PerfettoTrace:
    """A trace that is being written.

    Args:
        file: Where the packets go.
        origin_ns: A time at which the run was under way.
    """

    def __init__(self, file: BinaryIO, origin_ns: int) -> None:
        self._file = file
        self._block = bytearray()
        self._tracks = 0
        self._ranks: dict[tuple[int, str], int] = {}
        self._names: dict[tuple[int, str], int] = {}
        self._heads: dict[tuple[int, int, str, str], bytes] = {}
        self._tails: dict[int, bytes] = {}
        # What precedes an event, by its size.
        self._before: dict[int, bytes] = {}
        self._high: dict[int, bytes] = {}
        # Not of floats: 0.0 and -0.0 are equal too.
        self._annotations: dict[type, dict[tuple[str, Any], bytes]] = {str: {}, int: {}, bool: {}}
        clocks = b"".join(
            _bytes(1, _number(1, clock) + _number(2, origin_ns)) for clock in (_REALTIME, _BOOTTIME)
        )
        self._packet(_bytes(6, clocks + _number(2, _BOOTTIME)) + _number(8, origin_ns) + _SEQUENCE)
        self._packet(_CLEARED_STATE)

    def folder(self, name: str, parent: int = 0, *, about: str = "") -> int:
        """Make a track that holds others; return its number."""
        return self._track(name, parent, about=about)

    def lane(self, name: str, parent: int) -> int:
        """Make a track of spans; the viewer shows lanes of one name as one."""
        return self._track(name, parent)

    def counter(self, name: str, parent: int, unit: str) -> int:
        """Make a track of numbers over time."""
        return self._track(name, parent, counter=_bytes(8, _text(6, unit)))

    def begin(
        self, track: int, time_ns: int, about: About, sources: Arrows = (), targets: Arrows = ()
    ) -> None:
        """Begin a span inside those that are open on its track.

        Args:
            track: A lane.
            time_ns: When.
            about: What the viewer writes on it, its family, and what is shown when it is selected.
            sources: Numbers of the arrows that come from here.
            targets: Numbers of the arrows that end here.
        """
        event = self._head(_BEGIN, track, about) + self._annotated(about[2])
        for flow in sources:
            event += _FLOW + _fixed64(flow)
        for flow in targets:
            event += _FLOW + _fixed64(flow)
        self._event(event, time_ns)

    def instant(self, track: int, time_ns: int, about: About) -> None:
        """Mark a moment."""
        self._event(self._head(_INSTANT, track, about) + self._annotated(about[2]), time_ns)

    def end(self, track: int, time_ns: int) -> None:
        """End the span of this track that began last."""
        tail = self._tails.get(track)
        if tail is None:
            event = _number(9, _END) + _number(11, track)
            tail = _SEQUENCE + _bytes(11, event) + b"\x40"
            # A time takes 9 bytes.
            tail = self._tails[track] = b"\x0a" + _varint(len(tail) + 9) + tail
        # The block is written out with the next span that begins.
        self._block += tail + self._time(time_ns)

    def count(self, track: int, time_ns: int, value: float) -> None:
        """Set the number of a counter from this moment on."""
        head = self._tails.get(track)
        if head is None:
            event = _number(9, _COUNTER) + _number(11, track)
            # The number takes 2 and 8 bytes, the time 1 and 9.
            event = _SEQUENCE + b"\x5a" + _varint(len(event) + 10) + event + _DOUBLE_COUNTER
            # Fields may come in any order, but those of one message stay together.
            head = self._tails[track] = b"\x0a" + _varint(len(event) + 8 + 10) + event
        self._write(head + _double(value) + b"\x40" + self._time(time_ns))

    def close(self) -> None:
        """Write what is left; the file stays open."""
        self._flush()

    def _track(self, name: str, parent: int, *, about: str = "", counter: bytes = b"") -> int:
        self._tracks += 1
        track = _number(1, self._tracks) + _text(2, name) + counter
        # Made in the order in which they are to be shown; lanes of one name are shown as one.
        rank = self._ranks.setdefault((parent, name), self._tracks)
        track += _number(11, _EXPLICIT_ORDER) + _number(12, rank)
        if parent:
            track += _number(5, parent)
        if about:
            track += _text(14, about)
        self._packet(_SEQUENCE + _bytes(60, track))
        return self._tracks

    def _head(self, kind: int, track: int, about: About) -> bytes:
        name, category, _ = about
        head = self._heads.get((kind, track, name, category))
        if head is None:
            head = _number(9, kind) + _number(10, self._interned(2, name)) + _number(11, track)
            head += _number(3, self._interned(1, category))
            self._heads[kind, track, name, category] = head
        return head

    def _event(self, event: bytes, time_ns: int) -> None:
        size = len(event)
        before = self._before.get(size)
        if before is None:
            size_bytes = _varint(size)
            # Five bytes of flags and tags, and ten for the time.
            whole = b"\x0a" + _varint(5 + len(size_bytes) + size + 10)
            before = self._before[size] = whole + _NEEDS_STATE + b"\x5a" + size_bytes
        self._block += before + event + b"\x40" + self._time(time_ns)
        if len(self._block) > _BLOCK_BYTES:
            self._flush()

    def _annotated(self, fields: Mapping[str, Any]) -> bytes:
        annotations = self._annotations
        event = b""
        for item in fields.items():
            # 1, 1.0 and True are equal and are not the same.
            kept = annotations.get(item[1].__class__)
            encoded = None if kept is None else kept.get(item)
            event += self._annotation(*item) if encoded is None else encoded
        return event

    def _annotation(self, key: str, value: Any) -> bytes:
        encoded = _bytes(4, _number(1, self._interned(3, key)) + self._value(value))
        kept = self._annotations.get(value.__class__)
        if kept is not None:
            if len(kept) > _KEPT:
                kept.clear()
            kept[key, value] = encoded
        return encoded

    def _value(self, value: Any) -> bytes:
        if isinstance(value, bool):
            return _number(2, value)
        if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            return _number(4, value)
        if isinstance(value, float):
            return b"\x29" + _double(value)
        if isinstance(value, Mapping):
            return b"".join(
                _bytes(11, _text(10, str(key)) + self._value(item)) for key, item in value.items()
            )
        if isinstance(value, (list, tuple)):
            return b"".join(_bytes(12, self._value(item)) for item in value)
        return _text(6, "null" if value is None else str(value))

    def _interned(self, kind: int, name: str) -> int:
        """Return the number of a category (1), event name (2) or annotation name (3)."""
        number = self._names.get((kind, name))
        if number is None:
            number = self._names[kind, name] = len(self._names) + 1
            entry = _bytes(kind, _number(1, number) + _text(2, name))
            self._packet(_NEEDS_STATE + _bytes(12, entry))
        return number

    def _packet(self, content: bytes) -> None:
        self._write(_bytes(1, content))

    def _write(self, packet: bytes) -> None:
        self._block += packet
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
