"""Write a timeline as Chrome's JSON trace events, for tools that do not read Perfetto's format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, BinaryIO

import msgspec

from verl_profiler.exports.perfetto import Event, Points, fields_of

__all__ = ["ChromeTrace"]

_encode = msgspec.json.Encoder(enc_hook=str).encode
_BLOCK_BYTES = 1 << 20


class ChromeTrace:
    """A trace that is being written; its methods are those of `PerfettoTrace`.

    A folder is a process of the format, a lane a thread.  Times in the file are microseconds after
    `origin_ns`, which stands under `otherData`.

    Args:
        file: Where it goes.
        origin_ns: The first time of the run, in nanoseconds since 1970.
    """

    def __init__(self, file: BinaryIO, origin_ns: int) -> None:
        self._file = file
        self._origin_ns = origin_ns
        self._block = bytearray(b'{"displayTimeUnit":"ms","otherData":')
        self._block += _encode({"origin_unix_ns": str(origin_ns)}) + b',"traceEvents":[\n'
        self._separator = b""
        self._paths: dict[int, str] = {0: ""}
        # What assigns an event to its track.
        self._places: dict[int, dict[str, Any]] = {}
        self._tracks = 0

    def folder(self, name: str, parent: int = 0, *, about: str = "") -> int:
        """Make a track that holds others; return its number."""
        self._tracks += 1
        path = f"{self._paths[parent]} / {name}" if parent else name
        self._paths[self._tracks] = path
        self._describe("process", self._tracks, 0, {"name": path, "labels": about})
        return self._tracks

    def lane(self, name: str, parent: int) -> int:
        """Make a track of spans."""
        self._tracks += 1
        self._places[self._tracks] = {"pid": parent, "tid": self._tracks}
        self._describe("thread", parent, self._tracks, {"name": name})
        return self._tracks

    def counter(self, name: str, parent: int, unit: str) -> int:
        """Make a track of numbers over time."""
        self._tracks += 1
        self._places[self._tracks] = {"pid": parent, "name": f"{name} ({unit})"}
        return self._tracks

    def write(self, events: Iterable[Event]) -> None:
        """Begin and end spans, and mark moments; see `PerfettoTrace.write`."""
        for track, time_ns, kind, fields, sources, targets in events:
            if kind is None:
                self._event("E", track, time_ns)
                continue
            name, category, moment = kind
            about = {"name": name, "cat": category, "args": fields_of(fields or "{}")}
            if moment:
                self._event("i", track, time_ns, s="t", **about)
            else:
                self._event("B", track, time_ns, **about)
            for arrow, flows in (("s", sources), ("f", targets)):
                for flow in flows:
                    self._event(arrow, track, time_ns, name="flow", cat="flow", id=flow, bp="e")

    def count(self, track: int, points: Points) -> None:
        """Set the number of a counter from each of some moments on, which are in order."""
        for time_ns, value in points:
            self._event("C", track, time_ns, args={"value": value})

    def close(self) -> None:
        """End the JSON; the file stays open."""
        self._block += b"\n]}\n"
        self._flush()

    def _event(self, kind: str, track: int, time_ns: int, **more: Any) -> None:
        time_us = (time_ns - self._origin_ns) / 1000
        self._write({"ph": kind, "ts": time_us, **self._places[track], **more})

    def _describe(self, what: str, pid: int, tid: int, about: dict[str, str]) -> None:
        for key, value in about.items():
            if value:
                event = {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_{key}"}
                self._write({**event, "args": {key: value}})
        order = {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_sort_index"}
        self._write({**order, "args": {"sort_index": self._tracks}})

    def _write(self, event: dict[str, Any]) -> None:
        self._block += self._separator + _encode(event)
        self._separator = b",\n"
        if len(self._block) > _BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._file.write(self._block)
        self._block.clear()
