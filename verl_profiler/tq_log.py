"""TransferQueue lines of console logs: read, paired to calls, placed in time and steps.

Four kinds of lines, of which a log has any mixture, in any order, with lines missing anywhere:

    [TQ-TRACE] trace_id=… | func=… | stage=FUNCTION_END | total_duration=…s | get_ratio=…% | …
    [TQ-DETAIL] trace_id=… | stage=TQ_CLIENT_PUT_END | duration=…s | throughput_mbps=…
    [TQ-LOG] op=TQ_GET | func=… | stage=END | duration=…s | pid=…
    Task … (pid=…) is getting len_samples=…, cost time: …            verl's own

Fields that are not known are kept.  MB in the lines is 2^20 bytes.
"""

from __future__ import annotations

import bisect
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_profiler.console_log import STDIN, ConsoleLine, file_lines, lines_of
from verl_profiler.tables import Tables
from verl_profiler.tq_phrases import Note

__all__ = ["MIB", "TransferLog", "read_logs"]

MIB = 1 << 20
# A line without any of these is not looked at.
_NEEDLES = ("[TQ-", "cost time", "step:")
_MARK = re.compile(
    r"\[TQ-(?:TRACE|DETAIL|LOG)\]|Task \S+ \(pid=\d+\) is (?:getting|writing)|step:\d+ - "
)
_WALL = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[,.](\d{1,6}))?")
# Where the next line begins, when the line end between two is lost.
_NEXT_LINE = re.compile(r"\s*(?:[A-Z]+:)?\d{4}-\d\d-\d\d[ T]\d\d:")
_KIND = re.compile(r"\[TQ-(TRACE|DETAIL|LOG)\]\s*(.*)", re.DOTALL)
_FIELD = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_COST = re.compile(
    r"Task (\S+) \(pid=(\d+)\) is (getting|writing)\b"
    r"(?:.*?len_samples=(\d+))?.*?, cost time: ([\d.]+(?:e[+-]?\d+)?)(s\))?",
    re.DOTALL,
)
_STEP = re.compile(r"step:(\d+) - ")
_STAGES = ("get", "compute", "put")
# The lines of a call and of a transfer, in the order in which they are written.
_ORDER = (
    "FUNCTION_START",
    *(f"{stage.upper()}_{end}" for stage in _STAGES for end in ("START", "END")),
    "FUNCTION_END",
)
_ENDS = ("START", "END")
_PLACES = {name: place for order in (_ORDER, _ENDS) for place, name in enumerate(order)}
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
_NAMES = {"trace_id", "func", "stage", "call", "status", "batch_size", "op"}
# Endings that are no failure.
_FINE = {None, "ok", "not_collected"}
# Calls without an end and without an id of their own: more than this are not kept open.
_OPEN = 512
_FAR = 1 << 60
_SHOWN = 5


@dataclass(slots=True)
class TransferLog:
    """What console logs say about TransferQueue.

    Args:
        label: The value of the column `run`.
        calls: Rows of the table `tq_calls`.
        stages: Rows of the table `tq_stages`.
        transfers: Rows of the table `transfers`.
        notes: What makes the numbers less than the truth.
        problems: What is wrong with the files themselves, in plain sentences.
        counts: `lines`, `unreadable`, `missing` (lines that Ray did not show) and others.
        missing: Lines that Ray did not show, by function and stage.
    """

    label: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    transfers: list[dict[str, Any]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)

    def tables(self) -> Tables:
        """Return the rows as tables for `verl_profiler.analysis`."""
        return Tables.of(
            {"tq_calls": self.calls, "tq_stages": self.stages, "transfers": self.transfers}
        )


def read_logs(paths: Sequence[Path], *, label: str | None = None) -> TransferLog:
    """Read logs as parts of one run, in the order in which they are given.

    Args:
        paths: Console logs, compressed or not; `-` is standard input.
        label: For the column `run`; the first log's name when None.

    Raises:
        ReadingError: A log cannot be opened.
    """
    log = TransferLog()
    reading = _Reading(log)
    for path in paths:
        shown = "standard input" if path == STDIN else path.name
        for number, raw in file_lines(path, log.problems):
            if any(needle in raw for needle in _NEEDLES):
                for console_line in lines_of(raw, number):
                    for line in _marked(shown, console_line):
                        reading.take(line)
    shown = "standard input" if paths[0] == STDIN else paths[0].name
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    log.label = label if label is not None else shown + more
    reading.finish(log.label)
    return log


