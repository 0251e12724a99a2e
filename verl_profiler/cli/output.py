"""Files that commands write: whole or not at all, and never over another without being told to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from verl_profiler.errors import ReadingError

__all__ = ["refuse_overwriting", "write_whole"]


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
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            prefix=f".{target.stem}-", suffix=target.suffix, dir=target.parent
        )
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.writelines(text)
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
