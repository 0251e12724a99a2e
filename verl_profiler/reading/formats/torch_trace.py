"""Read Chrome JSON traces, as torch.profiler exports them, for a timeline.

Times become nanoseconds since 1970; an event with a value of another type is left out.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Annotated

import msgspec

from verl_profiler.events.files import (
    UnusableFileError,
    cleaned_text,
    expanded,
    open_regular,
    reason_of,
)
from verl_profiler.reading.formats.foreign_traces import ForeignSpan, ForeignTrace, unusable

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
_Place = tuple[int | str, int | str]


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


_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError)


def read(path: Path, *, found: bool = False) -> ForeignTrace | None:
    """Read a trace.

    Args:
        path: The file, or its gzip.
        found: The user did not name it: JSON of another kind is skipped, not an error.

    Returns:
        None for a file that was found and is no trace.

    Raises:
        ReadingError: The file is no Chrome trace, or has no absolute time.
    """
    try:
        text = _content(path)
        if b'"traceEvents"' not in text:
            msgspec.json.decode(text)
            if found:
                return None
            raise unusable(path, "is not a trace of torch or nsys: it has no events")
        file = msgspec.json.decode(text, type=_File)
    except RecursionError:
        raise unusable(path, "cannot be read: it is nested too deeply") from None
    except (OSError, EOFError, zlib.error, *_NOT_JSON) as error:
        raise unusable(path, f"cannot be read: {reason_of(error)}") from error
    trace = ForeignTrace(f"torch: {cleaned_text(path.name)}", file.host_name)
    events: list[_Event] = []
    decode = msgspec.json.Decoder(_Event).decode
    for each in file.events:
        try:
            events.append(decode(each))
        except (RecursionError, *_NOT_JSON):
            trace.left_out += 1
    if not events:
        raise unusable(path, "is not a trace of torch or nsys: it has no events")
    _fill(trace, events, file.base_ns, path)
    return trace


def is_trace(path: Path) -> bool:
    """Whether a file begins as a trace of torch.profiler does."""
    try:
        with open_regular(path) as file, expanded(file) as opened:
            return b'"traceEvents"' in opened.read(_HEAD_BYTES)
    except (OSError, EOFError, zlib.error):
        return False


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
            raise unusable(path, "has no absolute time (time of day)")
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
