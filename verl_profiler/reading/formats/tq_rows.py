"""Rows of tables made of TransferQueue calls in logs, placed in time and steps."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from typing import Any

from verl_profiler.reading.formats.console_tq import MIB, Seen
from verl_profiler.reading.formats.tq_spans import Span, micros
from verl_profiler.reading.tables.schemas import TQ_STAGES

__all__ = ["Placing", "call_row", "cost_row", "process_of", "stage_rows", "transfer_row"]

# Beyond it, sums would leave 64 bits.
_SIZE_LIMIT = 10**18
# Endings that are no failure.
_FINE = {None, "ok", "not_collected"}


class Placing:
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

    def wall_us(self, seen: Seen, at_us: int | None) -> int | None:
        """Return when it was on the wall clock, or on the process's own where that is unknown."""
        if at_us is None:
            return seen.line.wall_us
        key = seen.line.process, seen.line.host
        offset = self.offsets_us.get(key, self.by_host.get(seen.line.host))
        if offset is None:
            self.unplaced += 1
            return at_us
        return at_us + offset

    def begin_us(self, seen: Seen, length_us: int) -> int | None:
        """Return when something began that ended with this line."""
        end_us = self.wall_us(seen, seen.at_us)
        return None if end_us is None else end_us - length_us

    def step(self, seen: Seen, given: int | None, wall_us: int | None) -> int | None:
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


def process_of(span: Span) -> str:
    """Return the process as it is shown: by Ray's prefix, else by the id in its lines."""
    pid = span.fields.get("pid")
    return span.first.line.process or (f"pid={pid}" if pid is not None else "")


def _who(span: Span, placing: Placing) -> dict[str, Any]:
    line, fields = span.first.line, span.fields
    trace = fields.get("trace_id")
    status = fields.get("status")
    return {
        "run": placing.label,
        "name": process_of(span),
        "role": line.actor or None,
        "func": fields.get("func"),
        "trace_id": None if trace in (None, "", "N/A", "None") else trace,
        "call": fields.get("call"),
        "status": None if status in _FINE else status,
        "sampled": max(fields.get("sampled", 1), 1),
        "rows": _rows_of(fields.get("batch_size")),
    }


def _call_of(span: Span) -> str:
    """Return the call's id; one that no log gives where there is none: `#17`."""
    return span.fields.get("call") or f"#{span.first.order}"


def _rows_of(text: str | None) -> int | None:
    matched = re.search(r"[0-9]{1,12}", text or "")
    return int(matched[0]) if matched else None


def call_row(span: Span, placing: Placing) -> dict[str, Any]:
    """Make a row of `tq_calls`; parts whose lines are missing follow from the last line, or are None."""
    fields, last = span.fields, span.last or span.first
    total = fields.get("total_duration")
    total_us = None if total is None else micros(total)
    row: dict[str, Any] = {
        **_who(span, placing),
        "call": _call_of(span),
        "source": "trace",
        "stage": span.stage,
        "finished": total_us is not None,
        "waits": span.more.get("waits", "").lower() in ("1", "true", "yes"),
        "duration_us": total_us,
        "estimated": False,
        "more": span.more or None,
    }
    for stage in TQ_STAGES:
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


def stage_rows(span: Span, row: dict[str, Any], placing: Placing) -> Iterator[dict[str, Any]]:
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


def cost_row(span: Span, placing: Placing) -> dict[str, Any]:
    """Make a call of verl's own lines: its parts are exact, its whole is the log's clock."""
    get_us, put_us = span.spent_us("get"), span.spent_us("put")
    first, last = span.first, span.last or span.first
    row: dict[str, Any] = {
        **_who(span, placing),
        "call": _call_of(span),
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
    if get_us is not None and put_us is not None and got_us is not None and done_us is not None:
        # The log's clock counts whole milliseconds.
        compute_us = max(done_us - put_us - got_us, 0)
        whole_us = get_us + compute_us + put_us
        row.update(compute_us=compute_us, finished=True, duration_us=whole_us)
        row["end_us"] = got_us - get_us + whole_us
        span.ended.append(("compute", last, compute_us))
    row["step"] = placing.step(first, None, row.get("end_us") or row["begin_us"])
    return row


def transfer_row(event: str, span: Span, placing: Placing) -> dict[str, Any]:
    """Make a row of `transfers`."""
    fields, last = span.fields, span.last or span.first
    duration = fields.get("duration")
    size = fields.get("data_size_bytes")
    moved, rate = fields.get("data_size_mb"), fields.get("throughput_mbps")
    if size is None and rate is not None and duration is not None and rate >= (moved or 0):
        # Both have two decimals: the larger number is the more exact.
        size = round(rate * duration * MIB)
    elif size is None and moved is not None:
        size = round(moved * MIB)
    if size is not None and size >= _SIZE_LIMIT:
        size = None
    length = None if duration is None else micros(duration)
    row: dict[str, Any] = {
        **_who(span, placing),
        "event": event,
        "duration_us": length,
        "size_bytes": size,
    }
    if length is None:
        row["begin_us"] = placing.wall_us(span.first, span.first.at_us)
    else:
        row["begin_us"] = placing.begin_us(last, length)
        row["end_us"] = None if row["begin_us"] is None else row["begin_us"] + length
    row["step"] = placing.step(span.first, fields.get("step"), row.get("end_us") or row["begin_us"])
    return row
