"""Find the event files that a path means: run directories, archives, steps, single files.

Event files may be compressed (`step_<N>/<name>.jsonl.gz`), by the recorder or with gzip.

A path may be a run directory, a folder that holds one, a `step_<N>` folder, an event file, a
`.parquet` file (or a folder of them, `events/` or `events/step_<N>/` in it), or a tar of a run
directory.  Nothing is parsed here but `run.json` and the process headers.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_profiler.errors import ReadingError
from verl_profiler.events.files import (
    expanded,
    is_regular,
    open_regular,
    reason_of,
    status_of_regular,
)
from verl_profiler.events.shipping import SHIPPING_FILE, UPLOAD_FILE
from verl_profiler.events.vocabulary import (
    FORMAT_VERSION,
    RUN_FILE,
    WORKER_ROLE,
    step_of_folder,
)
from verl_profiler.reading import archives
from verl_profiler.reading.descriptions import (
    Header,
    Launch,
    Shipping,
    Upload,
    described,
)
from verl_profiler.reading.formats.console_log import CONSOLE
from verl_profiler.reading.formats.registry import ARCHIVES, PARQUET, label_of, refuse_trace
from verl_profiler.reading.problems import Problems
from verl_profiler.units import counted

PROCESSES = "processes"
_NAME = re.compile(r"(?P<role>.+?)_(?P<rank>[0-9]{1,9})(?:-[0-9]+)?", re.DOTALL)
_STEP_LIMIT = 1 << 31
# Where a folder has a log: of the console, of TensorBoard, of W&B.
_LOGS = (CONSOLE, "*.tfevents.*", "output.log", "files/output.log")
_PARQUET = ("*.parquet", "events/*.parquet", "events/step_*/*.parquet")
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


@dataclass
class Source:
    """One run, or the requested part of it.

    Args:
        root: The run directory.
        label: What tables show in `run`.
        whole: True when all files of the directory are meant, so that a cache may be kept.
        shipping: `shipping.json`, where nodes with other disks sent their files; else empty.
        upload: `upload.json`, of a copy in object storage; else empty.
    """

    root: Path
    label: str
    whole: bool = True
    files: list[EventFile] = field(default_factory=list[EventFile])
    parquet: list[Path] = field(default_factory=list[Path])
    launch: dict[str, Any] = field(default_factory=dict[str, Any])
    headers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    shipping: dict[str, Any] = field(default_factory=dict[str, Any])
    upload: dict[str, Any] = field(default_factory=dict[str, Any])


def find_sources(paths: list[Path], scratch: Path, problems: list[str]) -> list[Source]:
    """List what `paths` hold, each run once.

    Args:
        paths: What the user named.
        scratch: A folder of the caller's for unpacked archives.
        problems: Sentences are appended here.

    Raises:
        ReadingError: A path does not exist, holds no events, or holds several runs.
    """
    sources: list[Source] = []
    seen: dict[Path, Path] = {}
    launches: dict[tuple[Any, ...], Source] = {}
    for position, path in enumerate(paths):
        real = _resolved(path)
        if real in seen:
            problems.append(f"{path} was given twice; it is read once")
            continue
        seen[real] = path
        source = _source(path, scratch / f"archive-{position}", problems)
        if source.whole and "launched" in source.launch:
            key = tuple(str(source.launch.get(part)) for part in ("launched", "host", "pid"))
            other = launches.setdefault(key, source)
            if other is not source:
                problems.append(
                    f"{path} is a copy of the run in {other.root} (same launch); it is read once"
                )
                continue
        sources.append(source)
    _make_labels_unique(sources)
    return sources


def role_and_rank(name: str) -> tuple[str, int | None]:
    """Read role and rank from a file name, for files without a header."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name, None
    role = match["role"]
    return (WORKER_ROLE if role == "worker" else role), int(match["rank"])


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        # A link that leads to itself; opening it fails.
        return path.absolute()


def _source(path: Path, scratch: Path, problems: list[str]) -> Source:
    try:
        os.stat(path)
    except FileNotFoundError as error:
        raise ReadingError(
            f"{path} does not exist.\nName a run directory, such as logs/my-run, or a console log",
            "no-such-run",
        ) from error
    except (OSError, ValueError) as error:
        raise ReadingError(f"{path} cannot be read: {reason_of(error)}", "unreadable") from error
    if not path.is_dir():
        try:
            status_of_regular(path)
        except OSError as error:
            raise ReadingError(
                f"{path} cannot be read: {reason_of(error)}", "unreadable"
            ) from error
        refuse_trace(path)
        if path.name.endswith(ARCHIVES):
            archives.unpack(path, scratch, problems)
            source = _directory(run_directory(scratch, path), problems)
            source.label = as_text(label_of(path))
            source.whole = True
            return source
        if path.name.endswith(PARQUET):
            return Source(path.parent, as_text(path.stem), whole=False, parquet=[path])
        return _single_file(path, problems)
    if step_of_folder(_resolved(path).name) is not None and not _step_folders(path):
        return _single_step(_resolved(path), problems)
    return _directory(run_directory(path, path), problems)


def _directory(root: Path, problems: list[str]) -> Source:
    source = described_run(root, problems)
    folders = _step_folders(root, problems)
    source.files = event_files(folders or [(None, root)], root, problems)
    if not source.files:
        found = sorted(path for pattern in _PARQUET for path in root.glob(pattern))
        source.parquet = usable(found, root, problems)
    if not source.files and not source.parquet and not source.headers and not source.launch:
        raise ReadingError(
            f"{root} holds no event files (step_<N>/<name>.jsonl).\n"
            "Name the directory that the run wrote, such as logs/my-run, or a console log",
            "no-events",
        )
    return source


