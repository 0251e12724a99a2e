"""Console logs read for TransferQueue: calls, stages and transfers as rows, and what they lack.

log = read_logs([Path("training.log")])
tables = log.tables()
print(*log.notes)
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_profiler.reading.formats.console_log import STDIN
from verl_profiler.reading.formats.console_tq import CALL_STAGES, MIB, Record, records
from verl_profiler.reading.problems import Problems
from verl_profiler.reading.tables.schemas import TQ_STAGES
from verl_profiler.reading.tables.tables import Tables

__all__ = ["TransferLog", "read_logs"]

_PLACES = {stage: place for of in (CALL_STAGES, ("START", "END")) for place, stage in enumerate(of)}
# The first and the last line of a call, by the kind of its lines; others are of transfers.
_BOUNDS = {"TRACE": ("FUNCTION_START", "FUNCTION_END"), "verl": ("GET_END", "PUT_END")}
# Calls without an end and without an id of their own: more than this are not kept open.
_OPEN = 512
_FAR = 1 << 60
# Beyond it, sums would leave 64 bits.
_SIZE_LIMIT = 10**18
# Endings that are no failure.
_FINE = {None, "ok", "not_collected"}


@dataclass(slots=True)
class TransferLog:
    """What console logs say about TransferQueue.

    Args:
        label: The value of the column `run`.
        calls: Rows of the table `tq_calls`.
        stages: Rows of the table `tq_stages`.
        transfers: Rows of the table `transfers`.
        notes: Data-quality warnings, in sentences.
        problems: What is wrong with the files themselves, in plain sentences.
        counts: `unreadable`, `missing` (lines that Ray did not show) and others.
        missing: Lines that Ray did not show, by function and stage.
    """

    label: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    stages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    transfers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    notes: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    missing: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def tables(self) -> Tables:
        """Return the rows as tables for `verl_profiler.analysis`."""
        return Tables.of(
            {"tq_calls": self.calls, "tq_stages": self.stages, "transfers": self.transfers}
        )


def read_logs(paths: Sequence[Path], *, utc_offset_s: int = 0) -> TransferLog:
    """Read logs as parts of one run, in the order in which they are given.

    Args:
        paths: Console logs, compressed or not; `-` is standard input.
        utc_offset_s: How far the clocks of the logs are ahead of UTC, which they do not have.

    Raises:
        ReadingError: A log cannot be opened.
    """
    shown = "standard input" if paths[0] == STDIN else paths[0].name
    log = TransferLog(shown + (f" and {len(paths) - 1} more" if len(paths) > 1 else ""))
    unreadable = Problems()

    def left_out(line: str) -> None:
        log.counts["unreadable"] += 1
        unreadable.add("like these", line)

    placing = _Placing(log.label)
    # By kind, event, process, and the call's id, or what lines without one have in common.
    groups: dict[tuple[Any, ...], list[Record]] = {}
    seen: set[int] = set()
    for record in records(paths, log.problems, left_out, utc_offset_s):
        placing.take(record)
        if record.kind == "step":
            continue
        timed = record.wall_us if record.kind == "verl" else record.at_us
        if timed is not None and record.digest in seen:
            # From a copy of the log.
            log.counts["doubled"] += 1
            continue
        seen.add(record.digest)
        func, call = record.fields.get("func"), record.fields.get("call")
        if record.repeated > 1:
            log.counts["missing"] += record.repeated - 1
            log.counts["repeated"] += 1
            log.missing[func or "", record.fields["stage"]] += record.repeated - 1
        groups.setdefault((record.kind, record.event, *_identity(record, func, call)), []).append(
            record
        )
    _fill(log, groups, placing)
    _name_functions(log)
    log.notes += _notes(log, unreadable.sentences(), placing)
    return log


def _identity(record: Record, func: Any, call: Any) -> tuple[Any, ...]:
    """Return the process, and what the lines of one call or transfer have in common."""
    if record.kind == "verl":
        return record.process or record.fields["pid"], func
    if record.kind == "TRACE" and call is not None:
        return record.process, call
    trace_id = record.fields.get("trace_id")
    return record.process, trace_id, call if record.kind == "DETAIL" else func


def _fill(log: TransferLog, groups: dict[tuple[Any, ...], list[Record]], placing: _Placing) -> None:
    """Make rows of all lines."""
    calls: list[_Call] = []
    detailed = {key[1:3] for key in groups if key[0] == "DETAIL"}
    for (kind, event, process, *_), found in groups.items():
        if kind in _BOUNDS:
            calls += _paired(found, *_BOUNDS[kind])
        elif kind == "DETAIL" or (event, process) not in detailed:
            log.transfers += (
                _transfer_row(event, call, placing) for call in _paired(found, "START", "END")
            )
    calls.sort(key=lambda call: (call.first.kind == "verl", call.first.order))
    traced = {(call.process, call.fields["func"]) for call in calls if call.first.kind == "TRACE"}
    for call in calls:
        if call.first.kind == "verl":
            known = (call.process, call.fields["func"]) in traced
            log.counts["verl_left_out" if known else "verl_rows"] += 1
            if known:
                continue
        row = _call_row(call, placing)
        log.calls.append(row)
        log.stages += _stage_rows(call, row, placing)


@dataclass(slots=True)
class _Call:
    """A call or transfer while its lines come in.

    Args:
        first: Its first line.
        last: The one that a call writes last, whatever the order in which they came.
        marks: Times of the process's clock by stage.
        ended: The stages that ended: name, that line, length.
    """

    first: Record
    last: Record
    marks: dict[str, int | None] = field(default_factory=dict[str, int | None])
    ended: list[tuple[str, Record, int]] = field(default_factory=list[tuple[str, Record, int]])
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    more: dict[str, str] = field(default_factory=dict[str, str])
    at_us: int | None = None

    @property
    def process(self) -> str:
        """The process as it is shown: by Ray's prefix, else by the id in its lines."""
        pid = self.fields.get("pid")
        return self.first.process or (f"pid={pid}" if pid is not None else "")

    @property
    def place(self) -> int:
        """The place of its last line."""
        return _PLACES[self.last.stage]

    def add(self, record: Record) -> None:
        """Take one of its lines."""
        if _PLACES[record.stage] >= self.place:
            self.last = record
        self.at_us = record.at_us if record.at_us is not None else self.at_us
        self.marks[record.stage] = record.at_us
        if "duration" in record.fields:
            stage = record.stage.removesuffix("_END").lower()
            self.ended.append((stage, record, _micros(record.fields["duration"])))
        self.fields.update(record.fields)
        self.more.update(record.more)

    def spent_us(self, stage: str) -> int | None:
        """Return how long a stage took, all times together that it was entered."""
        lengths = [length for name, _, length in self.ended if name == stage]
        return sum(lengths) if lengths else None


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _paired(found: list[Record], first: str, last: str) -> list[_Call]:
    """Put lines of one identity together to calls: those without an id by the times of their stages."""
    numbered = found[0].kind == "TRACE" and "call" in found[0].fields
    if not numbered and all(record.at_us is not None for record in found):
        found = sorted(found, key=lambda record: (record.at_us, _PLACES[record.stage]))
    calls: list[_Call] = []
    waiting: list[_Call] = []
    for record in found:
        call = None
        if numbered:
            call = calls[0] if calls else None
        elif record.stage != first:
            call = _matching(waiting, first if record.stage == last else None, record)
        if call is None:
            call = _Call(record, record)
            calls.append(call)
            waiting.append(call)
            if len(waiting) > _OPEN:
                del waiting[0]
        call.add(record)
        if record.stage == last and not numbered:
            waiting.remove(call)
    return calls


