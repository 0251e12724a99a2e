"""On a node: list the files of a run, and read the next part of each.

Nothing is kept between two calls: how much of each file the driver has is in receiver.py.  Files that only
grow (`.jsonl`) are read up to their last whole line; all others (headers, compressed files, reports of
captures) as they are.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from verl_profiler.events.open_files import EVIDENCE_FOLDER
from verl_profiler.events.open_files import FOLDER as OPEN
from verl_profiler.events.shipping import DISK_FILE, travels

CHUNK_BYTES = 4 << 20
# A line that is longer than a chunk is read whole, up to this.
_LINE_BYTES = 64 << 20
PROCESSES = "processes"
# What tells whether a file is small, and replaced often.
LIGHT = (PROCESSES, OPEN, EVIDENCE_FOLDER)


class Status(NamedTuple):
    """What shows that a file has changed."""

    size: int
    modified_ns: int
    inode: int


class Piece(NamedTuple):
    """A part of a file.

    Args:
        name: The file's path below the run directory.
        offset: Where the part begins in it.
        data: The part; None where the file cannot be read now.
        last: Whether the file ends with it.
        status: The file when it was read.
    """

    name: str
    offset: int
    data: bytes | None
    last: bool = True
    status: Status = Status(0, 0, 0)


def disk_of(directory: str | Path) -> str | None:
    """Return the random name of the disk that a run directory is on; it gets one where it has none.

    Returns:
        None where there is no such directory.

    Raises:
        OSError: It cannot be read or written.
    """
    path = Path(directory, DISK_FILE)
    if not path.parent.is_dir():
        return None
    if not path.exists():
        draft = path.with_name(f"{DISK_FILE}.{secrets.token_hex(8)}")
        with draft.open("x") as file:
            file.write(secrets.token_hex(16))
        try:
            # Unlike a rename, this fails where another process was faster.
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    return path.read_text().strip() or None


def listing(
    directory: str | Path,
    folders: Sequence[str] = ("",),
    captures: bool = False,
    since_ns: int = 0,
) -> tuple[int, dict[str, Status]]:
    """List the files that are brought from a node.

    Args:
        directory: The run directory, or another one that a capture tool writes to.
        folders: Names below it.
        captures: Whether they hold what capture tools write: files of any name, once their tool has closed
            them.
        since_ns: Leave out files that have not changed since this time; small ones are listed in any case.

    Returns:
        This node's time of day in ns before, and the files by name.
    """
    begun_ns = time.time_ns()
    root = Path(directory)
    unfinished = being_written(root) if captures else set[str]()
    found: dict[str, Status] = {}
    for name, status in _files_of(root, folders):
        is_ours = not name.endswith(".part") if captures else travels(name)
        if not is_ours or name in unfinished:
            continue
        # A rename changes the second one.
        changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
        if changed_ns >= since_ns or name.startswith(LIGHT):
            found[name] = _status(status)
    return begun_ns, found


def _files_of(root: Path, folders: Sequence[str]) -> Iterator[tuple[str, os.stat_result]]:
    left = [root / name for name in folders]
    while left:
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        left.append(Path(entry.path))
                    elif entry.is_file(follow_symlinks=False):
                        yield os.path.relpath(entry.path, root), entry.stat(follow_symlinks=False)


def _status(status: os.stat_result) -> Status:
    return Status(status.st_size, status.st_mtime_ns, status.st_ino)


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


def request_evidence(directory: str, hangs: int) -> None:
    """Request evidence of so many hangs; processes gather that of each one after the other."""
    for number in range(1, hangs + 1):
        Path(directory, EVIDENCE_FOLDER, str(number)).mkdir(parents=True, exist_ok=True)


def read(
    directory: str | Path, wanted: Sequence[tuple[str, int, int]], limit: int = CHUNK_BYTES
) -> list[Piece]:
    """Return the next parts of files, of about `limit` bytes together, or one chunk or line that is larger.

    Args:
        directory: As `listing` has it.
        wanted: Names, how many bytes of each the driver has, and the inode that these are of, 0 if unknown.
        limit: Bytes.
    """
    pieces: list[Piece] = []
    for name, offset, inode in wanted:
        try:
            piece = _next_part(Path(directory), name, offset, inode, limit)
        except OSError:
            # Removed, or cut short; the next listing shows it.
            piece = Piece(name, offset, None)
        pieces.append(piece)
        limit -= max(len(piece.data or b""), 1)
        if limit <= 0 or not piece.last:
            break
    return pieces


def _next_part(root: Path, name: str, offset: int, inode: int, room: int) -> Piece:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(root / name, flags), "rb") as file:
        status = _status(os.fstat(file.fileno()))
        size = status.size
        if inode not in (0, status.inode) or offset > size:
            # Another file has its name: the first one was compressed, or somebody removed it.
            offset = 0
        file.seek(offset)
        if not name.endswith(".jsonl"):
            data = file.read(min(CHUNK_BYTES, size - offset))
            last = offset + len(data) == size
            if not last and not data:
                raise OSError(f"{name} became shorter")
            return Piece(name, offset, data, last, status)
        data = file.read(min(room, size - offset))
        whole = data.rfind(b"\n") + 1
        while not whole and len(data) < min(size - offset, _LINE_BYTES):
            more = file.read(min(CHUNK_BYTES, size - offset - len(data)))
            if not more:
                break
            data += more
            whole = data.find(b"\n") + 1
        # What is left is sent with the next piece, if there is another whole line in it.
        last = not whole or (offset + len(data) >= size and b"\n" not in data[whole:])
        return Piece(name, offset, data[:whole], last, status)
