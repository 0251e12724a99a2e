"""The thread that writes: it names the process, encodes what waits, appends it to files, keeps the header.

Reason for its length: one thread with one state, whose order (name, kept lines, events, header, end)
is what survives full disks, hung disks, forks and kills.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from verl_profiler.events.vocabulary import FORMAT_VERSION, process_name
from verl_profiler.recording import context
from verl_profiler.recording.byte_budget import ByteBudget
from verl_profiler.recording.clock import Readings, now
from verl_profiler.recording.closed_steps import ClosedSteps
from verl_profiler.recording.complaints import Complaints, say
from verl_profiler.recording.details import SLOWEST, Details, are_held, one_in
from verl_profiler.recording.encoding import LineEncoder
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.process_header import Mark, ProcessHeader
from verl_profiler.recording.writer import EventFiles

if TYPE_CHECKING:
    from verl_profiler.recording.recorder import Recorder

__all__ = ["BackgroundWriter"]

# A process whose role stays unknown (a short Ray task) waits this long before it writes anyway.
_IDENTITY_PATIENCE_S = 10.0
_HEADER_INTERVAL_S = 15.0
_COST_INTERVAL_S = 10.0
# Events between two writes, in which other threads run: more where many wait, in so many writes, since
# busy threads give the interpreter back only after 5 ms each.
_BATCH = 256
_BATCHES = 8
_BATCH_BYTES = 1 << 20
# Bytes that wait for a disk, per event of `max_pending`.
_BYTES_PER_EVENT = 512
# The end of recording: without progress for so long, the disk is taken to hang; a slow one has more.
_STALL_S = 2.0
_CLOSE_S = 10.0
_STRAGGLER_S = 0.01


class BackgroundWriter:
    """Writes the events of one recorder from a thread of its own.

    Args:
        recorder: Whose queue it empties.

    Attributes:
        closing: No further events are taken.
        hurry: The disk hangs or the time is up: what still waits has no later chance.
        finished: Everything is written or counted.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.directory = Path(recorder.config.directory)
        self.fallback: str | None = None
        self.identity: Identity | None = None
        self.name: str | None = None
        self.complaints = Complaints()
        self._encoder = LineEncoder(recorder.anchor, self.directory)
        self._writer_ns = self._writer_cpu_ns = 0
        self.own_events = 0
        # Encoded lines by path; a list loses what is written or kept.
        self._batch: dict[Path, tuple[list[bytes], bool]] = {}
        self.write_errors = 0
        self.files = EventFiles(
            recorder.limit, recorder.limit * _BYTES_PER_EVENT, self.complaints.make
        )
        self._closed_steps = (
            ClosedSteps(self.files.release, self.complaints.make)
            if recorder.config.events.max_gb is not None
            else None
        )
        events = recorder.config.events
        self._budget = None if events.max_gb is None else ByteBudget(round(events.max_gb * 1e9))
        self._saved_bytes = self._refused_then = 0
        self._details = (
            Details(
                events.detail_share,
                SLOWEST,
                recorder.limit,
                recorder.anchor.wall_ns - recorder.anchor.monotonic_ns,
            )
            if are_held(events)
            else None
        )
        self._header = ProcessHeader()
        self._header_ns = 0
        self._readings = Readings()
        self._cost: dict[int, list[int]] = {}
        # What had been spent and lost when costs were reported last.
        self._spent_then: dict[str, int] = {}
        self._dropped_then = 0
        self._started_ns = self._cost_reported_ns = self._complete_ns = now()
        self._longest_flush_ns = self._flush_began_ns = 0
        self._started = _iso_now()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._wake = threading.Event()
        self._end_reason: str | None = None
        self.closing = self.hurry = self.finished = False

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Events taken from the queue and not written so far."""
        held = 0 if self._details is None else self._details.waiting
        return (
            sum(len(lines) for lines, _ in list(self._batch.values())) + self.files.waiting + held
        )

    @property
    def sampled_out(self) -> int:
        """Details of requests that are not among those whose details are written."""
        return 0 if self._details is None else self._details.sampled_out

    @property
    def over_budget(self) -> int:
        """Events for which the byte budget had no room."""
        return 0 if self._budget is None else self._budget.refused

    def abandon(self) -> None:
        """Close the files; called in a forked child, whose parent writes on."""
        self.files.close()
        self._header.close()

    def start(self) -> None:
        """Start the thread unless it runs; a forked child does so with its first event."""
        if not self._starting.acquire(blocking=False):
            return
        try:
            thread = self._thread
            if (thread is None or not thread.is_alive()) and not self.closing:
                thread = threading.Thread(
                    target=self._run, name="verl-profiler writer", daemon=True
                )
                thread.start()
                self._thread = thread
        except RuntimeError:
            # No more threads; the next event, or the end, tries again.
            self._thread = None
        finally:
            self._starting.release()

    def close(self, reason: str) -> None:
        """Write what is left and end the header, in bounded time.  Safe to call twice."""
        if not self.closing:
            self._end_reason = reason
            self.closing = True
            self._recorder.end_queue()
            self._wake.set()
        thread = self._thread
        if thread is None:
            self._finish_here()
        elif thread is not threading.current_thread():
            self._await_end(thread)
            if not thread.is_alive() and not self.finished:
                self._finish_here()
        if not self.finished:
            waiting = self._recorder.waiting()
            what = (
                f"{waiting:,} events were not written" if waiting else "the last events may be lost"
            )
            self.complaints.make(
                "end", f"{what}: the disk did not respond within {_STALL_S:.0f} s (events-lost)"
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
                self._header_ns,
            )
            if progress != seen:
                seen, changed = progress, now()
            if now() - changed > _STALL_S * 1e9 or now() - begin > (_CLOSE_S + _STALL_S) * 1e9:
                self.hurry = True
                return
            if now() - begin > _CLOSE_S * 1e9:
                self.hurry = True

    def _finish_here(self) -> None:
        try:
            self._finish()
        except Exception as error:  # noqa: BLE001  the host is exiting; it must not see us fail
            self.complaints.make(
                "end", f"the last events could not be written: {error!r} (events-lost)"
            )

    def _run(self) -> None:
        failures = 0
        while not self.finished and failures < 3:
            try:
                self._wait_for_next_flush()
                if self.closing:
                    self._finish()
                else:
                    self._write_out()
            except Exception as error:  # noqa: BLE001  whatever the disk does; the next flush tries again
                failures += self.closing
                self.write_errors += 1
                self.complaints.make("flush", f"a flush failed: {error!r} (writer-failed)")

    def _wait_for_next_flush(self) -> None:
        interval_ns = self._recorder.config.flush_interval_s * 1e9
        # Flushes begin at that distance, however long each one takes.
        passed_ns = now() - self._flush_began_ns if self._flush_began_ns else 0
        self._wake.wait(max(interval_ns - passed_ns, interval_ns / 10) / 1e9)

    def _write_out(self, *, final: bool = False) -> None:
        begin, cpu = now(), time.thread_time_ns()
        self._flush_began_ns = begin
        try:
            self._flush(final=final)
        finally:
            self._writer_ns += now() - begin
            self._writer_cpu_ns += time.thread_time_ns() - cpu

    def _flush(self, *, final: bool = False) -> None:
        if self.name is None and not self._settle_identity(final=final):
            return
        self._check_files()
        self.files.retry()
        until = now()
        # No longer than what is there now: a busy host must not keep the writer in here.
        left = len(self._recorder.taken)
        most = max(_BATCH, left // _BATCHES)
        while left > 0 and not self.hurry:
            left -= self._encode_batch(min(left, most))
            self._write_batch()
        self._encode_held(final=final)
        self._write_batch()
        self._keep_to_budget()
        self._check_files()
        if not self.files.waiting and not left:
            self.complaints.forget(("disk", "memory"))
            late_ns = (
                until - self._complete_ns - round(self._recorder.config.flush_interval_s * 1e9)
            )
            self._longest_flush_ns = max(self._longest_flush_ns, late_ns)
            self._complete_ns = until
        if final:
            return
        if self._closed_steps is not None and not self.files.waiting:
            self._closed_steps.compress_one()
        if now() - self._cost_reported_ns > _COST_INTERVAL_S * 1e9:
            self._report_cost()
        if now() - self._header_ns > _HEADER_INTERVAL_S * 1e9:
            self._write_header()
        self._header.update(self._mark())

    def _check_files(self) -> None:
        """Begin the files anew where somebody has removed them."""
        self.files.check()
        if self.hurry or not self._header.is_gone or self.name is None:
            return
        try:
            # In a directory that another launch has made meanwhile, the name may be taken.
            self._settle_name(self._header.claim(self.directory, self.name))
        except OSError as error:
            self.complaints.make(
                "header",
                f"the header of {self.name} was removed and cannot be written: {error} (disk-refuses)",
            )
            return
        self._write_header()

    def _encode_batch(self, most: int) -> int:
        """Encode some of the next `most` events; return how many were taken from the queue."""
        taken, details = self._recorder.taken, self._details
        full = self.files.refuses and self.files.is_full
        size = count = 0
        while count < most and size < _BATCH_BYTES:
            count += 1
            item = taken.popleft()
            if full:
                self.files.drop(1)
                continue
            if details is None:
                size += self._encode(item)
            else:
                try:
                    items = details.take(item)
                except Exception as error:  # noqa: BLE001  as below
                    self._recorder.refuse(f"{type(error).__name__} in the writer")
                    continue
                size += sum(map(self._encode, items))
        if full:
            time.sleep(0)
        return count

    def _encode(self, item: tuple[Any, ...]) -> int:
        """Put the line of an event into the batch; return its bytes, 0 where there is none."""
        try:
            path, owned, line, step = self._encoder.encode(item)
            if self._budget is not None and not self._budget.admits(item[0], len(line)):
                return 0
            cost = self._cost.get(step)
            if cost is None:
                cost = self._cost[step] = [0, 0]
            cost[0] += 1
            cost[1] += len(line)
            lines = self._batch.get(path)
            if lines is None:
                lines = self._batch[path] = ([], owned)
            lines[0].append(line)
        except Exception as error:  # noqa: BLE001  a fault of one event must not cost another
            self._recorder.refuse(f"{type(error).__name__} in the writer")
            return 0
        return len(line)

    def _encode_held(self, *, final: bool) -> None:
        """Put the details of steps that are over into the batch; at the end, all."""
        if self._details is None or self.hurry:
            return
        for item in self._details.close() if final else self._details.quiet(now()):
            self._encode(item)

    def _keep_to_budget(self) -> None:
        budget = self._budget
        if budget is None or self._details is None:
            return
        saved = 0 if self._closed_steps is None else self._closed_steps.saved_bytes
        change = budget.update(saved - self._saved_bytes)
        self._saved_bytes = saved
        events = self._recorder.config.events
        left = budget.halvings
        self._details.every = 0 if left is None else one_in(events.detail_share) << left
        self._details.slowest = 0 if left is None else SLOWEST
        if change is not None:
            say(f"{self.name}: profiler.events.max_gb: {change} (byte-budget)")
        elif budget.refused and self._refused_then == 0:
            say(
                f"{self.name}: profiler.events.max_gb is used up; further events are dropped and counted "
                "(byte-budget)"
            )
        self._refused_then = budget.refused

    def _write_batch(self) -> None:
        """Write the encoded lines; other threads run meanwhile."""
        for path, (lines, owned) in self._batch.items():
            if owned and self._closed_steps is not None:
                self._closed_steps.note(path)
            if lines:
                self.files.append(path, lines, owned=owned)
        self._batch.clear()

    def _finish(self) -> None:
        """Write what is left, count what cannot be written, and end the header."""
        self._write_out(final=True)
        if threading.active_count() > 2:
            # A thread of the host may have got hold of the queue just before it was taken away.
            time.sleep(_STRAGGLER_S)
            self._write_out(final=True)
        self._report_cost(final=True)
        self._keep_to_budget()
        lost = self._recorder.waiting()
        self._recorder.late.count += lost - self.files.waiting
        self._recorder.taken.clear()
        if self._details is not None:
            self._details.waiting = 0
        self._batch.clear()
        self.files.give_up("disk")
        self.files.check()
        self.files.close()
        self._complete_ns = now()
        self.finished = True
        if lost:
            self.complaints.make(
                "end",
                f"{lost:,} events could not be written before the process ended (events-lost)",
            )
        self._write_header(ended=self._end_reason)
        self._header.close()

    def _report_cost(self, *, final: bool = False) -> None:
        """Write per step what the profiler did since the last report."""
        # While a disk refuses, the account waits too.
        if self.name is None or self.files.waiting:
            return
        self._cost_reported_ns = now()
        costs, self._cost = self._cost, {}
        events = sum(count for count, _ in costs.values())
        if not events:
            return
        dropped = self._recorder.dropped
        spent_then, self._spent_then = self._spent_then, self._spent()
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
            path, owned, line, _ = self._encoder.encode(("profiler_cost", None, now(), extra, step))
            self.own_events += 1
            if self._budget is None or self._budget.admits("profiler_cost", len(line)):
                self.files.append(path, [line], owned=owned)
        if not final and now() - self._header_ns > _HEADER_INTERVAL_S * 1e9:
            self._write_header()

    def _spent(self) -> dict[str, int]:
        """Return nanoseconds by the name of their counter, which is in seconds."""
        return {
            "wrapper_s": self._recorder.wrapper_ns,
            "wrapper_cpu_s": self._recorder.wrapper_cpu_ns,
            "writer_s": self._writer_ns,
            "writer_cpu_s": self._writer_cpu_ns,
        }

    def _settle_identity(self, *, final: bool) -> bool:
        identity = self._recorder.identify()
        if identity is None:
            waited_s = (now() - self._started_ns) / 1e9
            if not self._recorder.taken or (waited_s < _IDENTITY_PATIENCE_S and not final):
                return False
            identity = Identity("process", None)
        if not self._claim_name(identity):
            return False
        if identity.replica is not None:
            context.process.replica = identity.replica
        self._write_header()
        return True

    def _claim_name(self, identity: Identity) -> bool:
        base = process_name(identity.role, identity.rank, socket.gethostname(), self._recorder.pid)
        try:
            self.name = self._header.claim(self.directory, base)
        except OSError as error:
            try:
                directory = Path(tempfile.mkdtemp(prefix="verl_profiler_"))
                self.name = self._header.claim(directory, base)
            except OSError:
                self.complaints.make(
                    "claim",
                    f"{self.directory} cannot be written ({error.strerror or error}), nor can "
                    f"{tempfile.gettempdir()}; the events of {base} are kept in memory (not-writable)",
                )
                return False
            self.fallback = f"{self.directory} cannot be written on this host"
            self.directory = directory
            self.complaints.make(
                "fallback",
                f"{self._recorder.config.directory} cannot be written on {socket.gethostname()}; the events "
                f"of this process go to {directory}.\n"
                "Copy that folder's contents into the run directory afterwards. (not-writable)",
            )
        self.identity = identity
        self._settle_name(self.name)
        return True

    def _settle_name(self, name: str) -> None:
        self.name = self.complaints.name = name
        if self.identity is None:
            return
        self._encoder.settle(self.directory, name, self.identity.rank)

    def _mark(self) -> Mark:
        return Mark(
            self._encoder.timestamp(self._complete_ns),
            self.files.events,
            self.files.bytes,
            self._recorder.waiting(),
            self._recorder.dropped,
            self.sampled_out,
        )

    def _write_header(self, ended: str | None = None) -> None:
        self._header_ns = now()
        identity = self.identity
        if identity is None or self.name is None:
            return
        account = self._recorder.account()
        account.pop("waiting")
        header: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "name": self.name,
            "role": identity.role,
            "rank": identity.rank,
            "replica": identity.replica,
            "host": socket.gethostname(),
            "pid": self._recorder.pid,
            "ppid": os.getppid(),
            "actor_name": identity.actor_name,
            "actor_class": identity.actor_class,
            "python": sys.version.split()[0],
            "clock": {
                **msgspec.structs.asdict(self._recorder.anchor),
                "readings": self._readings.take(),
                "last_wall_ns": time.time_ns(),
                "last_monotonic_ns": now(),
            },
            "counters": {
                **account,
                **{name: spent_ns / 1e9 for name, spent_ns in self._spent().items()},
            },
            "started": self._started,
            "updated": _iso_now(),
            "ended": _iso_now() if ended else None,
            "end_reason": ended,
            "directory": str(self.directory),
            "fallback": self.fallback,
            "flush_interval_s": self._recorder.config.flush_interval_s,
            "longest_flush_s": round(self._longest_flush_ns / 1e9, 6),
        }
        if self._budget is not None:
            header["budget"] = self._budget.header()
        try:
            header.update(self._recorder.describe())
            self._header.write(header, self._mark())
        except Exception as error:  # noqa: BLE001  the events are worth more than the header
            self.write_errors += 1
            self.complaints.make(
                "header", f"the header of {self.name} could not be written: {error} (disk-refuses)"
            )


def _iso_now() -> str:
    seconds, rest = divmod(time.time_ns() // 1000, 1_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:06d}+00:00"
