"""On a node: read what the files of a run have gained since the last call.

Files that only grow (`.jsonl`) are read from where the last call ended, up to their last whole line;
all others (headers, compressed files, reports of captures) whole, whenever they have changed.  Nothing is
held open between calls, and one call reads about `limit` bytes, or one piece or line that is larger.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from verl_profiler.events.open_files import EVIDENCE_FOLDER
from verl_profiler.events.open_files import FOLDER as OPEN
from verl_profiler.events.shipping import DISK_FILE, process_of, travels

__all__ = [
    "CHUNK_BYTES",
    "NodeFiles",
    "Piece",
    "being_written",
    "disk_of",
    "files_of",
    "hangs_of",
    "packed_from",
    "request_evidence",
]

CHUNK_BYTES = 4 << 20
# A line that is longer than a chunk is read whole, up to this.
_LINE_BYTES = 64 << 20
_PROCESSES = "processes"
_PACKED = ".jsonl.gz"
# What tells whether a file is small, and replaced often.
_LIGHT = (_PROCESSES, OPEN, EVIDENCE_FOLDER)


@dataclass(frozen=True)
class Piece:
    """A part of a file.

    Args:
        name: The file's path below the run directory.
        offset: Where the part begins in it.
        data: The part; None where the file is gone.
        last: Whether the file ends with it.
    """

    name: str
    offset: int
    data: bytes | None
    last: bool = True


def disk_of(directory: Path) -> str | None:
    """Return the random name of the disk that a run directory is on; it gets one where it has none.

    Returns:
        None where there is no such directory.

    Raises:
        OSError: It cannot be read or written.
    """
    path = directory / DISK_FILE
    if not directory.is_dir():
        return None
    if not path.exists():
        draft = directory / f"{DISK_FILE}.{secrets.token_hex(8)}"
        with draft.open("x") as file:
            file.write(secrets.token_hex(16))
        try:
            # Unlike a rename, this fails where another process was faster.
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    return path.read_text().strip() or None


def packed_from(name: str) -> str | None:
    """Return the name of the event file that a compressed one replaces; None for other files."""
    return name.removesuffix(".gz") if name.endswith(_PACKED) else None


def files_of(
    root: Path, folders: Sequence[str] = ("",), *, captures: bool = False
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield names and states of the files that are brought from a node.

    Args:
        root: The run directory, or another one that a capture tool writes to.
        folders: Names below it.
        captures: Whether they hold what capture tools write, whose files have any name.
    """
    left = [root / name for name in folders]
    while left:
        folder = left.pop()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                name = os.path.relpath(entry.path, root)
                with contextlib.suppress(OSError):
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        left.append(Path(entry.path))
                    elif (
                        not name.endswith(".part") if captures else travels(name)
                    ) and entry.is_file(follow_symlinks=False):
                        yield name, entry.stat(follow_symlinks=False)


def being_written(folder: Path) -> set[str]:
    """Return the files under a folder, relative to it, that a process of this machine has open for writing.

    None without `/proc`, for example on a Mac.
    """
    prefix = os.path.realpath(folder) + os.sep
    found: set[str] = set()
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for link in os.scandir(descriptors):
                with contextlib.suppress(OSError):
                    target = os.readlink(link.path)
                    # The link's own permissions are how the file was opened.
                    if target.startswith(prefix) and os.lstat(link.path).st_mode & 0o200:
                        found.add(target.removeprefix(prefix))
    return found


def hangs_of(directory: Path) -> int:
    """Return of how many hangs evidence is requested in a run directory."""
    numbers = [
        int(each.name) for each in (directory / EVIDENCE_FOLDER).glob("*") if each.name.isdecimal()
    ]
    return max(numbers, default=0)


def request_evidence(directory: Path, hangs: int) -> None:
    """Request evidence of so many hangs; processes gather that of each one after the other."""
    for number in range(1, hangs + 1):
        (directory / EVIDENCE_FOLDER / str(number)).mkdir(parents=True, exist_ok=True)


@dataclass
class _Known:
    """How much of a file was read, and what it was like then."""

    offset: int
    size: int
    modified_ns: int
    inode: int


