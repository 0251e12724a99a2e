"""Runs in object storage: what is needed of them is downloaded once, and read like any other run.

    <home>/remote/<digest>/<name>/      the files, as they are there
    <home>/remote/<digest>/.listing     size and version of each, as of the last download

`cache_home` has where that is and how it stays small.  A file that has changed is replaced whole, under
the lock of one command at a time; whoever has it open reads on in the old one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from verl_profiler.errors import ReadingError, install_line
from verl_profiler.events.files import read_object
from verl_profiler.events.redaction import problem_of, public
from verl_profiler.events.remote import (
    RemoteError,
    connect,
    is_url,
    listing,
    name_of,
    takes_threads,
)
from verl_profiler.events.shipping import SHIPPING_FILE, UPLOAD_FILE
from verl_profiler.events.vocabulary import RUN_FILE, step_of_folder
from verl_profiler.events.whole_files import replace_file, replacing
from verl_profiler.reading import cache_home
from verl_profiler.reading.formats.registry import suffixes

__all__ = ["fetched", "is_downloaded", "is_url"]

# What describes a run is needed for any part of it.
_ABOUT = ("processes/", "open/")
_LISTING, _UPDATING = ".listing", ".updating"
# What an object's description has that differs for each content, and
# of its age.
_EXACT = ("ETag", "etag", "md5")
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "modify")
_UNSETTLED, _SETTLED_S = "unsettled", 60.0
_AT_ONCE = 8
_TRIES = 2


def fetched(url: str) -> Path:
    """Download what is needed of a run, a step or a file, and return where it is.

    Args:
        url: Such as `s3://bucket/runs/my-run`, `…/step_5`, or a file of any format that is read.

    Raises:
        ReadingError: A package is missing, there is nothing, or it cannot be read or stored.
    """
    try:
        filesystem, target = connect(url.rstrip("/"))
        name = name_of(url)
    except RemoteError as error:
        advice = (
            "" if "pip install" in str(error) else "\nName a run, such as s3://bucket/runs/my-run"
        )
        extra = f"\nor {install_line('remote')}" if not advice and "s3fs" in str(error) else ""
        raise ReadingError(f"{error}{advice}{extra}", "remote-run") from None
    found = _listing(filesystem, target, url)
    if step_of_folder(name) is not None and found:
        run_url, _, step = url.rstrip("/").rpartition("/")
        above = target.rpartition("/")[0]
        everything = _listing(filesystem, above, run_url)
        return _run(filesystem, run_url, above, everything, only=f"{step}/") / step
    if list(found) == [target]:
        return _file(filesystem, url.rstrip("/"), target, found[target])
    if not found:
        raise ReadingError(
            f"{public(url)} does not exist, or is empty.\nName a run, such as s3://bucket/runs/my-run",
            "no-such-run",
        )
    return _run(filesystem, url, target, found)


def is_downloaded(path: Path) -> bool:
    """Return whether a path is a copy of something in object storage."""
    with contextlib.suppress(ReadingError):
        return path.absolute().is_relative_to((cache_home.home() / "remote").absolute())
    return False


def _file(filesystem: Any, url: str, target: str, about: Mapping[str, Any]) -> Path:
    """Download a file; of a step, with what describes the run."""
    folder, _, name = url.rpartition("/")
    run_url, _, step = folder.rpartition("/")
    if step_of_folder(step) is not None:
        above = target.rsplit("/", 2)[0]
        everything = _listing(filesystem, above, run_url)
        return _run(filesystem, run_url, above, everything, only=f"{step}/{name}") / step / name
    place = _place(folder, "files")
    _update(filesystem, place, {name: (target, about)}, remove=False)
    return place / name


def _listing(filesystem: Any, target: str, url: str) -> dict[str, Any]:
    """Return what is there, by path; nothing where there is no such thing."""
    try:
        return listing(filesystem, target)
    except FileNotFoundError:
        return {}
    except Exception as error:
        raise ReadingError(
            f"{public(url)} cannot be read: {problem_of(error)}.\nCheck the URL, the credentials in "
            "the environment and the endpoint",
            "remote-run",
        ) from error


def _run(
    filesystem: Any, url: str, target: str, found: Mapping[str, Any], *, only: str | None = None
) -> Path:
    """Download a run, or what a part of it needs.

    Args:
        filesystem: fsspec's.
        url: The run.
        target: Its path there.
        found: What is there.
        only: What the names of the events begin with that are needed; None for all.
    """
    files: dict[str, tuple[str, Mapping[str, Any]]] = {}
    prefix = f"{target}/"
    for path, about in found.items():
        name = str(path).removeprefix(prefix)
        if _is_needed(name, only):
            files[name] = (str(path), about)
    place = _place(url, name_of(url))
    _update(filesystem, place, files, remove=only is None)
    return place


def _is_needed(name: str, only: str | None) -> bool:
    path = PurePosixPath(name)
    if path.is_absolute() or any(part.startswith(".") for part in path.parts):
        return False
    if only is not None and not name.startswith((only, *_ABOUT)):
        return name in (RUN_FILE, SHIPPING_FILE, UPLOAD_FILE)
    return name.endswith((".json", *suffixes("events", "parquet", "nsys_export")))


def _place(url: str, name: str) -> Path:
    """Make the folder for a URL."""
    home = cache_home.home()
    # Credentials in a URL do not make it another one; another endpoint does.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    digest = hashlib.sha256(f"{public(url.rstrip('/'))}\0{endpoint}".encode()).hexdigest()[:16]
    folder = home / "remote" / digest
    try:
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{folder} is another user's")
    except OSError as error:
        raise _unwritable(home, error) from error
    cache_home.evict()
    return folder / name


def _update(
    filesystem: Any,
    place: Path,
    files: Mapping[str, tuple[str, Mapping[str, Any]]],
    *,
    remove: bool,
) -> None:
    """Download what is not there as it is now; one command at a time does so.

    Args:
        filesystem: fsspec's.
        place: Where to.
        files: Path and description there, by name.
        remove: Remove files that are not there any more.
    """
    stored = place.parent / _LISTING
    try:
        with open(place.parent / _UPDATING, "w") as updating:
            fcntl.flock(updating, fcntl.LOCK_EX)
            known: dict[str, Any] = {}
            with contextlib.suppress(OSError, ValueError):
                known = read_object(stored)
            began = time.time()
            wanted = {name: _version(about) for name, (_, about) in files.items()}
            changed = [
                name
                for name, version in wanted.items()
                if known.get(name) != version or not (place / name).is_file()
            ]

            def download(name: str) -> tuple[str, str | None]:
                return _download(filesystem, files[name], place / name, name)

            with ThreadPoolExecutor(_AT_ONCE if takes_threads(filesystem) else 1) as pool:
                for name, version in pool.map(download, changed):
                    if version is None:
                        known.pop(name, None)
                    elif _may_change(files[name][1], began):
                        known[name] = f"{wanted[name]}|{_UNSETTLED}"
                    else:
                        known[name] = wanted[name]
            if remove:
                for name in [name for name in known if name not in wanted]:
                    (place / name).unlink(missing_ok=True)
                    del known[name]
            replace_file(stored, json.dumps(known).encode())
    except OSError as error:
        raise _unwritable(place, error) from error


def _download(
    filesystem: Any, source: tuple[str, Mapping[str, Any]], target: Path, name: str
) -> tuple[str, str | None]:
    """Download a file whole; one that was removed meanwhile is None."""
    path, _ = source
    for number in range(_TRIES):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as file:
                filesystem.get_file(path, file.name)
        except FileNotFoundError:
            return name, None
        except Exception as error:
            if number + 1 < _TRIES:
                continue
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ReadingError(
                f"{public(path)} cannot be downloaded: {problem_of(error)}",
                "remote-run",
            ) from error
        else:
            return name, name
    return name, None


def _version(about: Mapping[str, Any]) -> str:
    """Return what changes when an object does."""
    keys = ("size", *_EXACT, *_TIMES)
    return "|".join(str(about[key]) for key in keys if about.get(key) is not None)


def _may_change(about: Mapping[str, Any], now: float) -> bool:
    """Return whether an object may be replaced by one of the same version.

    SFTP and libhdfs have no tags, and times in whole seconds.  The server's clock may be off by less than
    a minute.
    """
    if any(about.get(key) is not None for key in _EXACT):
        return False
    written = next((about[key] for key in _TIMES if about.get(key) is not None), None)
    if isinstance(written, datetime):
        written = written.timestamp()
    if not isinstance(written, (int, float)):
        return False
    return written % 1 == 0 and now - written < _SETTLED_S


def _unwritable(place: Path, error: OSError) -> ReadingError:
    return ReadingError(
        f"the files cannot be stored in {place}: {error.strerror or error}.\nSet VERL_PROFILER_CACHE_HOME to "
        "a directory with room for them",
        "cache-place",
    )
