"""Lines between their encoding and their file: those of one batch, and what a disk refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from verl_profiler.recording.encoding import Event, LineEncoder, Target
from verl_profiler.recording.writer import EventFiles

if TYPE_CHECKING:
    from verl_profiler.recording.byte_budget import ByteBudget
    from verl_profiler.recording.step_costs import StepCosts

# Lines that wait for a file that the caller chose.
_KEPT = 1000


class LineBatch:
    """The lines that wait.

    Args:
        encoder: Encodes events.
        files: Get the lines.
        budget: Of bytes, if there is one.
        refuse: Called with the reason where an event cannot be encoded.

    Attributes:
        observers: Get the lines that were written.
    """

    def __init__(
        self,
        encoder: LineEncoder,
        files: EventFiles,
        budget: ByteBudget | None,
        refuse: Callable[[str], None],
    ) -> None:
        self._encoder = encoder
        self._files = files
        self._budget = budget
        self._refuse = refuse
        self._targets: list[Target] = []
        self.observers: list[StepCosts | ByteBudget] = []

    def waiting(self) -> int:
        """Return how many lines wait."""
        return sum(len(target.lines) for target in list(self._targets))

    def add(self, event: Event) -> int:
        """Add the line of an event; return its bytes, 0 where there is none."""
        try:
            target, line = self._encoder.encode(event)
            if self._budget is not None and not self._budget.admits(event[0], len(line)):
                return 0
            if not target.lines:
                self._targets.append(target)
            target.lines.append(line)
        except Exception as error:  # noqa: BLE001  a fault of one event must not cost another
            self._refuse(f"{type(error).__name__} in the writer")
            return 0
        return len(line)

    def write(self) -> None:
        """Write the lines; other threads run meanwhile, and what the disk refuses stays."""
        for target in self._targets:
            if self._files.refuses and target.owned:
                continue
            lines = target.lines.copy()
            self._files.append(target.path, target.lines, owned=target.owned)
            del lines[len(lines) - len(target.lines) :]
            for observer in self.observers if lines else ():
                observer.written(target, lines)
            if not target.owned:
                self._files.drop("disk", target.lines, _KEPT)
        self._targets = [target for target in self._targets if target.lines]

    def write_own(self, event: Event) -> None:
        """Write an event of the profiler's own account, which is not accounted for itself."""
        target, line = self._encoder.encode(event)
        if self._budget is None or self._budget.admits(event[0], len(line)):
            lines = [line]
            self._files.append(target.path, lines, owned=target.owned)
            if lines:
                self._targets += [] if target.lines else [target]
                target.lines += lines

    def clear(self) -> None:
        """Give up the lines that wait."""
        self._targets = []
