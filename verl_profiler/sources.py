"""Find the event files that a path means: run directories, archives, steps, single files.

A path may be a run directory, a folder that holds one, a `step_<N>` folder, an event file, a
`.parquet` file (or a folder of them), or a tar of a run directory.  Nothing is parsed here but
`run.json` and the process headers; event files are only listed, with their sizes and times.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from verl_profiler.errors import ReadingError
from verl_profiler.events import FORMAT_VERSION, RUN_FILE, WORKER_ROLE

__all__ = ["EventFile", "Source", "find_sources", "role_and_rank"]

PROCESSES = "processes"
_STEP_FOLDER = re.compile(r"step_(\d{1,18})")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
_NAME = re.compile(r"(?P<role>.+?)_(?P<rank>\d{1,9})(?:-\d+)?")
# A header or run.json is a few kilobytes; whatever is larger is something else.
_JSON_LIMIT = 16 << 20


@dataclass(frozen=True)
class EventFile:
    """One `.jsonl` file.

    Args:
        path: Where it is.
        shown: Its path below the run directory, for messages.
        name: The process, from the file name.
        step: From the folder's name; None when the file lies outside one.
        size_bytes: Its size when it was found.
        modified_ns: Its modification time when it was found.
    """

    path: Path
    shown: str
    name: str
    step: int | None
    size_bytes: int
    modified_ns: int


@dataclass
class Source:
    """One run, or the part of it that was asked for.

    Args:
        root: The run directory.
        label: What tables show in `run`.
        whole: True when all files of the directory are meant, so that a cache may be kept.
    """

    root: Path
    label: str
    whole: bool = True
    files: list[EventFile] = field(default_factory=list)
    parquet: list[Path] = field(default_factory=list)
    launch: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)


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
        real = path.resolve()
        if real in seen:
            problems.append(f"{path} was named twice; it is read once")
            continue
        seen[real] = path
        source = _source(path, scratch / f"archive-{position}", problems)
        key = _launch_key(source.launch)
        if key is not None and source.whole and key in launches:
            other = launches[key]
            problems.append(
                f"{path} is a copy of the run in {other.root} (same launch); it is read once"
            )
            continue
        if key is not None and source.whole:
            launches[key] = source
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


def _source(path: Path, scratch: Path, problems: list[str]) -> Source:
    if not path.exists():
        raise ReadingError(
            f"{path} does not exist.\nName a run directory, such as logs/my-run", "no-such-run"
        )
    if path.is_file():
        if path.name.endswith(_ARCHIVES):
            _unpack(path, scratch, problems)
            source = _directory(_run_directory(scratch, path), problems)
            source.label = _text(re.sub(r"(\.tar(\.gz|\.zst)?|\.tgz)$", "", path.name))
            source.whole = True
            return source
        if path.suffix == ".parquet":
            return Source(path.parent, _text(path.stem), whole=False, parquet=[path])
        return _single_file(path, problems)
    if _STEP_FOLDER.fullmatch(path.resolve().name) and not _step_folders(path):
        return _single_step(path.resolve(), problems)
    return _directory(_run_directory(path, path), problems)


def _directory(root: Path, problems: list[str]) -> Source:
    source = _described(root, problems)
    folders = _step_folders(root)
    for step, folder in folders:
        source.files += _event_files(folder, root, step)
    if not folders:
        source.files += _event_files(root, root, None)
    if not source.files:
        source.parquet = sorted([*root.glob("*.parquet"), *root.glob("events/*.parquet")])
    if not source.files and not source.parquet and not source.headers and not source.launch:
        raise ReadingError(
            f"{root} holds no event files (step_<N>/<name>.jsonl).\n"
            "Name the directory that the run wrote, such as logs/my-run",
            "no-events",
        )
    return source


def _single_step(folder: Path, problems: list[str]) -> Source:
    source = _described(folder.parent, problems)
    source.whole = False
    match = _STEP_FOLDER.fullmatch(folder.name)
    step = int(match[1]) if match else None
    source.files = _event_files(folder, folder.parent, step)
    return source


def _single_file(path: Path, problems: list[str]) -> Source:
    path = path.resolve()
    match = _STEP_FOLDER.fullmatch(path.parent.name)
    root = path.parent.parent if match else path.parent
    source = _described(root, problems)
    source.whole = False
    file = _event_file(path, root, int(match[1]) if match else None)
    source.files = [file] if file is not None else []
    return source


def _described(root: Path, problems: list[str]) -> Source:
    """Read what a run says about itself; both parts may be missing."""
    source = Source(root, _text(root.resolve().name or str(root)))
    launch = root / RUN_FILE
    if launch.is_file():
        source.launch = _json_object(launch, RUN_FILE, problems) or {}
    with contextlib.suppress(OSError):
        for path in sorted((root / PROCESSES).glob("*.json")):
            shown = _text(f"{PROCESSES}/{path.name}")
            header = _json_object(path, shown, problems)
            if header is not None:
                source.headers[_text(path.stem)] = header
    for shown, content in [
        (RUN_FILE, source.launch),
        *((f"{PROCESSES}/{name}.json", header) for name, header in source.headers.items()),
    ]:
        version = content.get("format", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            problems.append(
                f"{shown} has format {version!r}; this version of verl-profiler reads format "
                f"{FORMAT_VERSION}, so something may be misread"
            )
            break
    return source


def _json_object(path: Path, shown: str, problems: list[str]) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > _JSON_LIMIT:
            problems.append(f"{shown} is larger than {_JSON_LIMIT >> 20} MiB; it is not read")
            return None
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{shown} cannot be read ({error}); what it says is missing")
        return None
    if not isinstance(content, dict):
        problems.append(f"{shown} is not a JSON object; what it says is missing")
        return None
    return content


def _step_folders(root: Path) -> list[tuple[int, Path]]:
    folders = []
    for entry in root.iterdir():
        match = _STEP_FOLDER.fullmatch(entry.name)
        if match and entry.is_dir():
            folders.append((int(match[1]), entry))
    return sorted(folders)


def _event_files(folder: Path, root: Path, step: int | None) -> list[EventFile]:
    found = (_event_file(path, root, step) for path in sorted(folder.glob("*.jsonl")))
    return [file for file in found if file is not None]


def _event_file(path: Path, root: Path, step: int | None) -> EventFile | None:
    try:
        status = path.stat()
    except OSError:
        return None
    if not path.is_file():
        return None
    shown = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
    size, modified = status.st_size, status.st_mtime_ns
    return EventFile(path, _text(shown), _text(path.stem), step, size, modified)


def _text(name: str) -> str:
    """Return a file name as text that can be encoded; names on disk are bytes."""
    return os.fsencode(name).decode("utf-8", "replace")


def _is_run(folder: Path) -> bool:
    return (
        (folder / RUN_FILE).is_file()
        or (folder / PROCESSES).is_dir()
        or bool(_step_folders(folder))
        or any(folder.glob("*.jsonl"))
        or any(folder.glob("*.parquet"))
    )


def _run_directory(path: Path, named: Path) -> Path:
    """Return the run in or below `path`, when there is exactly one."""
    try:
        if _is_run(path):
            return path
        runs = sorted(child for child in path.iterdir() if child.is_dir() and _is_run(child))
        if not runs:
            runs = sorted(child for child in path.glob("*/*") if child.is_dir() and _is_run(child))
    except OSError as error:
        raise ReadingError(f"{named} cannot be read: {error.strerror}", "unreadable") from error
    if len(runs) == 1:
        return runs[0]
    if runs:
        listed = "\n    ".join(str(run) for run in runs[:10])
        raise ReadingError(
            f"{named} holds {len(runs)} runs; name the one that you mean:\n    {listed}",
            "several-runs",
        )
    raise ReadingError(
        f"{named} holds no event files (step_<N>/<name>.jsonl).\n"
        "Name the directory that the run wrote, such as logs/my-run",
        "no-events",
    )


def _unpack(archive: Path, target: Path, problems: list[str]) -> None:
    """Unpack what belongs to runs; links, devices and paths that lead outside are left out."""
    target.mkdir(parents=True)
    skipped = 0
    try:
        with _tar_stream(archive) as stream, tarfile.open(fileobj=stream, mode="r|*") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                if not member.isfile():
                    skipped += not member.isdir()
                    continue
                if PurePosixPath(member.name).is_absolute() or ".." in parts:
                    skipped += 1
                    continue
                if not member.name.endswith((".json", ".jsonl", ".parquet")):
                    continue
                content = tar.extractfile(member)
                if content is None:
                    continue
                path = target.joinpath(*parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    while chunk := content.read(1 << 20):
                        file.write(chunk)
    except Exception as error:
        # Each module for zstd has an error class of its own.
        known = isinstance(error, (tarfile.TarError, EOFError, OSError, ValueError))
        if not known and type(error).__name__ != "ZstdError":
            raise
        problems.append(f"{archive.name} breaks off ({error}); what came before is read")
    if skipped:
        problems.append(f"{archive.name}: {skipped} links or unsafe paths were left out")


@contextlib.contextmanager
def _tar_stream(archive: Path) -> Iterator[IO[bytes]]:
    with archive.open("rb") as file:
        if not archive.name.endswith(".zst"):
            yield file
            return
        with _zstd_stream(file, archive) as stream:
            yield stream


def _zstd_stream(file: IO[bytes], archive: Path) -> Any:
    for module, opener in (
        ("compression.zstd", lambda zstd: zstd.ZstdFile(file)),
        (
            "zstandard",
            lambda zstd: zstd.ZstdDecompressor().stream_reader(file, read_across_frames=True),
        ),
        ("backports.zstd", lambda zstd: zstd.ZstdFile(file)),
    ):
        with contextlib.suppress(ImportError):
            return opener(importlib.import_module(module))
    if program := shutil.which("zstd"):
        return _output_of([program, "--decompress", "--stdout", "--quiet", "--", str(archive)])
    raise ReadingError(
        f"{archive} is compressed with zstd, and neither a Python module nor a program for it is "
        "installed.\npip install zstandard",
        "no-zstd",
    )


@contextlib.contextmanager
def _output_of(command: list[str]) -> Iterator[IO[bytes]]:
    # The program is zstd; the file's name is one argument, never a shell's.
    with subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield cast("IO[bytes]", process.stdout)
        finally:
            process.kill()


def _launch_key(launch: dict[str, Any]) -> tuple[Any, ...] | None:
    key = tuple(str(launch.get(part)) for part in ("launched", "host", "pid"))
    return key if "launched" in launch else None


def _make_labels_unique(sources: list[Source]) -> None:
    taken: set[str] = set()
    for source in sources:
        label, number = source.label, 2
        while label in taken:
            label = f"{source.label} ({number})"
            number += 1
        source.label = label
        taken.add(label)
