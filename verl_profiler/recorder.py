"""Hold events in memory, write them from one background thread, survive fork and exit.

The caller's thread appends one tuple to a deque and returns.  Everything else (identity of the
process, timestamps, JSON, files) happens in the writer thread, at most `flush_interval_s` later.
Nothing here raises into the host, holds a lock across host code, or calls fsync.

A file only ever holds whole lines: the process owns it alone (see `_claim_name`), and a write that
the disk cuts short is taken back before it is tried again.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from verl_profiler import context
from verl_profiler.clock import Anchor, Readings, Timestamps, anchor_for_this_boot, now
from verl_profiler.events import FORMAT_VERSION, process_name
from verl_profiler.settings import Carried

__all__ = [
    "SAMPLED",
    "Identity",
    "Recorder",
    "active",
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
# Lines encoded before the writer lets other threads run.
_CHUNK = 256
_OPEN_FILES = 4


@dataclass(frozen=True)
class Identity:
    """Who this process is: role, rank, and what Ray calls it."""

    role: str
    rank: int | None
    replica: int | None = None
    actor_name: str | None = None
    actor_class: str | None = None


class _Line(msgspec.Struct, omit_defaults=True):
    timestamp: str
    event: str
    duration_sec: float | None = None
    extra: dict[str, Any] | None = None
    workid: Any = None
    step: Any = None


def _plain(value: Any) -> Any:
    """Encode what JSON does not know: str subclasses and scalars by value, the rest by repr."""
    if isinstance(value, str):
        return str.__str__(value)
    item = getattr(value, "item", None)
    if callable(item):
        with contextlib.suppress(Exception):
            return item()
    return repr(value)[:200]


_encode = msgspec.json.Encoder(enc_hook=_plain).encode


class _StepFile:
    """One open event file and how much of it is whole lines."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self.fd = os.open(path, flags, 0o644)
        self.size = os.fstat(self.fd).st_size

    def write(self, data: bytes) -> None:
        """Append all of `data` or none of it."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError:
            os.ftruncate(self.fd, self.size)
            raise
        self.size += len(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


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
        self.steps = frozenset(carried.events.steps) if carried.events.steps is not None else None
        self.queue: deque[tuple[Any, ...]] = deque()
        self.limit = carried.events.max_pending
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self.carried = carried
        self.directory = Path(carried.directory)
        self.fallback: str | None = None
        self.identity: Identity | None = None
        self.name: str | None = None
        self.anchor: Anchor = anchor_for_this_boot(carried.clock)
        self._readings = Readings()
        # Called by the writer thread before each of its flushes.
        self.before_flush: Callable[[], None] | None = None
        self._identify = identify
        self._describe = describe
        self._timestamps = Timestamps(self.anchor)
        self._files: dict[Path, _StepFile] = {}
        self._unwritten: dict[Path, list[bytes]] = {}
        self._unwritten_events = 0
        self._counts = {"events": 0, "bytes": 0, "write_errors": 0, "dropped_at_write": 0}
        self._writer_ns = 0
        self._writer_cpu_ns = 0
        self._cost: dict[int, list[int]] = {}
        self._cost_reported_ns = now()
        # What had been spent and lost when costs were reported last.
        self._spent_then: dict[str, int] = {}
        self._dropped_then = 0
        self._step_paths: dict[Any, Path] = {}
        self._started_ns = now()
        self._started = _iso_now()
        self._header_ns = 0
        self._announced = False
        self._complained = False
        self._closing = False
        self._wake = threading.Event()
        self._flush_lock = threading.Lock()
        self.pid = os.getpid()

    def append(self, item: tuple[Any, ...]) -> None:
        """Take one event; the only work done in the caller's thread."""
        if len(self.queue) >= self.limit:
            self.dropped += 1
            return
        self.queue.append(item)
        if self._thread is None:
            self.start_writer()

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

    def start_writer(self) -> None:
        """Start the writer thread; a forked child does so with its first event."""
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(
                target=self._run, name="verl-profiler writer", daemon=True
            )
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def close(self, reason: str) -> None:
        """Write what is left and end the header.  Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(timeout=5)
        try:
            # An interrupted flush of the writer thread may still hold the lock.
            if self._flush_lock.acquire(timeout=2):
                try:
                    self._write_out(final=True)
                    self._report_cost(final=True)
                    self._write_header(ended=reason)
                finally:
                    self._flush_lock.release()
        except Exception as error:  # noqa: BLE001  the host is exiting; it must not see us fail
            self._complain(f"the last events could not be written: {error!r}")
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _run(self) -> None:
        interval = self.carried.events.flush_interval_s
        while not self._closing:
            self._wake.wait(interval)
            if self._closing:
                return
            try:
                if self.before_flush is not None:
                    self.before_flush()
                with self._flush_lock:
                    self._write_out()
            except Exception as error:  # noqa: BLE001  a fault here must not end the thread
                self._counts["write_errors"] += 1
                self._complain(f"events could not be written: {error!r}")

    def _write_out(self, *, final: bool = False) -> None:
        begin, cpu = now(), time.thread_time_ns()
        try:
            self._flush(final=final)
        finally:
            self._writer_ns += now() - begin
            self._writer_cpu_ns += time.thread_time_ns() - cpu

    def _flush(self, *, final: bool = False) -> None:
        if self.name is None and not self._settle_identity(final=final):
            return
        lines: dict[Path, list[bytes]] = self._unwritten
        self._unwritten = {}
        kept = self._unwritten_events
        self._unwritten_events = 0
        encoded = 0
        # No longer than what is there now: a busy host must not keep the writer in here.
        for _ in range(len(self.queue)):
            try:
                item = self.queue.popleft()
            except IndexError:
                break
            path, line, step = self._encode(item)
            if line is None:
                continue
            lines.setdefault(path, []).append(line)
            cost = self._cost.setdefault(step if isinstance(step, int) else 0, [0, 0])
            cost[0] += 1
            cost[1] += len(line)
            encoded += 1
            if encoded % _CHUNK == 0:
                time.sleep(0)
        for path, chunk in lines.items():
            self._write(path, chunk, kept + encoded)
        if final:
            return
        if now() - self._cost_reported_ns > _COST_INTERVAL_S * 1e9:
            self._report_cost()
        if now() - self._header_ns > _HEADER_INTERVAL_S * 1e9:
            self._write_header()

    def _encode(self, item: tuple[Any, ...]) -> tuple[Path, bytes | None, Any]:
        event, begin_ns, end_ns, extra, step = item[:5]
        microseconds = self._timestamps.microseconds
        end = microseconds(end_ns)
        duration = None if begin_ns is None else (end - microseconds(begin_ns)) / 1e6
        rank = self.identity.rank if self.identity is not None else None
        path = self._path_of(step)
        more: dict[str, Any] | None = None
        if len(item) > 5:
            workid, explicit_path, more = item[5:]
            rank = rank if workid is None else workid
            path = path if explicit_path is None else Path(explicit_path)
        line = _Line(self._timestamps.text(end), event, duration, extra or None, rank, step)
        try:
            if more:
                builtins = msgspec.to_builtins(line, enc_hook=_plain)
                data = _encode({**builtins, **more})
            else:
                data = _encode(line)
        except Exception:  # noqa: BLE001  keys that are no strings, cycles: keep what can be kept
            line.extra = {"unencodable": repr(extra)[:200]}
            try:
                data = _encode(line)
            except Exception:  # noqa: BLE001
                self._counts["dropped_at_write"] += 1
                return path, None, step
        return path, data + b"\n", step

    def _path_of(self, step: Any) -> Path:
        path = self._step_paths.get(step)
        if path is None:
            if len(self._step_paths) > 64:
                self._step_paths.clear()
            number = step if isinstance(step, int) else 0
            path = self.directory / f"step_{number}" / f"{self.name}.jsonl"
            self._step_paths[step] = path
        return path

    def _write(self, path: Path, lines: list[bytes], pending: int) -> None:
        data = b"".join(lines)
        try:
            file = self._files.pop(path, None)
            if file is None:
                while len(self._files) >= _OPEN_FILES:
                    self._files.pop(next(iter(self._files))).close()
                file = _StepFile(path)
            # Last used last, so that the files of finished steps are the ones that are closed.
            self._files[path] = file
            file.write(data)
        except OSError as error:
            self._counts["write_errors"] += 1
            if pending <= self.limit:
                self._unwritten[path] = lines
                self._unwritten_events += len(lines)
                advice = "they are kept in memory and tried again"
            else:
                self._counts["dropped_at_write"] += len(lines)
                advice = "too many wait already, so they are dropped"
            self._complain(f"cannot write to {path}: {error.strerror or error}; {advice}")
            return
        self._complained = False
        self._counts["events"] += len(lines)
        self._counts["bytes"] += len(data)

    def _report_cost(self, *, final: bool = False) -> None:
        """Say per step what the profiler did since the last report."""
        if self.name is None:
            return
        self._cost_reported_ns = now()
        costs, self._cost = self._cost, {}
        events = sum(count for count, _ in costs.values())
        if not events:
            return
        dropped = self.dropped + self._counts["dropped_at_write"]
        spent_then, self._spent_then = self._spent_then, self._spent()
        lost, self._dropped_then = dropped - self._dropped_then, dropped
        for position, (step, (count, size)) in enumerate(sorted(costs.items())):
            share = count / events
            extra = {
                "events": count,
                "bytes": size,
                # Drops have no step of their own; they are said once.
                "dropped": lost if position == 0 else 0,
                **{
                    name: round((spent_ns - spent_then.get(name, 0)) * share / 1e9, 9)
                    for name, spent_ns in self._spent_then.items()
                },
            }
            moment = now()
            path, line, _ = self._encode(("profiler_cost", None, moment, extra, step))
            if line is not None:
                self._write(path, [line], 0)
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
            if not self.queue or (waited_s < _IDENTITY_PATIENCE_S and not final):
                return False
            identity = Identity("process", None)
        self.identity = identity
        if identity.replica is not None:
            context.process.replica = identity.replica
        self._claim_name(identity)
        return True

    def _claim_name(self, identity: Identity) -> None:
        """Take the first free name in `processes/`; the header's creation is the claim."""
        base = process_name(identity.role, identity.rank, socket.gethostname(), self.pid)
        for directory in (self.directory, self._fallback_directory()):
            try:
                (directory / "processes").mkdir(parents=True, exist_ok=True)
                for number in range(1, 10_000):
                    name = base if number == 1 else f"{base}-{number}"
                    try:
                        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
                        os.close(os.open(directory / "processes" / f"{name}.json", flags, 0o644))
                    except FileExistsError:
                        continue
                    if directory != self.directory:
                        self.fallback = f"{self.directory} cannot be written on this host"
                        self.directory = directory
                        self._step_paths.clear()
                        self._complain(
                            f"{self.carried.directory} cannot be written on "
                            f"{socket.gethostname()}; the events of this process go to {directory}.\n"
                            "Copy that folder's contents into the run directory afterwards"
                        )
                    self.name = name
                    self._write_header()
                    return
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    continue
        self.name = base
        self._complain(f"no header could be written for {base}")

    def _fallback_directory(self) -> Path:
        run = Path(self.carried.directory).name
        return Path(tempfile.gettempdir()) / "verl_profiler" / run

    def _write_header(self, ended: str | None = None) -> None:
        self._header_ns = now()
        identity = self.identity
        if identity is None or self.name is None:
            return
        announcement = None
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
                "events": self._counts["events"],
                "bytes": self._counts["bytes"],
                "dropped": self.dropped + self._counts["dropped_at_write"],
                "write_errors": self._counts["write_errors"],
                **{name: spent_ns / 1e9 for name, spent_ns in self._spent().items()},
            },
            "started": self._started,
            "updated": _iso_now(),
            "ended": _iso_now() if ended else None,
            "end_reason": ended,
            "directory": str(self.directory),
            "fallback": self.fallback,
        }
        try:
            header.update(self._describe())
            announcement = header.pop("announcement", None)
            target = self.directory / "processes" / f"{self.name}.json"
            partial = target.with_suffix(".json.part")
            partial.write_bytes(_encode(header))
            partial.replace(target)
        except OSError as error:
            self._counts["write_errors"] += 1
            self._complain(f"the header of {self.name} could not be written: {error}")
        if announcement and not self._announced and self.carried.events.announce:
            self._announced = True
            say(f"{self.name}: {announcement}")

    def _complain(self, text: str) -> None:
        """Print one line, and not again until a write has worked."""
        if not self._complained:
            self._complained = True
            say(f"WARNING {self.name or 'process'}: {text}")

    def forked(self) -> None:
        """Forget the parent's events, files and thread; called in a forked child."""
        self.queue = deque()
        self._files = {}
        self._unwritten = {}
        self._unwritten_events = 0
        self._counts = dict.fromkeys(self._counts, 0)
        self._cost = {}
        self._step_paths = {}
        self.before_flush = None
        self._thread = None
        self._flush_lock = threading.Lock()
        self._wake = threading.Event()
        self.dropped = self._dropped_then = 0
        self.wrapper_ns = self.wrapper_cpu_ns = self._writer_ns = self._writer_cpu_ns = 0
        self._spent_then = {}
        self.pid = os.getpid()
        self._started_ns = now()
        self._started = _iso_now()
        parent = self.identity
        # A child is not the actor that its parent is; the parent's name says where it comes from.
        role = f"{parent.role}_child" if parent is not None else "child"
        self.identity = None
        self.name = None
        self._announced = True
        self._identify = lambda: Identity(role, None)


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
    """Record one event; without an active recorder do nothing.

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
    if step is None:
        step = context.process.current_step()
    if recorder.wants(step):
        recorder.append((event, begin_ns, end_ns, extra, step))


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
    if _active is not None:
        for callback in _before_stop:
            with contextlib.suppress(Exception):
                callback()
    recorder, _active = _active, None
    if recorder is not None:
        recorder.close(reason)


def before_stop(callback: Callable[[], None]) -> None:
    """Call this once more before recording ends, to close what is open."""
    if callback not in _before_stop:
        _before_stop.append(callback)


def _install_exit_hooks() -> None:
    global _exit_hooks
    if _exit_hooks:
        return
    _exit_hooks = True
    atexit.register(stop, "exit")
    os.register_at_fork(after_in_child=_after_fork)
    with contextlib.suppress(ValueError, OSError):
        # Only where nobody else handles it; Ray installs a handler of its own, then atexit runs.
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, _on_sigterm)


def _after_fork() -> None:
    if _active is not None:
        _active.forked()


def _on_sigterm(number: int, _frame: Any) -> None:
    stop("sigterm")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
