"""The name of this process in the run, and its header: who it is, and what became of its events.

The header is replaced whole every few seconds.  Its last fields have a fixed width and are
overwritten in place after every flush, so that the header of a killed process is up to date.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from verl_profiler.events.vocabulary import FORMAT_VERSION, process_name
from verl_profiler.recording import context
from verl_profiler.recording.clock import now
from verl_profiler.recording.complaints import Complaints
from verl_profiler.recording.encoding import LineEncoder
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.values import plain

if TYPE_CHECKING:
    from verl_profiler.recording.byte_budget import ByteBudget
    from verl_profiler.recording.recorder import Recorder

_NAMES = 10_000
_WRITE_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
# A process whose role stays unknown (a short Ray task) waits this long before it writes anyway.
_IDENTITY_PATIENCE_S = 10.0
# A process without further events replaces its header more rarely: a replacement costs 1 ms.
_HEADER_INTERVAL_NS, _IDLE_INTERVAL_NS = 15_000_000_000, 60_000_000_000


_UNTIL = b',"complete_until":"'
# The last fields: name, counter of `Recorder.account`, digits; before them `complete_until`, up to when every
# event is in the files or counted as dropped, on the axis of the process's events.
_MARK = (
    ("written_events", "events", 16),
    ("written_bytes", "bytes", 20),
    ("waiting_events", "waiting", 12),
    ("dropped_events", "dropped", 16),
    ("sampled_out_events", "sampled_out", 16),
)


_parts: list[Callable[[], dict[str, Any]]] = []


def add_part(part: Callable[[], dict[str, Any]]) -> None:
    """Have the header contain what a function returns; it is called in the writer thread."""
    if part not in _parts:
        _parts.append(part)


class OwnProcess:
    """Names the process and keeps its header.

    Args:
        recorder: The process's.
        encoder: Gets the name.
        complaints: Prints what goes wrong.
        budget: Of bytes, if there is one.

    Attributes:
        directory: The run directory, or the folder in its place.
        identity: Who the process is, once that is known.
        name: Its name in the run, once it has one.
        errors: Headers that could not be written.
        header_ns: When the header was written last.
        complete_ns: Every event taken before is in the files or counted.
    """

    def __init__(
        self,
        recorder: Recorder,
        encoder: LineEncoder,
        complaints: Complaints,
        budget: ByteBudget | None,
    ) -> None:
        self._recorder = recorder
        self._encoder = encoder
        self._complaints = complaints
        self._budget = budget
        self._interval_ns = round(recorder.config.flush_interval_s * 1e9)
        self._longest_flush_ns = 0
        self._fd: int | None = None
        self._path = ""
        # Device and inode of the header's file.
        self._identity = 0, 0
        self._header_events = 0
        self._offset = 0
        self._marked = b""
        self._fallback: str | None = None
        self._started = _iso_now()
        self._started_ns = self.complete_ns = now()
        self.directory = Path(recorder.config.directory)
        self.identity: Identity | None = None
        self.name: str | None = None
        self.errors = 0
        self.header_ns = 0

    def has_name(self, *, final: bool) -> bool:
        """Return whether the process has a name; take one as soon as its role is known.

        Args:
            final: Wait no longer for the role.
        """
        if self.name is not None:
            return True
        identity = self._recorder.identify()
        if identity is None:
            waited_s = (now() - self._started_ns) / 1e9
            if not self._recorder.taken or (waited_s < _IDENTITY_PATIENCE_S and not final):
                return False
            identity = Identity("process", None)
        if not self._claim_name(identity):
            return False
        if identity.replica is not None:
            context.process.replica = identity.replica
        self.write()
        return True

    def complete(self, until_ns: int) -> None:
        """Note that every event taken before is in the files or counted."""
        late_ns = until_ns - self.complete_ns - self._interval_ns
        self._longest_flush_ns = max(self._longest_flush_ns, late_ns)
        self.complete_ns = until_ns

    def stay_complete(self, until_ns: int) -> None:
        """Mark the files as complete up to this time, where nothing else has changed."""
        self.complete(until_ns)
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, self._until(), self._offset + len(_UNTIL))

    def check(self) -> None:
        """Begin the header anew where somebody has removed or replaced it."""
        if self._fd is None or self.name is None:
            return
        with contextlib.suppress(OSError):
            found = os.stat(self._path)
            if (found.st_dev, found.st_ino) == self._identity:
                return
        try:
            # In a directory that another launch has made meanwhile, the name may be taken.
            self._settle_name(claim_name(self.directory, self.name))
        except OSError as error:
            self._complaints.make(
                "header",
                f"the header of {self.name} was removed and cannot be written: {error} (disk-refuses)",
            )
            return
        self.write()

    def update(self) -> None:
        """Bring the header up to date: its last fields, and at an interval all of it."""
        account = self._recorder.account()
        idle = account["events"] == self._header_events
        if now() - self.header_ns > (_IDLE_INTERVAL_NS if idle else _HEADER_INTERVAL_NS):
            self.write()
        marked = self._mark(account)
        if self._fd is not None and marked != self._marked and len(marked) == len(self._marked):
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, marked, self._offset)
                self._marked = marked

    def close(self) -> None:
        """Close the header's file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def write(self, ended: str | None = None) -> None:
        """Replace the header."""
        self.header_ns = now()
        identity = self.identity
        if identity is None or self.name is None:
            return
        account = self._recorder.account()
        self._header_events = account["events"]
        header: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "name": self.name,
            "role": identity.role,
            "rank": identity.rank,
            "replica": identity.replica,
            "host": socket.gethostname(),
            "pid": self._recorder.pid,
            "ppid": os.getppid(),
            "actor_name": identity.actor_name,
            "actor_class": identity.actor_class,
            "python": sys.version.split()[0],
            "clock": {
                **msgspec.structs.asdict(self._recorder.anchor),
                "last_wall_ns": time.time_ns(),
                "last_monotonic_ns": now(),
            },
            "counters": {
                **{name: count for name, count in account.items() if name != "waiting"},
                **{name: spent_ns / 1e9 for name, spent_ns in self._recorder.spent().items()},
            },
            "started": self._started,
            "updated": _iso_now(),
            "ended": _iso_now() if ended else None,
            "end_reason": ended,
            "directory": str(self.directory),
            "fallback": self._fallback,
            "flush_interval_s": self._recorder.config.flush_interval_s,
            "longest_flush_s": round(self._longest_flush_ns / 1e9, 6),
        }
        if self._budget is not None:
            header["budget"] = self._budget.header()
        try:
            for describe in (self._recorder.describe, *_parts):
                header |= describe()
            self._replace(header, self._mark(account))
        except Exception as error:  # noqa: BLE001  the events are worth more than the header
            self.errors += 1
            self._complaints.make(
                "header", f"the header of {self.name} could not be written: {error} (disk-refuses)"
            )

    def _replace(self, header: dict[str, Any], marked: bytes) -> None:
        partial = f"{self._path}.part"
        # Versions of packages may be subclasses of str.
        body = msgspec.json.encode(header, enc_hook=plain)[:-1]
        fd = os.open(partial, _WRITE_FLAGS | os.O_CREAT | os.O_TRUNC, 0o666)
        # Whatever may be thrown into this thread, one of the two files is closed.
        try:
            data = memoryview(body + marked)
            while data:
                data = data[os.write(fd, data) :]
            os.replace(partial, self._path)
            found = os.fstat(fd)
            self._identity = found.st_dev, found.st_ino
            self._fd, fd = fd, self._fd
            self._offset, self._marked = len(body), marked
        finally:
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _mark(self, account: dict[str, Any]) -> bytes:
        """Return the last fields of the JSON object, always of the same length."""
        counts = "".join(f',"{name}":{account[key]:>{digits}}' for name, key, digits in _MARK)
        return b"".join((_UNTIL, self._until(), b'"', counts.encode(), b"}"))

    def _until(self) -> bytes:
        return f"{self._encoder.timestamp(self.complete_ns):<32.32}".encode()

    def _claim_name(self, identity: Identity) -> bool:
        host = socket.gethostname()
        base = process_name(identity.role, identity.rank, host, self._recorder.pid)
        try:
            name = claim_name(self.directory, base)
        except OSError as error:
            try:
                directory = Path(tempfile.mkdtemp(prefix="verl_profiler_"))
                name = claim_name(directory, base)
            except OSError:
                self._complaints.make(
                    "claim",
                    f"{self.directory} cannot be written ({error.strerror or error}), nor can "
                    f"{tempfile.gettempdir()}; the events of {base} are kept in memory (not-writable)",
                )
                return False
            self._fallback = f"{self.directory} cannot be written on this host"
            self.directory = directory
            self._complaints.make(
                "fallback",
                f"{self._recorder.config.directory} cannot be written on {host}; the events of this "
                f"process go to {directory}.\n"
                "Copy that folder's contents into the run directory afterwards. (not-writable)",
            )
        self.identity = identity
        self._settle_name(name)
        return True

    def _settle_name(self, name: str) -> None:
        self.name = self._complaints.name = name
        self._path = os.path.join(self.directory, "processes", f"{name}.json")
        if self.identity is not None:
            self._encoder.assign(self.directory, name, self.identity.rank)


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


def _iso_now() -> str:
    seconds, rest = divmod(time.time_ns() // 1000, 1_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:06d}+00:00"
