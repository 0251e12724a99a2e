"""Read verl's own memory lines from console logs, into the tables that a run has.

verl prints them on rank 0, with `VERL_LOGGING_LEVEL=DEBUG`:

    Before resume weights, memory allocated (GB): 1.20, memory reserved (GB): 1.50, device memory
    used/total (GB): 30.10/79.10

(in one line).  Versions before 0.3 lack the last part.  A line names no step; it belongs to the step
whose metrics are printed next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_profiler.reading.formats.console_log import console_lines, stamps_us
from verl_profiler.reading.tables.tables import Tables

# verl writes GB for 2**30 bytes (verl 0.9.1 utils/profiler/performance.py).
_UNIT = 1024**3
_GB = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_READING = re.compile(
    rf", memory allocated \(GB\): (?P<allocated>{_GB}), memory reserved \(GB\): (?P<reserved>{_GB})"
    rf"(?:, device memory used/total \(GB\): (?P<used>{_GB})/(?P<total>{_GB}))?"
)
# What stands before a reading: the logger's prefix, and where verl took it.
_TIME = re.compile(r"[A-Z]:([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8},[0-9]{3}):")
_BEFORE = 240
_STEP = re.compile(r"\bstep:([0-9]{1,9}) - ")


def read_logs(paths: Iterable[Path]) -> tuple[Tables, list[str]]:
    """Read console logs.

    Args:
        paths: Text or gzip files; `-` for standard input.

    Returns:
        Tables with `memory` filled, one run per log, and problems in plain sentences.

    Raises:
        ReadingError: A file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for path in paths:
        found = readings(path, problems)
        if not found:
            problems.append(f"{path} has no memory line; run with VERL_LOGGING_LEVEL=DEBUG.")
        rows += found
    return Tables.of({"memory": rows}), problems


def readings(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the rows of the table `memory` that one log gives.

    `end_us` is the line's time, taken as UTC, where it has one, and keeps the order of the lines
    where it has none.
    """
    rows: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    step, moment_us, repeated = None, 0, 0
    for line in console_lines(path, problems):
        for match in _READING.finditer(line.text):
            time, at = _place(line.text[max(match.start() - _BEFORE, 0) : match.start()])
            if not at:
                continue
            moment_us = max([moment_us + 1, *stamps_us(time)])
            repeated += line.repeated - 1
            name = line.process or "console"
            waiting.append(
                {
                    "run": "-" if str(path) == "-" else path.name,
                    "name": name if line.pid is None else f"{name}_{line.pid}",
                    "role": name,
                    "end_us": moment_us,
                    "at": at,
                    **{
                        f"{what}_bytes": None if text is None else round(float(text) * _UNIT)
                        for what, text in match.groupdict().items()
                    },
                }
            )
        printed = _STEP.search(line.text)
        if printed is not None:
            step = int(printed[1])
            rows += ({**row, "step": step} for row in waiting)
            waiting = []
    # What comes after the last metrics is of a step that did not end.
    rows += ({**row, "step": None if step is None else step + 1} for row in waiting)
    if repeated:
        problems.append(
            f"{path}: Ray left out {repeated} memory lines that looked like others; "
            "RAY_DEDUP_LOGS=0 keeps them."
        )
    return rows


def _place(before: str) -> tuple[str, str]:
    """Return the time that a logger put before a reading, and what verl calls its place."""
    time = ""
    for match in _TIME.finditer(before):
        time, before = match[1], match.string[match.end() :]
    at = before.rpartition(",")[2]
    return (time if at == before else ""), at.strip()
