"""`shipping.json`: which nodes ship to a run directory, and up to when they have."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_profiler.events.files import read_object
from verl_profiler.events.shipping import FORMAT_VERSION, SHIPPING_FILE, iso
from verl_profiler.events.whole_files import replace_file

__all__ = ["earlier", "write_account"]


def earlier(run: Path) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """Return what an earlier `shipping.json` has: where the run directory was on the nodes, and these by disk."""
    found: dict[str, dict[str, Any]] = {}
    directory = None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        content = read_object(run / SHIPPING_FILE)
        directory = str(content["directory"])
        for row in content["nodes"]:
            processes = {str(name): str(here) for name, here in row["processes"].items()}
            found[str(row["disk"])] = {**row, "processes": processes}
    return directory, found


def write_account(
    run: Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    directory: str,
    every_s: float | None,
    ended: bool,
) -> None:
    """Replace `shipping.json`; where that fails, the old one stays.

    Args:
        run: The run directory.
        rows: One per node with a disk of its own.
        directory: The run directory on the nodes.
        every_s: The interval between two shipments of events.
        ended: Whether nothing more is shipped.
    """
    now = iso(time.time())
    content = {
        "format": FORMAT_VERSION,
        "directory": directory,
        "every_s": every_s,
        "updated": now,
        "ended": now if ended else None,
        "nodes": list(rows),
    }
    with contextlib.suppress(OSError):
        replace_file(run / SHIPPING_FILE, (json.dumps(content, indent=1) + "\n").encode())
