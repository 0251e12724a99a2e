"""Prune the event files of steps that are over: `profiler.events.keep_steps`.

The trainer's process decides which steps are kept, and writes that to `retention.json`; each process
follows it, and deletes nothing but files that it wrote itself.  A file is deleted as a whole.  What it
adds up to is first appended to `pruned/<name>.jsonl`: a `step_pruned` line per step, and the trainer's
own timers and metrics, which are a few lines per step.  The last line about a file has its size, so that
whoever reads in between, or after a kill in between, leaves out the file.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.events.vocabulary import (
    PRUNED_FOLDER,
    RETENTION_FILE,
    steps_of_folder,
)
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.step_choice import StepChoice
from verl_profiler.recording.step_totals import Totals, decode_line, is_timer
from verl_profiler.recording.whole_files import replace_file
from verl_profiler.recording.worker_config import EventSettings, KeepSteps

__all__ = ["Decision", "Retention", "publish"]

# Files that one flush deletes at most.
_AT_ONCE = 8
# Compressed ones count as ten times their size; the last flush has not the time for more.
_LAST_BYTES = 32 << 20
_EXPANSION = 10
# Lines between which other threads run.
_BATCH = 256


class Decision(msgspec.Struct):
    """`retention.json`: of the steps up to `until`, only those in the folders of `kept` are kept."""

    until: int = -1
    kept: list[str] = []

    @classmethod
    def read(cls, directory: Path) -> Decision | None:
        """Return what the trainer has decided, if that can be read."""
        try:
            return cls.of((directory / RETENTION_FILE).read_bytes())
        except OSError:
            return None

    @classmethod
    def of(cls, content: bytes) -> Decision | None:
        """Return the decision in a `retention.json`; None where there is none."""
        try:
            return msgspec.json.decode(content, type=cls)
        except msgspec.MsgspecError:
            return None

    def prunes(self, folder: str) -> bool:
        """Whether the files in the folder of a step, or of several, are deleted."""
        steps = steps_of_folder(folder)
        return steps is not None and steps[1] <= self.until and folder not in self.kept


def publish(directory: Path, content: bytes) -> None:
    """Write `retention.json`, which others see whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    draft = directory / f".{RETENTION_FILE}.{os.getpid()}.part"
    replace_file(directory / RETENTION_FILE, content, draft)


@dataclass(frozen=True)
class _Read:
    """Files of a path, with their sizes, and what is left of them.

    `last` is the line that readers look for; `count` is the number of lines in the files.
    """

    path: Path
    sizes: dict[Path, int]
    lines: list[bytes]
    last: bytes
    count: int


