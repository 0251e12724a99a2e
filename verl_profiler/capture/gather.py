"""Find what the tools wrote, name it by role, rank and step, and say what is missing and why.

RUN/nsight/journal/…                         what each process captured, written by itself
RUN/nsight/raw/…                             where the tools write
RUN/nsight/actor_0.step3.nsys-rep            a report, moved here
RUN/nsight/actor_0.step3.json                whose it is: step, task, rank, host, pid, times
RUN/nsight/captures.json                     all captures, found and missing
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.capture import node_copy
from verl_profiler.capture.file_modes import restrict
from verl_profiler.capture.nsys_processes import being_written, tools_of
from verl_profiler.capture.planner import raw_directory
from verl_profiler.errors import ReadingError
from verl_profiler.events.files import (
    is_regular,
    parse_json,
    read_bounded,
    read_object,
    reason_of,
)
from verl_profiler.events.vocabulary import RUN_FILE

__all__ = ["Fetch", "Found", "account", "collect", "raw_of", "read_journal"]

SUMMARY = "captures.json"
_NSYS, _TORCH = ".nsys-rep", ".json.gz"
_WRITING = (".qdstrm", ".nsys-rep.tmp")
_AGAIN_S = 1.0
_SMALL_TRACE = 4096
# A capture takes two lines of 200 bytes.
_JOURNAL_LIMIT_BYTES = 64 << 20
_NAME = re.compile(r"[\w.:-]*")
_NO_NAME = re.compile(r"[^\w.:-]")
_NAME_SHOWN = 60
# What verl 0.9 calls the traces of its torch profiler (utils/profiler/torch_profile.py).
_VERL_TRACE = re.compile(
    r"(?P<label>.*?)_step(?P<step>\d{1,9})_rank(?P<rank>\d{1,9})\S*_pid(?P<pid>\d{1,9})_"
)
# With profile_discrete verl lets SGLang's schedulers trace themselves; sglang 0.5.12 names the traces
# after the moment at which they began.
_ENGINE_TRACE = re.compile(
    r"agent_loop_rollout_replica_(?P<replica>\d{1,9})/(?P<begin>\d{1,10}\.\d+)-TP-(?P<rank>\d{1,9}).*"
)


@dataclass
class Found:
    """One capture: where it is, or why it is not.

    Args:
        role: Role of the process.
        rank: Its rank, or None.
        host: Its host.
        pid: Its process.
        step: verl's global step.
        task: The task of verl's, with one capture per task.
        number: Which of this process's captures it is, from 1.
        begin_ns: When it began, on that host's wall clock; None if nobody wrote it down.
        end_ns: When it ended; None if it did not.
        tool: `nsys` or `torch`.
        file: The report's name in `RUN/nsight`; None if there is none.
        size_bytes: Its size.
        problem: What is wrong with it; empty if nothing is.
        silent: Whether nvtx took nsys for none when the capture began.
        source: The name that the tool gave to the file.
    """

    role: str
    rank: int | None
    host: str
    pid: int
    step: int | None
    task: str | None
    number: int
    begin_ns: int | None
    end_ns: int | None
    tool: str
    file: str | None = None
    size_bytes: int = 0
    problem: str = ""
    silent: bool = False
    source: str = ""

    @property
    def process(self) -> str:
        """The beginning of this process's file names."""
        return f"{self.role}_{self.host}_{self.pid}"

    @property
    def label(self) -> str:
        """`actor_0`, or role, host and pid without a rank."""
        return self.process if self.rank is None else f"{self.role}_{self.rank}"

    @property
    def key(self) -> tuple[str, int, int]:
        """Which capture of which process it is."""
        return self.host, self.pid, self.number


@dataclass(frozen=True)
class _Place:
    """Where the files of a run are, and how far they are.

    Args:
        home: `RUN/nsight`.
        raw: Where the tools write.
        unfinished: Names of the files there that somebody writes now.
        known: What earlier collections placed, by `Found.key`.
    """

    home: Path
    raw: Path
    unfinished: set[str]
    known: dict[tuple[str, int, int], Found]


