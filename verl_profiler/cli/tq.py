"""Show the cost of TransferQueue by function: get, compute, put, throughput.

    verl-profiler tq logs/my-run
    verl-profiler tq training.log.1.gz training.log
    ssh node cat training.log | verl-profiler tq -
    verl-profiler tq training.log --function update_actor --steps 3:10
    verl-profiler tq training.log --lang zh

Reads a run directory, which has every call, or console logs with the log
records of TQ_TRACE_ENABLED=1 and TQ_TRACE_DETAIL_ENABLED=1, or else verl's own
"cost time" lines. Several logs are parts of one run, in the order given.
`verl-profiler export prometheus|otlp|jsonl` exports the calls.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.cli.options import (
    JSON,
    NO_CACHE,
    RUNS,
    STEPS,
    Argument,
    did_you_mean,
    refuse_steps,
)
from verl_profiler.cli.output import bounded, print_json
from verl_profiler.cli.terminal import print_error
from verl_profiler.errors import ReadingError
from verl_profiler.render.visible import shown

if TYPE_CHECKING:
    from verl_profiler.analysis.selection import Rows, Steps
    from verl_profiler.reading.tables.tables import Tables

_TIMES = ("duration_us", "get_us", "compute_us", "put_us")

ARGUMENTS = (
    RUNS,
    STEPS,
    Argument("--function", metavar="NAME", help="one function (default: all)"),
    Argument(
        "--trace",
        metavar="ID",
        help="list the calls that handled this data; a trace id or a prefix",
    ),
    Argument(
        "--lang",
        choices=("en", "zh"),
        default="en",
        help="report language; zh: the Chinese report of verl's TransferQueue guide",
    ),
    JSON,
    NO_CACHE,
)


@dataclass
class Transfers:
    """The TransferQueue calls of runs, or of console logs read as one run.

    Args:
        tables: Their tables.
        labels: The values of the column `run`.
        problems: What is wrong with the files and the data, in sentences.
        counts: Number of `missing` and `unreadable` log lines, by label.
    """

    tables: Tables
    labels: list[str]
    problems: list[str]
    counts: dict[str, dict[str, int]]

    @property
    def is_empty(self) -> bool:
        """Whether there is no call."""
        return not any(
            self.tables.rows(f"SELECT 1 AS known FROM {name} LIMIT 1")
            for name in ("tq_calls", "transfers")
        )


@contextlib.contextmanager
def opened_transfers(
    paths: list[Path], *, cache: bool = True, utc_offset_s: int = 0
) -> Generator[Transfers, None, None]:
    """Open runs or logs.

    Args:
        paths: Of one of the two kinds.
        cache: Read and write the runs' caches.
        utc_offset_s: UTC offset of the logs' timestamps.

    Raises:
        ReadingError: There is nothing to read at a path.
    """
    from verl_profiler.cli.logs import are_logs
    from verl_profiler.reading.formats.tq_log import read_logs
    from verl_profiler.reading.reader import load

    if are_logs(paths):
        log = read_logs(paths, utc_offset_s=utc_offset_s)
        lost = {reason: log.counts[reason] for reason in ("missing", "unreadable")}
        yield Transfers(log.tables(), [log.label], [*log.problems, *log.notes], {log.label: lost})
        return
    with load(paths, cache=cache) as opened:
        yield Transfers(opened.tables, opened.labels, opened.problems, {})


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0, or 1 if there is no TransferQueue data."""
    with opened_transfers(args.runs, cache=not args.no_cache) as opened:
        if opened.is_empty:
            print_error(*nothing(args.runs))
            return 1
        check(opened.tables, args.steps, args.function)
        found = _gathered(opened.tables, args)
        if args.json:
            _print_json(opened, found)
        elif args.trace is not None:
            return _print_trace(opened.tables, found["tq_traces"], args)
        else:
            _print_text(opened, found, args.lang)
    return 0


def nothing(paths: list[Path]) -> tuple[str, str]:
    """Return why there is nothing to show, and what records it."""
    return (
        f"nothing to report: no TransferQueue call in {', '.join(map(str, paths))}.",
        (
            "Log records need TQ_TRACE_ENABLED=1 in the environment of the command that starts training, "
            "VERL_LOGGING_LEVEL at INFO or below, and a verl version that uses TransferQueue"
        ),
    )


