"""Read what the processes of a run report about themselves: headers, what is open for long, evidence of hangs.

Nothing is written, locked or requested from the run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from verl_profiler.events.open_files import EVIDENCE_FOLDER, FOLDER
from verl_profiler.reading.descriptions import Evidence, Opened, described
from verl_profiler.reading.discovery import described_run
from verl_profiler.reading.listing import as_text
from verl_profiler.reading.problems import Problems

__all__ = ["ProcessFiles"]

_HANG = re.compile(r"[0-9]{1,3}")


class ProcessFiles:
    """The small files of a run directory.

    Args:
        directory: The run.

    Attributes:
        damaged: Problems found in run.json and the headers at the last read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damaged: list[str] = []

    def headers(self) -> dict[str, dict[str, Any]]:
        """Return the current headers of all processes by name, and record problems in them."""
        self.damaged = []
        return described_run(self.directory, self.damaged).headers

    def open_files(self) -> dict[str, dict[str, Any]]:
        """Return what each process has open for long, by name; see docs/stuck.md."""
        return self._described(FOLDER, Opened)

    def evidence(self) -> dict[str, dict[str, Any]]:
        """Return the evidence of the last hang that was found, by process; see docs/stuck.md."""
        numbers = [
            int(each.name)
            for each in (self.directory / EVIDENCE_FOLDER).glob("*")
            if _HANG.fullmatch(each.name)
        ]
        if not numbers:
            return {}
        return self._described(f"{EVIDENCE_FOLDER}/{max(numbers)}", Evidence)

    def _described(self, folder: str, kind: Any) -> dict[str, dict[str, Any]]:
        faults = Problems()
        found: dict[str, dict[str, Any]] = {}
        for path in sorted((self.directory / folder).glob("*.json")):
            shown = f"{folder}/{as_text(path.name)}"
            content = described(path, shown, kind, faults)
            if content is not None:
                found[as_text(path.stem)] = content
        self.damaged += faults.sentences()
        return found