class Retention:
    """Deletes the files of one process whose steps are not kept; in the trainer's, chooses these.

    Args:
        events: `profiler.events`.
        captured: Steps that a capture is made of.
        release: Called with a path whose file is not to be held open any longer.
        complain: Called with a kind and a text where steps are not pruned.

    Attributes:
        lines: How many lines were deleted.
        freed_bytes: Bytes of the files that were deleted.
    """

    def __init__(
        self,
        events: EventSettings,
        captured: Iterable[int],
        release: Callable[[Path], None],
        complain: Callable[[str, str], None],
    ) -> None:
        keep = events.keep_steps or KeepSteps()
        self.lines = 0
        self.freed_bytes = 0
        self._last = keep.last
        self._choice = StepChoice(keep, events.steps_per_file, captured)
        self._release = release
        self._complain = complain
        self._directory = Path()
        self._name = ""
        self._rank: int | None = None
        self._decides = False
        self._files: dict[Path, int] = {}
        # Not deleted so far: their totals may wait for the disk.
        self._summed: list[_Read] = []
        self._read_so_far: dict[Path, _Read] = {}
        self._newest = -1
        self._read_at = -1
        self._decision = Decision()
        self._failed = False

    def settle(self, directory: Path, name: str, identity: Identity) -> None:
        """Set where this process writes, and who it is."""
        self._directory, self._name, self._rank = directory, name, identity.rank
        self._decides = identity.role == "trainer"

    def see(self, item: tuple[Any, ...]) -> None:
        """Take note of an event of the trainer."""
        if not self._decides:
            return
        event, begin_ns, end_ns, extra, step = item[:5]
        if event == "sample_consumed":
            self._choice.consumed(extra, step)
        elif event == "step" and begin_ns is not None and type(step) is int:
            decision = self._choice.ended(step, (end_ns - begin_ns) / 1e9)
            if decision is not None:
                self._publish(decision)
            elif self._choice.is_asynchronous:
                self._complain(
                    "keep",
                    "training is asynchronous, so profiler.events.keep_steps has no effect: a step's "
                    "requests belong to several steps (not-pruned)",
                )

    def alarmed(self, step: int) -> None:
        """Take note of a step in which the trainer is stuck."""
        self._choice.alarmed(step)

    def note(self, path: Path) -> None:
        """Take note of a file of this process that lines are written to."""
        if path not in self._files:
            steps = steps_of_folder(path.parent.name)
            if steps is not None:
                self._files[path] = steps[1]
                self._newest = max(self._newest, steps[0])

    def read_again(self) -> None:
        """Look for a new decision, also where this process has begun no other step since."""
        self._read_at = -1

    def sum_up(self, *, final: bool = False) -> tuple[Path, list[bytes]]:
        """Read some files of steps that are not kept; `delete` deletes them once the lines are written.

        Args:
            final: The process ends: only what is read quickly.

        Returns:
            The file for what is left of them, and its next lines.
        """
        left = _LAST_BYTES
        path = self._directory
        read: list[_Read] = []
        try:
            for path in self._due():
                left -= sum(map(_lines_bytes, _files_of(path)))
                if final and left < 0:
                    break
                read.append(self._read(path))
        except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
            self._fail(path, error)
        self._summed += read
        lines = [line for each in read for line in each.lines]
        # Together at the end, where readers look.
        lines += [each.last for each in read if each.last]
        return self._directory / PRUNED_FOLDER / f"{self._name}.jsonl", lines

    def delete(self) -> None:
        """Delete the files whose totals are written."""
        summed, self._summed = self._summed, []
        path = self._directory
        try:
            for each in summed:
                path = each.path
                if _sizes_of(path) != each.sizes:
                    # Lines came while the disk refused the totals; only they are left to add up.
                    self._read_so_far[path] = each
                else:
                    self._delete(each)
        except OSError as error:
            self._fail(path, error)

    @property
    def is_due(self) -> bool:
        """Whether there are files to delete."""
        return bool(self._due())

    def _due(self) -> list[Path]:
        """Return the next files to delete."""
        oldest = self._newest - self._last
        old = [path for path, last in self._files.items() if last <= oldest]
        if self._failed or not old:
            return []
        if self._read_at < self._newest:
            # The file changes with each step.
            self._read_at = self._newest
            self._decision = Decision.read(self._directory) or self._decision
        waiting = {each.path for each in self._summed}
        return [
            path for path in old if path not in waiting and self._decision.prunes(path.parent.name)
        ][:_AT_ONCE]

    def _fail(self, path: Path, error: Exception) -> None:
        self._failed = True
        self._complain("prune", f"{_problem(path, error)}; from now on no step is pruned")

    def _publish(self, decision: dict[str, Any]) -> None:
        """Write the decision for all processes."""
        try:
            publish(self._directory, msgspec.json.encode(decision))
            self._read_at = -1
        except OSError as error:
            # The next step tries again.
            self._complain("keep", _problem(self._directory / RETENTION_FILE, error))

    def _read(self, path: Path) -> _Read:
        """Add up the files of a path."""
        self._release(path)
        sizes = _sizes_of(path)
        so_far = self._read_so_far.get(path)
        begins = {} if so_far is None else so_far.sizes
        steps: dict[int, Totals] = {}
        timers: list[bytes] = []
        count = 0 if so_far is None else so_far.count
        for file, size in sizes.items():
            if begins.get(file) == size:
                continue
            with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as texts:
                texts.seek(begins.get(file, 0))
                for text in texts:
                    line = decode_line(text)
                    count += 1
                    if not count % _BATCH:
                        time.sleep(0)
                    steps.setdefault(line.step or 0, Totals()).add(line)
                    if self._decides and is_timer(line):
                        timers.append(text)
        names = {file.name.removeprefix(self._name): size for file, size in sizes.items()}
        lines = [
            *timers,
            *(
                self._line(step, each, names if position == len(steps) else None)
                for position, (step, each) in enumerate(sorted(steps.items()), 1)
            ),
        ]
        return _Read(path, sizes, lines[:-1], lines[-1] if lines else b"", count)

    def _delete(self, read: _Read) -> None:
        for file in read.sizes:
            file.unlink()
        with contextlib.suppress(OSError):
            # Until the last process gets here, there are files of others.
            read.path.parent.rmdir()
        del self._files[read.path]
        self._read_so_far.pop(read.path, None)
        self.lines += read.count
        self.freed_bytes += sum(read.sizes.values())

    def _line(self, step: int, totals: Totals, sizes: dict[str, int] | None) -> bytes:
        line: dict[str, Any] = {"timestamp": totals.at, "event": "step_pruned"}
        line["extra"] = totals.fields() if sizes is None else {**totals.fields(), "files": sizes}
        if self._rank is not None:
            line["workid"] = self._rank
        return msgspec.json.encode({**line, "step": step}) + b"\n"


def _files_of(path: Path) -> list[Path]:
    return [each for each in (path, path.with_name(f"{path.name}.gz")) if each.exists()]


def _sizes_of(path: Path) -> dict[Path, int]:
    return {file: file.stat().st_size for file in _files_of(path)}


def _lines_bytes(file: Path) -> int:
    return file.stat().st_size * (_EXPANSION if file.suffix == ".gz" else 1)


def _problem(path: Path, error: Exception) -> str:
    return f"{path}: {getattr(error, 'strerror', None) or error} (not-pruned)"
