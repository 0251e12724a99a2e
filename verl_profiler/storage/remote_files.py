"""Write files to storage so that others see each one whole: the old content or the new one.

An object is there once all of it has arrived.  Where there are folders, a file is written beside its
place and renamed; not every file system replaces a file by that, so there it is deleted first.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any

from verl_profiler.events.remote import joined

__all__ = ["RemoteFiles", "is_draft"]

_DRAFT = ".part"
# A rename replaces what is there.
_REPLACING = frozenset({"file", "local", "sftp", "ssh"})


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
        protocol = filesystem.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._replaces = not names.isdisjoint(_REPLACING)

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        path = joined(self._target, name)
        if self._folders:
            draft = self._draft(path)
            self._filesystem.pipe_file(draft, data)
            self._rename(draft, path, len(data))
        else:
            self._filesystem.pipe_file(path, data)

    def copy(self, source: Path, name: str) -> None:
        """Write a file that is too large for memory."""
        path = joined(self._target, name)
        if self._folders:
            draft = self._draft(path)
            self._filesystem.put_file(str(source), draft)
            self._rename(draft, path, None)
        else:
            self._filesystem.put_file(str(source), path)

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

    def _rename(self, draft: str, path: str, size: int | None) -> None:
        if not self._replaces:
            if self._filesystem.exists(path):
                self._filesystem.rm_file(path)
            self._filesystem.mv(draft, path)
            # HDFS answers that it did not, which its client does not pass on.
            there = self._filesystem.info(path)["size"]
            if size is not None and there != size:
                raise OSError(f"{path} has {there:,} bytes, not {size:,}")
        else:
            self._filesystem.mv(draft, path)
