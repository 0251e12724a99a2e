"""Hold events in memory, write them from one background thread, survive fork and exit.

The caller's thread appends one tuple to a deque and returns.  Everything else (identity of the
process, timestamps, JSON, files) happens in the writer thread, at most `flush_interval_s` later.
Nothing here raises into the host, holds a lock across host code, or calls fsync.

Every event that is taken is written or counted: `Recorder.account`.  A file only ever holds whole
lines: the process owns it alone (see `process_header.claim_name`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_profiler.recording import context, process_end
from verl_profiler.recording.background_writer import BackgroundWriter
from verl_profiler.recording.clock import Anchor, anchor_for_this_boot, now
from verl_profiler.recording.encoding import Event
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import WorkerConfig

# A thread's CPU clock costs 0.9 µs, a third of a wrapper: it is read where the time in ns is a
# multiple of this, which is as good as by chance.
SAMPLED = 17
# Bytes of long values in the queue.
_LONG_VALUES_BYTES = 64 << 20


class _Ended:
    """Stands in for the queue once recording has ended: it counts what comes too late."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        # An empty queue sends the wrappers to `Recorder.append`.
        return 0

    def append(self, _item: Event) -> None:
        # CPython 3.10 to 3.12 switch threads at calls and backward jumps only: no count is lost here
        # or at the recorder's other counters.
        self.count += 1