def collect(
    run: Path,
    *,
    patience_s: float = 0.0,
    fetch: Callable[[float], bool] | None = None,
    fetch_s: float = 10.0,
    raw: Path | None = None,
) -> list[Found]:
    """Move the reports of a run to their places and write their metadata.

    Args:
        run: The run directory.
        patience_s: How long to wait for reports that nsys is still writing, and for other nodes.
        fetch: Brings what other nodes have by now, within the seconds that it is given; returns
            whether more may come.  Called before each look.
        fetch_s: How long to wait for other nodes at least.
        raw: Where the tools wrote; None for what run.json says.

    Returns:
        Every capture that the journals know, and every report that they do not.

    Raises:
        ReadingError: If the run captured nothing, or its directory cannot be written.
    """
    home = run / "nsight"
    raw = raw_of(run) if raw is None else raw
    begun = time.monotonic()
    deadline, last_fetch = begun + patience_s, begun + max(patience_s, fetch_s)
    while True:
        more = fetch is not None and fetch(last_fetch - time.monotonic())
        if not home.is_dir():
            raise ReadingError(
                f"{run} has no captures.\nCaptures are made with trainer.profile_steps=[…] and for "
                "example actor_rollout_ref.actor.profile_ranks=[0].",
                "no-captures",
            )
        captures = read_journal(home / "journal")
        known = {said.key: said for said in _metadata(home)}
        place = _Place(home, raw, being_written(raw), known)
        missing = [c for c in captures if c.end_ns and c.tool == "nsys" and not _report(c, place)]
        waiting = missing or [tool for tool in tools_of(run, raw) if not tool.in_use]
        if not more and (not waiting or time.monotonic() >= deadline):
            break
        if not more:
            time.sleep(_AGAIN_S)
    try:
        return _put(captures, place)
    except OSError as error:
        raise ReadingError(
            f"The captures of {run} cannot be gathered: {reason_of(error)}.\n"
            "Make its nsight folder writable, or copy the run.",
            "not-collected",
        ) from None


def _put(captures: list[Found], place: _Place) -> list[Found]:
    """Put the reports into their places; return all captures."""
    home = place.home
    for capture in captures:
        _settle(capture, place, captures)
    captures += _verl_traces(place, captures)
    captures += _strangers(place)
    files = {capture.file for capture in captures}
    captures += [said for said in _metadata(home) if said.file not in files]
    _write_json(home / SUMMARY, [asdict(capture) for capture in captures])
    return captures


