"""TransferQueue's lines in console logs: found in what else stands there, and taken apart.

Four kinds of lines, of which a log has any mixture, with lines late or missing anywhere:

    [TQ-TRACE] trace_id=… | func=… | stage=FUNCTION_END | total_duration=…s | get_ratio=…% | …
    [TQ-DETAIL] trace_id=… | stage=TQ_CLIENT_PUT_END | duration=…s | throughput_mbps=…
    [TQ-LOG] op=TQ_GET | func=… | stage=END | duration=…s | pid=…
    Task … (pid=…) is getting len_samples=…, cost time: …            verl's own

Fields that are not known are kept.  MB in the lines is 2^20 bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler.reading.formats.console_log import (
    STDIN,
    ConsoleLine,
    file_lines,
    lines_of,
    stamps_us,
)
from verl_profiler.reading.tables.schemas import TQ_STAGES

MIB = 1 << 20
# The lines of a call, in the order in which they are written.
CALL_STAGES = (
    "FUNCTION_START",
    *(f"{stage.upper()}_{end}" for stage in TQ_STAGES for end in ("START", "END")),
    "FUNCTION_END",
)
# A line without any of these is not looked at.
_NEEDLES = ("[TQ-", "cost time", "step:")
_MARK = re.compile(
    r"\[TQ-(?:TRACE|DETAIL|LOG)\]|Task \S+ \(pid=[0-9]{1,9}\) is (?:getting|writing)"
    r"|step:[0-9]{1,9} - "
)
# Where the next line begins, when the line end between two is lost.
_NEXT_LINE = re.compile(r"(?:[A-Z]{1,20}:)?\d{4}-\d\d-\d\d[ T]\d\d:")
_KIND = re.compile(r"\[TQ-(TRACE|DETAIL|LOG)\]")
_TASK = re.compile(r"Task (\S+) \(pid=([0-9]{1,9})\) is (getting|writing)\b")
_ROWS = re.compile(r"len_samples=([0-9]{1,12})")
_COST = re.compile(r", cost time: ([0-9.]{1,40}(?:e[+-]?[0-9]{1,4})?)")
_STEP = re.compile(r"step:([0-9]{1,9}) - ")
_CLIENT = re.compile(r"TQ_CLIENT_(GET|PUT)_(START|END)")
_OPERATIONS = {
    "TQ_GET": "tq_get",
    "TQ_PUT": "tq_put",
    "TQ_GET_META": "tq_meta",
    "TQ_CLEAR": "tq_clear",
}
_UNITS = {
    "duration": "s",
    "total_duration": "s",
    "get_ratio": "%",
    "compute_ratio": "%",
    "put_ratio": "%",
}
_NUMBERS = {"timestamp", "data_size_mb", "throughput_mbps", *_UNITS}
_COUNTS = {"pid", "sampled", "step", "data_size_bytes"}
# Above these a value cannot be right; other numbers end at 1e9, other counts at 2**31.
_LIMITS = {"timestamp": 9e9, "data_size_mb": 1e12, "throughput_mbps": 1e12, "data_size_bytes": 1e18}
_NAMES = {"trace_id", "func", "stage", "call", "status", "batch_size", "op"}


class _UnreadableError(Exception):
    """A line is not what its mark announces; the message has the reason."""


@dataclass(slots=True)
class Record:
    """What one process wrote as one line.

    Args:
        kind: `TRACE`, `DETAIL`, `LOG`, `verl` for verl's own, or `step` for the trainer's metrics.
        event: `call`, or the transfer, such as `tq_get`.
        stage: One of `CALL_STAGES`; of a transfer `START` or `END`.
        fields: The known fields, by name.
        more: The others.
        actor: The class or name in Ray's prefix.
        process: The process in it, as it is shown: `WorkerDict pid=11 ip=10.0.0.2`; empty without one.
        host: The node in it; empty on the driver's.
        wall_us: The logger's time, in microseconds since 1970, as if it were UTC.
        repeated: How many lines Ray shows as this one.
        order: Its place among the records.
        digest: Of its text; equal for copies of the line.
    """

    kind: str
    event: str
    stage: str
    fields: dict[str, Any]
    more: dict[str, str]
    actor: str
    process: str
    host: str
    wall_us: int | None
    repeated: int
    order: int
    digest: int

    @property
    def at_us(self) -> int | None:
        """Return when the process wrote it, by its own clock in microseconds; None if it has no time."""
        seconds = self.fields.get("timestamp")
        return None if seconds is None else round(seconds * 1e6)


def records(
    paths: Iterable[Path],
    problems: list[str],
    unreadable: Callable[[str], None],
    utc_offset_s: int = 0,
) -> Iterator[Record]:
    """Give what the logs say about TransferQueue, and their step lines.

    Args:
        paths: Console logs, compressed or not; `-` is standard input.
        problems: What is wrong with a file is added here.
        unreadable: Takes each line that cannot be read, with the reason.
        utc_offset_s: How far the logs' clocks are ahead of UTC.

    Raises:
        ReadingError: A log cannot be opened.
    """
    order = 0
    for path in paths:
        shown = "standard input" if path == STDIN else path.name
        for number, raw in file_lines(path, problems):
            if not any(needle in raw for needle in _NEEDLES):
                continue
            for line in lines_of(raw, number):
                for text, wall_us, whole in _marked(line, utc_offset_s):
                    order += 1
                    try:
                        found = _record(text, line, wall_us, order, whole=whole)
                    except _UnreadableError as reason:
                        unreadable(f"{shown}:{number} ({reason}): {text[:120]}")
                    else:
                        if found is not None:
                            yield found


def _marked(line: ConsoleLine, utc_offset_s: int) -> Iterator[tuple[str, int | None, bool]]:
    """Cut a line at its marks, as two may stand in one; yield text, time, and whether it has its end."""
    found = list(_MARK.finditer(line.text))
    begin = 0
    for place, match in enumerate(found):
        head = line.text[begin : match.start()]
        last = place + 1 == len(found)
        begin = len(line.text) if last else found[place + 1].start()
        text = line.text[match.start() : begin]
        next_line = None if last else _NEXT_LINE.search(text)
        if next_line:
            begin = match.start() + next_line.start()
            text = text[: next_line.start()]
        stamps = stamps_us(head)
        wall_us = stamps[-1] - utc_offset_s * 1_000_000 if stamps else None
        yield text.strip(), wall_us, line.whole or not last


def _record(
    text: str, line: ConsoleLine, wall_us: int | None, order: int, *, whole: bool
) -> Record | None:
    """Read a line; None for one of verl's own without a time."""
    fields: dict[str, Any] | None
    more: dict[str, str] = {}
    event = "call"
    step, marked = _STEP.match(text), _KIND.match(text)
    if step is not None:
        kind, fields = "step", {"step": int(step[1]), "stage": ""}
    elif marked is None:
        kind, fields = "verl", _cost_fields(text, whole=whole)
    else:
        kind, fields = marked[1], _fields(text, more, whole=whole)
    if fields is None:
        return None
    stage = fields.get("stage", "")
    client = _CLIENT.fullmatch(stage) if kind == "DETAIL" else None
    if client is not None:
        event, stage = f"tq_{client[1].lower()}", client[2]
    elif kind == "LOG":
        event = _OPERATIONS.get(fields.get("op", ""), "")
        if not event or stage not in ("START", "END"):
            raise _UnreadableError("unknown op or stage")
    elif kind == "DETAIL" or (kind == "TRACE" and stage not in CALL_STAGES):
        raise _UnreadableError(f"unknown stage {stage}")
    if kind == "TRACE" and "func" not in fields:
        raise _UnreadableError("no func")
    needed = "total_duration" if stage == "FUNCTION_END" else "duration"
    if stage.endswith("END") and needed not in fields:
        raise _UnreadableError(f"no {needed}")
    process = f"{line.process or ''} pid={line.pid}".strip() if line.pid is not None else ""
    process += f" ip={line.ip}" if process and line.ip else ""
    return Record(
        kind=kind,
        event=event,
        stage=stage,
        fields=fields,
        more=more,
        actor=line.process or "",
        process=process,
        host=line.ip or "",
        wall_us=wall_us,
        repeated=line.repeated,
        order=order,
        digest=hash((process, wall_us, text)),
    )


