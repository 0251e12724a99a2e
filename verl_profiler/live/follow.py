"""Read the files of a run as they grow: each byte once, whole lines only.

Opening a long run does not read all of it: of earlier steps, only the
files of the trainer and its queue, which are small.  Nothing is written, locked or requested from the run.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.events.files import UnusableFileError, cleaned_text, expanded, open_regular
from verl_profiler.events.open_files import EVIDENCE_FOLDER, FOLDER
from verl_profiler.events.vocabulary import RUN_FILE, step_of_folder
from verl_profiler.reading.descriptions import EVIDENCE, HEADER, LAUNCH, OPEN, Faults, described

__all__ = ["Line", "Run"]

_HANG = re.compile(r"[0-9]{1,3}")
_DURATION_LIMIT_S = 1e9
_STEP_LIMIT = 1 << 31
# Maximum nesting of a line; the decoder's own limit is the interpreter's stack.
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TRAINER = "trainer_"
# Counts its steps by the samples in it, so that it writes to earlier steps than the trainer.
_QUEUE = "message_queue_"
# Number of latest steps that are read completely at start, and polled on every refresh.
_LATEST = 3
# Folders before these that are polled on every refresh for late lines, and how many of the others are, in turn.
_RECENT, _IN_TURN = 5, 2
_BLOCK_BYTES = 1 << 20
# Bytes read before the next frame is drawn.
_AT_ONCE_BYTES = 32 << 20


class Line(msgspec.Struct):
    """A line of an event file."""

    timestamp: str
    event: str
    duration_sec: float | None = None
    extra: dict[str, Any] | None = None
    step: int | None = None


class Run:
    """A run directory that is being followed.

    Args:
        directory: The run.

    Attributes:
        behind_bytes: Unread bytes when `poll` returned.
        unreadable: Number of lines that could not be read.
        damaged: Problems found in run.json and the headers at the last read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.behind_bytes = 0
        self.unreadable = 0
        self.damaged: list[str] = []
        self._offsets: dict[Path, int] = {}
        # The same files by folder, and the folders that were seen.
        self._followed: dict[Path, list[Path]] = {}
        self._seen: set[Path] = set()
        self._turn = 0
        # Files with bytes that the last poll left unread.
        self._behind: set[Path] = set()
        self._unusable: dict[Path, str] = {}
        self._first_step: int | None = None
        self._decode = msgspec.json.Decoder(Line).decode

    def launch(self) -> dict[str, Any]:
        """Return run.json, or an empty dict."""
        path = self.directory / RUN_FILE
        return described(path, RUN_FILE, LAUNCH, Faults()) or {}

    def headers(self) -> dict[str, dict[str, Any]]:
        """Return the current headers of all processes by name, and record problems in them."""
        faults = Faults()
        headers: dict[str, dict[str, Any]] = {}
        path = self.directory / RUN_FILE
        if os.path.lexists(path):
            described(path, RUN_FILE, LAUNCH, faults)
        for path in sorted((self.directory / "processes").glob("*.json")):
            shown = cleaned_text(path.name)
            header = described(path, shown, HEADER, faults)
            headers[cleaned_text(path.stem)] = header or {}
        self.damaged = [*faults.sentences(), *self._unusable.values()]
        return headers

    def open_files(self) -> dict[str, dict[str, Any]]:
        """Return what each process has open for long, by name; see docs/stuck.md."""
        return self._described(FOLDER, OPEN)

    def evidence(self) -> dict[str, dict[str, Any]]:
        """Return the evidence of the last hang that was found, by process; see docs/stuck.md."""
        numbers = [
            int(each.name)
            for each in (self.directory / EVIDENCE_FOLDER).glob("*")
            if _HANG.fullmatch(each.name)
        ]
        if not numbers:
            return {}
        return self._described(f"{EVIDENCE_FOLDER}/{max(numbers)}", EVIDENCE)

    def _described(self, folder: str, schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        faults = Faults()
        found: dict[str, dict[str, Any]] = {}
        for path in sorted((self.directory / folder).glob("*.json")):
            shown = f"{folder}/{cleaned_text(path.name)}"
            content = described(path, shown, schema, faults)
            if content is not None:
                found[cleaned_text(path.stem)] = content
        self.damaged += faults.sentences()
        return found

    def poll(self) -> Iterator[tuple[str, int, Line]]:
        """Yield process, step and line of everything appended since the last call."""
        self.behind_bytes = 0
        left = _AT_ONCE_BYTES
        files, self._behind = self._files(), set()
        for step, path in files:
            if path in self._unusable:
                continue
            if path.suffix == ".gz":
                yield from self._packed(step, path)
                continue
            offset = self._offset(path)
            try:
                size = path.stat().st_size
                if size <= offset:
                    continue
                with open_regular(path) as file:
                    file.seek(offset)
                    while left > 0 and (block := file.read(_BLOCK_BYTES)):
                        whole = block.rfind(b"\n") + 1
                        if not whole and len(block) < _BLOCK_BYTES:
                            break
                        # No valid line is this long; the remainder cannot be read either.
                        whole = whole or len(block)
                        offset += whole
                        left -= whole
                        file.seek(offset)
                        yield from self._lines(cleaned_text(path.stem), step, block[:whole])
            except UnusableFileError as error:
                self._unusable[path] = f"{cleaned_text(path.name)} of step {step} {error}"
                continue
            except OSError:
                # Removed, or a temporarily unavailable file system.
                continue
            finally:
                self._offsets[path] = offset
            if left <= 0 and offset < size:
                self.behind_bytes += size - offset
                self._behind.add(path)

    def _packed(self, step: int, path: Path) -> Iterator[tuple[str, int, Line]]:
        """Yield the lines of a compressed file, of a step that is over, once."""
        self._offset(path)
        try:
            self._offsets[path] = path.stat().st_size
            with open_regular(path) as packed, expanded(packed) as file:
                while lines := file.readlines(_BLOCK_BYTES):
                    name = cleaned_text(path.with_suffix("").stem)
                    yield from self._lines(name, step, b"".join(lines))
        except UnusableFileError as error:
            self._unusable[path] = f"{cleaned_text(path.name)} of step {step} {error}"
        except (OSError, EOFError, zlib.error):
            # Damaged: what lies behind that place cannot be read.
            return

    def _lines(self, name: str, step: int, block: bytes) -> Iterator[tuple[str, int, Line]]:
        for text in block.splitlines():
            try:
                line = self._decode(text)
            except _UNDECODABLE:
                line = None
            if line is None or not _is_possible(line):
                self.unreadable += 1
                continue
            yield name, step if line.step is None else line.step, line

    def _files(self) -> list[tuple[int, Path]]:
        folders: list[tuple[int, Path]] = []
        with contextlib.suppress(OSError):
            for entry in self.directory.iterdir():
                step = step_of_folder(entry.name)
                if step is not None and step < _STEP_LIMIT:
                    folders.append((step, entry))
        folders.sort()
        latest = {step for step, _ in folders[-_LATEST:]}
        if self._first_step is None and folders:
            self._first_step = min(latest)
        older = [each for each in folders if each[0] not in latest]
        found: list[tuple[int, Path]] = []
        for step, folder in [*self._due(older), *(each for each in folders if each[0] in latest)]:
            if step in latest:
                found += [(step, path) for path in sorted(folder.glob("*.jsonl"))]
            elif step < (self._first_step or 0):
                found += [(step, path) for path in folder.glob("*.jsonl*") if self._is_wanted(path)]
            else:
                # Late lines of steps that were followed from their start.
                found += [(step, path) for path in self._followed.get(folder, ())]
        return found

    def _due(self, older: list[tuple[int, Path]]) -> list[tuple[int, Path]]:
        """Return the folders to look into this time: the new and the recent ones, of the others some in turn."""
        due = {folder for _, folder in older[-_RECENT:]} | {path.parent for path in self._behind}
        others = older[:-_RECENT]
        for _ in range(min(_IN_TURN, len(others))):
            self._turn += 1
            due.add(others[self._turn % len(others)][1])
        due.update(folder for _, folder in others if folder not in self._seen)
        self._seen.update(due)
        return [each for each in older if each[1] in due]

    def _is_wanted(self, path: Path) -> bool:
        """Whether a file of a step before the followed ones is read: the trainer's once, its queue's as it grows."""
        if path.name.startswith(_QUEUE):
            return path.suffix != ".gz" or path not in self._offsets
        new = path not in self._offsets or path in self._behind
        return new and path.name.startswith(_TRAINER)

    def _offset(self, path: Path) -> int:
        if path not in self._offsets:
            self._offsets[path] = 0
            self._followed.setdefault(path.parent, []).append(path)
        return self._offsets[path]


def _is_possible(line: Line) -> bool:
    """Return whether the numbers of a line are plausible for their fields."""
    duration = line.duration_sec
    return (
        duration is None or (math.isfinite(duration) and 0 <= duration <= _DURATION_LIMIT_S)
    ) and (line.step is None or abs(line.step) < _STEP_LIMIT)