def _write_json(path: Path, content: Any) -> None:
    """Write a file whole; what is in its place may be a link or a pipe, and is replaced."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with contextlib.suppress(FileNotFoundError):
        part.unlink()
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as file:
        file.write(json.dumps(content, indent=2) + "\n")
    part.replace(path)


class Fetch:
    """Brings the journals and reports of the other nodes to this one, over Ray.

    Args:
        run: The run directory.
        raw: Where the tools wrote; None for what run.json says.
    """

    def __init__(self, run: Path, raw: Path | None = None) -> None:
        self._run = run
        self._raw = raw_of(run) if raw is None else raw
        self._nodes = node_copy.Nodes()

    def __call__(self, left_s: float) -> bool:
        """Bring what is finished by now and did not come before.

        Args:
            left_s: How long it may take; a node that sends files then may go on.

        Returns:
            Whether more may come.
        """
        home = self._run / "nsight"
        # Placed reports have other names here.
        placed = {said.source: said.size_bytes for said in _metadata(home)}
        folders = {}
        for folder in (home / "journal", self._raw):
            here = {
                str(path.relative_to(folder)): path.stat().st_size
                for path in folder.rglob("*")
                if is_regular(path)
            }
            folders[folder.absolute()] = here | placed
        return self._nodes.fetch(folders, left_s)

    def account(self) -> list[str]:
        """Return lines for people: which nodes could not give their reports."""
        return [f"WARNING {problem} (not-fetched)" for problem in self._nodes.problems()]


def read_journal(folder: Path) -> list[Found]:
    """Return the captures that the processes wrote down, in the order in which they began.

    Lines that cannot be right are one capture per journal, whose `problem` has their number; likewise a
    journal that cannot be read.
    """
    captures = []
    for file in sorted(folder.glob("*.jsonl")):
        by_number: dict[int, Found] = {}
        refused: list[Any] = []
        try:
            lines = read_bounded(file, _JOURNAL_LIMIT_BYTES).splitlines()
        except OSError as error:
            captures.append(
                _lost({"role": file.stem}, f"{_shown(file)} cannot be read ({reason_of(error)})")
            )
            continue
        for text in lines:
            # A process that was killed leaves half a line.
            with contextlib.suppress(ValueError):
                line = parse_json(text)
                if not _take_line(line, by_number):
                    refused.append(line)
        captures += by_number.values()
        if refused:
            many = len(refused) > 1
            captures.append(
                _lost(
                    refused[0],
                    f"{len(refused):,} line{'s' * many} of {_shown(file)} "
                    f"{'are' if many else 'is'} left out: role or host cannot be part of a file name, "
                    "or a value is of another type",
                )
            )
    return sorted(captures, key=lambda capture: (capture.begin_ns or 0, capture.label))


def _take_line(line: Any, by_number: dict[int, Found]) -> bool:
    """Add what a line of a journal says; return False for one with other types or names."""
    if not isinstance(line, dict):
        return False
    number = line.get("capture")
    if not isinstance(number, int):
        return False
    found = by_number.get(number)
    if found is None:
        facts = {"number": number, "begin_ns": None, "end_ns": None, "tool": "nsys"}
        facts |= {key: line.get(key) for key in ("role", "rank", "host", "pid", "step", "task")}
        found = _found({**facts, "tool": line.get("tool", "nsys")})
        if found is None:
            return False
        by_number[number] = found
    for key in ("begin_ns", "end_ns"):
        if isinstance(line.get(key), int):
            setattr(found, key, line[key])
    found.silent = bool(line.get("silent"))
    return True


def _shown(journal: Path) -> str:
    return f"journal/{_NO_NAME.sub('_', journal.name)}"


def _lost(line: Any, problem: str) -> Found:
    """Return what stands for captures that are not gathered, named as a line that is none."""
    facts = line if isinstance(line, dict) else {}

    def name(key: str) -> str:
        return _NO_NAME.sub("_", str(facts.get(key)))[:_NAME_SHOWN]

    def number(key: str) -> int | None:
        value = facts.get(key)
        return value if type(value) is int and 0 <= value < 1 << 31 else None

    return Found(
        *(name("role"), number("rank"), name("host"), number("pid") or 0, number("step"), None, 0),
        *(None, None, "nsys"),
        problem=f"{problem}; what was captured there is not gathered",
    )


def _found(facts: dict[str, Any]) -> Found | None:
    """Return a capture, or None where its facts are not those that this package writes."""
    try:
        found = msgspec.convert(facts, Found)
    except (msgspec.ValidationError, TypeError):
        return None
    # They become names of files.
    names = found.role, found.host, *([found.file] if found.file is not None else [])
    in_folder = all(_NAME.fullmatch(name) for name in names)
    return found if in_folder and found.tool in ("nsys", "torch") else None


def raw_of(run: Path) -> Path:
    """Return where the tools of this run wrote; run.json may say another folder."""
    directory, cwd = None, ""
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
        launch = read_object(run / RUN_FILE)
        directory = (launch["settings"].get("nsight") or {}).get("directory")
        cwd = launch.get("cwd") or ""
        return raw_directory(run, directory, cwd)
    return raw_directory(run, None)


def _candidates(capture: Found, suffix: str) -> Iterator[str]:
    """Yield the names that a tool may have given to this capture's file."""
    yield f"{capture.process}.{capture.number}{suffix}"
    # nsys leaves the number out when only one capture was announced.
    if capture.number == 1:
        yield f"{capture.process}{suffix}"


def _report(capture: Found, place: _Place) -> tuple[Path, str] | None:
    """Return a capture's file and its tool's name for it; an earlier collection may have placed it."""
    suffix = _TORCH if capture.tool == "torch" else _NSYS
    for name in _candidates(capture, suffix):
        if name not in place.unfinished and is_regular(place.raw / name):
            return place.raw / name, name
    said = place.known.get(capture.key)
    return (place.home / str(said.file), said.source) if said is not None else None


def _settle(capture: Found, place: _Place, captures: list[Found]) -> None:
    if capture.problem:
        return
    report = _report(capture, place)
    if report is None:
        capture.problem = _cause(capture, place, captures)
        return
    path, capture.source = report
    _move(capture, path, place.home)


def _move(capture: Found, report: Path, home: Path) -> None:
    suffix = _TORCH if report.name.endswith(_TORCH) else _NSYS
    stem = f"{capture.label}.step{capture.step}"
    for number in itertools.count(2):
        target = home / f"{stem}{suffix}"
        if target == report or not target.exists():
            break
        stem = f"{capture.label}.step{capture.step}.{number}"
    if report != target:
        shutil.move(report, target)
        restrict(target)
    capture.file, capture.size_bytes = target.name, target.stat().st_size
    if not capture.size_bytes:
        capture.problem = "empty: the disk may be full, or the process was killed while it wrote"
    elif suffix == _TORCH and _is_idle(target):
        capture.problem = "empty: this process ran no operation of torch in the step"
    _write_json(home / f"{stem}.json", asdict(capture))


def _is_idle(trace: Path) -> bool:
    """Whether a Chrome trace holds nothing but its frame, which takes some hundred bytes."""
    try:
        return b'"cpu_op"' not in gzip.decompress(read_bounded(trace, _SMALL_TRACE))
    except (OSError, EOFError, zlib.error):
        return False


