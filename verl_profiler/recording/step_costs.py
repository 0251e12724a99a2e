"""What the profiler does and takes, per step, as events of its own: `profiler_cost`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from verl_profiler.recording.clock import now
from verl_profiler.recording.encoding import Event, Target

if TYPE_CHECKING:
    from verl_profiler.recording.recorder import Recorder

INTERVAL_S = 10.0


class StepCosts:
    """Counts lines and bytes by step, and divides the time that was spent among them.

    Args:
        recorder: Has what was spent and dropped.
        write: Writes an event.

    Attributes:
        own_events: Events that were made here.
    """

    def __init__(self, recorder: Recorder, write: Callable[[Event], None]) -> None:
        self._recorder = recorder
        self._write = write
        self._by_step: dict[int, list[int]] = {}
        # What had been spent and lost at the last report.
        self._spent_then: dict[str, int] = {}
        self._dropped_then = 0
        self._reported_ns = now()
        self.own_events = 0

    def written(self, target: Target, lines: list[bytes]) -> None:
        """Count lines."""
        cost = self._by_step.setdefault(target.step, [0, 0])
        cost[0] += len(lines)
        cost[1] += sum(map(len, lines))

    def after_flush(self, *, final: bool) -> None:
        """Write an event per step since the last report, if that is due."""
        at_ns = now()
        if not final and at_ns - self._reported_ns < INTERVAL_S * 1e9:
            return
        self._reported_ns = at_ns
        costs, self._by_step = self._by_step, {}
        events = sum(count for count, _ in costs.values())
        if not events:
            return
        dropped = self._recorder.dropped
        spent_then, self._spent_then = self._spent_then, self._recorder.spent()
        lost, self._dropped_then = dropped - self._dropped_then, dropped
        for position, (step, (count, size)) in enumerate(sorted(costs.items())):
            share = count / events
            extra = {
                "events": count,
                "bytes": size,
                # Drops have no step of their own; they are reported once.
                "dropped": lost if position == 0 else 0,
                **{
                    name: round((spent_ns - spent_then.get(name, 0)) * share / 1e9, 9)
                    for name, spent_ns in self._spent_then.items()
                },
            }
            self.own_events += 1
            self._write(("profiler_cost", None, at_ns, extra, step))
