"""Compress the event files of steps that are over, in the thread that writes them.

A file is replaced by its copy only when that is complete and on the disk; where anything fails, it
stays as it is.  Lines that come later go to a new file beside the compressed one.
"""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Callable
from pathlib import Path

from verl_profiler.events.vocabulary import step_of_folder

__all__ = ["ClosedSteps"]

# A step is over for a process that has written to so many later ones.
_LATER_STEPS = 3
# Smaller files stay: they take a block on most disks in any case.
_LEAST_BYTES = 16 << 10
_CHUNK_BYTES = 1 << 20
_LEVEL = 1


class ClosedSteps:
    """The event files of one process that are not compressed so far.

    Args:
        release: Called with a path whose file is not to be held open any longer.
        complain: Called with a kind and a text where something could not be compressed.

    Attributes:
        saved_bytes: How much smaller the compressed files are.
    """

    def __init__(
        self, release: Callable[[Path], None], complain: Callable[[str, str], None]
    ) -> None:
        self._release = release
        self._complain = complain
        self._open: dict[Path, int] = {}
        self._newest = 0
        self._failed = False
        self.saved_bytes = 0

    def opened(self, path: Path) -> None:
        """Remember a file that lines are written to."""
        if path not in self._open:
            self._open[path] = step = step_of_folder(path.parent.name) or 0
            self._newest = max(self._newest, step)

    def compress_one(self) -> None:
        """Compress one file of a step that is over, if there is any."""
        if self._failed:
            return
        over = self._newest - _LATER_STEPS
        path = next((path for path, step in self._open.items() if step <= over), None)
        if path is None:
            return
        del self._open[path]
        if not path.exists():
            # Somebody removed it.
            return
        self._release(path)
        try:
            self._compress(path)
        except OSError as error:
            self._failed = True
            self._complain(
                "compress",
                f"{path} could not be compressed: {error.strerror or error}; files stay as they are "
                "(not-compressed)",
            )

    def _compress(self, path: Path) -> None:
        packed = path.with_name(f"{path.name}.gz")
        size = path.stat().st_size
        if size < _LEAST_BYTES or packed.exists():
            return
        draft = path.with_name(f".{path.name}.packing")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(draft, flags, 0o666)
        try:
            with os.fdopen(target, "wb") as out, path.open("rb") as lines:
                with gzip.GzipFile("", "wb", _LEVEL, out, mtime=0) as compressed:
                    while chunk := lines.read(_CHUNK_BYTES):
                        compressed.write(chunk)
                out.flush()
                os.fsync(out.fileno())
                whole = lines.tell() == size == path.stat().st_size
                packed_bytes = out.tell()
            if whole:
                draft.replace(packed)
                path.unlink()
                self.saved_bytes += size - packed_bytes
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
