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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_profiler.reading.formats.console_log import STDIN, ConsoleLine, file_lines, lines_of

__all__ = [
    "CLIENT",
    "KIND",
    "MIB",
    "OPERATIONS",
    "STEP",
    "Line",
    "Seen",
    "Unreadable",
    "lines",
    "read_cost",
    "read_fields",
]

MIB = 1 << 20
# A line without any of these is not looked at.
_NEEDLES = ("[TQ-", "cost time", "step:")
_MARK = re.compile(
    r"\[TQ-(?:TRACE|DETAIL|LOG)\]|Task \S+ \(pid=[0-9]{1,9}\) is (?:getting|writing)"
    r"|step:[0-9]{1,9} - "
)
_WALL = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[,.](\d{1,6}))?")
# Where the next line begins, when the line end between two is lost.
_NEXT_LINE = re.compile(r"(?:[A-Z]{1,20}:)?\d{4}-\d\d-\d\d[ T]\d\d:")
KIND = re.compile(r"\[TQ-(TRACE|DETAIL|LOG)\]")
_TASK = re.compile(r"Task (\S+) \(pid=([0-9]{1,9})\) is (getting|writing)\b")
_ROWS = re.compile(r"len_samples=([0-9]{1,12})")
_COST = re.compile(r", cost time: ([0-9.]{1,40}(?:e[+-]?[0-9]{1,4})?)")
STEP = re.compile(r"step:([0-9]{1,9}) - ")
CLIENT = re.compile(r"TQ_CLIENT_(GET|PUT)_(START|END)")
OPERATIONS = {
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


class Unreadable(Exception):  # noqa: N818
    """A line is not what its mark announces; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Line:
    """What one process wrote, from the mark on.

    Args:
        where: File and line number.
        text: From the mark to the end.
        actor: The class or name in Ray's prefix.
        pid: The process in it.
        host: The node in it; empty on the driver's.
        wall_us: The logger's time, in microseconds since 1970, as if it were UTC.
        repeated: How many lines Ray shows as this one.
        whole: The line has its end.
    """

    where: str
    text: str
    actor: str
    pid: int | None
    host: str
    wall_us: int | None
    repeated: int
    whole: bool

    @property
    def process(self) -> str:
        """Return the process as it is shown: `WorkerDict pid=11 ip=10.0.0.2`; empty if unknown."""
        if self.pid is None:
            return ""
        name = f"{self.actor} pid={self.pid}".strip()
        return f"{name} ip={self.host}" if self.host else name


@dataclass(slots=True)
class Seen:
    """A line that was read: its fields, who wrote it and when."""

    line: Line
    fields: dict[str, Any]
    more: dict[str, str]
    order: int

    @property
    def at_us(self) -> int | None:
        """Return when the process wrote it, by its own clock in microseconds; None if it has no time."""
        seconds = self.fields.get("timestamp")
        return None if seconds is None else round(seconds * 1e6)


def lines(paths: Iterable[Path], problems: list[str], utc_offset_s: int = 0) -> Iterator[Line]:
    """Give what the logs say about TransferQueue, and their step lines.

    Args:
        paths: Console logs, compressed or not; `-` is standard input.
        problems: What is wrong with a file is added here.
        utc_offset_s: How far the logs' clocks are ahead of UTC.

    Raises:
        ReadingError: A log cannot be opened.
    """
    for path in paths:
        shown = "standard input" if path == STDIN else path.name
        for number, raw in file_lines(path, problems):
            if any(needle in raw for needle in _NEEDLES):
                for line in lines_of(raw, number):
                    yield from _marked(shown, line, utc_offset_s)


def _marked(shown: str, line: ConsoleLine, utc_offset_s: int) -> Iterator[Line]:
    """Cut a line at its marks: two may stand in one."""
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
        wall_us = None
        for wall in _WALL.finditer(head):
            wall_us = _wall_us(wall, utc_offset_s)
        yield Line(
            where=f"{shown}:{line.number}",
            text=text.strip(),
            actor=line.process or "",
            pid=line.pid,
            host=line.ip or "",
            wall_us=wall_us,
            repeated=line.repeated,
            whole=line.whole or not last,
        )


def _wall_us(match: re.Match[str], utc_offset_s: int) -> int | None:
    seconds = _wall_s(match[1])
    if seconds is None:
        return None
    return (seconds - utc_offset_s) * 1_000_000 + int((match[2] or "").ljust(6, "0"))


@lru_cache(1024)
def _wall_s(text: str) -> int | None:
    try:
        moment = datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    except ValueError:
        return None
    return round(moment.timestamp())


def read_fields(line: Line, order: int) -> Seen:
    """Read the fields of a `[TQ-…]` line.

    Raises:
        Unreadable: One of them has another type than its name implies, or the line has no end.
    """
    if not line.whole:
        raise Unreadable("the line has no end")
    values: dict[str, Any] = {}
    more: dict[str, str] = {}
    for part in line.text.partition("]")[2].split("|"):
        name, given, value = part.strip().partition("=")
        if not given or not name or " " in name:
            raise Unreadable(f"{part[:40].strip()!r} is not a field")
        if name in _NUMBERS:
            values[name] = _number(name, value)
        elif name in _COUNTS:
            values[name] = _count_of(name, value)
        elif name in _NAMES:
            values[name] = value
        else:
            more[name] = value
    return Seen(line, values, more, order)


def read_cost(line: Line, order: int) -> Seen | None:
    """Read one of verl's own lines, the end of a get or put; None for one without a time.

    Raises:
        Unreadable: Its time cannot be read, or the line has no end.
    """
    matched = _TASK.match(line.text)
    rows = _ROWS.search(line.text, matched.end()) if matched else None
    cost = _COST.search(line.text, rows.end() if rows else 0) if matched else None
    if matched is None or cost is None or not line.whole:
        if "cost time" in line.text:
            raise Unreadable("no time that can be read")
        return None
    func, pid, what = matched.groups()
    stage = "GET_END" if what == "getting" else "PUT_END"
    values = {
        "func": func,
        "pid": int(pid),
        "stage": stage,
        "duration": _number("duration", f"{cost[1]}s"),
    }
    if rows:
        values["batch_size"] = rows[1]
    return Seen(line, values, {}, order)


def _number(name: str, text: str) -> float:
    unit = _UNITS.get(name, "")
    try:
        value = float(text.removesuffix(unit)) if text.endswith(unit) else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not 0 <= value < _LIMITS.get(name, 1e9):
        raise Unreadable(f"{name}={text[:30]}")
    return value


def _count_of(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise Unreadable(f"{name}={text[:30]}")
    value = int(text)
    if value >= _LIMITS.get(name, 1 << 31):
        raise Unreadable(f"{name}={text[:30]}")
    return value
