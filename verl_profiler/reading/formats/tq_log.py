"""Console logs read for TransferQueue: calls, stages and transfers as rows, and what they lack.

log = read_logs([Path("training.log")])
tables = log.tables()
print(*log.notes)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_profiler.reading.formats.console_log import STDIN
from verl_profiler.reading.formats.console_tq import (
    CLIENT,
    KIND,
    OPERATIONS,
    STEP,
    Line,
    Seen,
    Unreadable,
    lines,
    read_cost,
    read_fields,
)
from verl_profiler.reading.formats.tq_rows import (
    Placing,
    call_row,
    cost_row,
    process_of,
    stage_rows,
    transfer_row,
)
from verl_profiler.reading.formats.tq_spans import ENDS, ORDER, Lines, Span, paired
from verl_profiler.reading.tables.tables import Tables

__all__ = ["TransferLog", "read_logs"]

_SHOWN = 5


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
        counts: `lines`, `unreadable`, `missing` (lines that Ray did not show) and others.
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
    log = TransferLog()
    reading = _Reading(log)
    for line in lines(paths, log.problems, utc_offset_s):
        reading.add(line)
    shown = "standard input" if paths[0] == STDIN else paths[0].name
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    log.label = shown + more
    reading.finish(log.label)
    return log


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
        self.numbered: dict[tuple[str, str], Span] = {}
        self.unnumbered: dict[tuple[Any, ...], Lines] = {}
        self.moves: dict[tuple[Any, ...], Lines] = {}
        self.calls: list[Span] = []
        self.costs: list[Span] = []
        self.open_costs: dict[tuple[Any, ...], Span] = {}
        self.unreadable: list[str] = []
        self.reported: set[int] = set()

    def add(self, line: Line) -> None:
        """Read a line; one that cannot be read is counted."""
        self.order += 1
        if line.wall_us is not None and (self.latest_wall_us or 0) < line.wall_us:
            self.latest_wall_us = line.wall_us
        step = STEP.match(line.text)
        if step:
            self.steps.append((self.order, self.latest_wall_us, int(step[1])))
            return
        try:
            self._read(line)
        except Unreadable as reason:
            self.log.counts["unreadable"] += 1
            if len(self.unreadable) < _SHOWN:
                self.unreadable.append(f"{line.where} ({reason}): {line.text[:120]}")

    def _read(self, line: Line) -> None:
        marked = KIND.match(line.text)
        if marked is None:
            self._take_cost(line)
            return
        kind = marked[1]
        seen = read_fields(line, self.order)
        if seen.at_us is not None and self._is_told(line):
            return
        stage = seen.fields.get("stage")
        if kind == "TRACE":
            if stage not in ORDER:
                raise Unreadable(f"unknown stage {stage}")
            if "func" not in seen.fields:
                raise Unreadable("no func")
            self._take_trace(stage, seen)
        elif kind == "DETAIL":
            client = CLIENT.fullmatch(stage or "")
            if client is None:
                raise Unreadable(f"unknown stage {stage}")
            self._take_transfer(kind, f"tq_{client[1].lower()}", client[2], seen)
        else:
            event = OPERATIONS.get(seen.fields.get("op", ""))
            if event is None or stage not in ("START", "END"):
                raise Unreadable("unknown op or stage")
            self._take_transfer(kind, event, stage, seen)
        self._count(kind, seen)

    def _is_told(self, line: Line) -> bool:
        """Say whether this very line was read before, such as from a copy of the log."""
        key = hash((line.process, line.wall_us, line.text))
        if key in self.reported:
            self.log.counts["doubled"] += 1
            return True
        self.reported.add(key)
        return False

    def _count(self, kind: str, seen: Seen) -> None:
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

    def _take_trace(self, stage: str, seen: Seen) -> None:
        duration = "total_duration" if stage == "FUNCTION_END" else "duration"
        if stage.endswith("_END") and duration not in seen.fields:
            raise Unreadable(f"no {duration}")
        call = seen.fields.get("call")
        if call is None:
            key = seen.line.process, seen.fields.get("trace_id"), seen.fields["func"]
            self.unnumbered.setdefault(key, []).append((stage, seen))
            return
        span = self.numbered.get((seen.line.process, call))
        if span is None:
            span = self.numbered[seen.line.process, call] = Span(seen)
            self.calls.append(span)
        span.add(stage, seen)

    def _take_transfer(self, kind: str, event: str, end: str, seen: Seen) -> None:
        if end == "END" and "duration" not in seen.fields:
            raise Unreadable("no duration")
        what = seen.fields.get("func") if kind == "LOG" else seen.fields.get("call")
        key = kind, event, seen.line.process, seen.fields.get("trace_id"), what
        self.moves.setdefault(key, []).append((end, seen))

    def _take_cost(self, line: Line) -> None:
        """Take one of verl's own lines: the end of a get, or of a put."""
        seen = read_cost(line, self.order)
        if seen is None or (line.wall_us is not None and self._is_told(line)):
            return
        stage = seen.fields["stage"]
        key = (line.process or seen.fields["pid"], seen.fields["func"])
        span = self.open_costs.pop(key, None) if stage == "PUT_END" else None
        if span is None:
            span = Span(seen)
            self.costs.append(span)
        span.add(stage, seen)
        if stage == "GET_END":
            self.open_costs[key] = span
        self._count("verl", seen)

    def finish(self, label: str) -> None:
        """Make rows of everything that was read, and say what is wrong with it."""
        log = self.log
        placing = Placing(label, self.offsets_us, self.steps)
        for found in self.unnumbered.values():
            self.calls += paired(found, ORDER)
        self.calls.sort(key=lambda span: span.first.order)
        rows = [(span, call_row(span, placing)) for span in self.calls]
        traced = {(row["name"], row["func"]) for _, row in rows}
        kept = [
            (span, cost_row(span, placing))
            for span in self.costs
            if (process_of(span), span.fields["func"]) not in traced
        ]
        log.counts["verl_rows"] = len(kept)
        log.counts["verl_left_out"] = len(self.costs) - len(kept)
        for span, row in [*rows, *kept]:
            log.calls.append(row)
            log.stages += stage_rows(span, row, placing)
        detailed = {(key[1], key[2]) for key in self.moves if key[0] == "DETAIL"}
        log.transfers = [
            transfer_row(key[1], span, placing)
            for key, found in self.moves.items()
            if key[0] == "DETAIL" or (key[1], key[2]) not in detailed
            for span in paired(found, ENDS)
        ]
        _name_functions(log)
        log.notes += _notes(log, self, placing)


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


def _notes(log: TransferLog, reading: _Reading, placing: Placing) -> Iterator[str]:
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
        yield from (f"  {line}" for line in reading.unreadable)
        if counts["unreadable"] > len(reading.unreadable):
            yield f"  and {counts['unreadable'] - len(reading.unreadable)} more like these"
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
