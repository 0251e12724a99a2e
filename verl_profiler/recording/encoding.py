"""An event as one JSON line, and the file that it belongs to."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.events.vocabulary import step_folder
from verl_profiler.recording import values
from verl_profiler.recording.clock import Anchor, Timestamps

# Larger numbers are no steps; readers hold them in 32 bits.
STEP_LIMIT = 1 << 31
EVENT_NAME_LIMIT = 200
_PLAIN = frozenset({str, int, float, bool, type(None)})


class Logged(msgspec.Struct):
    """In the place of an event's fields, what `log_manager.log` was given.

    Args:
        fields: The fields.
        workid: In the place of the process's rank.
        path: A file that the caller chose.
        more: Further keys of the line, encoded.
    """

    fields: Any
    workid: int | str | None = None
    path: Path | None = None
    more: msgspec.Raw | None = None


# Name, begin and end on the clock of `clock.now()`, fields (a dict, its JSON, or a `Logged`), step.  A plain
# tuple, which costs the host's thread half as much as any class.
Event = tuple[Any, int | None, int, Any, Any]


class Target(msgspec.Struct, eq=False):
    """A file, and lines of one step that are to be written to it.

    Args:
        path: The file.
        step: verl's global step.
        owned: Whether only this process writes the file.
    """

    path: Path
    step: int
    owned: bool = True
    lines: list[bytes] = []


class _Line(msgspec.Struct, omit_defaults=True):
    timestamp: str
    event: str
    duration_sec: float | None = None
    extra: Any = None
    workid: Any = None
    step: int | None = None


_encode = msgspec.json.Encoder().encode


class LineEncoder:
    """Encodes events of one process.

    Args:
        anchor: Ties the monotonic clock to the time of day.
        directory: The run directory.
    """

    def __init__(self, anchor: Anchor, directory: Path) -> None:
        self._timestamps = Timestamps(anchor)
        self._directory = directory
        self._name: str | None = None
        self._rank: int | None = None
        # By step, or by path and step.
        self._targets: dict[Any, Target] = {}

    def assign(self, directory: Path, name: str, rank: int | None) -> None:
        """Set where lines go and whose they are."""
        self._directory, self._name, self._rank = directory, name, rank
        self._targets = {}

    def timestamp(self, at_ns: int) -> str:
        """Return a time of `clock.now()` as ISO-8601 with microseconds."""
        return self._timestamps.text(self._timestamps.microseconds(at_ns))

    def encode(self, item: Event) -> tuple[Target, bytes]:
        """Encode one event.

        Returns:
            Where it belongs, and the line with its newline.

        Raises:
            Exception: Whatever the event's values raise.
        """
        event, begin_ns, end_ns, extra, step = item
        if type(step) is not int and step is not None:
            step = operator.index(step)
        if type(event) is not str:
            event = values.text(event)
        microseconds = self._timestamps.microseconds
        end = microseconds(end_ns)
        duration = None if begin_ns is None else (end - microseconds(begin_ns)) / 1e6
        rank = self._rank
        more = path = None
        if type(extra) is Logged:
            path, more = extra.path, extra.more
            rank = rank if extra.workid is None else extra.workid
            extra = extra.fields
        target = self._targets.get(step if path is None else (path, step))
        if target is None:
            target = self._add_target(path, step)
        fields = extra or None
        if (
            fields is not None
            and type(fields) is not msgspec.Raw
            and not _PLAIN.issuperset(map(type, fields.values()))
        ):
            fields = msgspec.Raw(values.encode(fields))
        line = _Line(self._timestamps.text(end), event, duration, fields, rank, step)
        try:
            data = _encode(line)
        except Exception:  # noqa: BLE001  lone surrogates, keys that are no strings
            data = b""
        if not 0 < len(data) <= values.EXTRA_LIMIT:
            line.event = values.text(event, EVENT_NAME_LIMIT)
            if fields is not None and type(fields) is not msgspec.Raw:
                line.extra = msgspec.Raw(values.encode(fields))
            data = _encode(line)
        if more:
            data = data[:-1] + b"," + _encode(more)[1:]
        return target, data + b"\n"

    def _add_target(self, path: Path | None, step: int | None) -> Target:
        if len(self._targets) > 64:
            self._targets = {}
        number = step or 0
        if not -STEP_LIMIT <= number < STEP_LIMIT:
            raise ValueError(f"{number} is no step")
        # Nothing but whole numbers from 0 is a folder of a run.
        own = self._directory / step_folder(max(number, 0)) / f"{self._name}.jsonl"
        target = Target(path or own, number, path is None)
        self._targets[step if path is None else (path, step)] = target
        return target
