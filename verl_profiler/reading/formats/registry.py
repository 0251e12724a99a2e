"""The input formats: how each is recognized, and what reads it.

`FORMATS` is the only place that has suffixes of input files.  A new trace format is a module with
`read(path, found=…)`, `is_trace(path)` and a row here; one of another kind also needs a reader in its kind's module
(`discovery` for runs, `console_log` for logs).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from verl_profiler.errors import ReadingError

if TYPE_CHECKING:
    from verl_profiler.reading.formats.foreign_traces import ForeignTrace

__all__ = [
    "FORMATS",
    "InputFormat",
    "find_traces",
    "format_of",
    "is_run",
    "label_of",
    "read_trace",
    "refuse_trace",
    "suffixes",
]


@dataclass(frozen=True)
class InputFormat:
    """One kind of input file.

    Args:
        kind: `run`: events, or an archive of a run.  `trace`: another profiler's, merged into a
            timeline.  `log`: console output.
        suffixes: How its names end; empty for what every other name means.
        reader: The module with `read(path, found=…)` and `is_trace(path)`; of traces only.
        name: What a user calls it; of traces only.
    """

    kind: Literal["run", "trace", "log"]
    suffixes: tuple[str, ...]
    reader: str = ""
    name: str = ""


FORMATS = {
    "events": InputFormat("run", (".jsonl", ".jsonl.gz")),
    "parquet": InputFormat("run", (".parquet",)),
    "archive": InputFormat("run", (".tar", ".tar.gz", ".tgz", ".tar.zst")),
    "torch_trace": InputFormat(
        "trace",
        (".json", ".json.gz"),
        "verl_profiler.reading.formats.torch_trace",
        "a trace of torch.profiler",
    ),
    "nsys_export": InputFormat(
        "trace",
        (".sqlite",),
        "verl_profiler.reading.formats.nsys_trace",
        "an SQLite database, such as an nsys export",
    ),
    "console": InputFormat("log", ()),
}


def format_of(path: Path, kind: str | None = None) -> str:
    """Return the name of a file's format.

    Args:
        path: The file; it is not opened.
        kind: Only formats of this kind are considered.

    Returns:
        `console` where no suffix fits.
    """
    for name, each in FORMATS.items():
        if kind in (None, each.kind) and path.name.endswith(each.suffixes):
            return name
    return "console"


def is_run(path: Path) -> bool:
    """Tell a run directory, an archive of one or an event file from a console log."""
    return path.is_dir() or format_of(path, "run") != "console"


def label_of(path: Path) -> str:
    """Return the name of a file without its format's suffix."""
    fitting = [end for end in FORMATS[format_of(path)].suffixes if path.name.endswith(end)]
    return path.name.removesuffix(max(fitting, key=len, default=""))


def suffixes(*names: str) -> tuple[str, ...]:
    """Return how files of these formats end."""
    return tuple(suffix for name in names for suffix in FORMATS[name].suffixes)


def find_traces(folder: Path) -> list[Path]:
    """Return the files below a folder that may be traces of other profilers."""
    patterns = [
        f"*{suffix}"
        for each in FORMATS.values()
        if each.kind == "trace"
        for suffix in each.suffixes
    ]
    return sorted(path for pattern in patterns for path in folder.rglob(pattern))


def refuse_trace(path: Path) -> None:
    """Refuse another profiler's trace where a run or a log is to be read.

    Raises:
        ReadingError: The file is one.
    """
    form = FORMATS[format_of(path)]
    if form.kind == "trace" and importlib.import_module(form.reader).is_trace(path):
        raise ReadingError(
            f"{path} is {form.name}, not a run or a log.\n`verl-profiler export perfetto RUN --merge "
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
    name = format_of(path, "trace")
    reader = FORMATS["torch_trace" if name == "console" else name].reader
    return importlib.import_module(reader).read(path, found=found)
