"""Runs and console logs that are read together for TransferQueue."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from verl_profiler.reading.formats.registry import is_run
from verl_profiler.reading.formats.tq_log import read_logs
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables


@dataclass
class Source:
    """Runs, or logs read as one run.

    Args:
        tables: Their tables.
        labels: The values of the column `run`.
        problems: What is wrong with the files and the data, in sentences.
        counts: Number of `missing` and `unreadable` log lines, by label.
    """

    tables: Tables
    labels: list[str]
    problems: list[str] = field(default_factory=list[str])
    counts: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])


@contextlib.contextmanager
def open_sources(
    paths: list[Path], *, cache: bool = True, utc_offset_s: int = 0
) -> Generator[list[Source], None, None]:
    """Open runs and logs.

    Args:
        paths: Run directories, archives and event files; anything else is read as a log.
        cache: Read and write the runs' caches.
        utc_offset_s: UTC offset of the logs' timestamps.

    Raises:
        ReadingError: There is nothing to read at a path.
    """
    runs = [path for path in paths if is_run(path)]
    logs = [path for path in paths if path not in runs]
    sources: list[Source] = []
    with contextlib.ExitStack() as stack:
        if runs:
            loaded = stack.enter_context(load(runs, cache=cache))
            sources.append(Source(loaded.tables, loaded.labels, loaded.problems))
        if logs:
            log = read_logs(logs, utc_offset_s=utc_offset_s)
            lost = {reason: log.counts[reason] for reason in ("missing", "unreadable")}
            counts = {log.label: lost}
            problems = [*log.problems, *log.notes]
            sources.append(Source(log.tables(), [log.label], problems, counts))
        if runs and logs:
            sources[-1].problems.append(
                "A run directory and a log were given; they may contain the same calls and are shown separately"
            )
        yield sources


def has_transfers(source: Source) -> bool:
    """Whether there is any TransferQueue call."""
    return any(
        source.tables.rows(f"SELECT 1 AS known FROM {name} LIMIT 1")
        for name in ("tq_calls", "transfers")
    )
