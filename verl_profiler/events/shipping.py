"""What both halves have of shipping: `shipping.json` and `upload.json`, and which files of a run travel."""

from __future__ import annotations

import time

SHIPPING_FILE = "shipping.json"
FORMAT_VERSION = 1
# In object storage only: whether the upload of the run has ended, and up to when it was complete.
UPLOAD_FILE = "upload.json"
UPLOAD_FORMAT_VERSION = 1
# A random name of the disk that a run directory is on; two nodes that share it read the same.
DISK_FILE = ".disk"
SUFFIXES = (".jsonl.gz", ".jsonl", ".json")
_JOURNAL = ("nsight", "journal")


def travels(name: str) -> bool:
    """Return whether a file of a node's run directory is brought to the driver's.

    That is the case for event files, headers, open calls and the journals of captures; the reports of
    captures are gathered on their own.

    Args:
        name: Its path below the run directory, with `/`.
    """
    parts = name.split("/")
    if len(parts) < 2 or any(part.startswith(".") for part in parts):
        return False
    if parts[0] == _JOURNAL[0] and tuple(parts[:2]) != _JOURNAL:
        return False
    return name.endswith(SUFFIXES)


def process_of(name: str) -> str | None:
    """Return the process that wrote a file, by its name; None for what belongs to the run."""
    folder, _, file = name.rpartition("/")
    if not folder or folder.startswith(_JOURNAL[0]):
        return None
    return next((file.removesuffix(suffix) for suffix in SUFFIXES if file.endswith(suffix)), None)


def iso(seconds: float | None) -> str | None:
    """Return seconds since 1970 as ISO-8601 text."""
    if seconds is None:
        return None
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1e6):06d}+00:00"
