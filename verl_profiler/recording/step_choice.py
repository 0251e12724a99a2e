"""Choose the steps whose event files are kept (`profiler.events.keep_steps`), in the trainer's process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

from verl_profiler.events.json_values import is_object
from verl_profiler.events.vocabulary import step_folder, steps_of_folder
from verl_profiler.recording.worker_config import KeepSteps

__all__ = ["StepChoice"]

# From this share on of samples that a later step consumed, training is asynchronous.
_LATER_SHARE = 0.2


class StepChoice:
    """Chooses the steps to keep.

    Args:
        keep: What to keep.
        steps_per_file: So many steps share a file, and are kept or pruned together.
        captured: Steps that a capture was made of; always kept.
    """

    def __init__(self, keep: KeepSteps, steps_per_file: int, captured: Iterable[int] = ()) -> None:
        self._keep = keep
        self._per_file = steps_per_file
        self._captured = {step_folder(step, steps_per_file) for step in captured}
        # Folders that are neither pruned nor kept for good, with their longest step.
        self._open: dict[str, float] = {}
        self._latest: deque[float] = deque(maxlen=max(keep.last, 1))
        self._first_step: int | None = None
        self._slow: dict[str, float] = {}
        self._alarmed: set[str] = set()
        self._for_good: list[str] = [step_folder(0, steps_per_file)]
        self._consumed = self._later = 0
        self._until = -1

    @property
    def is_asynchronous(self) -> bool:
        """Whether steps consume what earlier ones dispatched, so that none is pruned."""
        return self._later > _LATER_SHARE * self._consumed

    def consumed(self, extra: Any, step: Any) -> None:
        """Note a sample that a step consumed."""
        at = extra.get("consumed_step") if is_object(extra) else None
        if type(at) is int and type(step) is int:
            self._consumed += 1
            self._later += at > step

    def alarmed(self, step: int) -> None:
        """Note a step in which a phase was stuck: it counts as slower than all others."""
        self._alarmed.add(step_folder(step, self._per_file))

    def ended(self, step: int, duration_s: float) -> dict[str, Any] | None:
        """Note the end of a step.

        Returns:
            The new content of `retention.json`; None where it stays as it is.
        """
        if self._first_step is None:
            self._first_step = step
            # What precedes it is of the start; of a resumed training, not in step 0.
            before = step_folder(max(step - 1, 0), self._per_file)
            if before not in self._for_good:
                self._for_good.append(before)
        folder = step_folder(step, self._per_file)
        if _last_step(folder) <= self._until:
            return None
        self._open[folder] = max(self._open.get(folder, 0.0), duration_s)
        self._latest.append(duration_s)
        until = step - self._keep.last
        over = [each for each in self._open if _last_step(each) <= until]
        if not over or self.is_asynchronous:
            return None
        usual_s = median(self._latest)
        for each in over:
            self._place(each, self._open.pop(each), usual_s)
            self._until = max(self._until, _last_step(each))
        return {"format": 1, "until": self._until, "kept": [*self._for_good, *self._slow]}

    def _place(self, folder: str, longest_s: float, usual_s: float) -> None:
        first = self._first_step or 0
        steps = steps_of_folder(folder)
        if folder in self._for_good:
            return
        if folder in self._captured or (steps and steps[0] < first + self._keep.first):
            self._for_good.append(folder)
            return
        ratio = longest_s / usual_s if usual_s > 0 else 1.0
        self._slow[folder] = float("inf") if folder in self._alarmed else ratio
        self._alarmed.discard(folder)
        # As many files as so many steps fill.
        if len(self._slow) > -(-self._keep.slow // self._per_file):
            # Of equal ones, the last.
            del self._slow[min(reversed(self._slow), key=lambda each: self._slow[each])]


def _last_step(folder: str) -> int:
    steps = steps_of_folder(folder)
    return steps[1] if steps is not None else -1
