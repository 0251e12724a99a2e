"""Files that others see whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, content: bytes, draft: Path) -> None:
    """Write a file beside its place, and move it there.

    Args:
        path: Its place.
        content: All of it.
        draft: Where it is written, in the same folder; links are not followed.

    Raises:
        OSError: It cannot be written; the old one stays.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(draft, flags, 0o666), "wb") as file:
        file.write(content)
    draft.replace(path)
