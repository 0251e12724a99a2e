"""Traces of other profilers, as a timeline takes them: Chrome JSON of torch.profiler, SQLite exports of nsys.

Times become nanoseconds since 1970; an event with a value of another type is left out.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from verl_profiler.errors import ReadingError
from verl_profiler.events.files import (
    UnusableFileError,
    cleaned_text,
    expanded,
    open_regular,
    reason_of,
)

# Microseconds since 1970 are larger than this, and times since a boot smaller.
_TIME_OF_DAY_US = 10**14
# Before its events, a trace has properties of the devices.
_HEAD_BYTES = 1 << 16
# Read whole; decoded, it takes several times as much.
_LIMIT_BYTES = 1 << 30
_LAST_NS = (1 << 63) - 1
_NAME_LIMIT = 4_096
_Time = (
    Annotated[int, msgspec.Meta(ge=0, lt=1 << 54)]
    | Annotated[float, msgspec.Meta(ge=0, lt=1 << 54)]
)
_SQLITE = b"SQLite format 3"
_Place = tuple[int | str, int | str]
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError)


@dataclass
class ForeignSpan:
    """A span of another profiler; an instant where begin and end are the same and `instant`.

    Args:
        fields: A JSON object.
    """

    begin_ns: int
    end_ns: int
    name: str
    category: str
    fields: str = "{}"
    instant: bool = False


@dataclass
class ForeignTrace:
    """A trace of another profiler.

    Args:
        title: What its folder is called.
        host: Where it was taken; None where the file does not state it.
        pids: The processes in it.
        threads: Spans by the name of their thread or stream.
        left_out: How many of its events were no events, or of impossible times.
    """

    title: str
    host: str | None = None
    pids: set[int] = field(default_factory=set[int])
    threads: dict[str, list[ForeignSpan]] = field(default_factory=dict[str, list[ForeignSpan]])
    left_out: int = 0


class _Event(msgspec.Struct):
    ph: str
    name: str = ""
    cat: str = "torch"
    pid: int | str = ""
    tid: int | str = ""
    ts: _Time | None = None
    dur: _Time = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def place(self) -> _Place:
        """The thread."""
        return self.pid, self.tid


class _File(msgspec.Struct):
    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    # Written by torch since 2.4.
    base_ns: Annotated[int, msgspec.Meta(ge=0, le=_LAST_NS)] = msgspec.field(
        name="baseTimeNanoseconds", default=0
    )
    host_name: str | None = None


class _Named(msgspec.Struct):
    name: str = ""


def is_trace(path: Path) -> bool:
    """Whether a file begins as a trace of torch.profiler or an SQLite database does."""
    try:
        with open_regular(path) as file, expanded(file) as opened:
            head = opened.read(_HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return False
    return head.startswith(_SQLITE) or b'"traceEvents"' in head


def read_trace(path: Path, *, found: bool = False) -> ForeignTrace | None:
    """Read another profiler's trace.

    Args:
        path: The file; one that is not named `.sqlite` is read as torch's.
        found: The user did not name it: JSON of another kind is skipped, not an error.

    Returns:
        None for a file that was found and is no trace.

    Raises:
        ReadingError: The file is no trace of a known format, or has no absolute time.
    """
    return _read_nsys(path) if path.suffix == ".sqlite" else _read_torch(path, found=found)


def _read_nsys(path: Path) -> ForeignTrace:
    """Read an export of nsys: NVTX ranges by thread, GPU work by stream."""
    # Brings in duckdb, which is not needed to recognize a trace.
    from verl_profiler.reading.formats import nsys_export

    export = nsys_export.read(path)
    if not export.dated:
        raise _unusable(path, "has no absolute time (time of day)")
    trace = ForeignTrace(f"nsys: {path.name}")

    def add(lane: str, pid: int, begin_ns: int, end_ns: int, name: Any, category: str) -> None:
        trace.pids.add(pid)
        span = ForeignSpan(begin_ns, end_ns, str(name or "range"), category)
        trace.threads.setdefault(lane, []).append(span)

    for _domain, name, category, _payload, _kind, pid, tid, begin_ns, end_ns in export.ranges:
        if end_ns is not None:
            add(f"NVTX of thread {tid}", pid, begin_ns, end_ns, name, category or "nvtx")
    for kind, name, gpu, stream, pid, _tid, _launch_ns, begin_ns, end_ns in export.work:
        add(f"GPU {gpu}, stream {stream}", pid, begin_ns, end_ns, name, kind)
    return trace


def _read_torch(path: Path, *, found: bool) -> ForeignTrace | None:
    """Read a trace of torch.profiler, or its gzip."""
    try:
        text = _content(path)
        if b'"traceEvents"' not in text:
            msgspec.json.decode(text)
            if found:
                return None
            raise _unusable(path, "is not a trace of torch or nsys: it has no events")
        file = msgspec.json.decode(text, type=_File)
    except RecursionError:
        raise _unusable(path, "cannot be read: it is nested too deeply") from None
    except (OSError, EOFError, zlib.error, *_NOT_JSON) as error:
        raise _unusable(path, f"cannot be read: {reason_of(error)}") from error
    trace = ForeignTrace(f"torch: {cleaned_text(path.name)}", file.host_name)
    events: list[_Event] = []
    decode = msgspec.json.Decoder(_Event).decode
    for each in file.events:
        try:
            events.append(decode(each))
        except (RecursionError, *_NOT_JSON):
            trace.left_out += 1
    if not events:
        raise _unusable(path, "is not a trace of torch or nsys: it has no events")
    _fill(trace, events, file.base_ns, path)
    return trace


def _content(path: Path) -> bytes:
    with open_regular(path, _LIMIT_BYTES) as file, expanded(file) as opened:
        text = bytearray()
        while block := opened.read(1 << 20):
            text += block
            if len(text) > _LIMIT_BYTES:
                raise UnusableFileError(f"is larger than {_LIMIT_BYTES >> 30} GiB")
    return bytes(text)


def _fill(trace: ForeignTrace, events: list[_Event], base_ns: int, path: Path) -> None:
    """Add spans and moments by thread."""
    names = {
        each.place: _name_in(each)
        for each in events
        if each.ph == "M" and each.name == "thread_name"
    }
    for each in events:
        if each.ph not in ("X", "i", "I"):
            continue
        if each.ts is None:
            trace.left_out += 1
            continue
        if not base_ns and each.ts < _TIME_OF_DAY_US:
            raise _unusable(path, "has no absolute time (time of day)")
        whole = int(each.ts)
        begin_ns = base_ns + whole * 1000 + round((each.ts - whole) * 1000)
        end_ns = begin_ns + round(each.dur * 1000)
        if end_ns > _LAST_NS:
            trace.left_out += 1
            continue
        fields = bytes(each.args).decode()
        span = ForeignSpan(
            begin_ns,
            end_ns,
            each.name[:_NAME_LIMIT],
            each.cat[:_NAME_LIMIT],
            fields if fields.startswith("{") else "{}",
            instant=each.ph != "X",
        )
        if isinstance(each.pid, int):
            trace.pids.add(each.pid)
        thread = names.get(each.place, f"{each.pid} {each.tid}"[:_NAME_LIMIT])
        trace.threads.setdefault(thread, []).append(span)


def _name_in(event: _Event) -> str:
    """Return the name that an event gives to its thread."""
    try:
        return msgspec.json.decode(event.args, type=_Named).name[:_NAME_LIMIT]
    except (RecursionError, *_NOT_JSON):
        return ""


def _unusable(path: Path, why: str) -> ReadingError:
    """Return the error of a file that is no trace, or cannot be placed in time."""
    return ReadingError(
        f"{path} {why}.\nGive a trace that torch.profiler exported, or what "
        "`nsys export --type sqlite` wrote",
        "bad-trace",
    )
