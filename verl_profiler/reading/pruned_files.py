"""What is left of steps whose event files were deleted (`keep_steps`), read beside a run that goes on.

A process appends what a file adds up to, and then deletes it (`recording/retention`).  A file is either
read, or replaced by these lines, and never both: also while it is deleted, and after a kill in between.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from verl_profiler.events.files import open_regular
from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.events.vocabulary import PRUNED_FOLDER, steps_of_folder
from verl_profiler.reading.listing import EventFile

__all__ = ["as_listed", "summed"]

# The lines about files that may not be deleted so far are at the end.
_TAIL_BYTES = 64 << 10


def summed(
    files: Iterable[EventFile],
    pruned: Iterable[EventFile],
    partial: Callable[[str], bool] = lambda _: False,
) -> list[EventFile]:
    """Return the files that are there although what is left of them is, too.

    Args:
        files: Event files of steps.
        pruned: Files in `pruned/`.
        partial: Whether the files of a process may be copies that lack the last lines.
    """
    of: dict[str, list[tuple[int, str, int]]] = {}
    for file in pruned:
        with contextlib.suppress(OSError):
            of[file.name] = list(_summed_sizes(file))
    return [
        file
        for file in files
        if file.name in of and _is_among(file, of[file.name], partial=partial(file.name))
    ]


def _summed_sizes(file: EventFile) -> Iterator[tuple[int, str, int]]:
    """Yield a step, the end of a file's name in its folder, and the size of that file."""
    with open_regular(file.path) as opened:
        opened.seek(max(file.size_bytes - _TAIL_BYTES, 0))
        for line in opened:
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                content = json.loads(line)
                sizes = mapping_or_empty(mapping_or_empty(content.get("extra")).get("files"))
                for end, size in sizes.items():
                    yield int(content["step"]), str(end), int(size)


def _is_among(file: EventFile, sizes: list[tuple[int, str, int]], *, partial: bool) -> bool:
    steps = steps_of_folder(file.path.parent.name)
    if steps is None:
        return False
    summed_sizes = {
        size
        for step, end, size in sizes
        if steps[0] <= step <= steps[1] and file.path.name == f"{file.name}{end}"
    }
    if not summed_sizes:
        return False
    if file.size_bytes in summed_sizes or (partial and file.size_bytes < max(summed_sizes)):
        return True
    # It may have grown since it was listed.
    with contextlib.suppress(OSError):
        return file.path.stat().st_size in summed_sizes
    return False


def as_listed(
    root: Path,
    pruned: Mapping[str, EventFile],
    gone: list[EventFile],
    counts: dict[str, int],
    scratch: Path,
) -> list[EventFile]:
    """Return what is left of pruned steps as it was when the files were listed.

    Of what was appended since, only the lines about files that could not be read any more are taken.

    Args:
        root: The run directory.
        pruned: The listed files, by process.
        gone: Event files that could not be read any more; those that lines are about are removed.
        counts: Events by process, to which the lines of these files are added.
        scratch: A folder for copies.
    """
    listed = dict(pruned)
    for name in {file.name for file in gone} - pruned.keys():
        shown = f"{PRUNED_FOLDER}/{name}.jsonl"
        listed[name] = EventFile(root / shown, shown, name, None, 0, 0, is_pruned=True)
    return [_as_listed(file, gone, counts, scratch) for file in listed.values()]


def _as_listed(
    file: EventFile, gone: list[EventFile], counts: dict[str, int], scratch: Path
) -> EventFile:
    own = [each for each in gone if each.name == file.name]
    if not own:
        return file
    try:
        with open_regular(file.path) as opened:
            before = opened.read(file.size_bytes)
            since = opened.readlines()
    except OSError:
        return file
    taken: list[bytes] = []
    lines = [*((line, False) for line in before.splitlines()), *((line, True) for line in since)]
    for line, is_new in lines:
        step, count = _step_and_lines(line)
        about = [each for each in own if _holds(each, step)]
        if about:
            if is_new:
                taken.append(line)
            counts[file.name] = counts.get(file.name, 0) + count
            gone[:] = [each for each in gone if each not in about]
    copy = scratch / f"pruned-{hashlib.sha256(file.name.encode()).hexdigest()[:16]}.jsonl"
    copy.write_bytes(b"".join([before, *taken]))
    status = copy.stat()
    return replace(file, path=copy, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _step_and_lines(line: bytes) -> tuple[int | None, int]:
    """Return the step of a line, and of how many lines it is the total."""
    try:
        content = json.loads(line)
        return int(content["step"]), int(mapping_or_empty(content.get("extra")).get("lines") or 0)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None, 0


def _holds(file: EventFile, step: int | None) -> bool:
    """Whether a file was in the folder of a step."""
    steps = steps_of_folder(file.path.parent.name)
    return step is not None and steps is not None and steps[0] <= step <= steps[1]