@dataclass(frozen=True, slots=True)
class _Line:
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


def _marked(shown: str, line: ConsoleLine) -> Iterator[_Line]:
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
            wall_us = _wall_us(wall)
        yield _Line(
            where=f"{shown}:{line.number}",
            text=text.strip(),
            actor=line.process or "",
            pid=line.pid,
            host=line.ip or "",
            wall_us=wall_us,
            repeated=line.repeated,
            whole=line.whole or not last,
        )


def _wall_us(match: re.Match[str]) -> int | None:
    moment = (int(part) for part in match.groups()[:6])
    fraction = (match[7] or "").ljust(6, "0")
    try:
        return round(datetime(*moment, tzinfo=timezone.utc).timestamp()) * 1_000_000 + int(fraction)
    except (ValueError, OverflowError):
        return None


class _Unreadable(Exception):  # noqa: N818
    """A line is not what its mark promises; the message says why."""


@dataclass(slots=True)
class _Seen:
    """A line that was read: its fields, who wrote it and when."""

    line: _Line
    fields: dict[str, Any]
    more: dict[str, str]
    order: int

    @property
    def at_us(self) -> int | None:
        seconds = self.fields.get("timestamp")
        return None if seconds is None else round(seconds * 1e6)


@dataclass(slots=True)
class _Span:
    """A call or transfer while its lines come in."""

    first: _Seen
    stage: str = ""
    last: _Seen | None = None
    at_us: int | None = None
    # Times of the process's clock by stage, and the stages that ended: name, that line, length.
    marks: dict[str, int | None] = field(default_factory=dict)
    ended: list[tuple[str, _Seen, int]] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    more: dict[str, str] = field(default_factory=dict)

    def add(self, stage: str, seen: _Seen) -> None:
        # Lines may be late: the last one is the one that a call writes last.
        if self.last is None or _PLACES[stage] >= _PLACES[self.stage]:
            self.stage, self.last = stage, seen
        self.at_us = seen.at_us if seen.at_us is not None else self.at_us
        self.marks[stage] = seen.at_us
        if "duration" in seen.fields:
            self.ended.append(
                (stage.removesuffix("_END").lower(), seen, _us(seen.fields["duration"]))
            )
        self.fields.update(seen.fields)
        self.more.update(seen.more)

    def spent_us(self, stage: str) -> int | None:
        """Return how long a stage took, all times together that it was entered."""
        lengths = [length for name, _, length in self.ended if name == stage]
        return sum(lengths) if lengths else None


_Lines = list[tuple[str, _Seen]]


