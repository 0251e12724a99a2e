"""Open runs: event files in, tables and a list of what is wrong with them out.

    from verl_profiler.reading.reader import load

    with load("logs/my-run") as run:
        for row in run.rows("SELECT step, count(*) AS requests FROM requests GROUP BY step"):
            print(row)
        for problem in run.problems:
            print(problem)

Files are never trusted: what cannot be read is named in `Run.problems`, and costs nothing else.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb

from verl_profiler.errors import ReadingError
from verl_profiler.events.remote import is_url
from verl_profiler.reading.cache_folder import CacheFolder, Kept
from verl_profiler.reading.convert import convert
from verl_profiler.reading.discovery import find_sources, may_hold
from verl_profiler.reading.formats.nsys_export import take_captures
from verl_profiler.reading.losses import (
    detail_notes,
    end_problems,
    not_arrived,
    process_problems,
    replay_notes,
)
from verl_profiler.reading.processes import Process, processes
from verl_profiler.reading.remote import fetched
from verl_profiler.reading.table_cache import (
    EventPart,
    TableCache,
    event_parts,
    folder_step,
    parts_query,
    parts_within,
)
from verl_profiler.reading.tables.tables import Tables, connect

__all__ = ["Run", "load"]


def load(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    cache: bool = True,
    memory_limit: str = "1GB",
    threads: int | None = None,
    steps: tuple[int, int] | None = None,
) -> Run:
    """Open one run, or several as one: the parts of a resumed training.

    Args:
        paths: Run directories, archives of them, step folders, event files or Parquet files; or URLs
            of these, such as `s3://bucket/runs/my-run`, which are downloaded (`remote`).
        cache: Keep a Parquet copy of the events in `<run>/.cache`, or elsewhere (`cache_folder`), and
            use the one that is there if it is not older than the files.
        memory_limit: What duckdb may use; more is spilled to temporary files.
        threads: Threads to read with; all cores when None.
        steps: First and last step that is needed.  Files of other steps are not read, but for
            the step before and the one after; tables and problems are about these steps alone.
            Asynchronous runs are read whole, because their steps consume requests of earlier ones.

    Raises:
        ReadingError: There is nothing to read at `paths`.
    """
    listed = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not listed:
        raise ReadingError("no run was named.\nName a run directory, such as logs/my-run", "no-run")
    places = [fetched(path) if is_url(path) else Path(path) for path in listed]
    run = _opened(places, cache, memory_limit, threads, steps)
    if run.steps is not None and run._needs_all(run.steps):  # pyright: ignore[reportPrivateUsage]
        run.close()
        run = _opened(places, cache, memory_limit, threads, None)
    return run


def _opened(
    places: list[Path],
    cache: bool,
    memory_limit: str,
    threads: int | None,
    steps: tuple[int, int] | None,
) -> Run:
    run = Run(Path(tempfile.mkdtemp(prefix="verl_profiler-")), memory_limit, threads)
    try:
        run._open(places, cache=cache, steps=steps)  # pyright: ignore[reportPrivateUsage]
    except BaseException:
        run.close()
        raise
    return run


class Run:
    """One training, read: its tables, what launched it, and what is wrong with its files.

    Attributes:
        tables: The tables; `rows` and `relation` are its methods.
        launches: `run.json` by run label; empty where it is missing.
        labels: The values of the column `run`, in the order in which they were named.
        steps: The steps that were read, if not all.
        arrived: The processes whose files are all here, so that it is known when they ended.
        all_steps: First and last step of the files, as far as that is known without reading them.
    """

    def __init__(self, scratch: Path, memory_limit: str, threads: int | None) -> None:
        self._scratch = scratch
        # A run that is dropped without `close` leaves nothing behind either.
        self._remove_scratch = weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        self.tables = Tables(connect(scratch, memory_limit, threads))
        self.launches: dict[str, dict[str, Any]] = {}
        self.tables.launches = self.launches
        self.labels: list[str] = []
        self._folders: list[CacheFolder] = []
        self.arrived: list[Process] = []
        self.steps: tuple[int, int] | None = None
        self.all_steps: tuple[int, int] | None = None
        self._size_bytes = 0
        self._problems: list[str] = []
        self._checked = False

    def rows(self, query: str, parameters: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """Run SQL over the tables and return its rows as dicts."""
        return self.tables.rows(query, parameters)

    def relation(self, name: str) -> duckdb.DuckDBPyRelation:
        """Return a table as a duckdb relation."""
        return self.tables.relation(name)

    @property
    def problems(self) -> list[str]:
        """Data-quality warnings about these tables, in plain sentences."""
        if not self._checked:
            self._checked = True
            self._problems += _table_problems(
                self.tables, self.arrived, several=len(self.labels) > 1
            )
        return list(self._problems)

    @property
    def notes(self) -> list[str]:
        """Facts about the runs that limit which analyses apply, in plain sentences."""
        return [
            *detail_notes(self.tables),
            *replay_notes(self.tables),
            *(
                f"{row['run']} trains asynchronously: {row['later']:,} of {row['requests']:,} requests "
                "were consumed by a later step than the one that dispatched them. Critical path and "
                "stragglers of requests do not apply; device time, its findings and what-if do."
                for row in self.tables.rows("SELECT * FROM asynchronous ORDER BY run")
            ),
        ]

    def supersede(self, made: set[str]) -> set[str]:
        """Remove the files that an earlier reading of the same run left in the cache, and this one did not use.

        Args:
            made: What `supersede` returned then.
        """
        # The first folder is the scratch folder.
        for folder in self._folders[1:]:
            folder.supersede(made)
            made = set(folder.made)
        return made

    def close(self) -> None:
        """Give memory and temporary files back."""
        self.tables.connection.close()
        for folder in self._folders:
            folder.close()
        self._remove_scratch()

    # typing.Self is not in Python 3.10.
    def __enter__(self) -> Run:  # noqa: PYI034
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, paths: list[Path], *, cache: bool, steps: tuple[int, int] | None) -> None:
        sources = find_sources(paths, self._scratch, self._problems)
        connection = self.tables.connection
        self._size_bytes = sum(file.size_bytes for source in sources for file in source.files)
        self._size_bytes += sum(path.stat().st_size for each in sources for path in each.parquet)
        if self._size_bytes < _ONE_THREAD_BYTES:
            connection.execute("SET threads = 1")
        everyone: list[Process] = []
        parts: list[EventPart] = []
        scratch = CacheFolder(self._scratch)
        self._folders.append(scratch)
        kept = None
        members = [processes(source) for source in sources]
        if any(each.role == "rollouter" for found in members for each in found.values()):
            steps = None
        self.steps = steps
        if steps is not None:
            # How long a step takes to the next is in the next.
            steps = steps[0] - 1, steps[1] + 1
        for source, found in zip(sources, members, strict=True):
            everyone += found.values()
            folder = None
            # What an archive brings along is not used; it is unpacked anew each time.
            if cache and source.whole and self._scratch not in source.root.parents:
                folder = CacheFolder.for_run(source.root)
            if folder is not None:
                self._folders.append(folder)
            converted = convert(connection, source, found, scratch, cache=folder, steps=steps)
            several = len(sources) > 1
            # Of a part of the events it is not known whether all are there.
            counts = None if steps is not None else converted.counts
            problems = [
                *converted.problems,
                *process_problems(source, found, counts, original=converted.original),
            ]
            if converted.original:
                problems.append(_ORIGINAL)
            self._problems += [f"{source.label}: {p}" if several else p for p in problems]
            self.labels.append(source.label)
            self.launches[source.label] = source.launch
            late = not_arrived(source)
            self.arrived += (each for each in found.values() if each.name not in late)
            given = source.parquet
            if steps is not None:
                own_steps = {path: folder_step(path) for path in given}
                self._note_steps(step for step in own_steps.values() if step is not None)
                given = [path for path, step in own_steps.items() if may_hold(step, steps)]
            whole = [*converted.parts, *(Kept(_identity(path), path) for path in given)]
            try:
                own = event_parts(connection, source.label, whole)
            except duckdb.Error as error:
                raise ReadingError(
                    f"{source.root} cannot be read: {error}", "unreadable"
                ) from error
            self._note_steps(step for part in own for step in part.steps or ())
            self._note_steps(file.step for file in source.files if file.step is not None)
            if steps is not None:
                own = parts_within(own, steps)
            parts += own
            kept = converted.cache
        few = steps is None and sum(part.path.stat().st_size for part in parts) < _IN_MEMORY_BYTES
        if few:
            self.tables.expect_few_events()
        if parts:
            alone = kept if len(sources) == 1 else None
            self.tables.table_cache = TableCache(alone or scratch, scratch, parts, steps=steps)
        fields = parts_query(parts)
        if steps is not None:
            first, last = steps
            fields = (
                f"SELECT * FROM ({fields}) WHERE step BETWEEN {first} AND {last} OR step IS NULL"
            )
        self.tables.create_view("event_fields", fields, "TABLE" if few else "VIEW")
        self.tables.create_table("processes", (process.row() for process in everyone))
        roots = [(source.label, source.root) for source in sources]
        self._problems += take_captures(self.tables, roots)

    def _needs_all(self, steps: tuple[int, int]) -> bool:
        """Whether these steps need the others, or are none of a run that is read quickly."""
        if self.rows("SELECT 1 FROM asynchronous LIMIT 1"):
            return True
        first, last = steps
        there = self.rows(f"SELECT 1 FROM steps WHERE step BETWEEN {first} AND {last} LIMIT 1")
        return not there and self._size_bytes < _SMALL_BYTES

    def _note_steps(self, known: Iterable[int]) -> None:
        """Widen `all_steps` by what statistics and names of folders tell."""
        steps = [*(self.all_steps or ()), *known]
        if steps:
            self.all_steps = min(steps), max(steps)


# Of a larger run, a step that does not exist is an error without reading all others.
_SMALL_BYTES = 1 << 30
# Of fewer, threads take longer to start and to wait than rows to read.
_ONE_THREAD_BYTES = 4 << 20
# Parquet files of a few ten thousand events.
_IN_MEMORY_BYTES = 1 << 20
_ORIGINAL = (
    "the files are of the original multi-turn logger: times are local without a zone (shown as if "
    "UTC), steps count validation passes too, and trainer phases, engine timings and losses were "
    "not recorded"
)


def _identity(path: Path) -> str:
    """Return what changes when a file does."""
    status = path.stat()
    return f"{path.name}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _table_problems(tables: Tables, arrived: Iterable[Process], *, several: bool) -> Iterator[str]:
    """Say what only the tables show: requests without end or twice, steps in two runs."""
    total = tables.row("SELECT sum(events) AS events FROM event_counts")
    if not total.get("events"):
        yield "no events were found"
        return
    yield from end_problems(tables, arrived)
    rows = tables.rows(
        "SELECT step, event, status, error FROM event_fields "
        "WHERE family = 'trainer' AND role = 'trainer' AND status IS NOT NULL ORDER BY end_us"
    )
    for row in rows[:5]:
        error = f" ({row['error']})" if row["error"] else ""
        yield f"the trainer's {row['event']} of step {row['step']} ended in: {row['status']}{error}"
    rows = tables.rows(
        "SELECT run, step, count(*) AS requests, min(request_id) AS example FROM requests "
        "WHERE status = 'unfinished' GROUP BY run, step ORDER BY run, step"
    )
    if rows:
        count = sum(row["requests"] for row in rows)
        steps = ", ".join(str(row["step"]) for row in rows[:8])
        yield (
            f"{count} request{'s' * (count > 1)} started but did not end (step {steps}; "
            f"for example {rows[0]['example']}); they are left out of percentiles"
        )
    rows = tables.rows(
        "SELECT count(*) AS requests, min(request_id) AS example FROM requests "
        "WHERE endings > 1 AND request_id IS NOT NULL"
    )
    if rows and rows[0]["requests"]:
        yield (
            f"{rows[0]['requests']} request ids were used twice in one step (for example "
            f"{rows[0]['example']}); each is counted as one request"
        )
    rows = tables.rows(
        "SELECT count(*) AS requests FROM requests WHERE overlap_us > greatest(1000, "
        "0.001 * duration_us)"
    )
    if rows and rows[0]["requests"]:
        yield (
            f"in {rows[0]['requests']} requests the components add up to more than the duration, "
            "because calls ran concurrently; shares refer to the sum of the components"
        )
    yield from _contradictions(tables)
    if several:
        rows = tables.rows(
            "SELECT step, string_agg(run, ' and ' ORDER BY run) AS runs FROM steps "
            "WHERE step > 0 GROUP BY step HAVING count(*) > 1 ORDER BY step"
        )
        if rows:
            shown = ", ".join(str(row["step"]) for row in rows[:8])
            yield (
                f"{len(rows)} step{'s' * (len(rows) > 1)} (such as {shown}) are in "
                f"{rows[0]['runs']}; they are not merged"
            )


def _contradictions(tables: Tables) -> Iterator[str]:
    """Say where calls arrive on another host before they were made."""
    hosts = tables.row("SELECT count(DISTINCT boot_id) AS hosts FROM processes")
    if hosts["hosts"] < 2:
        return
    for row in tables.rows(
        """
        WITH calls AS (
            SELECT c.run, p.host AS host, e.host AS engine_host,
                c.begin_us - c.engine_begin_us AS before_us, c.end_us - c.engine_end_us AS after_us
            FROM engine_calls AS c
            JOIN processes AS p ON p.run = c.run AND p.name = c.name
            JOIN processes AS e ON e.run = c.run AND e.name = c.engine_name
            WHERE p.boot_id <> e.boot_id
        )
        SELECT host, engine_host, count(*) AS calls,
            count(*) FILTER (before_us > 0 OR after_us < 0) AS early,
            greatest(max(before_us), -min(after_us), 0) AS contradiction_us
        FROM calls WHERE before_us IS NOT NULL AND after_us IS NOT NULL
        GROUP BY run, host, engine_host ORDER BY run, host, engine_host
        """
    ):
        if row["contradiction_us"]:
            yield (
                f"{row['early']} of {row['calls']} generate calls from host {row['host']} appear on "
                f"host {row['engine_host']} before they were sent or after they returned; the two "
                f"clocks differ by at least {row['contradiction_us'] / 1000:.3f} ms more than the "
                "correction"
            )
