"""Tables made from events, kept as Parquet files, and which event files each of them needs.

A file is named after a digest of everything that it was made from: the SQL, the parts of the events
that can hold its rows, and what its query reads besides them.  A run that grows makes only the
tables of its last steps again, and no file is ever used for something else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import duckdb

import verl_profiler
from verl_profiler.reading.cache_folder import CacheFolder, unwritable
from verl_profiler.reading.event_parts import EventPart
from verl_profiler.reading.event_sql import AS_PARQUET
from verl_profiler.reading.scans import quoted, scan
from verl_profiler.reading.tables.derivations import fingerprint
from verl_profiler.reading.tables.schemas import SCHEMAS

__all__ = ["TableCache"]


class TableCache:
    """A folder of tables as Parquet files.

    Args:
        cache: Where they are kept.
        scratch: Where they go when nothing can be written there.
        parts: The files of events that are read.
        steps: The only steps that are read of them; None for all.
    """

    def __init__(
        self,
        cache: CacheFolder,
        scratch: CacheFolder,
        parts: Sequence[EventPart],
        *,
        steps: tuple[int, int] | None = None,
    ) -> None:
        self.parts = parts
        self._steps = steps
        self._folders = list(dict.fromkeys((cache, scratch)))

    @property
    def folder(self) -> CacheFolder:
        """Where tables are kept now."""
        return self._folders[0]

    @property
    def lasts(self) -> bool:
        """Whether another command finds what is kept."""
        return len(self._folders) > 1

    @property
    def everything(self) -> list[str]:
        """What decides the rows of a table of all events that are read."""
        read = [] if self._steps is None else [f"steps {self._steps[0]} to {self._steps[1]}"]
        return [*(part.fingerprint for part in self.parts), *read]

    def of_steps(self, steps: tuple[int, int] | None, without_step: bool) -> list[EventPart]:
        """Return the parts that may hold events of these steps, or of none."""
        return [part for part in self.parts if part.may_hold(steps, without_step)]

    def of_times(self, first_us: int, last_us: int) -> list[EventPart]:
        """Return the parts that may hold events of these times."""
        return [part for part in self.parts if part.may_hold_times(first_us, last_us)]

    def table(
        self,
        connection: duckdb.DuckDBPyConnection,
        name: str,
        query: str,
        made_from: Iterable[str],
    ) -> tuple[str, Path]:
        """Return a name of a table's rows, and their file, made now if it is not there.

        Args:
            connection: Makes it.
            name: The table.
            query: Its SQL.
            made_from: Whatever decides its rows.

        Raises:
            ReadingError: Its file cannot be written anywhere.
        """
        identity = json.dumps([duckdb.__version__, fingerprint(), name, *made_from])
        digest = hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:16]
        key = f"{name}-{digest}"
        kept = self._folders[0].find(key)
        if kept is not None and kept.path is not None and _holds(connection, kept.path, name):
            return key, kept.path
        while True:
            folder = self._folders[0]
            try:
                with folder.new() as draft:
                    connection.execute(f"COPY ({query}) TO '{quoted(draft.path)}' {AS_PARQUET}")
                    made = draft.publish(key)
            except (OSError, duckdb.IOException) as error:
                if len(self._folders) == 1:
                    raise unwritable(f"the table {name}", folder, error) from error
                del self._folders[0]
            else:
                return key, made.path or folder.path

    def document(self, name: str, made_from: Iterable[str], make: Callable[[], Any]) -> Any:
        """Return what `make` returns, as JSON has it, or what it returned before for the same.

        Args:
            name: Of small letters and underscores.
            made_from: Whatever decides it, besides the events and the code.
            make: Makes it if it is not kept.
        """
        identity = json.dumps(
            [duckdb.__version__, fingerprint(), _code(), *self.everything, *made_from]
        )
        digest = hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:16]
        kept = self._folders[0].find(f"{name}-{digest}")
        if kept is not None and kept.note is not None:
            return kept.note
        made = make()
        with contextlib.suppress(OSError):
            self._folders[0].keep(f"{name}-{digest}", made)
        self.forget_others(name)
        return made

    def forget_others(self, name: str) -> None:
        """Remove files of the table that nothing requests any more: the run has changed since."""
        if self._steps is None:
            self._folders[0].retire(name)


@cache
def _code() -> str:
    """Return what changes with the code of this package."""
    package = Path(verl_profiler.__file__).parent
    found = ((path, path.stat()) for path in sorted(package.rglob("*.py")))
    return str([(str(path), status.st_size, status.st_mtime_ns) for path, status in found])


def _holds(connection: duckdb.DuckDBPyConnection, path: Path, name: str) -> bool:
    """Whether a file has the columns of a table."""
    columns = ", ".join(f'"{column}"' for column in SCHEMAS[name])
    try:
        connection.execute(f"SELECT {columns} FROM {scan('read_parquet', [path])} LIMIT 0")
    except duckdb.Error:
        return False
    return True
