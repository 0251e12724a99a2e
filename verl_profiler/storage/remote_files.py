"""Write files to storage so that others see each one whole: the old content or the new one.

An object is there once all of it has arrived.  Where there are folders, a file is written beside its
place and renamed, which replaces what is there on disks and by SFTP.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any

from verl_profiler.events.remote import joined

__all__ = ["RemoteFiles", "is_draft"]

_DRAFT = ".part"


def is_draft(name: str) -> bool:
    """Return whether a file was to be renamed, and is left of an upload that was killed."""
    base = name.rpartition("/")[2]
    return base.startswith(".") and base.endswith(_DRAFT)


class RemoteFiles:
    """Writes the files of a run to storage.

    Args:
        filesystem: fsspec's.
        target: The path of the run there.
        folders: Whether it has folders, which must be made.
    """

    def __init__(self, filesystem: Any, target: str, *, folders: bool) -> None:
        self._filesystem = filesystem
        self._target = target
        self._folders = folders
        self._made: set[str] = set()
        # Another process may write the same file: two launches, or `collect` beside an upload.
        self._draft_end = f".{secrets.token_hex(4)}{_DRAFT}"

    def write(self, name: str, content: bytes | Path) -> None:
        """Write a file: these bytes, or those of a file that is too large for memory."""
        path = joined(self._target, name)
        place = self._draft(path) if self._folders else path
        if isinstance(content, bytes):
            self._filesystem.pipe_file(place, content)
        else:
            self._filesystem.put_file(str(content), place)
        if place != path:
            self._filesystem.mv(place, path)

    def remove(self, name: str) -> None:
        """Remove a file that may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(joined(self._target, name))

    def read(self, name: str) -> bytes:
        """Read a file."""
        return self._filesystem.cat_file(joined(self._target, name))

    def _draft(self, path: str) -> str:
        folder, _, base = path.rpartition("/")
        if folder not in self._made:
            self._filesystem.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        return f"{folder}/.{base}{self._draft_end}"
