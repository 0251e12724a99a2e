"""An event as one JSON line, and the file that it belongs to."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.events.vocabulary import step_folder
from verl_profiler.recording import values
from verl_profiler.recording.clock import Anchor, Timestamps

__all__ = ["EVENT_NAME_LIMIT", "STEP_LIMIT", "LineEncoder"]

# Larger numbers are no steps; readers hold them in 32 bits.
STEP_LIMIT = 1 << 31
EVENT_NAME_LIMIT = 200
_PLAIN = frozenset({str, int, float, bool, type(None)})


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
        self._step_paths: dict[int | None, Path] = {}

    def settle(self, directory: Path, name: str, rank: int | None) -> None:
        """Set where lines go and whose they are."""
        self._directory, self._name, self._rank = directory, name, rank
        self._step_paths.clear()

    def timestamp(self, at_ns: int) -> str:
        """Return a time of `clock.now()` as ISO-8601 with microseconds."""
        return self._timestamps.text(self._timestamps.microseconds(at_ns))

    def encode(self, item: tuple[Any, ...]) -> tuple[Path, bool, bytes, int]:
        """Encode one event.

        Args:
            item: Event, begin_ns, end_ns, extra and step; where a caller of `log_manager.log` named
                them also workid, path and further keys.

        Returns:
            The file, whether it is this process's own, the line with its newline, and the step.

        Raises:
            Exception: Whatever the event's values raise.
        """
        event, begin_ns, end_ns, extra, step = item[:5]
        if type(step) is not int and step is not None:
            step = operator.index(step)
        if type(event) is not str:
            event = values.text(event)
        microseconds = self._timestamps.microseconds
        end = microseconds(end_ns)
        duration = None if begin_ns is None else (end - microseconds(begin_ns)) / 1e6
        rank = self._rank
        path, owned = self._path_of(step), True
        more: Any = None
        if len(item) > 5:
            workid, explicit_path, more = item[5:]
            rank = rank if workid is None else workid
            if explicit_path is not None:
                path, owned = Path(explicit_path), False
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
        return path, owned, data + b"\n", step or 0

    def _path_of(self, step: int | None) -> Path:
        path = self._step_paths.get(step)
        if path is None:
            if len(self._step_paths) > 64:
                self._step_paths.clear()
            number = step or 0
            if not -STEP_LIMIT <= number < STEP_LIMIT:
                raise ValueError(f"{number} is no step")
            # Nothing but whole numbers from 0 is a folder of a run.
            path = self._directory / step_folder(max(number, 0)) / f"{self._name}.jsonl"
            self._step_paths[step] = path
        return path
