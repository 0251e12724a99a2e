"""The header of one process: a claim on its name, an account of itself, and how far its files go.

The header is replaced whole every few seconds.  Its last fields have a fixed width and are
overwritten in place after every flush, so that the header of a killed process is up to date.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.recording.values import plain

__all__ = ["Mark", "ProcessHeader", "claim_name"]

_NAMES = 10_000
_WRITE_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class Mark(msgspec.Struct):
    """How far the files of a process go.

    Args:
        complete_until: Every event taken before is in the files or counted as dropped; ISO-8601 with
            microseconds, on the axis of the process's events.
        written_events: Lines written.
        written_bytes: Their bytes.
        waiting_events: Events taken, neither written, dropped nor sampled out.
        dropped_events: Events dropped.
        sampled_out_events: Details of requests whose details are not written.
    """

    complete_until: str
    written_events: int = 0
    written_bytes: int = 0
    waiting_events: int = 0
    dropped_events: int = 0
    sampled_out_events: int = 0

    def encode(self) -> bytes:
        """Return the last fields of the JSON object, always of the same length."""
        return (
            f',"complete_until":"{self.complete_until:<32.32}"'
            f',"written_events":{self.written_events:>16}'
            f',"written_bytes":{self.written_bytes:>20}'
            f',"waiting_events":{self.waiting_events:>12}'
            f',"dropped_events":{self.dropped_events:>16}'
            f',"sampled_out_events":{self.sampled_out_events:>16}}}'
        ).encode()


class ProcessHeader:
    """One header file.  Only one thread at a time may use it."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.name: str | None = None
        self._fd: int | None = None
        self._offset = 0
        self._marked = b""

    def claim(self, directory: Path, base: str) -> str:
        """Take the first free name in `processes/`; the file's creation is the claim.

        Returns:
            `base`, or `base` with a number if that is taken.

        Raises:
            OSError: If no file can be made there.
        """
        self.directory, self.name = directory, claim_name(directory, base)
        return self.name

    def write(self, content: dict[str, Any], mark: Mark) -> None:
        """Replace the header.

        Raises:
            OSError: If it cannot be written; the old one stays.
        """
        if self.directory is None or self.name is None:
            return
        target = self.directory / "processes" / f"{self.name}.json"
        partial = target.with_suffix(".json.part")
        # Versions of packages may be subclasses of str.
        body = msgspec.json.encode(content, enc_hook=plain)[:-1]
        marked = mark.encode()
        fd = os.open(partial, _WRITE_FLAGS | os.O_CREAT | os.O_TRUNC, 0o666)
        # Whatever may be thrown into this thread, one of the two files is closed.
        try:
            data = memoryview(body + marked)
            while data:
                data = data[os.write(fd, data) :]
            partial.replace(target)
            self._fd, fd = fd, self._fd
            self._offset, self._marked = len(body), marked
        finally:
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def update(self, mark: Mark) -> None:
        """Overwrite the last fields; does nothing before the first `write`."""
        marked = mark.encode()
        if self._fd is None or marked == self._marked or len(marked) != len(self._marked):
            return
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, marked, self._offset)
            self._marked = marked

    @property
    def is_gone(self) -> bool:
        """Whether somebody has removed or replaced the file."""
        if self._fd is None or self.directory is None:
            return False
        try:
            there = os.stat(self.directory / "processes" / f"{self.name}.json")
            return not os.path.samestat(os.fstat(self._fd), there)
        except OSError:
            return True

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


def claim_name(directory: Path, base: str, taken: Collection[str] = ()) -> str:
    """Take the first free name for a process of a run, by creating its header.

    Args:
        directory: The run directory.
        base: The name, which gets a number if it is taken.
        taken: Names that are taken without a header.

    Raises:
        OSError: If no file can be made there.
    """
    folder = directory / "processes"
    for number in range(1, _NAMES):
        name = base if number == 1 else f"{base}-{number}"
        with contextlib.suppress(FileExistsError):
            if name not in taken:
                _create(folder / f"{name}.json")
                return name
    raise FileExistsError(f"{folder} has {_NAMES:,} headers of {base}")


def _create(path: Path) -> None:
    """Create a file, and its folder if that is not there."""
    flags = _WRITE_FLAGS | os.O_CREAT | os.O_EXCL
    try:
        os.close(os.open(path, flags, 0o666))
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, flags, 0o666))
