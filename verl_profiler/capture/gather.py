"""Find the reports of a run, name them by role, rank and step, and list what is missing and why.

RUN/nsight/journal/…                         what each process captured, recorded by itself
RUN/nsight/raw/…                             where the tool writes
RUN/nsight/actor_0.step3.nsys-rep            a report, moved here
RUN/nsight/actor_0.step3.json                its metadata: step, task, rank, host, pid, times
RUN/nsight/captures.json                     all captures, with and without a report
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_profiler.capture import tools
from verl_profiler.capture.plan import raw_directory, restrict
from verl_profiler.capture.record import CaptureRecord, read_journals, read_metadata
from verl_profiler.errors import ReadingError
from verl_profiler.events.files import is_regular, read_object, reason_of
from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.events.redaction import problem_of
from verl_profiler.events.vocabulary import RUN_FILE
from verl_profiler.events.whole_files import replace_file
from verl_profiler.nodes.files import being_written
from verl_profiler.nodes.rounds import Nodes
from verl_profiler.units import size

_SUMMARY = "captures.json"
# How long one call of `Fetch` waits for nodes that have not answered yet.
_FETCH_S = 5.0


@dataclass(frozen=True)
class _Place:
    """Where the files of a run are.

    Args:
        home: `RUN/nsight`.
        raw: Where the tool writes.
        unfinished: Names of the files there that a process has open for writing.
        placed: What earlier collections moved, by `CaptureRecord.key`.
    """

    home: Path
    raw: Path
    unfinished: set[str]
    placed: dict[tuple[str, int, int], CaptureRecord]


def collect(
    run: Path,
    *,
    patience_s: float = 0.0,
    fetch: Callable[[float], bool] | None = None,
    fetch_s: float = 10.0,
    raw: Path | None = None,
    poll_s: float = 1.0,
) -> list[CaptureRecord]:
    """Move the reports of a run to their places and write their metadata.

    Args:
        run: The run directory.
        patience_s: How long to wait for reports that are still being written, and for other nodes,
            while none grows.
        fetch: Copies what other nodes have by now, within the seconds that it is given; returns
            whether more may come.  Called before each poll.
        fetch_s: How long to wait for other nodes at least.
        raw: Where the tool wrote; None for what run.json has.
        poll_s: How long to wait between two polls.

    Returns:
        Every capture of the journals, and every report that no journal lists.

    Raises:
        ReadingError: If the run captured nothing, or its directory cannot be written.
    """
    home = run / "nsight"
    raw = raw_of(run) if raw is None else raw
    begun = time.monotonic()
    deadline, last_fetch = begun + patience_s, begun + max(patience_s, fetch_s)
    there = -1
    while True:
        more = fetch is not None and fetch(last_fetch - time.monotonic())
        if not home.is_dir():
            raise ReadingError(
                f"{run} has no captures.\nCaptures are made with trainer.profile_steps=[…] and for "
                "example actor_rollout_ref.actor.profile_ranks=[0].",
                "no-captures",
            )
        captures = read_journals(home / "journal")
        placed = {record.key: record for record in read_metadata(home)}
        place = _Place(home, raw, being_written(raw), placed)
        if (now_there := _bytes_of(raw)) != there:
            there, deadline = now_there, time.monotonic() + patience_s
        waiting = any(_may_come(capture, place) for capture in captures)
        if not more and (not waiting or time.monotonic() >= deadline):
            break
        if not more:
            time.sleep(poll_s)
    try:
        return _place_reports(captures, place)
    except OSError as error:
        raise ReadingError(
            f"The captures of {run} cannot be gathered: {reason_of(error)}.\n"
            "Make its nsight folder writable, or copy the run.",
            "not-collected",
        ) from None


def _bytes_of(folder: Path) -> int:
    size_bytes = 0
    for path in folder.rglob("*"):
        # A tool's temporary file may be gone.
        with contextlib.suppress(OSError):
            size_bytes += path.lstat().st_size
    return size_bytes


def raw_of(run: Path) -> Path:
    """Return where the tool of this run wrote; run.json may name another folder."""
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
        launch = read_object(run / RUN_FILE)
        directory = mapping_or_empty(launch["settings"].get("nsight")).get("directory")
        return raw_directory(run, directory, launch.get("cwd") or "")
    return raw_directory(run, None)


def account(captures: list[CaptureRecord]) -> list[str]:
    """Return lines for a terminal: how many captures there are, and why others have no report."""
    good = [capture for capture in captures if capture.file and not capture.problem]
    gathered = sum(capture.size_bytes for capture in good)
    lines = [f"{len(good)} of {len(captures)} captures gathered, {size(gathered)}"]
    for capture in captures:
        # Records without a number stand for a journal, or lines of it.
        subject = f"{capture.label} step {capture.step}: " if capture.number else ""
        if capture.problem:
            lines.append(f"WARNING {subject}{capture.problem} (capture-missing)")
    return lines


class Fetch:
    """Brings the journals and reports of the other nodes to this one, over Ray.

    Args:
        run: The run directory.
        raw: Where the tool wrote; None for what run.json has.
    """

    def __init__(self, run: Path, raw: Path | None = None) -> None:
        self._run = run
        self._raw = raw_of(run) if raw is None else raw
        self._nodes: list[Nodes] | None = None
        self._problem = ""
        self._ended = False

    def __call__(self, left_s: float) -> bool:
        """Take what is finished by now and was not taken before.

        Args:
            left_s: How long it may take; a node that is sending files then may continue.

        Returns:
            Whether more may come.
        """
        import ray

        if left_s <= 0 or self._problem or self._ended:
            return False
        try:
            if not ray.is_initialized():
                self._problem = (
                    "Ray has been shut down; files on other nodes' own disks were not copied"
                )
                return False
            if self._nodes is None:
                self._nodes = self._places(ray)
            if left_s <= _FETCH_S:
                self._ended = True
                for nodes in self._nodes:
                    nodes.finish(left_s)
                return False
            complete = [nodes.round(patience_s=_FETCH_S) for nodes in self._nodes]
            return not all(complete)
        except Exception as error:  # noqa: BLE001  Ray is gone, or the head does not answer
            self._problem = problem_of(error)
            return False

    def _places(self, ray: Any) -> list[Nodes]:
        """Return a visit of all nodes per folder that may have a disk of its own there."""
        # Placed reports have other names here.
        placed = {
            record.source: record.size_bytes for record in read_metadata(self._run / "nsight")
        }
        journal, own = "nsight/journal", "nsight/raw"
        if self._raw == self._run / own:
            have = {f"{own}/{name}": size_bytes for name, size_bytes in placed.items()}
            return [Nodes(ray, self._run, captures=(journal, own), have=have)]
        self._raw.mkdir(parents=True, exist_ok=True)
        reports = Nodes(ray, self._raw, captures=("",), have=placed)
        return [Nodes(ray, self._run, captures=(journal,)), reports]

    def account(self) -> list[str]:
        """End what brings them; return lines for a terminal: which nodes could not send their reports."""
        problems = [self._problem] if self._problem else []
        for nodes in self._nodes or ():
            nodes.close()
            problems += nodes.problems()
        return [f"WARNING {problem} (not-fetched)" for problem in dict.fromkeys(problems)]


def _may_come(capture: CaptureRecord, place: _Place) -> bool:
    """Whether a capture has no report yet, and its tool may still be writing it."""
    ended = capture.end_ns is not None
    return ended and tools.get(capture.tool).finishes_late and _report_of(capture, place) is None


def _place_reports(captures: list[CaptureRecord], place: _Place) -> list[CaptureRecord]:
    """Move the reports into their places; return all captures."""
    home = place.home
    for capture in captures:
        if not capture.problem:
            report = _report_of(capture, place)
            if report is None:
                capture.problem = _cause(capture, place, captures)
            else:
                path, capture.source = report
                _move(capture, path, home)
    for tool in tools.every():
        for path, capture in list(tool.unclaimed_reports(place.raw, captures)):
            capture.source = str(path.relative_to(place.raw))
            _move(capture, path, home)
            captures.append(capture)
    files = {capture.file for capture in captures}
    captures += [record for record in read_metadata(home) if record.file not in files]
    _write_json(home / _SUMMARY, [asdict(capture) for capture in captures])
    return captures


def _report_of(capture: CaptureRecord, place: _Place) -> tuple[Path, str] | None:
    """Return a capture's file and its tool's name for it; an earlier collection may have moved it."""
    for name in tools.get(capture.tool).report_names(capture.process, capture.number):
        if name not in place.unfinished and is_regular(place.raw / name):
            return place.raw / name, name
    placed = place.placed.get(capture.key)
    return (place.home / str(placed.file), placed.source) if placed is not None else None


def _move(capture: CaptureRecord, report: Path, home: Path) -> None:
    tool = tools.get(capture.tool)
    first = stem = f"{capture.label}.step{capture.step}"
    number = 1
    while (target := home / f"{stem}{tool.suffix}") != report and target.exists():
        number += 1
        stem = f"{first}.{number}"
    if report != target:
        shutil.move(report, target)
        restrict(target)
    capture.file, capture.size_bytes = target.name, target.stat().st_size
    if capture.size_bytes:
        capture.problem = tool.is_empty(target)
    else:
        capture.problem = "empty: the disk may be full, or the process was killed while it wrote"
    _write_json(home / f"{stem}.json", asdict(capture))


def _write_json(path: Path, content: Any) -> None:
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())


def _cause(capture: CaptureRecord, place: _Place, captures: list[CaptureRecord]) -> str:
    """Return the likely reason why a capture has no report."""
    tool = tools.get(capture.tool)
    if capture.end_ns is None:
        return (
            f"the capture did not end: process {capture.pid} on {capture.host} died in step "
            f"{capture.step}"
        )
    if not place.raw.is_dir():
        return (
            f"{place.raw} is not on this machine; run `verl-profiler collect` on {capture.host} too"
        )
    begun = {path.name for path in place.raw.iterdir() if path.name.startswith(capture.process)}
    if any(name.endswith(tool.unfinished_suffixes) for name in begun) or begun & place.unfinished:
        return f"{tool.title} is still writing, or was killed while it wrote; collect again later"
    if any(other.process == capture.process and other.file for other in captures):
        return tool.count_cause or tool.no_report_cause
    return tool.no_report_cause
