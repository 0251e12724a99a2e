"""The bytes that the event files of one process may take, and what is left out as they fill up.

Up to nine tenths of the budget the share of requests with details is halved, each time half of what was
left is used; the last tenth is for lines that every answer needs; at the end nothing more is written.

Files of steps that are over are compressed, in the thread that writes them.  A file is replaced by its copy
only when that is complete and on the disk; where anything fails, it stays as it is.  Lines that come later go
to a new file beside the compressed one.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_profiler.events.vocabulary import EVENTS, step_of_folder
from verl_profiler.events.whole_files import replacing
from verl_profiler.recording.complaints import Complaints, announce
from verl_profiler.recording.details import Details
from verl_profiler.recording.encoding import Target

# For request lines, and the trainer's and workers' events.
_RESERVED = 0.1
# The share is halved so often; then details are written of no request.
_HALVINGS = 10
_LEFT_OUT = frozenset({"engine", "reward", "memory", "transfer_queue", "event_loop"})
_SPARE = frozenset(
    name
    for name, event in EVENTS.items()
    if event.family in _LEFT_OUT or (event.family == "rollout" and event.parent is not None)
)


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
        try:
            with path.open("rb") as lines, replacing(packed) as out:
                with gzip.GzipFile("", "wb", _LEVEL, out, mtime=0) as compressed:
                    while chunk := lines.read(_CHUNK_BYTES):
                        compressed.write(chunk)
                out.flush()
                os.fsync(out.fileno())
                packed_bytes = out.tell()
                if not lines.tell() == size == path.stat().st_size:
                    raise _GrownError
        except _GrownError:
            return
        path.unlink()
        self.saved_bytes += size - packed_bytes


class _GrownError(Exception):
    """Somebody else writes the file."""


class ByteBudget:
    """Decides about one process's lines, and compresses its files.

    Args:
        limit_bytes: Of the event files, as they are on the disk.
        closed_steps: What compresses them.
        details: Gets which share of requests has details.
        complaints: Has the process's name.

    Attributes:
        used_bytes: What the files take, with the lines that wait for the disk.
        halvings: How often the share of requests with details is halved; None once there are no details.
        refused: Lines for which there was no room.
    """

    def __init__(
        self, limit_bytes: int, closed_steps: ClosedSteps, details: Details, complaints: Complaints
    ) -> None:
        self.limit_bytes = limit_bytes
        self._closed_steps = closed_steps
        self._details = details
        self._every, self._slowest = details.every, details.slowest
        self._complaints = complaints
        self._saved_bytes = self._refused_then = 0
        self.used_bytes = 0
        self.halvings: int | None = 0
        # What was printed last.
        self._lowest = 0
        self.refused = 0

    def admits(self, event: Any, size: int) -> bool:
        """Count a line of `size` bytes; return whether it may be written."""
        limit = self.limit_bytes
        if event in _SPARE:
            limit = round(limit * (1 - _RESERVED))
        if self.used_bytes + size > limit:
            self.refused += 1
            return False
        self.used_bytes += size
        return True

    def written(self, target: Target, _lines: list[bytes]) -> None:
        """Take note of a file."""
        if target.owned:
            self._closed_steps.opened(target.path)

    def after_flush(self, *, final: bool) -> None:
        """Compress a file of a step that is over, and adapt the share of requests with details."""
        if not final:
            self._closed_steps.compress_one()
        self.update()

    def update(self) -> None:
        """Count what compression has given back, and adapt the share of requests with details."""
        saved_bytes = self._closed_steps.saved_bytes
        change = self._changed(saved_bytes - self._saved_bytes)
        self._saved_bytes = saved_bytes
        left = self.halvings
        self._details.every = 0 if left is None else self._every << left
        self._details.slowest = 0 if left is None else self._slowest
        if change is not None:
            announce(f"{self._complaints.name}: profiler.events.max_gb: {change} (byte-budget)")
        elif self.refused and not self._refused_then:
            announce(
                f"{self._complaints.name}: profiler.events.max_gb is used up; further events are dropped "
                "and counted (byte-budget)"
            )
        self._refused_then = self.refused

    def _changed(self, saved_bytes: int) -> str | None:
        """Set `halvings`; return what changed, in words, where less is written from now on."""
        self.used_bytes = max(self.used_bytes - saved_bytes, 0)
        room = self.limit_bytes * (1 - _RESERVED)
        left = 1 - self.used_bytes / room
        halvings = 0
        while halvings <= _HALVINGS and left <= 0.5 ** (halvings + 1):
            halvings += 1
        self.halvings = None if halvings > _HALVINGS else halvings
        lowered = _HALVINGS + 1 if self.halvings is None else self.halvings
        if lowered <= self._lowest:
            # Where files are compressed or deleted, it goes up and down.
            return None
        self._lowest = lowered
        used = f"{self.used_bytes / 1e9:.2f} of {self.limit_bytes / 1e9:g} GB are used"
        if self.halvings is None:
            return f"{used}: events that few answers need, and all details, are left out"
        return f"{used}: details are written of 1/{2**self.halvings} of the share of requests"

    def header(self) -> dict[str, Any]:
        """Return the fields of the process's header."""
        return {
            "max_bytes": self.limit_bytes,
            "used_bytes": self.used_bytes,
            "halvings": self.halvings,
            "refused": self.refused,
        }
