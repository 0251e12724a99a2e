"""List the event files in folders; they are not read, but for the first line of copies."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from verl_profiler.events.files import expanded, open_regular, reason_of, status_of_regular
from verl_profiler.reading.problems import Problems

__all__ = [
    "EventFile",
    "as_text",
    "event_file",
    "event_files",
    "may_hold",
    "usable",
]

_PACKED = ".gz"
# Of a line, which begins with its time in microseconds.
_COMPARED_BYTES = 1 << 10


@dataclass(frozen=True)
class EventFile:
    """One `.jsonl` or `.jsonl.gz` file.

    Args:
        path: Where it is.
        shown: Its path below the run directory, for messages.
        name: The process, from the file name.
        step: From the folder's name; None when the file is outside one.
        size_bytes: Its size when it was found.
        modified_ns: Its modification time when it was found.
        is_packed: Whether it is compressed.
    """

    path: Path
    shown: str
    name: str
    step: int | None
    size_bytes: int
    modified_ns: int
    is_packed: bool = False


def event_files(
    folders: Iterable[tuple[int | None, Path]], root: Path, problems: list[str]
) -> list[EventFile]:
    """List the files in folders of steps, by step; compressed copies of others are left out.

    Args:
        folders: The step of lines without one, and the folder.
        root: The run directory.
        problems: What cannot be read is appended here.
    """
    files: list[EventFile] = []
    failed = Problems()
    for step, folder in folders:
        listed: list[Path] = []
        with contextlib.suppress(FileNotFoundError):
            # It may have been removed just now.
            listed = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])
        for path in listed:
            try:
                if not _is_copy(path):
                    files.append(event_file(path, root, step))
            except OSError as error:
                packed = path.with_name(f"{path.name}{_PACKED}")
                if os.path.lexists(path):
                    failed.add(
                        "files cannot be read",
                        f"{shown(path, root)} cannot be read: {reason_of(error)}",
                    )
                elif packed not in listed and os.path.lexists(packed):
                    # Compressed just now.
                    with contextlib.suppress(OSError):
                        files.append(event_file(packed, root, step))
    problems += failed.sentences()
    return files


def _is_copy(path: Path) -> bool:
    """Whether a compressed file stands beside what it was made of; later lines do not make it one."""
    plain = path.with_suffix("")
    if path.suffix != _PACKED or not plain.exists():
        return False
    try:
        with open_regular(plain) as file:
            first = file.readline(_COMPARED_BYTES)
    except FileNotFoundError:
        # Compressed just now.
        return False
    try:
        with open_regular(path) as packed, expanded(packed) as file:
            return bool(first) and file.readline(_COMPARED_BYTES) == first
    except (OSError, EOFError, zlib.error):
        # Cut short while it was written, before the other one would have been removed.
        return bool(first)


def event_file(path: Path, root: Path, step: int | None) -> EventFile:
    """Describe a file of a run.

    Raises:
        OSError: It is no regular file, or gone.
    """
    status = status_of_regular(path)
    size, modified = status.st_size, status.st_mtime_ns
    is_packed = path.suffix == _PACKED
    name = as_text((path.with_suffix("") if is_packed else path).stem)
    return EventFile(path, shown(path, root), name, step, size, modified, is_packed)


def may_hold(step: int | None, steps: tuple[int, int]) -> bool:
    """Whether a file of a step, or of any where it is None, may have events of steps from first to last."""
    return step is None or steps[0] <= step <= steps[1]


def usable(paths: Iterable[Path], root: Path, problems: list[str]) -> list[Path]:
    """Return the regular files of these; others are appended to the problems."""
    found: list[Path] = []
    failed = Problems()
    for path in paths:
        try:
            status_of_regular(path)
            found.append(path)
        except OSError as error:
            failed.add(
                "files cannot be read", f"{shown(path, root)} cannot be read: {reason_of(error)}"
            )
    problems += failed.sentences()
    return found


def shown(path: Path, root: Path) -> str:
    return as_text(str(path.relative_to(root)) if path.is_relative_to(root) else path.name)


def as_text(name: str) -> str:
    """Return a file name as text that can be encoded; names on disk are bytes."""
    return os.fsencode(name).decode("utf-8", "replace")
