"""Read SQLite exports of nsys reports for a timeline; `nsys_export` reads their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_profiler.events.files import open_regular
from verl_profiler.reading.formats import nsys_export
from verl_profiler.reading.formats.foreign_traces import ForeignSpan, ForeignTrace, unusable


def is_trace(path: Path) -> bool:
    """Whether a file is an SQLite database."""
    try:
        with open_regular(path) as file:
            return file.read(15) == b"SQLite format 3"
    except OSError:
        return False


def read(path: Path, *, found: bool = False) -> ForeignTrace:  # noqa: ARG001
    """Read an export: NVTX ranges by thread, GPU work by stream.

    Args:
        path: The file.
        found: Without effect: every SQLite file beside a run's reports should be an export.

    Raises:
        ReadingError: The file is no export, or has no absolute time.
    """
    export = nsys_export.read(path)
    if not export.dated:
        raise unusable(path, "has no absolute time (time of day)")
    trace = ForeignTrace(f"nsys: {path.name}")

    def add(lane: str, pid: int, begin_ns: int, end_ns: int, name: Any, category: str) -> None:
        trace.pids.add(pid)
        span = ForeignSpan(begin_ns, end_ns, str(name or "range"), category)
        trace.threads.setdefault(lane, []).append(span)

    for _domain, name, category, _payload, _kind, pid, tid, begin_ns, end_ns in export.ranges:
        if end_ns is not None:
            add(f"NVTX of thread {tid}", pid, begin_ns, end_ns, name, category or "nvtx")
    for kind, name, gpu, stream, pid, _tid, _launch_ns, begin_ns, end_ns in export.work:
        add(f"GPU {gpu}, stream {stream}", pid, begin_ns, end_ns, name, kind)
    return trace
