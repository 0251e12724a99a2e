"""In the driver: put the pieces that a node sends into the run directory.

A file that grows is appended to, all others get their names when they are whole.  Processes of two
nodes with separate disks may have one name, such as an actor that Ray started again elsewhere; the
second one's files are stored as `<name>-2`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from verl_profiler.events.shipping import SUFFIXES, process_of, travels
from verl_profiler.events.whole_files import replace_file
from verl_profiler.nodes.files import Piece, files_of, packed_from
from verl_profiler.recording.process_header import claim_name

__all__ = ["Names", "Receiver"]


class Names:
    """Which names of processes are taken in a run directory; for all nodes together.

    Args:
        run: The run directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def reserve(self, names: Iterable[str]) -> None:
        """Take names that an earlier shipment gave."""
        self._taken.update(names)

    def claim(self, process: str) -> str:
        """Return the first free name for a process of another node, and take it.

        Raises:
            OSError: The run directory cannot be written, or all names are taken.
        """
        with self._lock:
            # Processes of this node claim theirs in the same way.
            name = claim_name(self._run, process, self._taken)
            self._taken.add(name)
            return name


class Receiver:
    """Writes what one disk sends.  Only one thread at a time may use it.

    Args:
        run: The run directory.
        names: Of all nodes.
        processes: Names on that disk, and here, of an earlier shipment.
        claimed: Called when a process got a name, before its files come.
        captures: Folders with what capture tools write, which comes in place of the event files.

    Attributes:
        processes: Names of processes on that disk, and here.
        size_bytes: Bytes written.
    """

    def __init__(
        self,
        run: Path,
        names: Names,
        processes: Mapping[str, str] | None = None,
        claimed: Callable[[], None] = lambda: None,
        captures: Sequence[str] = (),
    ) -> None:
        self._run = run
        self._captures = tuple(captures)
        self._names = names
        self._claimed = claimed
        self._bases: dict[str, int] = {}
        self.processes = dict(processes or {})
        self.size_bytes = 0
        names.reserve(self.processes.values())

    def have(self) -> dict[str, int]:
        """Return names on that disk, and sizes, of the files that are here."""
        there = {here: name for name, here in self.processes.items()}
        found: dict[str, int] = {}
        folders = self._captures or ("",)
        for name, status in files_of(self._run, folders, captures=bool(self._captures)):
            process = self._process_of(name)
            if process is None:
                found[name] = status.st_size
            elif process in there:
                found[_renamed(name, there[process])] = status.st_size
        return found

    def accept(self, piece: Piece) -> None:
        """Write a piece.

        Raises:
            OSError: It cannot be written, or does not continue what is here.
        """
        target = self._target(piece.name)
        if piece.data is None:
            target.unlink(missing_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if piece.name.endswith(".jsonl"):
            self._append(piece, target)
        else:
            self._replace(piece, target)
        self.size_bytes += len(piece.data)

    def _process_of(self, name: str) -> str | None:
        return None if self._captures else process_of(name)

    def _target(self, name: str) -> Path:
        path = PurePosixPath(name)
        known = any(name.startswith(each) for each in self._captures) or travels(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or not known:
            raise OSError(f"{name!r} is not a file of a run")
        process = self._process_of(name)
        if process is None:
            return self._run / name
        here = self.processes.get(process)
        if here is None:
            here = self.processes[process] = self._names.claim(process)
            self._claimed()
        return self._run / _renamed(name, here)

    def _append(self, piece: Piece, target: Path) -> None:
        size = target.stat().st_size if target.exists() else 0
        if piece.offset == 0:
            # Somebody removed the file on the node, and its process made another one.
            self._bases[piece.name] = size
        _add(piece, target, self._bases.get(piece.name, 0) + piece.offset)

    def _replace(self, piece: Piece, target: Path) -> None:
        if piece.last and piece.offset == 0:
            replace_file(target, piece.data or b"")
        else:
            part = target.with_name(f"{target.name}.part")
            if piece.offset == 0:
                # Of an earlier try.
                part.unlink(missing_ok=True)
            _add(piece, part, piece.offset)
            if piece.last:
                part.replace(target)
        if packed_from(target.name):
            # What it was made of; later lines of the process begin another file.
            target.with_suffix("").unlink(missing_ok=True)
            self._bases.pop(packed_from(piece.name) or "", None)


def _add(piece: Piece, target: Path, offset: int) -> None:
    """Append a piece to a file that has `offset` bytes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(target, flags, 0o666), "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size != offset:
            raise OSError(
                f"{target} has {size:,} bytes, and the node continues at {piece.offset:,}"
            )
        data = memoryview(piece.data or b"")
        try:
            while data:
                data = data[file.write(data) or 0 :]
        except OSError:
            # A full disk: no half line stays.
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise


def _renamed(name: str, process: str) -> str:
    """Return a file's name with another process in it."""
    folder, _, file = name.rpartition("/")
    suffix = next(suffix for suffix in SUFFIXES if file.endswith(suffix))
    return f"{folder}/{process}{suffix}"