class Recorder:
    """Records the events of this process into one run directory.

    Args:
        config: Where to write and what.
        identify: Returns who this process is, or None while that is not known yet.
        describe: Returns further keys of the header; called in the writer thread.

    Attributes:
        taken: The queue of events; `queue` is where host threads append, `late` once recording ended.
        wrapper_ns: Time spent in wrappers; wrapper_cpu_ns: on a core, estimated from a sample.
        alive_ns: When a probed coroutine began last in whose event loop requests may wait: the loop ran then.
        bad_events: Events that cannot be recorded.
    """

    def __init__(
        self,
        config: WorkerConfig,
        identify: Callable[[], Identity | None],
        describe: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        # What wrappers use stands together: between two of them the processor forgets it.
        self.wrapper_ns = 0
        self.wrapper_cpu_ns = 0
        self.alive_ns = 0
        self.steps = frozenset(config.events.steps) if config.events.steps is not None else None
        self.taken: deque[Event] = deque()
        self.queue: Any = self.taken
        self.limit = config.max_pending
        self.config = config
        self.anchor: Anchor = anchor_for_this_boot(config.clock)
        self.identify = identify
        self.describe = describe
        self._begin()

    def _begin(self) -> None:
        """Begin anew: at the start, and in a forked child."""
        self.wrapper_ns = self.wrapper_cpu_ns = 0
        self.taken = self.queue = deque()
        self.late = _Ended()
        self._queue_full = 0
        self.bad_events = 0
        self._writer = BackgroundWriter(self)
        # Last: until then a forked child holds what is its parent's.
        self.pid = os.getpid()

    @property
    def directory(self) -> Path:
        """Where this process writes: the run directory, or the folder used in its place."""
        return self._writer.process.directory

    @property
    def name(self) -> str | None:
        """The process's name in the run, once it is known."""
        return self._writer.process.name

    @property
    def identity(self) -> Identity | None:
        """Who this process is, once it is known."""
        return self._writer.process.identity

    def append(self, item: Event) -> None:
        """Take one event; the only work done in the caller's thread."""
        queue = self.queue
        # One that holds something has its writer running.
        if 0 < len(queue) < self.limit:
            queue.append(item)
        else:
            self._append_first_or_drop(item)

    def _append_first_or_drop(self, item: Event) -> None:
        if self._writer.closing:
            self.late.append(item)
            return
        if len(self.queue) < self.limit:
            self.queue.append(item)
        else:
            self._queue_full += 1
        if not self._writer.is_running:
            self._writer.start()

    def append_long(self, item: Event, size: int) -> None:
        """Take one event whose values have `size` bytes, unless too many of these wait."""
        if len(self.queue) * size > _LONG_VALUES_BYTES:
            self._queue_full += 1
        else:
            self.append(item)

    def refuse(self, problem: str) -> None:
        """Count an event that cannot be recorded, and print the first of each kind."""
        self.bad_events += 1
        self._writer.complaints.make(
            problem,
            f"an event is not recorded: {problem}. Further ones are only counted. (event-refused)",
        )

    def begin_section(self) -> tuple[int, int]:
        """Begin work of the profiler's own in a thread of the host.

        Returns:
            The time in ns; the thread's CPU time in ns where it is sampled, else 0.
        """
        begin = now()
        return begin, 0 if begin % SAMPLED else time.thread_time_ns()

    def end_section(self, begin_ns: int, cpu_ns: int) -> None:
        """Account for the work since `begin_section`."""
        if cpu_ns:
            self.add_cpu(cpu_ns)
        self.wrapper_ns += now() - begin_ns

    def add_cpu(self, cpu_ns: int) -> None:
        """Account for a sampled section's time on a core, and that of those beside it."""
        self.wrapper_cpu_ns += (time.thread_time_ns() - cpu_ns) * SAMPLED

    def wants(self, step: Any) -> bool:
        """Whether events of this step are kept."""
        return self.steps is None or step in self.steps

    def account(self) -> dict[str, Any]:
        """Return what became of all events so far.

        Returns:
            `events`: lines written, of `bytes` bytes, `own_events` of all events came from the
            recorder itself.  `dropped`, by reason in `dropped_by`.  `sampled_out`: details of
            requests whose details are not written.  `waiting`: taken, and none of these so far.
            `write_errors`: failed attempts.
            Events offered and own events together are events, dropped, sampled out and waiting together.
        """
        dropped = self._dropped_by()
        writer = self._writer
        return {
            "events": writer.files.events,
            "own_events": writer.costs.own_events,
            "bytes": writer.files.bytes,
            "dropped": sum(dropped.values()),
            "dropped_by": dropped,
            "sampled_out": 0 if writer.details is None else writer.details.sampled_out,
            "waiting": 0 if self._hung() else self.waiting(),
            "write_errors": writer.write_errors + writer.process.errors + writer.files.errors,
        }

    def spent(self) -> dict[str, int]:
        """Return nanoseconds by the name of their counter, which is in seconds."""
        return {
            "wrapper_s": self.wrapper_ns,
            "wrapper_cpu_s": self.wrapper_cpu_ns,
            "writer_s": self._writer.spent_ns,
            "writer_cpu_s": self._writer.spent_cpu_ns,
        }

    def _hung(self) -> bool:
        return self._writer.hurry and not self._writer.finished

    def waiting(self) -> int:
        """Return how many events were taken, and are neither written nor dropped so far."""
        return len(self.taken) + self._writer.waiting

    def _dropped_by(self) -> dict[str, int]:
        budget = self._writer.budget
        counts = {
            **self._writer.files.dropped,
            "queue_full": self._queue_full,
            "bad_event": self.bad_events,
            "budget": 0 if budget is None else budget.refused,
            # What a hung disk holds up has no later chance once the process ends.
            "late": self.late.count + (self.waiting() if self._hung() else 0),
        }
        return {reason: count for reason, count in sorted(counts.items()) if count}

    @property
    def dropped(self) -> int:
        """Events that were not and will not be written."""
        return sum(self._dropped_by().values())

    def end_queue(self) -> None:
        """Count what comes from now on as late."""
        self.queue = self.late

    def close(self, reason: str) -> None:
        """Write what is left and end the header, in bounded time.  Safe to call twice."""
        self._writer.close(reason)

    def start_writer(self) -> None:
        """Start the writer thread."""
        self._writer.start()

    def forked(self) -> None:
        """Forget the parent's events, files and thread; called in a forked child."""
        parent = self.identity
        self._writer.abandon()
        self._begin()
        # A child is not the actor that its parent is; the parent's name shows where it comes from.
        role = f"{parent.role}_child" if parent is not None else "child"
        # One that records nothing leaves no file.
        self.identify = lambda: Identity(role, None) if self.taken else None


_active: Recorder | None = None
_before_stop: list[Callable[[], None]] = []
_after_fork: list[Callable[[], None]] = []


def active() -> Recorder | None:
    """Return the recorder of this process, or None when nothing is recorded."""
    return _active


def in_captured_step() -> bool:
    """Return whether the step that this process works on is one of `trainer.profile_steps`."""
    steps = _active.config.captured_steps if _active is not None else ()
    return bool(steps) and context.process.current_step() in steps


def record(
    event: str,
    begin_ns: int | None,
    end_ns: int,
    extra: dict[str, Any] | None = None,
    step: int | None = None,
) -> None:
    """Record one event; without an active recorder do nothing.  Never raises.

    Args:
        event: Its name.
        begin_ns: `clock.now()` at its begin; None for an instant.
        end_ns: `clock.now()` at its end.
        extra: Identity and fields; the recorder keeps the object, so do not change it afterwards.
        step: verl's global step; None for the one that this process is in.
    """
    recorder = _active
    if recorder is None:
        return
    try:
        if step is None:
            step = context.process.current_step()
        if recorder.steps is None or step in recorder.steps:
            recorder.append((event, begin_ns, end_ns, extra, step))
    except Exception as error:  # noqa: BLE001  a step that cannot be hashed, a trainer that raises
        recorder.refuse(f"its step: {type(error).__name__}")


def start(
    config: WorkerConfig,
    identify: Callable[[], Identity | None],
    describe: Callable[[], dict[str, Any]] = dict,
) -> Recorder:
    """Start recording in this process; a second call returns the running recorder."""
    global _active
    if _active is None:
        _active = Recorder(config, identify, describe)
        _active.start_writer()
        process_end.install(stop, _forked)
    return _active


def stop(reason: str = "stopped") -> None:
    """Write what is left and stop recording."""
    global _active
    if _active is not None and _active.pid != os.getpid():
        # A signal in a child that `os.fork` has not returned to yet: nothing here is the child's.
        _forked()
    if _active is not None:
        for callback in _before_stop:
            with contextlib.suppress(Exception):
                callback()
    recorder, _active = _active, None
    if recorder is not None:
        recorder.close(reason)


def before_stop(callback: Callable[[], None]) -> None:
    """Call this once more before recording ends, to close what is open; not in a forked child."""
    if callback not in _before_stop:
        _before_stop.append(callback)


def after_fork(callback: Callable[[], None]) -> None:
    """Call this in each forked child, to forget what belongs to its parent."""
    if callback not in _after_fork:
        _after_fork.append(callback)


def _forked() -> None:
    # What the parent has open, it ends itself.
    _before_stop.clear()
    context.process.forget_parent()
    for callback in _after_fork:
        with contextlib.suppress(Exception):
            callback()
    if _active is not None:
        _active.forked()
        process_end.stop_with_multiprocessing(_active, stop)
