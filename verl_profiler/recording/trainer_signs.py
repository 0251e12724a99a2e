"""Signs of life of the trainer's process, as another process sees them: by its header, which changes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from verl_profiler.events.shipping import SHIPPING_FILE
from verl_profiler.events.vocabulary import process_name

__all__ = ["TrainerSigns"]

# With less, a busy machine would be taken for a process that stands still.
_LEAST_NS = 10 * 10**9
_HEADER_NAME = f"{process_name('trainer', 0, '', 0)}.json"


class _Header(msgspec.Struct):
    ended: str | None = None


class _Node(msgspec.Struct):
    processes: dict[str, str] = {}


class _Shipping(msgspec.Struct):
    nodes: list[_Node] = []


class TrainerSigns:
    """Watches the header of the trainer's process.

    Clocks of two hosts are not compared: what counts is when this process saw the header change.  Where
    this process runs late itself, the machine is busy, and of the time between two looks no more than
    twice the planned one counts.  While the run starts, imports hold the trainer's interpreter lock for
    long: there it is never silent.

    Args:
        directory: The run. On a disk that the trainer's process does not write to, there is no header, or a
            copy, which is replaced rarely: there it is never silent.
        after_ns: From how many nanoseconds on it is silent, at least 10 s.
        period_ns: The planned time between two looks.
    """

    def __init__(self, directory: Path, after_ns: int, period_ns: int) -> None:
        self._directory = directory
        self._after_ns = max(after_ns, _LEAST_NS)
        self._path: Path | None = None
        self._seen: tuple[int, int] | None = None
        self._changed_ns = self._looked_ns = self._quiet_ns = 0
        self._most_ns = 2 * period_ns

    @property
    def name(self) -> str:
        """The name of the trainer's process; empty before its header was found."""
        return "" if self._path is None else self._path.stem

    def silent_since(self, at_ns: int) -> int | None:
        """Return when it last changed its header, if that is too long ago and it has not ended.

        Args:
            at_ns: The present, on the clock of `clock.now()`; so is the result.
        """
        # Not found by listing all headers: each process would list those of all others.
        path = self._path or self._directory / "processes" / _HEADER_NAME
        try:
            status = os.stat(path)
        except FileNotFoundError:
            if self._path is None:
                return None
            raise
        self._path = path
        seen = status.st_mtime_ns, status.st_ino
        if seen != self._seen:
            self._seen, self._changed_ns, self._quiet_ns = seen, at_ns, 0
        else:
            self._quiet_ns += min(at_ns - self._looked_ns, self._most_ns)
        self._looked_ns = at_ns
        if self._quiet_ns <= self._after_ns or not _trains(self._directory):
            return None
        if _has_ended(self._path) or _is_copy(self._directory, self.name):
            return None
        return self._changed_ns


def _trains(directory: Path) -> bool:
    """Whether a step has begun."""
    return any(each.name != "step_0" for each in directory.glob("step_*"))


def _has_ended(header: Path) -> bool:
    """Whether its process has ended, or it cannot be read, which is no sign of a hang."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(header.read_bytes(), type=_Header).ended is not None
    return True


def _is_copy(directory: Path, name: str) -> bool:
    """Whether a process writes to the disk of another node, from which its files are brought here."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        text = (directory / SHIPPING_FILE).read_bytes()
        nodes = msgspec.json.decode(text, type=_Shipping).nodes
        return any(name in node.processes.values() for node in nodes)
    return False