def _single_step(folder: Path, problems: list[str]) -> Source:
    source = described_run(folder.parent, problems)
    source.whole = False
    source.files = event_files([(_step_of(folder), folder)], folder.parent, problems)
    return source


def _single_file(path: Path, problems: list[str]) -> Source:
    path = _resolved(path)
    step = _step_of(path.parent)
    root = path.parent if step is None else path.parent.parent
    source = described_run(root, problems)
    source.whole = False
    source.files = [event_file(path, root, step)]
    return source


def _step_of(folder: Path) -> int | None:
    """Return the step of lines without one: the folder's."""
    step = step_of_folder(folder.name)
    return step if step is not None and step < _STEP_LIMIT else None


def described_run(root: Path, problems: list[str]) -> Source:
    """Read run.json and the headers of a run; both may be missing."""
    source = Source(root, as_text(_resolved(root).name or str(root)))
    faults = Problems()
    source.launch = described(root / RUN_FILE, RUN_FILE, Launch, faults) or {}
    source.shipping = described(root / SHIPPING_FILE, SHIPPING_FILE, Shipping, faults) or {}
    source.upload = described(root / UPLOAD_FILE, UPLOAD_FILE, Upload, faults) or {}
    with contextlib.suppress(OSError):
        for path in sorted((root / PROCESSES).glob("*.json")):
            shown = as_text(f"{PROCESSES}/{path.name}")
            header = described(path, shown, Header, faults)
            if header is not None:
                source.headers[as_text(path.stem)] = header
    problems += faults.sentences()
    for shown, content in [
        (RUN_FILE, source.launch),
        *((f"{PROCESSES}/{name}.json", header) for name, header in source.headers.items()),
    ]:
        version = content.get("format", FORMAT_VERSION)
        if version not in (None, FORMAT_VERSION):
            problems.append(
                f"{shown} has format {version!r}; this version of verl-profiler reads format "
                f"{FORMAT_VERSION}, so some data may be misread"
            )
            break
    return source


def _step_folders(root: Path, problems: list[str] | None = None) -> list[tuple[int | None, Path]]:
    folders: list[tuple[int | None, Path]] = []
    for entry in root.iterdir():
        if step_of_folder(entry.name) is None or not _is_folder(entry):
            continue
        step = _step_of(entry)
        if step is not None:
            folders.append((step, entry))
        elif problems is not None:
            problems.append(f"{entry.name}/ is not the folder of a step; it is not read")
    return sorted(folders)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def is_run_directory(folder: Path) -> bool:
    """Return whether a folder holds the files of a run itself."""
    return (
        is_regular(folder / RUN_FILE)
        or _is_folder(folder / PROCESSES)
        or bool(_step_folders(folder))
        or any(folder.glob("*.jsonl"))
        or any(folder.glob("*.jsonl.gz"))
        or any(folder.glob("*.parquet"))
    )


def runs_below(folder: Path) -> list[Path]:
    """Return the run directories in a folder and in those of its folders that are no runs, and its archives, by name.

    Raises:
        OSError: It cannot be listed.
    """
    found: list[Path] = []
    for child in sorted(folder.iterdir()):
        if not _is_folder(child):
            continue
        if is_run_directory(child):
            found.append(child)
        else:
            found += sorted(
                each for each in child.glob("*") if _is_folder(each) and is_run_directory(each)
            )
    files = (each for each in sorted(folder.iterdir()) if each.name.endswith(ARCHIVES))
    return found + [each for each in files if each.is_file()]


def run_directory(path: Path, named: Path) -> Path:
    """Return the run in or below `path`, when there is exactly one."""
    try:
        if is_run_directory(path):
            return path
        runs = runs_below(path)
    except OSError as error:
        raise ReadingError(f"{named} cannot be read: {error.strerror}", "unreadable") from error
    folders = [each for each in runs if _is_folder(each)]
    if len(folders) == 1:
        return folders[0]
    if runs:
        listed = "\n    ".join(str(run) for run in runs[:10])
        raise ReadingError(
            f"{named} holds {counted(len(runs), 'run')}; name one, or list them with `verl-profiler runs {named}`:\n"
            f"    {listed}",
            "several-runs",
        )
    advice = "Name the directory that the run wrote, such as logs/my-run, or a console log"
    held = next((log for pattern in _LOGS for log in sorted(path.glob(pattern))), None)
    if held is not None:
        advice = f"It holds a log: name {named / held.relative_to(path)}"
    raise ReadingError(
        f"{named} holds no event files (step_<N>/<name>.jsonl).\n{advice}", "no-events"
    )


def _make_labels_unique(sources: list[Source]) -> None:
    taken: set[str] = set()
    for source in sources:
        label, number = source.label, 2
        while label in taken:
            label = f"{source.label} ({number})"
            number += 1
        source.label = label
        taken.add(label)


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
                        f"{_shown(path, root)} cannot be read: {reason_of(error)}",
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
    return EventFile(path, _shown(path, root), name, step, size, modified, is_packed)


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
                "files cannot be read", f"{_shown(path, root)} cannot be read: {reason_of(error)}"
            )
    problems += failed.sentences()
    return found


def _shown(path: Path, root: Path) -> str:
    return as_text(str(path.relative_to(root)) if path.is_relative_to(root) else path.name)


def as_text(name: str) -> str:
    """Return a file name as text that can be encoded; names on disk are bytes."""
    return os.fsencode(name).decode("utf-8", "replace")
