"""Capture tools: everything that differs between nsys, the torch profiler and any further one.

Each module of this folder is one tool and defines `TOOL`, an instance of a subclass of `Tool`; the
module's name is the value of `profiler.nsight.tool`.  Training processes load the tool of their run,
so a module imports only the standard library and this package before it is used.
"""

from __future__ import annotations

import abc
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from verl_profiler.capture.plan import NsightSettings, RoleCapture
    from verl_profiler.capture.record import CaptureRecord

# The tool of a run that names none, and of a journal line that names none.
DEFAULT = "nsys"
# The handle of a capture that verl started itself.
STARTED_BY_HOST = object()

Options = Mapping[str, str]


class MachineCheck(NamedTuple):
    """One line of `verl-profiler check`; its fields are the keys of `--json`.

    Args:
        topic: What was checked.
        good: False if something would fail or be missing.
        message: What was found.
        advice: What to do about it; empty if nothing.
        details: Further lines.
    """

    topic: str
    good: bool
    message: str
    advice: str = ""
    details: tuple[str, ...] = ()

    def text(self) -> str:
        """Return it as lines for a terminal."""
        lines = [f"{' ' if self.good else '!'} {self.topic:<21} {self.message}"]
        lines += [f"    {line}" for line in (*self.details, self.advice) if line]
        return "\n".join(lines)


class Tool(abc.ABC):
    """One capture tool.

    Attributes:
        name: Its value in settings, journals and `captures.json`; also the name of its module.
        title: Its name in sentences.
        suffix: How the names of its reports end.
        unfinished_suffixes: How the names of files end that it will still turn into a report.
        finishes_late: Whether a report may be finished after its capture has ended.
        count_cause: Why it is missing if other captures of the process have one.
        no_report_cause: Why it is missing otherwise, and where the one above is empty.
    """

    name: str
    title: str
    suffix: str
    unfinished_suffixes: tuple[str, ...] = ()
    finishes_late = False
    count_cause = ""
    no_report_cause = "no report was written: the process was killed first, or the disk is full"

    # In the driver, before training.

    def configure(self, native: Any, directory: Path) -> None:
        """Set what verl's own profiler needs for this tool.

        Args:
            native: `global_profiler` of verl's config, changed in place.
            directory: Where the tool writes on each node.
        """
        del native, directory

    def options(
        self, config: Any, settings: NsightSettings, key: str, output: str, captures: int
    ) -> dict[str, str]:
        """Return the options that the tool is started with for one role.

        Args:
            config: verl's config, translated.
            settings: `profiler.nsight`.
            key: The role's key in `profiler.nsight.roles`.
            output: The path of the reports, without process and suffix.
            captures: How many captures each process will make.

        Raises:
            ConfigError: For an option that the tool cannot be given.
        """
        del config, settings, key, output, captures
        return {}

    def command(self, options: Options) -> list[str]:
        """Return the command line that starts a process under the tool; empty if there is none."""
        del options
        return []

    def ray_nsight(self, options: Options) -> dict[str, str] | None:
        """Return the `nsight` entry of a captured actor's runtime environment, or None."""
        del options
        return None

    # On a node, before training.

    def check_node(
        self, options: Mapping[str, Options], path: str | None = None
    ) -> tuple[list[str], str]:
        """Return what prevents captures on this node, each with its fix, and the version of the tool's program.

        Args:
            options: Role → its options.
            path: PATH for the tool's program; None for that of the parent process, which is Ray.
        """
        del options, path
        return [], ""

    def check_machine(self) -> Iterable[MachineCheck]:
        """Yield what `verl-profiler check` prints about this machine."""
        return ()

    # In a captured process.

    @abc.abstractmethod
    def start(self, capture: RoleCapture) -> Any:
        """Start a capture.

        Returns:
            A handle for `stop`; None if none was started, or if verl's own start was called, whose
            probe records it.
        """

    @abc.abstractmethod
    def stop(self, handle: Any, path: Path) -> None:
        """End a capture.

        Args:
            handle: What `start` returned, or `STARTED_BY_HOST`.
            path: The report, for a tool that writes it now.
        """

    # When reports are gathered.

    def report_names(self, process: str, number: int) -> Iterator[str]:
        """Yield the names that the report of a process's n-th capture may have, counted from 1."""
        yield f"{process}.{number}{self.suffix}"

    def unclaimed_reports(
        self, raw: Path, captures: list[CaptureRecord]
    ) -> Iterator[tuple[Path, CaptureRecord]]:
        """Yield reports that no journal lists, with the facts in their names.

        Args:
            raw: Where the tool wrote.
            captures: The captures of the journals.

        Yields:
            The file, and its record.
        """
        del raw, captures
        yield from ()

    def is_empty(self, report: Path) -> str:
        """Return why a report of some bytes holds nothing; empty if it holds something."""
        del report
        return ""

    def export(self, report: Path) -> Path | None:
        """Convert a report to what `verl_profiler.reading` reads; None if there is no such form.

        Raises:
            ReadingError: If it cannot be converted here.
        """
        del report
        return None


def names() -> list[str]:
    """Return the names of all tools."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: Any) -> Tool | None:
    """Return the tool of a name, or None if there is none."""
    return get(name) if name in names() else None


def get(name: str) -> Tool:
    """Return the tool of a name.

    Raises:
        ImportError: If there is none.
    """
    return importlib.import_module(f"{__name__}.{name}").TOOL


def every() -> list[Tool]:
    """Return all tools."""
    return [get(name) for name in names()]
