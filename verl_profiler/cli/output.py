"""Where a command writes its file, and how: whole or not at all, and over nothing by accident."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from verl_profiler.errors import ReadingError

__all__ = ["replacing", "target_of"]


def target_of(runs: Sequence[Path], out: Path | None, name: str, *, force: bool) -> Path:
    """Return the file to write: `out`, or `name` in or beside the first run.

    Raises:
        ReadingError: It exists, and `force` is not given.
    """
    first = runs[0]
    if out is not None:
        target = out / name if out.is_dir() else out
    elif first.is_dir():
        target = first / name
    else:
        # An archive or a single file: beside it.
        target = first.with_name(f"{first.name.split('.')[0]}-{name}")
    if target.exists() and not force:
        raise ReadingError(
            f"{target} exists and is not replaced.\nAdd --force, or name another file with --out",
            "output-exists",
        )
    return target


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `target` when all of it is written.

    Raises:
        ReadingError: The folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".verl_profiler-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ReadingError(
            f"{target} cannot be written: {error.strerror}.\nName another file with --out",
            "cannot-write",
        ) from error
