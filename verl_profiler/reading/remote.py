"""Runs in object storage: what is needed of them is downloaded once, and read like any other run.

    <home>/remote/<digest>/<name>/      the files, as they are there
    <home>/remote/<digest>/.listing     size and version of each, as of the last download

`cache_folder` has where that is and how it stays small.  A file that has changed is replaced whole, under
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
    listing,
    name_of,
    takes_threads,
)
from verl_profiler.events.shipping import SHIPPING_FILE, UPLOAD_FILE
from verl_profiler.events.vocabulary import RUN_FILE, step_of_folder
from verl_profiler.events.whole_files import replace_file, replacing
from verl_profiler.reading.cache_folder import evict, home
from verl_profiler.reading.formats.registry import EVENTS, PARQUET

# What describes a run is needed for any part of it.
_ABOUT = ("processes/", "open/")
_LISTING, _UPDATING = ".listing", ".updating"
# What an object's description has that differs for each content, and
# of its age.
_EXACT = ("ETag", "etag", "md5")
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "modify")
_SETTLED_S = 60.0
_AT_ONCE = 8
_TRIES = 2


def fetched(url: str) -> Path:
    """Download what is needed of a run, a step or a file, and return where it is.

    Args:
        url: Such as `s3://bucket/runs/my-run`, `…/step_5`, or a file of any format that is read.

    Raises:
        ReadingError: A package is missing, there is nothing, or it cannot be read or stored.
    """
    url = url.rstrip("/")
    try:
        filesystem, target = connect(url)
        name_of(url)
    except RemoteError as error:
        advice = (
            "" if "pip install" in str(error) else "\nName a run, such as s3://bucket/runs/my-run"
        )
        extra = f"\nor {install_line('remote')}" if not advice and "s3fs" in str(error) else ""
        raise ReadingError(f"{error}{advice}{extra}", "remote-run") from None
    # A step, or a file in one, needs what describes the run.
    names = url.split("/")
    depth = next((depth for depth in (1, 2) if step_of_folder(names[-depth]) is not None), 0)
    part = "/".join(names[len(names) - depth :])
    run_url, above = (each.removesuffix(part).rstrip("/") for each in (url, target))
    found = _listing(filesystem, above, run_url)
    if not any(path == target or path.startswith(f"{target}/") for path in found):
        raise ReadingError(
            f"{public(url)} does not exist, or is empty.\nName a run, such as s3://bucket/runs/my-run",
            "no-such-run",
        )
    if list(found) == [target]:
        place, name = _place(url.rpartition("/")[0], "files"), names[-1]
        _update(filesystem, place, {name: (target, found[target])}, remove=False)
        return place / name
    place = _place(run_url, name_of(run_url))
    files = {path.removeprefix(f"{above}/"): (path, about) for path, about in found.items()}
    needed = {name: source for name, source in files.items() if _is_needed(name, part)}
    _update(filesystem, place, needed, remove=not part)
    return place / part


def is_downloaded(path: Path) -> bool:
    """Return whether a path is a copy of something in object storage."""
    with contextlib.suppress(ReadingError):
        return path.absolute().is_relative_to((home() / "remote").absolute())
    return False


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


def _is_needed(name: str, part: str) -> bool:
    """Whether a file is needed to read a run, or only a step of it or a file in one."""
    path = PurePosixPath(name)
    if path.is_absolute() or any(each.startswith(".") for each in path.parts):
        return False
    if part and not name.startswith((part, *_ABOUT)):
        return name in (RUN_FILE, SHIPPING_FILE, UPLOAD_FILE)
    return name.endswith((".json", ".sqlite", *EVENTS, *PARQUET))


def _place(url: str, name: str) -> Path:
    """Make the folder for a URL."""
    place = home()
    # Credentials in a URL do not make it another one; another endpoint does.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    digest = hashlib.sha256(f"{public(url.rstrip('/'))}\0{endpoint}".encode()).hexdigest()[:16]
    folder = place / "remote" / digest
    try:
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{folder} is another user's")
    except OSError as error:
        raise _unwritable(place, error) from error
    evict()
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
            now_s = time.time()
            wanted = {name: _version(about, now_s) for name, (_, about) in files.items()}
            changed = [
                name
                for name, version in wanted.items()
                if not version or known.get(name) != version or not (place / name).is_file()
            ]

            def download(name: str) -> bool:
                return _download(filesystem, files[name][0], place / name)

            with ThreadPoolExecutor(_AT_ONCE if takes_threads(filesystem) else 1) as pool:
                for name, is_there in zip(changed, pool.map(download, changed), strict=True):
                    known.pop(name, None)
                    if is_there:
                        known[name] = wanted[name]
            if remove:
                for name in [name for name in known if name not in wanted]:
                    (place / name).unlink(missing_ok=True)
                    del known[name]
            replace_file(stored, json.dumps(known).encode())
    except OSError as error:
        raise _unwritable(place, error) from error


def _download(filesystem: Any, path: str, target: Path) -> bool:
    """Download a file whole; return False for one that was removed meanwhile."""
    for number in range(_TRIES):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as file:
                filesystem.get_file(path, file.name)
        except FileNotFoundError:
            return False
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
            break
    return True


def _version(about: Mapping[str, Any], now_s: float) -> str:
    """Return what changes when an object does; empty where it may change within the same second.

    SFTP has no tags, and times in whole seconds.  The server's clock may be off by less than a minute.
    """
    written: Any = next((about[key] for key in _TIMES if about.get(key) is not None), None)
    if isinstance(written, datetime):
        written = written.timestamp()
    exact = any(about.get(key) is not None for key in _EXACT)
    numbered = isinstance(written, (int, float)) and not exact
    if numbered and written % 1 == 0 and now_s - written < _SETTLED_S:
        return ""
    keys = ("size", *_EXACT, *_TIMES)
    return "|".join(str(about[key]) for key in keys if about.get(key) is not None)


def _unwritable(place: Path, error: OSError) -> ReadingError:
    return ReadingError(
        f"the files cannot be stored in {place}: {error.strerror or error}.\nSet VERL_PROFILER_CACHE_HOME to "
        "a directory with room for them",
        "cache-place",
    )
