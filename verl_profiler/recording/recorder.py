"""Hold events in memory, write them from one background thread, survive fork and exit.

The caller's thread appends one tuple to a deque and returns.  Everything else (identity of the
process, timestamps, JSON, files) happens in the writer thread, at most `flush_interval_s` later.
Nothing here raises into the host, holds a lock across host code, or calls fsync.

Every event that is taken is written or counted: `Recorder.account`.  A file only ever holds whole
lines: the process owns it alone (see `ProcessHeader.claim`).
"""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler.events.vocabulary import FORMAT_VERSION, process_name
from verl_profiler.recording import context, values
from verl_profiler.recording.carried import Carried
from verl_profiler.recording.clock import Anchor, Readings, Timestamps, anchor_for_this_boot, now
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.process_header import Mark, ProcessHeader, fallback_directory
from verl_profiler.recording.writer import EventFiles

__all__ = [
    "SAMPLED",
    "Recorder",
    "active",
    "after_fork",
    "before_stop",
    "record",
    "say",
    "start",
    "stop",
]

# A process that never learns its role (a short Ray task) waits this long before it writes anyway.
_IDENTITY_PATIENCE_S = 10.0
_HEADER_INTERVAL_S = 15.0
_COST_INTERVAL_S = 10.0
# A thread's CPU clock costs 0.9 µs, a third of a wrapper: it is read where the time in ns is a
# multiple of this, which is as good as by chance.
SAMPLED = 17
# Events between two writes, in which other threads run: more where many wait, in so many writes, since
# busy threads give the interpreter back only after 5 ms each.
_BATCH = 256
_BATCHES = 8
_BATCH_BYTES = 1 << 20
# Bytes that wait for a disk, per event of `max_pending`; and bytes of long values in the queue.
_BYTES_PER_EVENT = 512
_LONG_VALUES_BYTES = 64 << 20
# The end of recording: without progress for so long, the disk is taken to hang; a slow one has more.
_STALL_S = 2.0
_CLOSE_S = 10.0
# Printed of one complaint, in characters; an error may quote a path of thousands.
_LONGEST_COMPLAINT = 1000
_STRAGGLER_S = 0.01
# Larger numbers are no steps; readers hold them in 32 bits.
STEP_LIMIT = 1 << 31
EVENT_NAME_LIMIT = 200
_PLAIN = frozenset({str, int, float, bool, type(None)})


class _Line(msgspec.Struct, omit_defaults=True):
    timestamp: str
    event: str
    duration_sec: float | None = None
    extra: Any = None
    workid: Any = None
    step: int | None = None


_encode = msgspec.json.Encoder().encode