def _cause(capture: Found, place: _Place, captures: list[Found]) -> str:
    """Return why a capture has no report, as far as one can tell."""
    if capture.end_ns is None:
        return (
            f"the capture did not end: process {capture.pid} on {capture.host} died in step "
            f"{capture.step}"
        )
    if capture.silent:
        return (
            "nvtx and this nsys record no range together, so nsys saw no capture begin; use a "
            "newer nsys, or nvtx 0.2.11"
        )
    if not place.raw.is_dir():
        return (
            f"{place.raw} is not on this machine; run `verl-profiler collect` on {capture.host} too"
        )
    begun = {path.name for path in place.raw.iterdir() if path.name.startswith(capture.process)}
    if any(name.endswith(_WRITING) for name in begun) or begun & place.unfinished:
        return "nsys is still writing, or was killed while it wrote; collect again later"
    others = [c for c in captures if c.process == capture.process and c.file]
    if others:
        return (
            "nsys ended before this capture: capture-range-end counts fewer captures than there "
            "were; set it under profiler.nsight.options"
        )
    return (
        "nsys wrote nothing: the process was not started under nsys, nsys was killed before it "
        "wrote, or the capture range never reached it"
    )


def _verl_traces(place: _Place, captures: list[Found]) -> list[Found]:
    """Place the traces that verl's and SGLang's own torch profilers wrote, by what their names say."""
    found = []
    # The names end in the time of the trace.
    traces = filter(is_regular, place.raw.glob(f"*{_TORCH}"))
    for file in sorted(traces, key=lambda file: file.name.rsplit("_", 1)[-1]):
        match = _VERL_TRACE.match(file.name)
        if match is not None:
            role = match["label"].split("_")[0]
            role = role if role in ("actor", "critic", "ref") else "actor"
            said = int(match["rank"]), "", int(match["pid"]), int(match["step"]), match["label"]
            found.append((file, Found(role, *said, 0, None, None, "torch")))
    for file in sorted(filter(is_regular, place.raw.glob(f"*/*{_TORCH}"))):
        match = _ENGINE_TRACE.fullmatch(str(file.relative_to(place.raw)))
        if match is not None:
            begin_ns = int(float(match["begin"]) * 1e9)
            said = int(match["replica"]), "", 0, _step_at(begin_ns, captures)
            task = f"scheduler TP-{match['rank']}"
            found.append((file, Found("engine", *said, task, 0, begin_ns, None, "torch")))
    for file, capture in found:
        capture.source = str(file.relative_to(place.raw))
        _move(capture, file, place.home)
    return [capture for _, capture in found]


def _step_at(time_ns: int, captures: list[Found]) -> int | None:
    """Return the step whose capture was open at a time of day."""
    for capture in captures:
        if capture.begin_ns and capture.begin_ns <= time_ns <= (capture.end_ns or time_ns):
            return capture.step
    return None


def _strangers(place: _Place) -> list[Found]:
    """Return reports that no journal knows: of processes that died before they wrote a line."""
    found = []
    for file in sorted(place.raw.glob(f"*{_NSYS}")) if place.raw.is_dir() else []:
        if file.name in place.unfinished or not is_regular(file):
            continue
        match = re.match(
            r"(?P<role>[a-z_]+)_(?P<host>[\w.-]+)_(?P<pid>\d{1,9})(\.\d+)?\.nsys-rep", file.name
        )
        if match is None:
            continue
        found.append(
            Found(
                *(match["role"], None, match["host"], int(match["pid"]), None, None, 0, None, None),
                "nsys",
                None,
                file.stat().st_size,
                f"no process wrote down this capture; the report is left at {file}",
            )
        )
    return found


def _metadata(home: Path) -> Iterator[Found]:
    """Yield what is written down beside the reports that are in their places."""
    for path in sorted(home.glob("*.json")):
        # Whatever else lies there is not ours.
        with contextlib.suppress(OSError, ValueError):
            said = _found(read_object(path))
            if said is not None and said.file and is_regular(home / said.file):
                yield said


def account(captures: list[Found]) -> list[str]:
    """Return lines for people: how many captures there are, and what became of the others."""
    good = [capture for capture in captures if capture.file and not capture.problem]
    size = sum(capture.size_bytes for capture in good)
    lines = [f"{len(good)} of {len(captures)} captures gathered, {size / 1e6:.1f} MB"]
    for capture in captures:
        # Those without a number stand for a journal, or lines of it.
        of = f"{capture.label} step {capture.step}: " if capture.number else ""
        if capture.problem:
            lines.append(f"WARNING {of}{capture.problem} (capture-missing)")
    return lines