def _matching(waiting: list[_Call], begun: str | None, record: Record) -> _Call | None:
    """Return the call that a line belongs to: by times where there are any, else the newest.

    Several calls of one function may be under way in one process, with the same trace id.

    Args:
        waiting: Calls that have not ended.
        begun: The stage whose begin the line's length refers to; that of the line when None.
        record: The line.
    """
    place, at_us = _PLACES[record.stage], record.at_us
    length_s = record.fields.get("total_duration", record.fields.get("duration"))
    begun = begun or record.stage.replace("_END", "_START")

    def distance(call: _Call) -> tuple[int, int]:
        before = place - call.place
        if at_us is None:
            return before, 0
        if length_s is None:
            apart = abs(at_us - call.at_us) if call.at_us is not None else _FAR
            return (0 if before == 1 else 1), apart
        begun_us = call.marks.get(begun)
        if begun_us is None:
            return _FAR, before
        return abs(at_us - _micros(length_s) - begun_us), before

    earlier = [call for call in reversed(waiting) if call.place < place]
    return min(earlier, key=distance, default=None)


class _Placing:
    """Puts processes' clocks on the wall, and calls into steps."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.inferred = 0
        self.unplaced = 0
        self._latest_us: int | None = None
        # By process, and the nearest to the truth of a host, whose processes share the clock.
        self._offsets_us: dict[str, int] = {}
        # Of the trainer's metrics: place in the log, time, step.
        self._orders: list[int] = []
        self._walls: list[Any] = []
        self._steps: list[int] = []

    def take(self, record: Record) -> None:
        """Note what a line shows about clocks and steps."""
        wall_us, at_us = record.wall_us, record.at_us
        if wall_us is not None:
            self._latest_us = max(self._latest_us or 0, wall_us)
        if record.kind == "step":
            self._orders.append(record.order)
            self._walls.append(self._latest_us)
            self._steps.append(record.fields["step"])
        elif at_us is not None and wall_us is not None:
            for key in (f"{record.process} on {record.host}", record.host):
                known_us = self._offsets_us.get(key, wall_us - at_us)
                self._offsets_us[key] = min(wall_us - at_us, known_us)

    def wall_us(self, record: Record, at_us: int | None) -> int | None:
        """Return when it was on the wall clock, or on the process's own where that is unknown."""
        if at_us is None:
            return record.wall_us
        own = f"{record.process} on {record.host}"
        offset = self._offsets_us.get(own, self._offsets_us.get(record.host))
        if offset is None:
            self.unplaced += 1
            return at_us
        return at_us + offset

    def begin_us(self, record: Record, length_us: int) -> int | None:
        """Return when something began that ended with this line."""
        end_us = self.wall_us(record, record.at_us)
        return None if end_us is None else end_us - length_us

    def step(self, call: _Call, row: dict[str, Any]) -> int | None:
        """Return the step that the lines of a call name, or the one in which they stand in the log."""
        given = call.fields.get("step")
        if given is not None or not self._steps:
            return given
        self.inferred += 1
        wall_us = row.get("end_us") or row["begin_us"]
        # Times only grow, once there is one.
        if wall_us is not None and self._walls[0] is not None:
            place = bisect.bisect_left(self._walls, wall_us)
        else:
            place = bisect.bisect_left(self._orders, call.first.order)
        return self._steps[place] if place < len(self._steps) else self._steps[-1] + 1


