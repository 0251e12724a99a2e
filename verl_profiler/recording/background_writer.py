"""The thread that writes: it encodes what waits and appends it to files, flush by flush.

Its order (name, kept lines, events, header, end) is what survives full disks, hung disks, forks and kills.
What else belongs to a flush is an observer's: the costs of each step, the byte budget.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler.recording.clock import now
from verl_profiler.recording.complaints import Complaints
from verl_profiler.recording.encoding import Event, LineEncoder
from verl_profiler.recording.line_batch import LineBatch
from verl_profiler.recording.process_header import OwnProcess
from verl_profiler.recording.step_costs import StepCosts
from verl_profiler.recording.writer import EventFiles

if TYPE_CHECKING:
    from verl_profiler.recording.byte_budget import ByteBudget
    from verl_profiler.recording.details import Details
    from verl_profiler.recording.recorder import Recorder

# Events between two writes, in which other threads run: about 2 ms.  Where a share of the queue's limit
# waits, so many writes instead, since busy threads give the interpreter back only after 5 ms each.
_BATCH = 256
_BATCHES = 8
_BACKLOG = 1 / 4
_BATCH_BYTES = 1 << 20
# Wakes without anything to write between two full flushes, which also check the files and write the account.
_QUIET_WAKES = 10
# What the end of recording may take on a slow disk.
_CLOSE_S = 10.0
_STRAGGLER_S, _START_S = 0.01, 1.0


class BackgroundWriter:
    """Writes the events of one recorder from a thread of its own.

    Args:
        recorder: Whose queue it empties.

    Attributes:
        process: The name of the process, and its header.
        details: Holds details back, if only some are written.
        budget: Of bytes, if there is one.
        costs: The profiler's own account.
        closing: No further events are taken.
        hurry: The disk hangs or the time is up: what still waits has no later chance.
        finished: Everything is written or counted.
        stall_s: At the end of recording, the disk is taken to hang after so long without progress.
        spent_ns: Time in flushes; spent_cpu_ns: of the thread on a core, also between them.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        events, limit, anchor = recorder.config.events, recorder.limit, recorder.anchor
        self.complaints = Complaints()
        encoder = LineEncoder(anchor, Path(recorder.config.directory))
        self.files = EventFiles(self.complaints.make)
        self.details: Details | None = None
        self.budget: ByteBudget | None = None
        if events.holds_details():
            from verl_profiler.recording.details import SLOWEST, Details

            offset_ns = anchor.wall_ns - anchor.monotonic_ns
            self.details = Details(events.detail_share, SLOWEST, limit, offset_ns)
            if events.max_gb is not None:
                from verl_profiler.recording.byte_budget import ByteBudget, ClosedSteps

                closed = ClosedSteps(self.files.release, self.complaints.make)
                size = round(events.max_gb * 1e9)
                self.budget = ByteBudget(size, closed, self.details, self.complaints)
        self.process = OwnProcess(recorder, encoder, self.complaints, self.budget)
        self._batch = LineBatch(encoder, self.files, self.budget, recorder.refuse)
        self.costs = StepCosts(recorder, self._batch.write_own)
        self._batch.observers += [self.costs] if self.budget is None else [self.costs, self.budget]
        self.write_errors = 0
        self.stall_s = 2.0
        self.spent_ns = self.spent_cpu_ns = 0
        self._flush_began_ns = self._cpu_ns = 0
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        # Held until the end: to wait for a lock costs a third of waiting for an event.
        self._ended = threading.Lock()
        self._ended.acquire()
        self._end_reason: str | None = None
        self.closing = self.hurry = self.finished = False

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Events taken from the queue and not written so far."""
        held = 0 if self.details is None else self.details.waiting
        return self._batch.waiting() + held

    def abandon(self) -> None:
        """Close the files; called in a forked child, whose parent writes on."""
        self.files.close()
        self.process.close()

    def start(self) -> None:
        """Start the thread unless it runs; a forked child does so with its first event."""
        if not self._starting.acquire(blocking=False):
            return
        # Without a further thread, the next event, or the end, tries again.
        with contextlib.suppress(RuntimeError):
            if not (self.is_running or self.closing):
                name = "verl-profiler writer"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
        self._starting.release()

    def close(self, reason: str) -> None:
        """Write what is left and end the header, in bounded time.  Safe to call twice."""
        if not self.closing:
            self._end_reason = reason
            self.closing = True
            self._recorder.end_queue()
            self._ended.release()
        # One that another thread has just begun to start; a signal's handler would wait for itself.
        if self._starting.acquire(timeout=_START_S):
            self._starting.release()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._await_end(thread)
        if not (self.finished or self.is_running):
            self._run()
        if not self.finished:
            waiting = self._recorder.waiting()
            what = (
                f"{waiting:,} events were not written" if waiting else "the last events may be lost"
            )
            self.complaints.make(
                "end", f"{what}: the disk did not respond within {self.stall_s:.0f} s (events-lost)"
            )

    def _await_end(self, thread: threading.Thread) -> None:
        """Wait for the writer as long as it makes progress."""
        begin = changed = now()
        seen: Any = None
        while thread.is_alive():
            thread.join(timeout=0.05)
            progress = (
                len(self._recorder.taken),
                self.files.events,
                self.files.errors,
                self.process.header_ns,
            )
            if progress != seen:
                seen, changed = progress, now()
            longest_s = _CLOSE_S + self.stall_s
            if now() - changed > self.stall_s * 1e9 or now() - begin > longest_s * 1e9:
                self.hurry = True
                return
            if now() - begin > _CLOSE_S * 1e9:
                self.hurry = True

    def _run(self) -> None:
        failures = quiet = 0
        self._cpu_ns = time.thread_time_ns()
        interval_ns = self._recorder.config.flush_interval_s * 1e9
        while not self.finished and failures < 3:
            # Flushes begin at that distance, however long each one takes.
            passed_ns = now() - self._flush_began_ns if self._flush_began_ns else 0
            if not self.closing:
                self._ended.acquire(timeout=max(interval_ns - passed_ns, interval_ns / 10) / 1e9)
            try:
                if self.closing:
                    self._finish()
                elif quiet < _QUIET_WAKES and self.stay_quiet():
                    quiet += 1
                else:
                    quiet = 0
                    self._write_out()
            except Exception as error:  # noqa: BLE001  whatever the disk does; the next flush tries again
                failures += self.closing
                self.write_errors += 1
                self.complaints.make("flush", f"a flush failed: {error!r} (writer-failed)")

    def stay_quiet(self) -> bool:
        """Mark the files as complete if there is nothing to write; return whether that is so."""
        until = now()
        if self._recorder.taken or self.waiting or self.process.name is None:
            return False
        self._flush_began_ns = until
        self.process.stay_complete(until)
        return True

    def _write_out(self, *, final: bool = False) -> None:
        self._flush_began_ns = begin = now()
        try:
            self._flush(final=final)
        finally:
            self.spent_ns += now() - begin
            cpu_ns, self._cpu_ns = self._cpu_ns, time.thread_time_ns()
            self.spent_cpu_ns += self._cpu_ns - cpu_ns

    def _flush(self, *, final: bool = False) -> None:
        if not self.process.has_name(final=final):
            return
        # Files that somebody has removed are begun anew.
        self.files.check()
        if not self.hurry:
            self.process.check()
        self.files.refuses = False
        self._batch.write()
        until = now()
        # No longer than what is there now: a busy host must not keep the writer in here.
        left = len(self._recorder.taken)
        most = left // _BATCHES if left > self._recorder.limit * _BACKLOG else _BATCH
        # While the disk refuses, events wait in the queue.
        while left > 0 and not (self.hurry or self.files.refuses):
            left -= self._encode_batch(min(left, most))
            self._batch.write()
        if self.details is not None and not (self.hurry or self.files.refuses):
            for event in self.details.close() if final else self.details.quiet(now()):
                self._batch.add(event)
        self._batch.write()
        unwritten = self._batch.waiting()
        if not unwritten and not left:
            self.complaints.forget(("disk", "memory"))
            self.process.complete(until)
        elif len(self._recorder.taken) >= self._recorder.limit:
            self.complaints.make(
                "memory",
                f"{left:,} events are waiting for the disk, so further ones are dropped and counted "
                "(events-lost)",
            )
        if final:
            return
        # While a disk refuses, the account waits too.
        for observer in () if unwritten else self._batch.observers:
            observer.after_flush(final=False)
        self.process.update()

    def _encode_batch(self, most: int) -> int:
        """Encode some of the next `most` events; return how many were taken from the queue."""
        taken, details = self._recorder.taken, self.details
        size = count = 0
        while count < most and size < _BATCH_BYTES:
            count += 1
            event = taken.popleft()
            if details is None:
                size += self._batch.add(event)
            else:
                for each in self._held_back(details, event):
                    size += self._batch.add(each)
        return count

    def _held_back(self, details: Details, event: Event) -> Iterable[Event]:
        """Return what is to be written now, where an event has come."""
        try:
            return details.add(event)
        except Exception as error:  # noqa: BLE001  as below
            self._recorder.refuse(f"{type(error).__name__} in the writer")
            return ()

    def _finish(self) -> None:
        """Write what is left, count what cannot be written, and end the header."""
        self._write_out(final=True)
        if threading.active_count() > 2:
            # A thread of the host may have got hold of the queue just before it was taken away.
            time.sleep(_STRAGGLER_S)
            self._write_out(final=True)
        if self.process.name is not None and not self._batch.waiting():
            for observer in self._batch.observers:
                observer.after_flush(final=True)
        lost = self._recorder.waiting()
        refused = lost if self.files.refuses else self._batch.waiting()
        self.files.dropped["disk"] += refused
        self._recorder.late.count += lost - refused
        self._recorder.taken.clear()
        if self.details is not None:
            self.details.waiting = 0
        self._batch.clear()
        self.files.check()
        self.files.close()
        self.process.complete_ns = now()
        self.finished = True
        if lost:
            self.complaints.make(
                "end",
                f"{lost:,} events could not be written before the process ended (events-lost)",
            )
        self.process.write(ended=self._end_reason)
        self.process.close()