class _Reading:
    """The state between lines: calls that are open, clocks, and the steps that went by."""

    def __init__(self, log: TransferLog) -> None:
        self.log = log
        self.order = 0
        self.latest_wall_us: int | None = None
        self.steps: list[tuple[int, int | None, int]] = []
        self.offsets_us: dict[tuple[str, str], int] = {}
        # Calls whose lines carry an id, and lines without one by what they have in common: Ray may
        # show lines of one process late, so these are sorted before they are paired.
        self.numbered: dict[tuple[str, str], _Span] = {}
        self.unnumbered: dict[tuple[Any, ...], _Lines] = {}
        self.moves: dict[tuple[Any, ...], _Lines] = {}
        self.calls: list[_Span] = []
        self.costs: list[_Span] = []
        self.open_costs: dict[tuple[Any, ...], _Span] = {}
        self.unreadable: list[str] = []

    def take(self, line: _Line) -> None:
        """Read a line; one that cannot be read is counted."""
        self.order += 1
        if line.wall_us is not None and (self.latest_wall_us or 0) < line.wall_us:
            self.latest_wall_us = line.wall_us
        step = _STEP.match(line.text)
        if step:
            self.steps.append((self.order, self.latest_wall_us, int(step[1])))
            return
        try:
            self._read(line)
        except _Unreadable as reason:
            self.log.counts["unreadable"] += 1
            if len(self.unreadable) < _SHOWN:
                self.unreadable.append(f"{line.where} ({reason}): {line.text[:120]}")

    def _read(self, line: _Line) -> None:
        marked = _KIND.match(line.text)
        if marked is None:
            self._take_cost(line)
            return
        kind, rest = marked[1], marked[2]
        seen = self._fields(line, rest)
        stage = seen.fields.get("stage")
        if kind == "TRACE":
            if stage not in _ORDER:
                raise _Unreadable(f"no stage that is known: {stage}")
            if "func" not in seen.fields:
                raise _Unreadable("no func")
            self._take_trace(stage, seen)
        elif kind == "DETAIL":
            client = _CLIENT.fullmatch(stage or "")
            if client is None:
                raise _Unreadable(f"no stage that is known: {stage}")
            self._take_transfer(kind, f"tq_{client[1].lower()}", client[2], seen)
        else:
            event = _OPERATIONS.get(seen.fields.get("op", ""))
            if event is None or stage not in ("START", "END"):
                raise _Unreadable("no op or stage that is known")
            self._take_transfer(kind, event, stage, seen)
        self._count(kind, seen)

    def _count(self, kind: str, seen: _Seen) -> None:
        line = seen.line
        self.log.counts["lines"] += 1
        self.log.counts[kind] += 1
        if line.repeated > 1:
            self.log.counts["missing"] += line.repeated - 1
            self.log.counts["repeated"] += 1
            what = seen.fields.get("func") or "", seen.fields.get("stage") or ""
            self.log.missing[what] += line.repeated - 1
        at_us = seen.at_us
        if at_us is not None and line.wall_us is not None:
            key = line.process, line.host
            offset = line.wall_us - at_us
            self.offsets_us[key] = min(offset, self.offsets_us.get(key, offset))

    def _fields(self, line: _Line, text: str) -> _Seen:
        values: dict[str, Any] = {}
        more: dict[str, str] = {}
        for part in re.split(r"\s*\|\s*", text.strip()):
            matched = _FIELD.fullmatch(part.strip())
            if matched is None:
                raise _Unreadable(f"{part[:40]!r} is no field")
            name, value = matched.groups()
            if name in _NUMBERS:
                values[name] = _number(name, value)
            elif name in _COUNTS:
                values[name] = _count_of(name, value)
            elif name in _NAMES:
                values[name] = value
            else:
                more[name] = value
        return _Seen(line, values, more, self.order)

    def _take_trace(self, stage: str, seen: _Seen) -> None:
        duration = "total_duration" if stage == "FUNCTION_END" else "duration"
        if stage.endswith("_END") and duration not in seen.fields:
            raise _Unreadable(f"no {duration}")
        call = seen.fields.get("call")
        if call is None:
            key = seen.line.process, seen.fields.get("trace_id"), seen.fields["func"]
            self.unnumbered.setdefault(key, []).append((stage, seen))
            return
        span = self.numbered.get((seen.line.process, call))
        if span is None:
            span = self.numbered[seen.line.process, call] = _Span(seen)
            self.calls.append(span)
        span.add(stage, seen)

    def _take_transfer(self, kind: str, event: str, end: str, seen: _Seen) -> None:
        if end == "END" and "duration" not in seen.fields:
            raise _Unreadable("no duration")
        what = seen.fields.get("func") if kind == "LOG" else seen.fields.get("call")
        key = kind, event, seen.line.process, seen.fields.get("trace_id"), what
        self.moves.setdefault(key, []).append((end, seen))

    def _take_cost(self, line: _Line) -> None:
        """Take one of verl's own lines: the end of a get, or of a put."""
        matched = _COST.match(line.text)
        if matched is None:
            if "cost time" in line.text:
                raise _Unreadable("no time that can be read")
            return
        func, pid, what, rows, cost, _ = matched.groups()
        seconds = float(cost)
        if not math.isfinite(seconds):
            raise _Unreadable("no time that can be read")
        stage = "GET_END" if what == "getting" else "PUT_END"
        values = {"func": func, "pid": int(pid), "stage": stage, "duration": seconds}
        if rows:
            values["batch_size"] = rows
        seen = _Seen(line, values, {}, self.order)
        key = (line.process or pid, func)
        span = self.open_costs.pop(key, None) if stage == "PUT_END" else None
        if span is None:
            span = _Span(seen)
            self.costs.append(span)
        span.add(stage, seen)
        if stage == "GET_END":
            self.open_costs[key] = span
        self._count("verl", seen)

    def finish(self, label: str) -> None:
        """Make rows of everything that was read, and say what is wrong with it."""
        log = self.log
        placing = _Placing(label, self.offsets_us, self.steps)
        for found in self.unnumbered.values():
            self.calls += _paired(found, _ORDER)
        self.calls.sort(key=lambda span: span.first.order)
        rows = [(span, _call_row(span, placing)) for span in self.calls]
        traced = {(row["name"], row["func"]) for _, row in rows}
        own = [(span, _cost_row(span, placing)) for span in self.costs]
        kept = [each for each in own if (each[1]["name"], each[1]["func"]) not in traced]
        log.counts["verl_rows"], log.counts["verl_left_out"] = len(kept), len(own) - len(kept)
        for span, row in [*rows, *kept]:
            log.calls.append(row)
            log.stages += _stage_rows(span, row, placing)
        detailed = {(key[1], key[2]) for key in self.moves if key[0] == "DETAIL"}
        log.transfers = [
            _transfer_row(key[1], span, placing)
            for key, found in self.moves.items()
            if key[0] == "DETAIL" or (key[1], key[2]) not in detailed
            for span in _paired(found, _ENDS)
        ]
        _name_functions(log)
        log.notes += _notes(log, self, placing)