def _fields(text: str, more: dict[str, str], *, whole: bool) -> dict[str, Any]:
    """Return the fields of a `[TQ-…]` line; those without a known name go to `more`."""
    if not whole:
        raise _UnreadableError("the line has no end")
    values: dict[str, Any] = {}
    for part in text.partition("]")[2].split("|"):
        name, given, value = part.strip().partition("=")
        if not given or not name or " " in name:
            raise _UnreadableError(f"{part[:40].strip()!r} is not a field")
        if name in _NUMBERS:
            values[name] = _number(name, value)
        elif name in _COUNTS:
            values[name] = _count_of(name, value)
        elif name in _NAMES:
            values[name] = value
        else:
            more[name] = value
    return values


def _cost_fields(text: str, *, whole: bool) -> dict[str, Any] | None:
    """Read one of verl's own lines, the end of a get or put; None for one without a time."""
    matched = _TASK.match(text)
    rows = _ROWS.search(text, matched.end()) if matched else None
    cost = _COST.search(text, rows.end() if rows else 0) if matched else None
    if matched is None or cost is None or not whole:
        if "cost time" in text:
            raise _UnreadableError("no time that can be read")
        return None
    func, pid, what = matched.groups()
    values: dict[str, Any] = {
        "func": func,
        "pid": int(pid),
        "stage": "GET_END" if what == "getting" else "PUT_END",
        "duration": _number("duration", f"{cost[1]}s"),
    }
    return values if rows is None else {**values, "batch_size": rows[1]}


def _number(name: str, text: str) -> float:
    unit = _UNITS.get(name, "")
    try:
        value = float(text.removesuffix(unit)) if text.endswith(unit) else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not 0 <= value < _LIMITS.get(name, 1e9):
        raise _UnreadableError(f"{name}={text[:30]}")
    return value


def _count_of(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise _UnreadableError(f"{name}={text[:30]}")
    value = int(text)
    if value >= _LIMITS.get(name, 1 << 31):
        raise _UnreadableError(f"{name}={text[:30]}")
    return value
