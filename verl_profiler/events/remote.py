"""Runs in object storage: what is a URL, and the file system behind it.  Imported by both halves.

fsspec and what it needs for a protocol are imported where a URL is used, and nowhere else.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, TypeGuard

from verl_profiler.events.redaction import problem_of, public

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
# What to install for a protocol.
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "adl": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
# A key is all that there is: folders need not be made, and `makedirs` would make the bucket.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"})
# SFTP's client keeps no listings, and takes the option for one of SSH's.
_NEED_LISTINGS_CACHE = frozenset({"sftp", "ssh"})
# They have one connection, which only one thread may use: paramiko waits forever otherwise.
_OF_ONE_THREAD = frozenset({"sftp", "ssh", "ftp", "smb"})
# Nothing but this process would have what is written there.
_OF_ONE_PROCESS = frozenset({"memory"})


class RemoteError(Exception):
    """A URL that cannot be used; the message states what to do."""


def is_url(text: object) -> TypeGuard[str]:
    """Return whether a path is a URL, such as `s3://bucket/runs/my-run`."""
    return isinstance(text, str) and _URL.match(text) is not None


def name_of(url: str) -> str:
    """Return the last part of a URL's path.

    Raises:
        RemoteError: It has none.
    """
    rest = _URL.sub("", url, count=1).rstrip("/")
    _, _, name = rest.rpartition("/")
    if not name or "/" not in rest:
        raise RemoteError(f"{public(url)} has no folder for the run, such as s3://bucket/my-run")
    return name


def joined(path: str, name: str) -> str:
    """Return the path of a file in a folder."""
    return f"{path.rstrip('/')}/{name}"


def has_folders(url: str) -> bool:
    """Return whether a folder must be made before a file is written there."""
    match = _URL.match(url)
    return match is None or match[1].lower() not in _OBJECT_STORES


def connect(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, as fsspec has it, and the path in it.

    Raises:
        RemoteError: It is not a URL that can be used, or a package for it is missing.
    """
    match = _URL.match(url)
    if match is None or "::" in url:
        raise RemoteError(f"{public(url)} is not a URL such as s3://bucket/runs/my-run")
    protocol = match[1].lower()
    if protocol in _OF_ONE_PROCESS:
        raise RemoteError(f"{protocol}:// exists in one process only; name storage, such as s3://…")
    package = _PACKAGES.get(protocol)
    try:
        fsspec: Any = importlib.import_module("fsspec")
        cache = {} if protocol in _NEED_LISTINGS_CACHE else {"use_listings_cache": False}
        filesystem, path = fsspec.core.url_to_fs(url, **cache)
    except ImportError as error:
        missing = package or "fsspec"
        raise RemoteError(
            f"{protocol}:// needs a package that is not installed ({problem_of(error)}).\npip install {missing}"
        ) from None
    except Exception as error:  # noqa: BLE001  any client's: some connect at once
        raise RemoteError(f"{public(url)} cannot be used: {problem_of(error)}") from None
    return filesystem, str(path).rstrip("/")


def takes_threads(filesystem: Any) -> bool:
    """Return whether several threads may use a file system."""
    protocol = filesystem.protocol
    names = {protocol} if isinstance(protocol, str) else set(protocol)
    return names.isdisjoint(_OF_ONE_THREAD)


def listing(filesystem: Any, path: str) -> dict[str, Any]:
    """Return the files below a path, or the file that it is, with what its client knows of each.

    Raises:
        FileNotFoundError: There is nothing.
        Exception: The client's.
    """
    filesystem.invalidate_cache()
    found = filesystem.find(path, detail=True)
    if not found:
        # Most clients find nothing where they are not answered, too.
        filesystem.info(path)
    return found
