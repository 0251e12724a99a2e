"""What goes from the rollout of an asynchronous run to its trainer: queues, versions, samples."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_profiler.events.json_values import is_list, is_mapping
from verl_profiler.live.follow import Line

__all__ = ["Flow", "Taken"]

_STATES = ("ready", "running", "pending", "failed", "capacity")
_KEPT_STEPS = 50
# Damaged lines can name any number of replicas and queues.
_KEPT_NAMES = 64
_WORD = 100


@dataclass
class Taken:
    """The samples that a step consumed, and the prompts that it dropped.

    Args:
        dispatched: The earliest step that dispatched one of them.
        behind: Versions of the weights behind the trainer, of each sample's oldest token.
        dropped: Prompts by reason.
    """

    dispatched: int | None = None
    samples: int = 0
    behind: list[int] = field(default_factory=list[int])
    dropped: Counter[str] = field(default_factory=Counter[str])


class Flow:
    """What the latest lines of the trainer, its queue and the rollouter contain.

    Attributes:
        versions: By replica, when its weights were synced last, in seconds since 1970, and the version.
        trainer_version: The version that the trainer had when it last took samples or synced.
        queues: By queue, the time of its latest line, and prompts by state with its capacity.
        taken: Samples by the step that consumed them.
        times: When samples were consumed lately, in seconds since 1970.
        later: How many samples were consumed by a later step than the one that dispatched them.
        earlier: How many were not.
        has_rollouter: Whether a process of that role, of `verl.experimental`, wrote a line.
        is_separate: Whether replicas have devices of their own.
    """

    def __init__(self) -> None:
        self.versions: dict[int, tuple[float, int]] = {}
        self.trainer_version: int | None = None
        self.queues: dict[str, tuple[float, dict[str, int]]] = {}
        self.taken: dict[int, Taken] = {}
        self.times: deque[float] = deque()
        self.later = 0
        self.earlier = 0
        self.has_rollouter = False
        self.is_separate = False

    def is_asynchronous(self, launch: Mapping[str, Any]) -> bool:
        """Return whether steps train on samples of earlier steps."""
        training = launch.get("training")
        declared = is_mapping(training) and bool(training.get("asynchronous"))
        return declared or self.has_rollouter or self.later > self.earlier / 4

    def take(self, line: Line, number: int, end_s: float) -> None:
        """Update the state with one line; others than those about samples, queues and syncs are ignored."""
        extra = line.extra or {}
        if line.event == "queue_depth":
            self._queue(extra, end_s)
        elif line.event == "weight_sync":
            self._sync(extra, end_s)
        elif line.event == "sample_consumed":
            self._consumed(extra, number, end_s)
        elif line.event == "sample_dropped":
            reason = extra.get("reason")
            step = _whole(extra.get("dropped_step"))
            if step is not None:
                self._of(step).dropped[reason[:_WORD] if isinstance(reason, str) else "?"] += 1

    def _queue(self, extra: Mapping[str, Any], end_s: float) -> None:
        name = extra.get("queue")
        if not isinstance(name, str) or end_s < self.queues.get(name, (0.0,))[0]:
            return
        counts = {state: _whole(extra.get(state)) for state in _STATES}
        known = {state: count for state, count in counts.items() if count is not None}
        if name in self.queues or len(self.queues) < _KEPT_NAMES:
            self.queues[name[:_WORD]] = end_s, known

    def _sync(self, extra: Mapping[str, Any], end_s: float) -> None:
        version, replicas = _whole(extra.get("weight_version")), extra.get("replicas")
        if version is None or not is_list(replicas):
            return
        self.is_separate |= extra.get("pool") == "standalone"
        self.trainer_version = max(self.trainer_version or 0, version)
        for replica in map(_whole, replicas[:_KEPT_NAMES]):
            if replica is not None and end_s >= self.versions.get(replica, (0.0,))[0]:
                self.versions[replica] = end_s, version
        while len(self.versions) > _KEPT_NAMES:
            del self.versions[max(self.versions)]

    def _consumed(self, extra: Mapping[str, Any], number: int, end_s: float) -> None:
        step = _whole(extra.get("consumed_step"))
        if step is None:
            return
        if step > number:
            self.later += 1
        else:
            self.earlier += 1
        self.times.append(end_s)
        taken = self._of(step)
        taken.samples += 1
        taken.dispatched = number if taken.dispatched is None else min(taken.dispatched, number)
        trainer, oldest = _whole(extra.get("trainer_version")), extra.get("min_weight_version")
        if trainer is not None:
            self.trainer_version = max(self.trainer_version or 0, trainer)
            if isinstance(oldest, int):
                taken.behind.append(trainer - oldest)

    def _of(self, step: int) -> Taken:
        taken = self.taken.setdefault(step, Taken())
        while len(self.taken) > _KEPT_STEPS:
            del self.taken[min(self.taken)]
        return taken


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else None
