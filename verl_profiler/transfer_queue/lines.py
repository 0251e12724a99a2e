"""Print lines through Python's logging, from a thread of its own.

Putting a line together and writing it takes tens of microseconds, and a call has a dozen of them.  The
caller's thread only appends what it is made of, with the time; what is pending is written every 50 ms
and at exit.  Where the log blocks (a full pipe) lines are dropped, and counted in the log.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from verl_profiler.recording import recorder
from verl_profiler.transfer_queue.switches import LOG_LEVEL_VARIABLE

NAME = "verl_profiler.transfer_queue"
_INTERVAL_S = 0.05
# Lines that may wait.
_MOST = 50_000

_log = logging.getLogger(NAME)
_pending: deque[tuple[float, Callable[..., str], tuple[Any, ...]]] = deque()
_dropped = 0
_stopped = threading.Event()
_guard = threading.Lock()
_writing = threading.Lock()
_writer: threading.Thread | None = None


def configure() -> None:
    """Take the log level: verl's variable, INFO without one."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "").strip().upper()
    try:
        _log.setLevel(level)
    except ValueError:
        _log.setLevel("INFO")


def are_shown() -> bool:
    """Whether the level lets lines through."""
    return _log.isEnabledFor(logging.INFO)


def write_soon(make: Callable[..., str], *arguments: Any) -> None:
    """Print the line that `make(*arguments)` returns, soon, from another thread."""
    if len(_pending) >= _MOST:
        _drop()
        return
    _pending.append((time.time(), make, arguments))
    if _writer is None:
        _start()


def flush() -> None:
    """Write what is pending; also called by the recorder before it stops."""
    global _dropped
    if _pending and not _log.hasHandlers():
        # verl sets one up when it is imported; its format.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
        _log.addHandler(handler)
    with _writing:
        # A line that comes meanwhile is written too; the host's thread may be faster than ours.
        while _pending:
            moment, make, arguments = _pending.popleft()
            try:
                _print(logging.INFO, moment, make(*arguments))
            except Exception:  # noqa: BLE001  the lines behind it are printed
                _drop()
        with _guard:
            dropped, _dropped = _dropped, 0
        if dropped:
            text = f"{dropped} lines could not be printed and are missing here. (tq-lines-dropped)"
            _print(logging.WARNING, time.time(), text)


def _drop() -> None:
    global _dropped
    with _guard:
        _dropped += 1


def _print(level: int, moment: float, text: str) -> None:
    record = _log.makeRecord(NAME, level, "", 0, text, (), None)
    record.created, record.msecs = moment, moment % 1 * 1000
    _log.handle(record)


def stop() -> None:
    """Write what is pending and end the thread; for tests."""
    global _writer
    _stopped.set()
    if _writer is not None:
        _writer.join(timeout=5)
    _writer = None
    _stopped.clear()
    flush()


def _start() -> None:
    global _writer
    with _guard:
        if _writer is not None:
            return
        _writer = threading.Thread(target=_run, name="verl-profiler tq lines", daemon=True)
    with contextlib.suppress(RuntimeError):
        _writer.start()
    # Again in a forked child, in which the recorder has forgotten it.
    recorder.before_stop(flush)


def _run() -> None:
    while not _stopped.wait(_INTERVAL_S):
        if _pending or _dropped:
            with contextlib.suppress(Exception):
                flush()


def _forked() -> None:
    global _stopped, _writing, _guard, _writer, _dropped
    _stopped, _writer, _dropped = threading.Event(), None, 0
    _writing, _guard = threading.Lock(), threading.Lock()
    _pending.clear()


atexit.register(flush)
os.register_at_fork(after_in_child=_forked)
