"""Files that commands write: whole or not at all, and never over another without being told to."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from verl_profiler.errors import ReadingError

__all__ = ["refuse_overwriting", "replacing", "target_of", "write_whole"]


def target_of(runs: Sequence[Path], out: Path | None, name: str, *, force: bool) -> Path:
    """Return the file to write: `out`, or `name` in or beside the first run.

    Raises:
        ReadingError: It exists, and `force` is False.
    """
    first = runs[0]
    if out is not None:
        target = out / name if out.is_dir() else out
    elif first.is_dir():
        target = first / name
    else:
        # An archive or a single file: beside it.
        target = first.with_name(f"{first.name.split('.')[0]}-{name}")
    refuse_overwriting(target, force=force)
    return target


def refuse_overwriting(target: Path, *, force: bool) -> None:
    """Refuse a file that exists.

    Raises:
        ReadingError: It exists, and `force` is False.
    """
    if target.exists() and not force:
        raise ReadingError(
            f"{target} exists and is not replaced.\nAdd --force, or name another file with --out",
            "output-exists",
        )


def write_whole(target: Path, text: Iterable[str]) -> None:
    """Write a file beside its place and move it there: who reads it never sees a part of it.

    Raises:
        ReadingError: It cannot be written.
    """
    with replacing(target) as file:
        file.writelines(piece.encode() for piece in text)


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `target` when all of it is written.

    Raises:
        ReadingError: It cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            prefix=f".{target.stem}-", suffix=target.suffix, dir=target.parent
        )
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