def _number(name: str, text: str) -> float:
    unit = _UNITS.get(name, "")
    try:
        value = float(text.removesuffix(unit)) if text.endswith(unit) else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not 0 <= value < 1e12:
        raise _Unreadable(f"{name}={text[:30]}")
    return value


def _count_of(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise _Unreadable(f"{name}={text[:30]}")
    return int(text)


def _paired(found: _Lines, order: Sequence[str]) -> list[_Span]:
    """Put lines that share process, function and trace id together to calls."""
    if all(seen.at_us is not None for _, seen in found):
        found = sorted(found, key=lambda line: (line[1].at_us, _PLACES[line[0]]))
    spans: list[_Span] = []
    waiting: list[_Span] = []
    for stage, seen in found:
        span = None if stage == order[0] else _matching(waiting, order, stage, seen)
        if span is None:
            span = _Span(seen)
            spans.append(span)
            waiting.append(span)
            if len(waiting) > _OPEN:
                del waiting[0]
        span.add(stage, seen)
        if stage == order[-1]:
            waiting.remove(span)
    return spans


def _matching(waiting: list[_Span], order: Sequence[str], stage: str, seen: _Seen) -> _Span | None:
    """Return the call that a line belongs to: by times where there are any, else the oldest.

    Several calls of one function may be under way in one process, with the same trace id.
    """
    place = _PLACES[stage]
    at_us = seen.at_us
    duration = seen.fields.get("total_duration", seen.fields.get("duration"))
    began = order[0] if stage == order[-1] else stage.replace("_END", "_START")

    def distance(span: _Span) -> tuple[int, int]:
        before = place - _PLACES[span.stage]
        if at_us is None:
            return before, 0
        if duration is None:
            apart = abs(at_us - span.at_us) if span.at_us is not None else _FAR
            return (0 if before == 1 else 1), apart
        began_us = span.marks.get(began)
        if began_us is None:
            return _FAR, before
        return abs(at_us - round(duration * 1e6) - began_us), before

    earlier = [span for span in waiting if _PLACES[span.stage] < place]
    return min(earlier, key=distance, default=None)


class _Placing:
    """Puts processes' clocks on the wall, and calls into steps."""

    def __init__(
        self,
        label: str,
        offsets_us: dict[tuple[str, str], int],
        steps: list[tuple[int, int | None, int]],
    ) -> None:
        self.label = label
        self.offsets_us = offsets_us
        self.by_host: dict[str, int] = {}
        for (_, host), offset in offsets_us.items():
            # Processes of a host share the clock; the smallest is the nearest to the truth.
            self.by_host[host] = min(offset, self.by_host.get(host, offset))
        self.orders = [order for order, _, _ in steps]
        self.walls = [wall for _, wall, _ in steps]
        self.numbers = [number for _, _, number in steps]
        self.by_wall = all(wall is not None for wall in self.walls)
        self.inferred = 0
        self.unplaced = 0

    def wall_us(self, seen: _Seen, at_us: int | None) -> int | None:
        """Return when it was on the wall clock, or on the process's own where that is unknown."""
        if at_us is None:
            return seen.line.wall_us
        key = seen.line.process, seen.line.host
        offset = self.offsets_us.get(key, self.by_host.get(seen.line.host))
        if offset is None:
            self.unplaced += 1
            return at_us
        return at_us + offset

    def begin_us(self, seen: _Seen, length_us: int) -> int | None:
        """Return when something began that ended with this line."""
        end_us = self.wall_us(seen, seen.at_us)
        return None if end_us is None else end_us - length_us

    def step(self, seen: _Seen, given: int | None, wall_us: int | None) -> int | None:
        """Return the step that a line names, or the one in which it stands in the log."""
        if given is not None or not self.numbers:
            return given
        self.inferred += 1
        walls: list[Any] = self.walls
        if self.by_wall and wall_us is not None:
            place = bisect.bisect_left(walls, wall_us)
        else:
            place = bisect.bisect_left(self.orders, seen.order)
        return self.numbers[place] if place < len(self.numbers) else self.numbers[-1] + 1


def _who(span: _Span, placing: _Placing) -> dict[str, Any]:
    line, fields = span.first.line, span.fields
    pid = line.pid if line.pid is not None else fields.get("pid")
    trace = fields.get("trace_id")
    status = fields.get("status")
    return {
        "run": placing.label,
        "name": line.process or (f"pid={pid}" if pid is not None else ""),
        "role": line.actor or None,
        "func": fields.get("func"),
        "trace_id": None if trace in (None, "", "N/A", "None") else trace,
        "call": fields.get("call"),
        "status": None if status in _FINE else status,
        "sampled": max(fields.get("sampled", 1), 1),
        "rows": _rows_of(fields.get("batch_size")),
    }


def _rows_of(text: str | None) -> int | None:
    matched = re.search(r"\d{1,18}", text or "")
    return int(matched[0]) if matched else None


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _call_row(span: _Span, placing: _Placing) -> dict[str, Any]:
    fields, last = span.fields, span.last or span.first
    total = fields.get("total_duration")
    total_us = None if total is None else _us(total)
    row = {
        **_who(span, placing),
        "source": "trace",
        "stage": span.stage,
        "finished": total_us is not None,
        "waits": span.more.get("waits", "").lower() in ("1", "true", "yes"),
        "duration_us": total_us,
        "estimated": False,
        "more": span.more or None,
    }
    for stage in _STAGES:
        spent_us = span.spent_us(stage)
        ratio = fields.get(f"{stage}_ratio")
        if spent_us is None and ratio and total_us is not None:
            spent_us, row["estimated"] = round(total_us * ratio / 100), True
        row[f"{stage}_us"] = spent_us
    if "FUNCTION_START" in span.marks and span.marks["FUNCTION_START"] is not None:
        row["begin_us"] = placing.wall_us(span.first, span.marks["FUNCTION_START"])
    elif total_us is None:
        row["begin_us"] = placing.wall_us(span.first, span.first.at_us)
    else:
        row["begin_us"] = placing.begin_us(last, total_us)
    if row["begin_us"] is not None and total_us is not None:
        row["end_us"] = row["begin_us"] + total_us
    row["step"] = placing.step(span.first, fields.get("step"), row.get("end_us") or row["begin_us"])
    return row


def _stage_rows(span: _Span, row: dict[str, Any], placing: _Placing) -> Iterator[dict[str, Any]]:
    """Give the stages of a call that has an end."""
    if row["duration_us"] is None:
        return
    shared = {name: row.get(name) for name in ("run", "step", "name", "func", "call")}
    for stage, seen, length_us in span.ended:
        begin_us = placing.begin_us(seen, length_us)
        if begin_us is not None:
            yield {
                **shared,
                "stage": stage,
                "begin_us": begin_us,
                "end_us": begin_us + length_us,
                "duration_us": length_us,
            }


def _cost_row(span: _Span, placing: _Placing) -> dict[str, Any]:
    """Make a call of verl's own lines: its parts are exact, its whole is the log's clock."""
    get_us, put_us = span.spent_us("get"), span.spent_us("put")
    first, last = span.first, span.last or span.first
    row = {
        **_who(span, placing),
        "source": "verl",
        "stage": span.stage,
        "get_us": get_us,
        "compute_us": None,
        "put_us": put_us,
        # A function that puts nothing has no last line.
        "finished": None,
        "duration_us": None,
        "begin_us": placing.begin_us(first, get_us or put_us or 0),
    }
    got_us, done_us = first.line.wall_us, last.line.wall_us
    if None not in (get_us, put_us, got_us, done_us):
        # The log's clock counts whole milliseconds.
        compute_us = max(done_us - put_us - got_us, 0)
        row.update(compute_us=compute_us, finished=True, duration_us=get_us + compute_us + put_us)
        row["end_us"] = row["begin_us"] + row["duration_us"]
        span.ended.append(("compute", last, compute_us))
    row["step"] = placing.step(first, None, row.get("end_us") or row["begin_us"])
    return row


def _transfer_row(event: str, span: _Span, placing: _Placing) -> dict[str, Any]:
    fields, last = span.fields, span.last or span.first
    duration = fields.get("duration")
    size = fields.get("data_size_bytes")
    if size is None and "data_size_mb" in fields:
        size = round(fields["data_size_mb"] * MIB)
    elif size is None and "throughput_mbps" in fields and duration is not None:
        size = round(fields["throughput_mbps"] * duration * MIB)
    length = None if duration is None else _us(duration)
    row = {**_who(span, placing), "event": event, "duration_us": length, "size_bytes": size}
    if length is None:
        row["begin_us"] = placing.wall_us(span.first, span.first.at_us)
    else:
        row["begin_us"] = placing.begin_us(last, length)
        row["end_us"] = None if row["begin_us"] is None else row["begin_us"] + length
    row["step"] = placing.step(span.first, fields.get("step"), row.get("end_us") or row["begin_us"])
    return row


def _name_functions(log: TransferLog) -> None:
    """Give transfers the function of their call: by its id, or where the process has but one."""
    functions: dict[tuple[Any, ...], set[str]] = {}
    for row in log.calls:
        for kind in ("call", "trace_id", "run"):
            if row.get(kind):
                functions.setdefault((kind, row["name"], row[kind]), set()).add(row["func"])
    for row in log.transfers:
        for kind in ("call", "trace_id", "run"):
            found = functions.get((kind, row["name"], row[kind]), set())
            if row["func"] is None and len(found) == 1:
                (row["func"],) = found


def _notes(log: TransferLog, reading: _Reading, placing: _Placing) -> Iterator[Note]:
    counts = log.counts
    if counts["missing"]:
        ends = {func: n for (func, stage), n in log.missing.items() if stage == "FUNCTION_END"}
        yield Note(
            "missing",
            number=counts["missing"],
            times=counts["repeated"],
            ends=", ".join(f"{func}: {n}" for func, n in sorted(ends.items(), key=lambda e: -e[1]))
            or "-",
        )
    if counts["unreadable"]:
        yield Note("unreadable", number=counts["unreadable"])
        for line in reading.unreadable:
            yield Note("line", line=line)
        if counts["unreadable"] > len(reading.unreadable):
            yield Note("more", number=counts["unreadable"] - len(reading.unreadable))
    open_calls = Counter(
        (row["func"], row["stage"]) for row in log.calls if row["finished"] is False
    )
    for (func, stage), number in sorted(open_calls.items()):
        yield Note("unfinished", number=number, func=func, stage=stage)
    for kind, number in (
        ("open_transfers", sum(row["duration_us"] is None for row in log.transfers)),
        ("estimated", sum(bool(row.get("estimated")) for row in log.calls)),
        ("verl_rows", counts["verl_rows"]),
        ("verl_left_out", counts["verl_left_out"]),
        ("inferred_steps", placing.inferred),
        ("unplaced", placing.unplaced),
    ):
        if number:
            yield Note(kind, number=number)
