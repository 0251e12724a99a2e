"""In the driver: take what the files on a node's disk have gained into the run directory.

A file that grows is appended to, all others get their names when they are whole.  Processes of two
nodes with separate disks may have one name, such as an actor that Ray started again elsewhere; the
second one's files are stored as `<name>-2`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from verl_profiler.events.open_files import FOLDER as OPEN
from verl_profiler.events.shipping import SUFFIXES, process_of, travels
from verl_profiler.events.whole_files import replace_file
from verl_profiler.nodes.files import LIGHT, PROCESSES, Piece, Status, listing

_PACKED = ".jsonl.gz"
# Files of one call, whose names travel with it.
_AT_ONCE = 200


class Receiver:
    """Takes what one disk has.

    Args:
        run: The run directory.
        claim: Takes a free name for a process of the disk, and adds it to the mapping that it gets.
        processes: Names on that disk, and here, of an earlier shipment.
        captures: Folders with what capture tools write, which comes in place of the event files.
        have: Names and sizes of files in them that are here under other names.

    Attributes:
        lock: Held by the thread that takes.
        processes: Names of processes on that disk, and here.
        size_bytes: Bytes taken.
        since_ns: When the disk was listed last, and all of it taken, by the node's time of day.
    """

    def __init__(
        self,
        run: Path,
        claim: Callable[[dict[str, str], str], str],
        processes: Mapping[str, str] | None = None,
        captures: Sequence[str] = (),
        have: Mapping[str, int] | None = None,
    ) -> None:
        self._run = run
        self._claim = claim
        self._captures = tuple(captures)
        self._have = have or {}
        # Where the bytes of a file begin here, where another one of its name was taken before.
        self._bases: dict[str, int] = {}
        # How much of a file that is replaced as a whole is here, and its inode.
        self._begun = "", 0, 0
        self.lock = threading.Lock()
        self.processes = dict(processes or {})
        self.size_bytes = self.since_ns = 0
        self._resume()

    def _resume(self) -> None:
        """Continue from what the run directory has."""
        there = {here: name for name, here in self.processes.items()}
        sizes = dict(self._have)
        _, found = listing(self._run, self._captures or ("",), bool(self._captures))
        for name, status in found.items():
            process = self._process_of(name)
            if process is None:
                sizes[name] = status.size
            elif process in there:
                sizes[_renamed(name, there[process])] = status.size
        self.since_ns = 0
        # How much of each file was taken, and what it was like then.  Small ones are taken again in any case:
        # they may have another content of the same size.
        self._taken = {
            name: (size, Status(size, 0, 0))
            for name, size in sizes.items()
            if not name.startswith(LIGHT)
        }

    def take(
        self,
        found: Mapping[str, Status],
        read: Callable[[list[tuple[str, int, int]]], list[Piece]],
        *,
        complete: bool,
    ) -> None:
        """Take what has changed, and remove what is over.

        Args:
            found: `files.listing` of the disk.
            read: `files.read` of it.
            complete: Whether the list has all files.

        Raises:
            OSError: A part cannot be written, or does not continue what is here.
        """
        for name in [name for name in self._taken if name not in found]:
            # Of others, somebody made room on the node.
            if name.startswith(f"{OPEN}/") or (complete and f"{name}.gz" in self._taken):
                self._target(name).unlink(missing_ok=True)
                del self._taken[name]
        names = deque(self._in_order(found))
        self._begun = "", 0, 0
        try:
            while names:
                places = [(name, *self._place(name)) for name in itertools.islice(names, _AT_ONCE)]
                for piece in read(places):
                    if piece.data is not None:
                        self._accept(piece)
                    if piece.last:
                        names.popleft()
        except Exception:
            self._resume()
            raise

    def _in_order(self, found: Mapping[str, Status]) -> list[str]:
        """Return which files have changed.

        The headers of new processes come first, all others last: they have how many events were written.
        """
        changed = sorted(name for name, status in found.items() if self._has_changed(name, status))
        # What is left of a file that was compressed is taken after the next listing.
        packed = set(map(_packed_from, changed))

        def place(name: str) -> int:
            return 1 if not name.startswith(PROCESSES) else 2 if name in self._taken else 0

        return sorted((name for name in changed if name not in packed), key=place)

    def _has_changed(self, name: str, status: Status) -> bool:
        if name not in self._taken:
            return status.size > 0 or bool(self._captures)
        _, before = self._taken[name]
        return status != before if before.inode else status.size != before.size

    def _place(self, name: str) -> tuple[int, int]:
        begun, offset, inode = self._begun
        if begun == name:
            return offset, inode
        if name not in self._taken or not name.endswith(".jsonl"):
            return 0, 0
        offset, status = self._taken[name]
        return offset, status.inode

    def _accept(self, piece: Piece) -> None:
        name, data = piece.name, piece.data or b""
        target = self._target(name)
        end = piece.offset + len(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith(".jsonl"):
            self._replace(piece, target)
            self._begun = name, end, piece.status.inode
        elif data:
            if piece.offset == 0:
                # Somebody removed the file on the node, and its process made another one.
                self._bases[name] = target.stat().st_size if target.exists() else 0
            _add(piece, target, self._bases.get(name, 0) + piece.offset)
        if piece.last or name.endswith(".jsonl"):
            self._taken[name] = end, piece.status
        self.size_bytes += len(data)

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
        here = self.processes.get(process) or self._claim(self.processes, process)
        return self._run / _renamed(name, here)

    def _replace(self, piece: Piece, target: Path) -> None:
        if piece.last and piece.offset == 0:
            replace_file(target, piece.data or b"")
        else:
            part = target.with_name(f"{target.name}.part")
            if piece.offset == 0:
                # Of an earlier try.
                part.unlink(missing_ok=True)
            _add(piece, part, piece.offset)
            if not piece.last:
                return
            part.replace(target)
        if plain := _packed_from(piece.name):
            # What it was made of; later lines of the process begin another file.
            target.with_suffix("").unlink(missing_ok=True)
            self._bases.pop(plain, None)
            self._taken.pop(plain, None)


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


def _packed_from(name: str) -> str | None:
    """Return the name of the event file that a compressed one replaces; None for other files."""
    return name.removesuffix(".gz") if name.endswith(_PACKED) else None


def _renamed(name: str, process: str) -> str:
    """Return a file's name with another process in it."""
    folder, _, file = name.rpartition("/")
    suffix = next(suffix for suffix in SUFFIXES if file.endswith(suffix))
    return f"{folder}/{process}{suffix}"