def check(tables: Tables, steps: Steps, function: str | None = None) -> None:
    """Reject an unknown function or step, and list the known ones.

    Raises:
        ReadingError: There is no such function or step.
    """
    both = tables.rows("SELECT func, step FROM tq_calls UNION SELECT func, step FROM transfers")
    functions = sorted({row["func"] for row in both if row["func"]})
    if function is not None and function not in functions:
        raise ReadingError(
            f"no function {function!r} was traced{did_you_mean(function, functions)} "
            f"Traced functions: {', '.join(functions) or 'none'}",
            "no-such-function",
        )
    known = sorted({row["step"] for row in both if row["step"] is not None})
    if steps is not None:
        refuse_steps(steps, known, known, "this run")


def _gathered(tables: Tables, args: argparse.Namespace) -> dict[str, Rows]:
    from verl_profiler.analysis.tq import (
        tq_functions,
        tq_over_time,
        tq_paths,
        tq_steps,
        tq_throughput,
        tq_trace_counts,
        tq_traces,
        tq_wall,
    )
    from verl_profiler.analysis.tq_findings import tq_findings

    narrowed: dict[str, Any] = {"function": args.function}
    analyses: tuple[tuple[Callable[..., Rows], dict[str, Any]], ...] = (
        (tq_findings, narrowed),
        (tq_functions, narrowed),
        (tq_wall, narrowed),
        (tq_throughput, narrowed),
        (tq_steps, narrowed),
        (tq_over_time, {**narrowed, "parts": 12}),
        (tq_paths, {}),
        (tq_trace_counts, {}),
        (tq_traces, {"trace_id": args.trace}),
    )
    return {analysis.__name__: analysis(tables, args.steps, **more) for analysis, more in analyses}


def _problems(opened: Transfers, found: Mapping[str, Rows]) -> list[str]:
    sampled: dict[int, list[str]] = {}
    for row in found["tq_functions"]:
        if row["sampled"] > 1:
            sampled.setdefault(row["sampled"], []).append(row["func"])
    notes = [
        f"{', '.join(names)}: 1 in {number} calls was traced. Counts, totals and shares are scaled "
        "accordingly; quantiles are those of the traced calls"
        for number, names in sampled.items()
    ]
    return [*opened.problems, *notes]


def _print_json(opened: Transfers, found: Mapping[str, Rows]) -> None:
    kept, left_out = bounded(found)
    content = {
        "format": 1,
        "runs": opened.labels,
        "tables": kept,
        "left_out": left_out,
        "problems": _problems(opened, found),
    }
    print_json(content)


def _print_text(opened: Transfers, found: Mapping[str, Rows], language: str) -> None:
    from verl_profiler.views.tq_text import tq_report

    for label in opened.labels:
        mine = {name: [row for row in rows if row["run"] == label] for name, rows in found.items()}
        print(tq_report(*shown((mine, label, _problems(opened, mine))), language=language))


def _print_trace(tables: Tables, rows: Rows, args: argparse.Namespace) -> int:
    """List the matching trace ids; for a single match, list its calls."""
    from verl_profiler.analysis.tq import tq_calls
    from verl_profiler.views.text_tables import table_text

    if not rows:
        reason = f"no call has a trace id that starts with {args.trace!r}"
        print_error(f"nothing to report: {reason}")
        return 1
    columns = ("trace_id", "calls", "spread_s", "total_s", "get_s", "put_s", "failed", "functions")
    print(table_text("Data", shown(rows), columns, "tq_traces", len(rows)))
    if len(rows) > 1:
        return 0
    calls = [
        row
        | {f"{name[:-2]}s": None if row[name] is None else row[name] / 1e6 for name in _TIMES}
        | {"after_s": ((row["begin_us"] or 0) - (rows[0]["begin_us"] or 0)) / 1e6}
        for row in tq_calls(tables, args.steps, function=args.function)
        if rows[0]["trace_id"] in row["trace_ids"] and row["run"] == rows[0]["run"]
    ]
    columns = ("after_s", *(f"{name[:-2]}s" for name in _TIMES), "step", "func", "name", "status")
    print("\n" + table_text("Calls", shown(calls), columns, "tq_calls", len(calls)))
    return 0
