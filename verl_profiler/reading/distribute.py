"""Convert the event files of runs by tasks, on several nodes.

Each task writes the Parquet shards that a reader would write itself, under the same names, into the cache of
the run (`cache_folder`).  A reader that comes after them makes its tables from these shards, and its answers
are those of a run that was read in one process; what a task did not leave, it converts itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from verl_profiler.errors import ReadingError
from verl_profiler.reading.cache_folder import CacheFolder
from verl_profiler.reading.convert import CONVERSION, convert, groups_within
from verl_profiler.reading.discovery import EventFile, Source, find_sources
from verl_profiler.reading.executors import OnRay
from verl_profiler.reading.processes import Process, processes
from verl_profiler.reading.tables.tables import connect

_MEMORY = "1GB"
_THREADS = 2


@dataclass(frozen=True)
class _Files:
    """A run whose event files are converted, and what a node must have.

    Args:
        source: The run.
        found: Its processes.
        token: A file in its cache, with a name that no other directory has.
        versions: What the names of the shards depend on.
    """

    source: Source
    found: dict[str, Process]
    token: Path
    versions: str


def distribute(
    paths: Sequence[Path],
    executor: OnRay,
    steps: tuple[int, int] | None = None,
) -> int:
    """Fill the caches of runs with their events; return how many groups of event files were converted.

    Args:
        paths: Run directories.
        executor: Where to do it.
        steps: First and last step that will be requested; all when None.

    Raises:
        ReadingError: A run cannot be read, has no place for a cache, or is not visible on any node.
    """
    done = 0
    for path in paths:
        with tempfile.TemporaryDirectory(prefix="verl_profiler-") as scratch:
            if path.exists() and not path.is_dir():
                raise ReadingError(
                    f"{path} is not a run directory.\nUnpack it, or omit --on", "option-not-heeded"
                )
            (source,) = find_sources([path.resolve()], Path(scratch), [])
        if not source.whole:
            raise ReadingError(
                f"{path} is a part of a run.\nGive the run directory and --steps, or omit --on",
                "option-not-heeded",
            )
        cache = CacheFolder.for_run(source.root)
        if cache is None or not cache.can_write():
            raise ReadingError(
                f"the cache of {source.root} cannot be written.\n--on stores the converted files in "
                "it: set VERL_PROFILER_CACHE_HOME to a directory that the nodes share, or omit --on",
                "unwritable",
            )
        found = processes(source)
        around = None if steps is None else (steps[0] - 1, steps[1] + 1)
        if any(process.role == "rollouter" for process in found.values()):
            # Read whole.
            around = None
        groups = groups_within(source, found, around)
        with cache.new() as token:
            files = _Files(source, found, token, _versions())
            done += sum(1 for _ in executor.run(_convert, files, groups))
    return done


def _versions() -> str:
    return json.dumps([CONVERSION, duckdb.__version__])


def _convert(files: _Files, group: list[EventFile]) -> None:
    """Convert one group of event files; raise an error with the reason if this node cannot be used."""
    if not files.source.root.is_dir():
        raise RuntimeError(f"does not have {files.source.root}")
    if files.versions != _versions():
        raise RuntimeError("has another version of verl-profiler or duckdb")
    if not files.token.exists():
        raise RuntimeError(f"has a different directory at {files.token.parent}")
    cache = CacheFolder(files.token.parent)
    if not cache.can_write():
        raise RuntimeError(f"cannot write to {cache.path}")
    with (
        tempfile.TemporaryDirectory(prefix="verl_profiler-") as place,
        connect(Path(place), _MEMORY, _THREADS) as connection,
    ):
        scratch = CacheFolder(Path(place))
        convert(connection, files.source, files.found, scratch, cache=cache, groups=[group])