def _row(call: _Call, placing: _Placing) -> dict[str, Any]:
    """Return what rows of calls and transfers share."""
    trace, status = call.fields.get("trace_id"), call.fields.get("status")
    rows = re.search(r"[0-9]{1,12}", call.fields.get("batch_size") or "")
    return {
        "run": placing.label,
        "name": call.process,
        "role": call.first.actor or None,
        "func": call.fields.get("func"),
        "trace_id": None if trace in (None, "", "N/A", "None") else trace,
        "call": call.fields.get("call"),
        "status": None if status in _FINE else status,
        "sampled": max(call.fields.get("sampled", 1), 1),
        "rows": None if rows is None else int(rows[0]),
    }


def _call_row(call: _Call, placing: _Placing) -> dict[str, Any]:
    """Make a row of `tq_calls`; parts whose lines are missing follow from the last line, or are None."""
    row: dict[str, Any] = {
        **_row(call, placing),
        # An id that no log gives where there is none.
        "call": call.fields.get("call") or f"#{call.first.order}",
        "source": "verl" if call.first.kind == "verl" else "trace",
        "stage": call.last.stage,
        **{f"{stage}_us": call.spent_us(stage) for stage in TQ_STAGES},
    }
    if call.first.kind == "verl":
        row |= _of_costs(call, row, placing)
    else:
        row |= _of_trace(call, row, placing)
    length_us = row["duration_us"]
    if row["begin_us"] is not None and length_us is not None:
        row["end_us"] = row["begin_us"] + length_us
    row["step"] = placing.step(call, row)
    return row


def _of_trace(call: _Call, row: dict[str, Any], placing: _Placing) -> dict[str, Any]:
    total = call.fields.get("total_duration")
    total_us = None if total is None else _micros(total)
    found: dict[str, Any] = {
        "finished": total_us is not None,
        "waits": call.more.get("waits", "").lower() in ("1", "true", "yes"),
        "duration_us": total_us,
        "estimated": False,
        "more": call.more or None,
    }
    for stage in TQ_STAGES:
        ratio = call.fields.get(f"{stage}_ratio")
        if row[f"{stage}_us"] is None and ratio and total_us is not None:
            found[f"{stage}_us"], found["estimated"] = round(total_us * ratio / 100), True
    started_us = call.marks.get("FUNCTION_START")
    if started_us is not None:
        found["begin_us"] = placing.wall_us(call.first, started_us)
    elif total_us is None:
        found["begin_us"] = placing.wall_us(call.first, call.first.at_us)
    else:
        found["begin_us"] = placing.begin_us(call.last, total_us)
    return found


def _of_costs(call: _Call, row: dict[str, Any], placing: _Placing) -> dict[str, Any]:
    """Return the whole of verl's own lines: get and put are exact, the rest is by the log's clock."""
    get_us, put_us = row["get_us"], row["put_us"]
    # A function that puts nothing has no last line.
    found: dict[str, Any] = {"finished": None, "duration_us": None}
    found["begin_us"] = placing.begin_us(call.first, get_us or put_us or 0)
    got_us, done_us = call.first.wall_us, call.last.wall_us
    if get_us is not None and put_us is not None and got_us is not None and done_us is not None:
        # The log's clock counts whole milliseconds.
        compute_us = max(done_us - put_us - got_us, 0)
        found |= {"finished": True, "compute_us": compute_us}
        found["duration_us"] = get_us + compute_us + put_us
        call.ended.append(("compute", call.last, compute_us))
    return found


