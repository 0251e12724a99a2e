"""Convert runs and make their tables by tasks, on several nodes.

Each task writes the Parquet shards that a reader would write itself, under the same names, into the cache of
the run (`cache_folder`).  A reader that comes after them has nothing left to do, and its answers are those
of a run that was read in one process; what a task did not leave, it makes itself.
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb

from verl_profiler.environ import CACHE
from verl_profiler.errors import ReadingError
from verl_profiler.reading.cache_folder import CacheFolder
from verl_profiler.reading.connection import connect
from verl_profiler.reading.convert import CONVERSION, convert, groups_within
from verl_profiler.reading.discovery import Source, find_sources
from verl_profiler.reading.event_parts import EventPart, parts_query
from verl_profiler.reading.event_sql import RECORDED_EXTRA
from verl_profiler.reading.executors import Executor
from verl_profiler.reading.processes import Process, processes
from verl_profiler.reading.reader import Run, load
from verl_profiler.reading.scans import scan
from verl_profiler.reading.table_cache import TableCache
from verl_profiler.reading.tables.derivations import fingerprint
from verl_profiler.reading.tables.tables import Chunk, Tables, waves

__all__ = ["Distributed", "distribute"]

_MEMORY = "1GB"
_THREADS = 2


@dataclass
class Distributed:
    """What tasks did.

    Args:
        shards: How many groups of event files were converted, or were found converted.
        chunks: For how many groups of steps tables were made, or were found made.
        nodes: On how many nodes.
        left_out: Why other nodes were not used, by node.
    """

    shards: int
    chunks: int
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


@dataclass(frozen=True)
class _Plan:
    """What tables of some steps are made of."""

    folder: Path
    parts: list[EventPart]
    names: list[str]
    tables: dict[str, list[Path]]
    processes: list[dict[str, Any]]
    memory: str


def distribute(
    paths: Sequence[Path],
    executor: Executor,
    steps: tuple[int, int] | None = None,
    *,
    memory_limit: str = _MEMORY,
) -> Distributed:
    """Fill the caches of runs, so that reading them is only reading the caches.

    Args:
        paths: Run directories.
        executor: Where to do it.
        steps: First and last step that will be requested; all when None.
        memory_limit: What each task may use.

    Raises:
        ReadingError: A run cannot be read, has no place for a cache, or is not visible on any node.
    """
    done = Distributed(0, 0, 0, {})
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
                f"there is no cache of {source.root} that can be written.\n"
                f"--on keeps there what it converts: see {CACHE} in docs/reading.md, or omit --on",
                "unwritable",
            )
        try:
            _leave_out_nodes(source, cache, executor, done)
            # Tables of several runs that are read as one are not kept.
            _fill(source, cache, executor, done, steps, memory_limit, tables=len(paths) == 1)
        finally:
            cache.close()
    done.nodes = executor.nodes
    return done


def _leave_out_nodes(
    source: Source, cache: CacheFolder, executor: Executor, done: Distributed
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
    other = f"has another directory as {probe.folder}"
    try:
        folder = CacheFolder.of(probe.folder)
    except OSError:
        return other
    try:
        if not folder.has(probe.token, probe.content):
            return other
        return None if folder.can_write() else f"cannot write to {probe.folder}"
    finally:
        folder.close()


def _versions() -> str:
    return json.dumps([CONVERSION, fingerprint(), duckdb.__version__])


def _fill(
    source: Source,
    cache: CacheFolder,
    executor: Executor,
    done: Distributed,
    steps: tuple[int, int] | None,
    memory_limit: str,
    *,
    tables: bool,
) -> None:
    """Convert a run, then make its tables, wave by wave."""
    found = processes(source)
    if any(process.role == "rollouter" for process in found.values()):
        # Read whole.
        steps = None
    around = None if steps is None else (steps[0] - 1, steps[1] + 1)
    numbers = sorted(groups_within(source, found, around))
    for _ in executor.run(_convert, _Files(source, found, cache.path), numbers):
        done.shards += 1
    if not tables:
        return
    with load(source.root, steps=steps, memory_limit=memory_limit) as run:
        names: list[str] = []
        whole = set[str]()
        chunks = 0
        for wave, needed in waves():
            names += wave
            whole |= needed
            plan = _plan(run, cache, names, whole, memory_limit)
            if plan is None:
                return
            wanted = list(enumerate(run.tables.chunks()))
            chunks = sum(1 for _ in executor.run(_make_chunk, plan, wanted))
        done.chunks += chunks


def _convert(shared: _Files, number: int) -> None:
    """Convert one group of event files."""
    with _workplace(shared.folder, _MEMORY) as (connection, cache, scratch):
        convert(connection, shared.source, shared.found, scratch, cache=cache, only=(number,))


def _plan(
    run: Run, cache: CacheFolder, names: list[str], whole: set[str], memory: str
) -> _Plan | None:
    """Return what tasks need to make tables of some steps; None where nothing is kept."""
    tables = run.tables
    if tables.table_cache is None or tables.table_cache.folder.path != cache.path:
        return None
    # Paths of this process lead through its descriptors.
    parts = [
        replace(part, path=_shared_path(part, cache.path)) for part in tables.table_cache.parts
    ]
    rows = tables.connection.execute("SELECT * FROM processes")
    columns = [column[0] for column in rows.description or ()]
    listed = [dict(zip(columns, row, strict=True)) for row in rows.fetchall()]
    return _Plan(cache.path, parts, list(names), tables.cached(whole), listed, memory)


def _shared_path(part: EventPart, folder: Path) -> Path:
    """Return where other processes find a part of the events."""
    kept = folder / part.fingerprint.removeprefix(f"{part.run}:")
    return kept if kept.is_file() else part.path


def _make_chunk(plan: _Plan, argument: tuple[int, Chunk]) -> None:
    """Make the tables of some steps."""
    number, chunk = argument
    with _workplace(plan.folder, plan.memory) as (connection, cache, scratch):
        table_cache = TableCache(cache, scratch, plan.parts)
        tables = Tables(connection, table_cache)
        near = {part.path for part in table_cache.of_steps(chunk.steps, chunk.without_step)}
        near.update(part.path for part in table_cache.of_times(*chunk.around_us))
        tables.take("event_fields", parts_query([part for part in plan.parts if part.path in near]))
        tables.take("events", f"SELECT *, {RECORDED_EXTRA} AS extra FROM event_fields")
        tables.put("processes", plan.processes)
        for name, files in plan.tables.items():
            tables.take(name, f"SELECT * FROM {scan('read_parquet', files)}")
        tables.make_chunk(plan.names, number, chunk)


@contextmanager
def _workplace(
    folder: Path, memory: str
) -> Generator[tuple[duckdb.DuckDBPyConnection, CacheFolder, CacheFolder], None, None]:
    """Open a connection, the cache of a run, and a folder for temporary files.

    Raises:
        ReadingError: The cache is not there any more.
    """
    place = Path(tempfile.mkdtemp(prefix="verl_profiler-"))
    try:
        cache = CacheFolder.of(folder)
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        raise ReadingError(
            f"{folder} cannot be opened on node {socket.gethostname()}: {error.strerror}.\n"
            "Omit --on to read the run here",
            "not-shared",
        ) from error
    scratch = CacheFolder.of(place)
    try:
        with connect(place, memory, _THREADS) as connection:
            yield connection, cache, scratch
    finally:
        cache.close()
        scratch.close()
        shutil.rmtree(place, ignore_errors=True)