class NodeFiles:
    """The files of a run on this node.

    Args:
        directory: The run directory.
        have: Names and sizes of the files that the other side has.
        captures: Folders of it with what capture tools write, which is read in place of the event files.
    """

    def __init__(
        self,
        directory: str | Path,
        have: Mapping[str, int] | None = None,
        captures: Sequence[str] = (),
    ) -> None:
        self._root = Path(directory)
        self._captures = tuple(captures)
        # These are read again in any case: they may have another content of the same size.
        self._known = {
            name: _Known(size, size, -1, -1)
            for name, size in (have or {}).items()
            if not name.startswith(_LIGHT)
        }
        self._queue: deque[str] = deque()
        # The first file of the queue, where a part of it was read.
        self._begun: _Known | None = None

    def scan(self, *, light: bool = False) -> None:
        """Find out which files have changed; `pieces` then reads them.

        Args:
            light: Only headers, open calls and evidence, which are few and small.
        """
        folders = _LIGHT if light else self._captures or ("",)
        found = dict(files_of(self._root, folders, captures=bool(self._captures)))
        if self._captures:
            # They are sent once their tool has closed them.
            for name in being_written(self._root):
                found.pop(name, None)
        changed = [name for name, status in found.items() if self._has_changed(name, status)]
        # The compressed copy first: what is left of the other one is sent with the next scan.
        packed = set(map(packed_from, changed))
        new = {
            process_of(name)
            for name in changed
            if name.startswith(_PROCESSES) and name not in self._known
        }
        headers = sorted(name for name in changed if name.startswith(_PROCESSES))
        first = [name for name in headers if process_of(name) in new]
        others = sorted(
            name for name in changed if not name.startswith(_PROCESSES) and name not in packed
        )
        gone = [
            name
            for name in self._known
            if name not in found and (not light or name.startswith(_LIGHT)) and self._replaced(name)
        ]
        # What is left of a step precedes the removal of its files.  A header has how many events were
        # written: it is read again after them.
        self._queue = deque([*first, *others, *gone, *headers])
        self._begun = None

    def pieces(self, limit: int = CHUNK_BYTES) -> list[Piece]:
        """Return the next pieces, of about `limit` bytes together; none where all was read."""
        found: list[Piece] = []
        room = limit
        while room > 0 and self._queue:
            name = self._queue[0]
            try:
                piece = self._next(name, room)
            except FileNotFoundError:
                piece = self._gone(name)
            except OSError:
                # The next scan tries again.
                piece = None
            if piece is None or piece.last:
                self._queue.popleft()
            if piece is not None:
                found.append(piece)
                room -= max(len(piece.data or b""), 1)
        return found

    def _has_changed(self, name: str, status: os.stat_result) -> bool:
        known = self._known.get(name)
        if known is None:
            return status.st_size > 0 or bool(self._captures)
        if known.inode == -1:
            return status.st_size != known.size
        return (status.st_size, status.st_mtime_ns, status.st_ino) != (
            known.size,
            known.modified_ns,
            known.inode,
        )

    def _replaced(self, name: str) -> bool:
        """Whether a file that is gone was closed by its process, and not removed by somebody else."""
        return name.startswith(f"{OPEN}/") or f"{name}.gz" in self._known

    def _gone(self, name: str) -> Piece | None:
        known = self._known.get(name)
        if known is None or not self._replaced(name):
            return None
        del self._known[name]
        return Piece(name, 0, None)

    def _next(self, name: str, room: int) -> Piece | None:
        """Read the next part of a file."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(self._root / name, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if name.endswith(".jsonl"):
                return self._lines(name, file, status, room)
            return self._whole(name, file, status)

    def _lines(self, name: str, file: BinaryIO, status: os.stat_result, room: int) -> Piece | None:
        """Read whole lines behind those that were read before."""
        known = self._known.get(name)
        offset = known.offset if known is not None else 0
        if known is not None and known.inode not in (-1, status.st_ino):
            # Its beginning was compressed, and is another file now.
            offset = 0
        size = status.st_size
        if size < offset:
            offset = 0
        file.seek(offset)
        data = file.read(min(room, size - offset))
        whole = data.rfind(b"\n") + 1
        while not whole and len(data) < min(size - offset, _LINE_BYTES):
            more = file.read(min(CHUNK_BYTES, size - offset - len(data)))
            if not more:
                break
            data += more
            whole = data.find(b"\n") + 1
        # What is left is sent with the next piece, if there is another whole line in it.
        last = offset + len(data) >= size and b"\n" not in data[whole:]
        data = data[:whole]
        end = offset + len(data)
        self._known[name] = _Known(end, size, status.st_mtime_ns, status.st_ino)
        if not data:
            return None
        return Piece(name, offset, data, last)

    def _whole(self, name: str, file: BinaryIO, status: os.stat_result) -> Piece | None:
        """Read the next piece of a file that is replaced as a whole; its length is that of the first piece.

        Raises:
            OSError: It was cut short meanwhile.
        """
        begun = self._begun
        if begun is None or begun.inode != status.st_ino:
            if not self._has_changed(name, status):
                # Read earlier in this scan.
                return None
            begun = _Known(0, status.st_size, status.st_mtime_ns, status.st_ino)
        offset = begun.offset
        file.seek(offset)
        data = file.read(min(CHUNK_BYTES, begun.size - offset))
        begun.offset += len(data)
        last = begun.offset == begun.size
        self._begun = None if last or not data else begun
        if not last and not data:
            raise OSError(f"{name} became shorter")
        if last:
            self._known[name] = begun
            # Later lines go to a new file of the name.
            self._known.pop(packed_from(name) or "", None)
        return Piece(name, offset, data, last)