class _Ended:
    """Stands in for the queue once recording has ended: it counts what comes too late."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        # An empty queue sends the wrappers to `Recorder.append`.
        return 0

    def append(self, _item: tuple[Any, ...]) -> None:
        # CPython 3.10 to 3.12 switch threads at calls and backward jumps only: no count is lost here
        # or at the recorder's other counters.
        self.count += 1


class Recorder:
    """Records the events of this process into one run directory.

    Args:
        carried: Where to write and what.
        identify: Returns who this process is, or None while that is not known yet.
        describe: Returns further keys of the header; called in the writer thread.
    """

    def __init__(
        self,
        carried: Carried,
        identify: Callable[[], Identity | None],
        describe: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        # What wrappers use stands together: between two of them the processor forgets it.
        self.wrapper_ns = 0
        self.wrapper_cpu_ns = 0
        # When a probed coroutine began last: its event loop ran then.
        self.alive_ns = 0
        self.steps = frozenset(carried.events.steps) if carried.events.steps is not None else None
        self._taken: deque[tuple[Any, ...]] = deque()
        self.queue: Any = self._taken
        self.limit = carried.events.max_pending
        self._thread: threading.Thread | None = None
        self.carried = carried
        self.anchor: Anchor = anchor_for_this_boot(carried.clock)
        self._identify = identify
        self._describe = describe
        self._announced = False
        self._begin()

    def _begin(self) -> None:
        """Begin anew: at the start, and in a forked child."""
        self.directory = Path(self.carried.directory)
        self.fallback: str | None = None
        self.identity: Identity | None = None
        self.name: str | None = None
        self.wrapper_ns = self.wrapper_cpu_ns = self._writer_ns = self._writer_cpu_ns = 0
        self._taken = self.queue = deque()
        self._late = _Ended()
        self._queue_full = 0
        self._bad_events = 0
        self._bad_paths = 0
        self._own_events = 0
        # Encoded lines by path; a list loses what is written or kept.
        self._batch: dict[Path, tuple[list[bytes], bool]] = {}
        self._write_errors = 0
        self._complained: set[str] = set()
        self._files = EventFiles(self.limit, self.limit * _BYTES_PER_EVENT, self._complain)
        self._header = ProcessHeader()
        self._header_ns = 0
        self._readings = Readings()
        self._timestamps = Timestamps(self.anchor)
        self._step_paths: dict[int | None, Path] = {}
        self._cost: dict[int, list[int]] = {}
        # What had been spent and lost when costs were reported last.
        self._spent_then: dict[str, int] = {}
        self._dropped_then = 0
        self._started_ns = self._cost_reported_ns = self._complete_ns = now()
        self._longest_flush_ns = self._flush_began_ns = 0
        self._started = _iso_now()
        self._thread = None
        self._starting = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._hurry = False
        self._end_reason: str | None = None
        self._finished = False
        # Last: until then a forked child holds what is its parent's.
        self.pid = os.getpid()

    def append(self, item: tuple[Any, ...]) -> None:
        """Take one event; the only work done in the caller's thread."""
        queue = self.queue
        # One that holds something has its writer running.
        if 0 < len(queue) < self.limit:
            queue.append(item)
        else:
            self._append_first_or_drop(item)

    def _append_first_or_drop(self, item: tuple[Any, ...]) -> None:
        if self._closing:
            self._late.append(item)
            return
        if len(self.queue) < self.limit:
            self.queue.append(item)
        else:
            self._queue_full += 1
        thread = self._thread
        if thread is None or not thread.is_alive():
            self.start_writer()

    def append_long(self, item: tuple[Any, ...], size: int) -> None:
        """Take one event whose values have `size` bytes, unless too many of these wait."""
        if len(self.queue) * size > _LONG_VALUES_BYTES:
            self._queue_full += 1
        else:
            self.append(item)

    def refuse(self, problem: str) -> None:
        """Count an event that cannot be recorded, and print the first of each kind."""
        self._bad_events += 1
        self._complain(
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
            recorder itself.  `dropped`, by reason in `dropped_by`.  `waiting`: taken, and neither
            written nor dropped so far.  `write_errors`: failed attempts.
            Events offered and own events together are events, dropped and waiting together.
        """
        dropped = self._dropped_by()
        return {
            "events": self._files.events,
            "own_events": self._own_events,
            "bytes": self._files.bytes,
            "dropped": sum(dropped.values()),
            "dropped_by": dropped,
            "waiting": 0 if self._hung() else self._waiting(),
            "write_errors": self._write_errors + self._files.errors,
        }

    def _hung(self) -> bool:
        return self._hurry and not self._finished

    def _waiting(self) -> int:
        return len(self._taken) + self._batch_events() + self._files.waiting

    def _batch_events(self) -> int:
        return sum(len(lines) for lines, _ in list(self._batch.values()))

    def _dropped_by(self) -> dict[str, int]:
        counts = Counter(self._files.dropped)
        counts["queue_full"] += self._queue_full
        counts["bad_event"] += self._bad_events
        counts["bad_path"] += self._bad_paths
        # What a hung disk holds up has no later chance once the process ends.
        counts["late"] += self._late.count + (self._waiting() if self._hung() else 0)
        return {reason: count for reason, count in sorted(counts.items()) if count}

    @property
    def dropped(self) -> int:
        """Events that were not and will not be written."""
        return sum(self._dropped_by().values())

    def start_writer(self) -> None:
        """Start the writer thread; a forked child does so with its first event."""
        if not self._starting.acquire(blocking=False):
            return
        try:
            thread = self._thread
            if (thread is None or not thread.is_alive()) and not self._closing:
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
        if not self._closing:
            self._end_reason = reason
            self._closing = True
            self.queue = self._late
            self._wake.set()
        thread = self._thread
        if thread is None:
            self._finish_here()
        elif thread is not threading.current_thread():
            self._await_end(thread)
            if not thread.is_alive() and not self._finished:
                self._finish_here()
        if not self._finished:
            self._complain(
                "end",
                f"{self._waiting():,} events were not written: the disk gave no answer within "
                f"{_STALL_S:.0f} s (events-lost)",
            )

    def _await_end(self, thread: threading.Thread) -> None:
        """Wait for the writer as long as it makes progress."""
        begin = changed = now()
        seen: Any = None
        while thread.is_alive():
            thread.join(timeout=0.05)
            progress = (len(self._taken), self._files.events, self._files.errors, self._header_ns)
            if progress != seen:
                seen, changed = progress, now()
            if now() - changed > _STALL_S * 1e9 or now() - begin > (_CLOSE_S + _STALL_S) * 1e9:
                self._hurry = True
                return
            if now() - begin > _CLOSE_S * 1e9:
                self._hurry = True

    def _finish_here(self) -> None:
        try:
            self._finish()
        except Exception as error:  # noqa: BLE001  the host is exiting; it must not see us fail
            self._complain("end", f"the last events could not be written: {error!r} (events-lost)")

    def _run(self) -> None:
        failures = 0
        while not self._finished and failures < 3:
            try:
                self._wait_for_next_flush()
                if self._closing:
                    self._finish()
                else:
                    self._write_out()
            except BaseException as error:  # noqa: BLE001  also what is thrown into the thread from outside
                failures += self._closing
                self._write_errors += 1
                self._complain("flush", f"a flush failed: {error!r} (writer-failed)")

    def _wait_for_next_flush(self) -> None:
        interval_ns = self.carried.events.flush_interval_s * 1e9
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
        self._files.retry()
        # Left behind by a flush that something interrupted.
        self._write_batch()
        until = now()
        # No longer than what is there now: a busy host must not keep the writer in here.
        left = len(self._taken)
        most = max(_BATCH, left // _BATCHES)
        while left > 0 and not self._hurry:
            left -= self._encode_batch(min(left, most))
            self._write_batch()
        if not self._files.waiting and not left:
            self._complained.difference_update(("disk", "memory"))
            late_ns = until - self._complete_ns - round(self.carried.events.flush_interval_s * 1e9)
            self._longest_flush_ns = max(self._longest_flush_ns, late_ns)
            self._complete_ns = until
        if final:
            return
        if now() - self._cost_reported_ns > _COST_INTERVAL_S * 1e9:
            self._report_cost()
        if now() - self._header_ns > _HEADER_INTERVAL_S * 1e9:
            self._files.forget_deleted()
            self._write_header()
        self._header.update(self._mark())

    def _encode_batch(self, most: int) -> int:
        """Encode some of the next `most` events; return how many were taken from the queue."""
        taken, batch = self._taken, self._batch
        full = self._files.refuses and self._files.is_full
        size = count = 0
        while count < most and size < _BATCH_BYTES:
            count += 1
            item = taken.popleft()
            if full:
                self._files.drop(1)
                continue
            try:
                path, owned, line, step = self._encode(item)
                cost = self._cost.get(step)
                if cost is None:
                    cost = self._cost[step] = [0, 0]
                cost[0] += 1
                cost[1] += len(line)
                lines = batch.get(path)
                if lines is None:
                    lines = batch[path] = ([], owned)
                size += len(line)
                lines[0].append(line)
            except Exception as error:  # noqa: BLE001  a fault of one event must not cost another
                self.refuse(f"{type(error).__name__} in the writer")
            except BaseException:
                # Thrown into the thread from outside.
                self._bad_events += 1
                raise
        if full:
            time.sleep(0)
        return count

    def _write_batch(self) -> None:
        """Write the encoded lines; other threads run meanwhile."""
        for path, (lines, owned) in self._batch.items():
            if lines:
                self._files.append(path, lines, owned=owned)
        self._batch.clear()

    def _encode(self, item: tuple[Any, ...]) -> tuple[Path, bool, bytes, int]:
        event, begin_ns, end_ns, extra, step = item[:5]
        if type(step) is not int and step is not None:
            step = operator.index(step)
        if type(event) is not str:
            event = values.text(event)
        microseconds = self._timestamps.microseconds
        end = microseconds(end_ns)
        duration = None if begin_ns is None else (end - microseconds(begin_ns)) / 1e6
        rank = self.identity.rank if self.identity is not None else None
        path, owned = self._path_of(step), True
        more: Any = None
        if len(item) > 5:
            workid, explicit_path, more = item[5:]
            rank = rank if workid is None else workid
            if explicit_path is not None:
                path, owned = Path(explicit_path), False
        fields = extra or None
        if (
            fields is not None
            and type(fields) is not msgspec.Raw
            and not _PLAIN.issuperset(map(type, fields.values()))
        ):
            fields = msgspec.Raw(values.encode(fields))
        line = _Line(self._timestamps.text(end), event, duration, fields, rank, step)
        try:
            data = _encode(line)
        except Exception:  # noqa: BLE001  lone surrogates, keys that are no strings
            data = b""
        if not 0 < len(data) <= values.EXTRA_LIMIT:
            line.event = values.text(event, EVENT_NAME_LIMIT)
            if fields is not None and type(fields) is not msgspec.Raw:
                line.extra = msgspec.Raw(values.encode(fields))
            data = _encode(line)
        if more:
            data = data[:-1] + b"," + _encode(more)[1:]
        return path, owned, data + b"\n", step or 0

    def _path_of(self, step: int | None) -> Path:
        path = self._step_paths.get(step)
        if path is None:
            if len(self._step_paths) > 64:
                self._step_paths.clear()
            number = step or 0
            if not -STEP_LIMIT <= number < STEP_LIMIT:
                raise ValueError(f"{number} is no step")
            # Nothing but whole numbers from 0 is a folder of a run.
            path = self.directory / f"step_{max(number, 0)}" / f"{self.name}.jsonl"
            self._step_paths[step] = path
        return path

    def _finish(self) -> None:
        """Write what is left, count what cannot be written, and end the header."""
        self._write_out(final=True)
        if threading.active_count() > 2:
            # A thread of the host may have got hold of the queue just before it was taken away.
            time.sleep(_STRAGGLER_S)
            self._write_out(final=True)
        self._report_cost(final=True)
        lost = self._waiting()
        self._late.count += lost - self._files.waiting
        self._taken.clear()
        self._batch.clear()
        self._files.give_up("disk")
        self._files.close()
        self._complete_ns = now()
        self._finished = True
        if lost:
            self._complain(
                "end",
                f"{lost:,} events could not be written before the process ended (events-lost)",
            )
        self._write_header(ended=self._end_reason)
        self._header.close()

    def _report_cost(self, *, final: bool = False) -> None:
        """Write per step what the profiler did since the last report."""
        # While a disk refuses, the account waits too.
        if self.name is None or self._files.waiting:
            return
        self._cost_reported_ns = now()
        costs, self._cost = self._cost, {}
        events = sum(count for count, _ in costs.values())
        if not events:
            return
        dropped = self.dropped
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
            path, owned, line, _ = self._encode(("profiler_cost", None, now(), extra, step))
            self._own_events += 1
            self._files.append(path, [line], owned=owned)
        if not final and now() - self._header_ns > _HEADER_INTERVAL_S * 1e9:
            self._write_header()

    def _spent(self) -> dict[str, int]:
        """Return nanoseconds by the name of their counter, which is in seconds."""
        return {
            "wrapper_s": self.wrapper_ns,
            "wrapper_cpu_s": self.wrapper_cpu_ns,
            "writer_s": self._writer_ns,
            "writer_cpu_s": self._writer_cpu_ns,
        }

    def _settle_identity(self, *, final: bool) -> bool:
        identity = self._identify()
        if identity is None:
            waited_s = (now() - self._started_ns) / 1e9
            if not self._taken or (waited_s < _IDENTITY_PATIENCE_S and not final):
                return False
            identity = Identity("process", None)
        if not self._claim_name(identity):
            return False
        if identity.replica is not None:
            context.process.replica = identity.replica
        self._write_header()
        return True

    def _claim_name(self, identity: Identity) -> bool:
        base = process_name(identity.role, identity.rank, socket.gethostname(), self.pid)
        try:
            self.name = self._header.claim(self.directory, base)
        except OSError as error:
            try:
                directory = fallback_directory(self.carried.directory, self.carried.clock)
                self.name = self._header.claim(directory, base)
            except OSError:
                self._complain(
                    "claim",
                    f"{self.directory} cannot be written ({error.strerror or error}), nor can "
                    f"{tempfile.gettempdir()}; the events of {base} are kept in memory (not-writable)",
                )
                return False
            self.fallback = f"{self.directory} cannot be written on this host"
            self.directory = directory
            self._complain(
                "fallback",
                f"{self.carried.directory} cannot be written on {socket.gethostname()}; the events "
                f"of this process go to {directory}.\n"
                "Copy that folder's contents into the run directory afterwards. (not-writable)",
            )
        self.identity = identity
        self._step_paths.clear()
        return True

    def _mark(self) -> Mark:
        return Mark(
            self._timestamps.text(self._timestamps.microseconds(self._complete_ns)),
            self._files.events,
            self._files.bytes,
            self._waiting(),
            self.dropped,
        )

    def _write_header(self, ended: str | None = None) -> None:
        self._header_ns = now()
        identity = self.identity
        if identity is None or self.name is None:
            return
        account = self.account()
        account.pop("waiting")
        header: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "name": self.name,
            "role": identity.role,
            "rank": identity.rank,
            "replica": identity.replica,
            "host": socket.gethostname(),
            "pid": self.pid,
            "ppid": os.getppid(),
            "actor_name": identity.actor_name,
            "actor_class": identity.actor_class,
            "python": sys.version.split()[0],
            "clock": {
                **msgspec.structs.asdict(self.anchor),
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
            "flush_interval_s": self.carried.events.flush_interval_s,
            "longest_flush_s": round(self._longest_flush_ns / 1e9, 6),
        }
        announcement = None
        try:
            header.update(self._describe())
            announcement = header.pop("announcement", None)
            self._header.write(header, self._mark())
        except Exception as error:  # noqa: BLE001  the events are worth more than the header
            self._write_errors += 1
            self._complain(
                "header", f"the header of {self.name} could not be written: {error} (disk-refuses)"
            )
        if announcement and not self._announced and self.carried.events.announce:
            self._announced = True
            say(f"{self.name}: {announcement}")

    def _complain(self, kind: str, problem: str) -> None:
        """Print the first problem of a kind; that of a disk again once it has taken a write."""
        if kind not in self._complained:
            self._complained.add(kind)
            if len(problem) > _LONGEST_COMPLAINT:
                half = _LONGEST_COMPLAINT // 2
                problem = f"{problem[:half]} … {problem[-half:]}"
            say(f"WARNING {self.name or 'process'}: {problem}")

    def forked(self) -> None:
        """Forget the parent's events, files and thread; called in a forked child."""
        parent = self.identity
        self._files.close()
        self._header.close()
        self._begin()
        # A child is not the actor that its parent is; the parent's name says where it comes from.
        role = f"{parent.role}_child" if parent is not None else "child"
        self._announced = True
        # One that records nothing leaves no file.
        self._identify = lambda: Identity(role, None) if self._taken else None


def _iso_now() -> str:
    seconds, rest = divmod(time.time_ns() // 1000, 1_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:06d}+00:00"


def say(text: str) -> None:
    """Print one line to stderr, marked as ours."""
    with contextlib.suppress(Exception):
        print(f"[verl-profiler] {text}", file=sys.stderr, flush=True)


_active: Recorder | None = None
_exit_hooks = False
_before_stop: list[Callable[[], None]] = []
_after_fork: list[Callable[[], None]] = []


def active() -> Recorder | None:
    """Return the recorder of this process, or None when nothing is recorded."""
    return _active


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
    carried: Carried,
    identify: Callable[[], Identity | None],
    describe: Callable[[], dict[str, Any]] = dict,
) -> Recorder:
    """Start recording in this process; a second call returns the running recorder."""
    global _active
    if _active is None:
        _active = Recorder(carried, identify, describe)
        _active.start_writer()
        _install_exit_hooks()
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


def _install_exit_hooks() -> None:
    global _exit_hooks
    if _exit_hooks:
        return
    _exit_hooks = True
    atexit.register(stop, "exit")
    os.register_at_fork(after_in_child=_forked)
    with contextlib.suppress(ValueError, OSError):
        # Only where nobody else handles it; Ray installs a handler of its own, then atexit runs.
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, _on_sigterm)


def _forked() -> None:
    # What the parent has open, it ends itself.
    _before_stop.clear()
    context.process.forget_parent()
    for callback in _after_fork:
        with contextlib.suppress(Exception):
            callback()
    if _active is not None:
        _active.forked()
        multiprocessing = sys.modules.get("multiprocessing.util")
        if multiprocessing is not None:
            multiprocessing.register_after_fork(_active, _stop_with_multiprocessing)


def _stop_with_multiprocessing(_recorder: Recorder) -> None:
    """Its children end without `atexit`."""
    sys.modules["multiprocessing.util"].Finalize(None, stop, args=("exit",), exitpriority=0)


def _on_sigterm(number: int, _frame: Any) -> None:
    stop("sigterm")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
