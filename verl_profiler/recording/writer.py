"""Append lines to the event files of one process.

A file of this process's own only ever holds whole lines: a write that the disk cuts short is taken
back to the last whole line, or, where that fails too, continued where it stopped.  No line is
written twice.  Only one thread at a time may use an `EventFiles`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_OPEN_FILES = 4
# What will not change by waiting, for a path that the caller chose.
_LASTING = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENXIO,
        errno.EPERM,
        errno.EROFS,
    }
)


_STALE = frozenset({errno.EBADF, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE})


class _File:
    """One open event file and how much of it is whole lines."""

    def __init__(self, path: Path, *, owned: bool) -> None:
        # Opening a named pipe must not wait for its reader.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        flags |= os.O_NOFOLLOW if owned else 0
        self.owned = owned
        # Of a file that others write too.
        self.ends_in_piece = False
        self._path = os.fspath(path)
        try:
            self.fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            # Mostly another process has made it: at each step, all open a file at once.
            path.parent.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(path, flags, 0o666)
        found = os.fstat(self.fd)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file")
        self._identity = found.st_dev, found.st_ino

    def write(self, lines: list[bytes], before: bytes = b"") -> OSError | None:
        """Append lines; leave in `lines` what is not in the file, also where anything else is raised.

        Args:
            lines: Whole lines.
            before: What ends a piece of a line at the end of the file.
        """
        data = before + b"".join(lines)
        self.ends_in_piece = False
        try:
            begin = os.fstat(self.fd).st_size
        except OSError as error:
            return error
        sent = 0
        # Whatever is raised into this thread between two instructions, a line is written once: `lines` and the
        # file are all that is remembered of a write.
        try:
            while sent < len(data):
                sent += os.write(self.fd, memoryview(data)[sent:])
            lines.clear()
        except BaseException as error:
            if lines:
                self._take_back(lines, begin, sent, before)
            if isinstance(error, OSError):
                return error
            raise
        return None

    def _take_back(self, lines: list[bytes], begin: int, sent: int, before: bytes) -> None:
        """Remove from `lines` what is in the file, and from the file what is no whole line."""
        if self.owned:
            with contextlib.suppress(OSError):
                sent = os.fstat(self.fd).st_size - begin
        sent -= len(before)
        whole = count = 0
        for line in lines:
            if whole + len(line) > sent:
                break
            whole += len(line)
            count += 1
        del lines[:count]
        torn = sent - whole
        if torn <= 0 or not lines:
            self.ends_in_piece = sent < 0
            return
        if not self.owned:
            # The piece stays as a line of its own, since others' lines may follow it; one that lacks its end alone
            # is whole.
            self.ends_in_piece = True
            if lines[0][torn:] == b"\n":
                lines[0] = b"\n"
            return
        try:
            os.ftruncate(self.fd, begin + whole)
        except OSError:
            lines[0] = lines[0][torn:]

    def place(self) -> str:
        """Return whether what was written is still at its path: `here`, `moved`, `lost` or `stale`."""
        is_there = True
        try:
            found = os.stat(self._path)
            if (found.st_dev, found.st_ino) == self._identity:
                return "here"
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            # What cannot be asked now is taken to be where it was.
            is_there = False
        try:
            found = os.fstat(self.fd)
        except OSError:
            # Unmounted by force, or a stale handle of a network file system.
            return "stale"
        if found.st_nlink == 0:
            return "lost"
        return "moved" if is_there else "here"

    def close(self) -> None:
        os.close(self.fd)


class EventFiles:
    """The open files.

    Args:
        complain: Called with a kind and a text where something could not be written.

    Attributes:
        events: Lines written, less those that were removed.
        bytes: Their bytes.
        errors: Failed attempts to open, write or close.
        dropped: Lines given up, by reason: `disk`, `bad_path`, or `removed` (written to a file that somebody
            removed).
        refuses: Whether the disk has refused a write to one of the process's own files; others would fail as
            well.
    """

    def __init__(self, complain: Callable[[str, str], None]) -> None:
        self._complain = complain
        self._files: dict[Path, _File] = {}
        # Those that end in a piece of a line, which cannot be taken back.
        self._pieces: set[Path] = set()
        # Lines and bytes that were written, by file.
        self._written: dict[Path, tuple[int, int]] = {}
        self.events = 0
        self.bytes = 0
        self.errors = 0
        self.dropped: Counter[str] = Counter()
        self.refuses = False

    def append(self, path: Path, lines: list[bytes], *, owned: bool = True) -> None:
        """Write lines; leave in `lines` what is not written, also where anything is raised.

        Args:
            path: The file.
            lines: Whole lines, with their ends.
            owned: Whether only this process writes the file; others choose their own path.
        """
        count, size = len(lines), sum(map(len, lines))
        try:
            file = self._open(path, owned)
            try:
                error = file.write(lines, b"\n" if path in self._pieces else b"")
            finally:
                (self._pieces.add if file.ends_in_piece else self._pieces.discard)(path)
        except (OSError, ValueError) as failed:
            error = failed
        finally:
            written, written_bytes = count - len(lines), size - sum(map(len, lines))
            self.events += written
            self.bytes += written_bytes
            before = self._written.get(path, (0, 0))
            if written or path in self._files:
                self._written[path] = before[0] + written, before[1] + written_bytes
        if error is not None:
            self._failed(path, lines, error, owned)

    def _failed(self, path: Path, lines: list[bytes], error: Exception, owned: bool) -> None:
        self.errors += 1
        code = error.errno if isinstance(error, OSError) else errno.EINVAL
        if code in _STALE:
            # The next attempt opens the path again.
            self.release(path)
        reason = getattr(error, "strerror", None) or error
        if not owned and code in _LASTING:
            self.drop("bad_path", lines, 0)
            self._complain(
                "bad_path",
                f"cannot write to {path}: {reason}; its events are dropped (events-lost)",
            )
            return
        self.refuses = self.refuses or owned
        self._complain(
            "disk",
            f"cannot write to {path}: {reason}; its events are kept in memory for now (disk-refuses)",
        )

    def drop(self, reason: str, lines: list[bytes], most: int) -> None:
        """Give up all but so many of these lines."""
        self.dropped[reason] += max(len(lines) - most, 0)
        del lines[most:]

    def check(self) -> None:
        """Count the lines of files that somebody removed as dropped.

        A file that is not where it was is made again with its next line.
        """
        away = {
            path: place for path, file in self._files.items() if (place := file.place()) != "here"
        }
        if not away:
            return
        for path, place in away.items():
            self._close(self._files.pop(path))
            if place == "moved":
                # Whoever moved the file has its lines.
                del self._written[path]
            elif place == "lost":
                self._count_lost(path)
        moved = {*away.values()} <= {"moved"}
        for path in [path for path in self._written if path not in self._files]:
            # Others were closed before; one that was compressed is not gone.
            if os.path.exists(path) or os.path.exists(f"{path}.gz"):
                continue
            if moved:
                del self._written[path]
            else:
                self._count_lost(path)

    def _count_lost(self, path: Path) -> None:
        lost, size = self._written.pop(path)
        self.events -= lost
        self.bytes -= size
        self.dropped["removed"] += lost
        self._complain(
            "removed",
            f"{path} was removed by another program: {lost:,} events in it are lost (events-lost)",
        )

    def release(self, path: Path) -> None:
        """Close a file; further lines open it again."""
        file = self._files.pop(path, None)
        if file is not None:
            self._close(file)

    def close(self) -> None:
        """Close all files."""
        while self._files:
            self._close(self._files.popitem()[1])

    def _open(self, path: Path, owned: bool) -> _File:
        file = self._files.pop(path, None)
        if file is None:
            while len(self._files) >= _OPEN_FILES:
                oldest = next(iter(self._files))
                self._close(closed := self._files.pop(oldest))
                if not closed.owned:
                    # Others write it too, and there may be any number of them.
                    self._written.pop(oldest, None)
            file = _File(path, owned=owned)
        file.owned = file.owned and owned
        # Last used last, so that the files of finished steps are the ones that are closed.
        self._files[path] = file
        return file

    def _close(self, file: _File) -> None:
        try:
            file.close()
        except OSError as error:
            # Some network file systems report a failed write only here.
            self.errors += 1
            self._complain(
                "close", f"the last events may be lost: {error.strerror or error} (events-lost)"
            )