def _stage_rows(call: _Call, row: dict[str, Any], placing: _Placing) -> Iterator[dict[str, Any]]:
    """Give the stages of a call that has an end."""
    if row["duration_us"] is None:
        return
    shared = {name: row.get(name) for name in ("run", "step", "name", "func", "call")}
    for stage, record, length_us in call.ended:
        begin_us = placing.begin_us(record, length_us)
        if begin_us is not None:
            yield {
                **shared,
                "stage": stage,
                "begin_us": begin_us,
                "end_us": begin_us + length_us,
                "duration_us": length_us,
            }


def _transfer_row(event: str, call: _Call, placing: _Placing) -> dict[str, Any]:
    """Make a row of `transfers`."""
    fields = call.fields
    duration = fields.get("duration")
    size = fields.get("data_size_bytes")
    moved, rate = fields.get("data_size_mb"), fields.get("throughput_mbps")
    if size is None and rate is not None and duration is not None and rate >= (moved or 0):
        # Both have two decimals: the larger number is the more exact.
        size = round(rate * duration * MIB)
    elif size is None and moved is not None:
        size = round(moved * MIB)
    row: dict[str, Any] = {
        **_row(call, placing),
        "event": event,
        "duration_us": None,
        "size_bytes": None if size is None or size >= _SIZE_LIMIT else size,
    }
    if duration is None:
        row["begin_us"] = placing.wall_us(call.first, call.first.at_us)
    else:
        row["duration_us"] = _micros(duration)
        row["begin_us"] = placing.begin_us(call.last, row["duration_us"])
        if row["begin_us"] is not None:
            row["end_us"] = row["begin_us"] + row["duration_us"]
    row["step"] = placing.step(call, row)
    return row


def _name_functions(log: TransferLog) -> None:
    """Give transfers whose lines name none the function that their process traced, if it is one.

    Lines with an id do name it, unless they are outside of functions.
    """
    functions: dict[tuple[str, str | None], set[str]] = {}
    for row in log.calls:
        for trace_id in {row["trace_id"], None}:
            functions.setdefault((row["name"], trace_id), set()).add(row["func"])
    for row in log.transfers:
        for trace_id in (row["trace_id"], None):
            found = functions.get((row["name"], trace_id), set())
            if row["func"] is None and row["call"] is None and len(found) == 1:
                (row["func"],) = found


def _notes(log: TransferLog, unreadable: Sequence[str], placing: _Placing) -> Iterator[str]:
    counts = log.counts
    if counts["missing"]:
        ends = Counter(
            {func: n for (func, stage), n in log.missing.items() if stage == "FUNCTION_END"}
        )
        listed = ", ".join(f"{func}: {number}" for func, number in ends.most_common()) or "-"
        yield (
            f"{counts['missing']} lines are missing: Ray merged similar lines of several processes into "
            f"one ([repeated Nx across cluster]) {counts['repeated']} times ({listed} of the missing lines "
            "are ends of calls). Counts and totals are too low accordingly. Set RAY_DEDUP_LOGS=0 for the "
            "run, or analyze its run directory, which has all calls"
        )
    if counts["unreadable"]:
        yield f"{counts['unreadable']} unreadable lines were left out:"
        yield from (f"  {line}" for line in unreadable)
    open_calls = Counter(
        (row["func"], row["stage"]) for row in log.calls if row["finished"] is False
    )
    for (func, stage), number in sorted(open_calls.items()):
        yield (
            f"{number} calls of {func} did not end; their last line is {stage}. They are "
            "counted as calls, but excluded from times"
        )
    for number, text in (
        (
            counts["doubled"],
            "lines occur more than once in the logs; each is counted once",
        ),
        (
            sum(row["duration_us"] is None for row in log.transfers),
            "gets and puts did not end; they are excluded from times and rates",
        ),
        (
            sum(bool(row.get("estimated")) for row in log.calls),
            (
                "calls lack stage lines: get, compute and put were derived from "
                "the percentages in the last line, with a resolution of 0.01 % of the call"
            ),
        ),
        (
            counts["verl_rows"],
            (
                "calls are known only from verl's own cost time lines: get and put are "
                "exact, compute and total times have the log's resolution of 1 ms, and functions "
                "without put have no total"
            ),
        ),
        (
            counts["verl_left_out"],
            "calls in verl's own cost time lines were also traced; they are counted once",
        ),
        (
            placing.inferred,
            (
                "calls and transfers have no step; each was assigned to the step during which "
                "it ended, by the log's step: lines"
            ),
        ),
        (
            placing.unplaced,
            (
                "timestamps are from the processes' own clocks, which differ between hosts: "
                "their lines have no time of day"
            ),
        ),
    ):
        if number:
            yield f"{number} {text}"
