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
from verl_profiler.reading.connection import connect
from verl_profiler.reading.convert import CONVERSION, convert, groups_within
from verl_profiler.reading.discovery import Source, find_sources
from verl_profiler.reading.executors import OnRay
from verl_profiler.reading.processes import Process, processes

__all__ = ["Distributed", "distribute"]

_MEMORY = "1GB"
_THREADS = 2


@dataclass
class Distributed:
    """What tasks did.

    Args:
        shards: How many groups of event files were converted, or were found converted.
        nodes: On how many nodes.
        left_out: Why other nodes were not used, by node.
    """

    shards: int
    nodes: int
    left_out: dict[str, str]


@dataclass(frozen=True)
class _Probe:
    """What a node must have.

    Args:
        root: The run.
        folder: Its cache.
        token: A file in it.
        content: Of that file.
        versions: What the names of the shards depend on.
    """

    root: Path
    folder: Path
    token: str
    content: bytes
    versions: str


@dataclass(frozen=True)
class _Files:
    """A run whose event files are converted."""

    source: Source
    found: dict[str, Process]
    folder: Path


def distribute(
    paths: Sequence[Path],
    executor: OnRay,
    steps: tuple[int, int] | None = None,
) -> Distributed:
    """Fill the caches of runs with their events.

    Args:
        paths: Run directories.
        executor: Where to do it.
        steps: First and last step that will be requested; all when None.

    Raises:
        ReadingError: A run cannot be read, has no place for a cache, or is not visible on any node.
    """
    done = Distributed(0, 0, {})
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
        try:
            _leave_out_nodes(source, cache, executor, done)
            found = processes(source)
            around = None if steps is None else (steps[0] - 1, steps[1] + 1)
            if any(process.role == "rollouter" for process in found.values()):
                # Read whole.
                around = None
            numbers = sorted(groups_within(source, found, around))
            for _ in executor.run(_convert, _Files(source, found, cache.path), numbers):
                done.shards += 1
        finally:
            cache.close()
    done.nodes = executor.nodes
    return done


def _leave_out_nodes(
    source: Source, cache: CacheFolder, executor: OnRay, done: Distributed
) -> None:
    with cache.new() as draft:
        token = f"{source.root}\n".encode()
        draft.write(token)
        probe = _Probe(source.root, cache.path, draft.name, token, _versions())
        done.left_out |= executor.leave_out(_missing, probe)
    if not executor.nodes:
        reasons = "".join(f"\n  {node}: {reason}" for node, reason in done.left_out.items())
        raise ReadingError(
            f"no node of the cluster can read the run:{reasons}\n"
            "Copy the run to a disk that the nodes share, or omit --on to read it here",
            "not-shared",
        )


def _missing(probe: _Probe) -> str | None:
    """Return why this node cannot be used; None if it can."""
    if not probe.root.is_dir():
        return f"does not have {probe.root}"
    if probe.versions != _versions():
        return "has another version of verl-profiler or duckdb"
    try:
        if (probe.folder / probe.token).read_bytes() == probe.content:
            writable = CacheFolder(probe.folder).can_write()
            return None if writable else f"cannot write to {probe.folder}"
    except OSError:
        pass
    return f"has a different directory at {probe.folder}"


def _versions() -> str:
    return json.dumps([CONVERSION, duckdb.__version__])


def _convert(shared: _Files, number: int) -> None:
    """Convert one group of event files."""
    cache = CacheFolder(shared.folder)
    with tempfile.TemporaryDirectory(prefix="verl_profiler-") as place:
        scratch = CacheFolder(Path(place))
        try:
            with connect(Path(place), _MEMORY, _THREADS) as connection:
                convert(
                    connection, shared.source, shared.found, scratch, cache=cache, only=(number,)
                )
        finally:
            cache.close()
            scratch.close()
