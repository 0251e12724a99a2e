"""Do independent pieces of work in one duckdb, two at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import duckdb

__all__ = ["two_at_a_time"]

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def two_at_a_time(
    connection: duckdb.DuckDBPyConnection,
    work: Callable[[duckdb.DuckDBPyConnection, Piece], Result],
    pieces: Iterable[Piece],
) -> Iterator[Result]:
    """Give the results of `work(cursor, piece)`, in the order of the pieces.

    While one piece waits for its last thread, the other goes on.  Temporary tables belong to a
    cursor, and are gone with it.
    """

    def of(piece: Piece) -> Result:
        with connection.cursor() as cursor:
            return work(cursor, piece)

    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(of, pieces)
