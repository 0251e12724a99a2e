"""The input formats, by the ends of file names, and what reads them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler.errors import ReadingError

if TYPE_CHECKING:
    from verl_profiler.reading.formats.foreign_traces import ForeignTrace


EVENTS = (".jsonl", ".jsonl.gz")
PARQUET = (".parquet",)
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
# Of other profilers' traces: what a user calls one, and the module with `read(path, found=…)` and
# `is_trace(path)`.
_FORMATS = "verl_profiler.reading.formats"
_TORCH = ("a trace of torch.profiler", f"{_FORMATS}.torch_trace")
_TRACES = {
    ".json": _TORCH,
    ".json.gz": _TORCH,
    ".sqlite": ("an SQLite database, such as an nsys export", f"{_FORMATS}.nsys_trace"),
}


def is_log_name(path: Path) -> bool:
    """Whether a name is that of a log: of none of the other formats."""
    return not path.name.endswith((*EVENTS, *PARQUET, *ARCHIVES, *_TRACES))


def is_run(path: Path) -> bool:
    """Tell a run directory, an archive of one or an event file from a console log."""
    return path.is_dir() or path.name.endswith((*EVENTS, *PARQUET, *ARCHIVES))


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
    for suffix, (name, module) in _TRACES.items():
        if path.name.endswith(suffix) and importlib.import_module(module).is_trace(path):
            raise ReadingError(
                f"{path} is {name}, not a run or a log.\n`verl-profiler export perfetto RUN --merge "
                f"{path}` shows it beside the events of its run",
                "no-events",
            )


def read_trace(path: Path, *, found: bool = False) -> ForeignTrace | None:
    """Read another profiler's trace.

    Args:
        path: The file; without a known suffix it is read as torch's.
        found: The user did not name it: a file of another kind is skipped, not an error.

    Returns:
        None for a file that was found and is no trace.

    Raises:
        ReadingError: The file is no trace of a known format, or has no absolute time.
    """
    _, module = _TRACES.get(path.suffix, _TORCH)
    return importlib.import_module(module).read(path, found=found)
