"""Time on the device of calls that return before their kernels have run, without waiting for them.

Two CUDA events are put into the current stream around a call.  They are read at a later call, when the
device has passed them: nothing here waits.  A process that does not use CUDA, or captures a graph, has no
such times; neither have the last calls before a process ends.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from verl_profiler.recording import context, devices, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.complaints import announce

# Calls whose events the device has not passed; of more, the oldest are forgotten.
_WAITING = 256
# Events to use again: creating one costs a call into the driver.
_KEPT = 64

# Name of the event, begin and end on the host, step, CUDA events.
_Pair = tuple[str, int, int, "int | None", Any, Any]

_waiting: deque[_Pair] = deque(maxlen=_WAITING)
_free: list[Any] = []
_failed = False


def begin() -> Any:
    """Put an event into the current stream; what the device has passed meanwhile is recorded.

    Returns:
        The event; None if this process does not use CUDA now.
    """
    try:
        cuda = _usable()
        if cuda is None:
            return None
        harvest()
        return _recorded(cuda)
    except Exception as error:  # noqa: BLE001  a device in trouble: the host will say so itself
        _give_up(error)
        return None


def end(call: Call, started: Any) -> None:
    """Put a second event behind the call's work, and keep both until the device has passed them."""
    if started is None or call.event is None or call.begin_ns is None or call.error is not None:
        return
    try:
        cuda = _usable()
        ended = None if cuda is None else _recorded(cuda)
    except Exception as error:  # noqa: BLE001  see above
        _give_up(error)
        return
    if ended is not None:
        if not _waiting:
            recorder.before_stop(harvest)
            recorder.after_fork(forget)
        step = context.process.current_step() if call.step is None else call.step
        _waiting.append((call.event, call.begin_ns, call.end_ns, step, started, ended))


def _give_up(error: Exception) -> None:
    global _failed
    forget()
    _failed = True
    announce(f"WARNING device time is no longer recorded: {error!r} (device-time-failed)")


def harvest() -> None:
    """Record the times of calls whose events the device has passed, in order; the others wait.

    Raises:
        Exception: CUDA's own.
    """
    while _waiting:
        name, begin_ns, end_ns, step, started, ended = _waiting[0]
        if not ended.query():
            return
        _waiting.popleft()
        extra = {
            "of": name,
            "device_s": round(started.elapsed_time(ended) / 1e3, 6),
            "host_s": round((end_ns - begin_ns) / 1e9, 6),
        }
        recorder.record("device_time", None, end_ns, extra, step)
        if len(_free) < _KEPT:
            _free.extend((started, ended))


def _usable() -> Any:
    """Return torch.cuda, or None: during the capture of a graph, CUDA also refuses to query events."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if _failed or cuda is None or not cuda.is_initialized():
        return None
    return None if cuda.is_current_stream_capturing() else cuda


def _recorded(cuda: Any) -> Any:
    if not _free:
        devices.remember_device(cuda)
    event = _free.pop() if _free else cuda.Event(enable_timing=True)
    event.record()
    return event


def forget() -> None:
    """Let go of all events, and of a failure: a forked child must not use its parent's."""
    global _failed
    _failed = False
    _waiting.clear()
    _free.clear()
