"""`upload.json`, beside a run in object storage: up to when that has the run, and whether more will come.

It is not in the run directory itself.  Where driver and upload are killed together, readers report by it
that the upload did not end.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_profiler.events.files import parse_json, read_object
from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.events.redaction import public
from verl_profiler.events.shipping import UPLOAD_FILE, UPLOAD_FORMAT_VERSION, iso
from verl_profiler.events.vocabulary import RUN_FILE
from verl_profiler.storage.remote_files import RemoteFiles

__all__ = ["UploadAccount"]

_SHOWN = 5
_LINE = 500


class UploadAccount:
    """Writes `upload.json`.

    Args:
        files: Where to.
        run: The run directory.
        url: Where to, for messages.
        every_s: The interval between two uploads; None where a command uploads once.
    """

    def __init__(self, files: RemoteFiles, run: Path, url: str, every_s: float | None) -> None:
        self._files = files
        self._every_s = every_s
        self._uploaded: str | None = None
        launch: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            launch = read_object(run / RUN_FILE)
        self._where = {
            "host": launch.get("host"),
            "directory": str(run.absolute()),
            "url": public(url),
        }

    def take_over(self) -> None:
        """Continue that of an earlier upload."""
        # Whatever a client raises, there is none then.
        with contextlib.suppress(Exception):
            earlier = mapping_or_empty(parse_json(self._files.read(UPLOAD_FILE)))
            uploaded = earlier.get("uploaded")
            self._uploaded = uploaded if isinstance(uploaded, str) else None

    def write(
        self,
        uploaded_s: float | None = None,
        *,
        ended: bool = False,
        failed: Sequence[str] = (),
    ) -> None:
        """Replace it.

        Args:
            uploaded_s: When a round began that has just uploaded all that was due; None if none has.
            ended: Whether nothing more is uploaded.
            failed: What could not be uploaded, as sentences.

        Raises:
            Exception: The storage's.
        """
        now = iso(time.time())
        self._uploaded = iso(uploaded_s) or self._uploaded
        content = {
            "format": UPLOAD_FORMAT_VERSION,
            **self._where,
            "every_s": self._every_s,
            "uploaded": self._uploaded,
            "updated": now,
            "ended": now if ended else None,
            "failed": len(failed),
            "problems": [each[:_LINE] for each in failed[:_SHOWN]],
        }
        self._files.write(UPLOAD_FILE, (json.dumps(content, indent=1) + "\n").encode())
