"""The input formats, by the ends of file names, and what reads them."""

from __future__ import annotations

from pathlib import Path

from verl_profiler.errors import ReadingError

EVENTS = (".jsonl", ".jsonl.gz")
PARQUET = (".parquet",)
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
# Of other profilers' traces, which `foreign_traces` reads: what a user calls one.
_TRACES = {
    ".json": "a trace of torch.profiler",
    ".json.gz": "a trace of torch.profiler",
    ".sqlite": "an SQLite database, such as an nsys export",
}


def is_log_name(path: Path) -> bool:
    """Whether a name is that of a log: of none of the other formats."""
    return not path.name.endswith((*EVENTS, *PARQUET, *ARCHIVES, *_TRACES))


def label_of(path: Path) -> str:
    """Return the name of a run's file without its format's suffix."""
    ends = [end for end in (*EVENTS, *PARQUET, *ARCHIVES) if path.name.endswith(end)]
    return path.name.removesuffix(max(ends, key=len, default=""))


def find_traces(folder: Path) -> list[Path]:
    """Return the files below a folder that may be traces of other profilers."""
    return sorted(path for suffix in _TRACES for path in folder.rglob(f"*{suffix}"))


def refuse_trace(path: Path) -> None:
    """Refuse another profiler's trace where a run or a log is to be read.

    Raises:
        ReadingError: The file is one.
    """
    name = next((name for suffix, name in _TRACES.items() if path.name.endswith(suffix)), None)
    if name is None:
        return
    from verl_profiler.reading.formats.foreign_traces import is_trace

    if is_trace(path):
        raise ReadingError(
            f"{path} is {name}, not a run or a log.\n`verl-profiler export perfetto RUN --merge "
            f"{path}` shows it beside the events of its run",
            "no-events",
        )
