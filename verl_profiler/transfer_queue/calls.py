"""One running function or client operation: its lines and its events.

A traced function is in one stage at a time.  Of a *bridged* function verl itself fetches the data
before and stores it after: GET lasts from the call until the function's own code begins, COMPUTE is
that code, PUT begins with the first write after it.  A *direct* function reads and writes the queue
in its own code: each read is a GET, each write a PUT, all else COMPUTE, and stages may come again.

Times are those of the monotonic clock.  What is open when an exception passes is closed with it.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict
from contextvars import ContextVar, Token
from typing import Any

from verl_profiler.probes.batch_sizes import size_of
from verl_profiler.recording import context, recorder
from verl_profiler.recording.call import outcome_of
from verl_profiler.recording.clock import now
from verl_profiler.transfer_queue import lines
from verl_profiler.transfer_queue.switches import Switches
from verl_profiler.transfer_queue.trace_ids import Origin, set_run

_MB = 2**20
_SECOND = 1e9

current: ContextVar[FunctionCall | None] = ContextVar("verl_profiler_tq_call", default=None)
current_client: ContextVar[ClientCall | None] = ContextVar("verl_profiler_tq_client", default=None)
switches = Switches()
is_on = False
_records = False

_process = f"{random.SystemRandom().randrange(16**6):06x}"
_numbers = itertools.count(1)
_seen: defaultdict[str, Any] = defaultdict(itertools.count)


def start(chosen: Switches, run: str, *, records: bool) -> None:
    """Trace in this process from now on, what is wrapped.

    Args:
        chosen: What is on.
        run: The run's name.
        records: Whether events of the family `transfer_queue` are recorded in this process.
    """
    global switches, is_on, _records
    switches, is_on, _records = chosen, chosen.any, records
    set_run(run)
    lines.configure()
    _seen.clear()


def stop() -> None:
    """Trace no further calls, and end the threads; for tests."""
    global switches, is_on, _records
    switches, is_on, _records = Switches(), False, False
    lines.stop()


def _new_id() -> str:
    # The process id changes in a forked child, which inherits the rest.
    return f"{_process}-{os.getpid()}-{next(_numbers)}"


def _is_sampled(name: str) -> bool:
    return switches.sample_every == 1 or next(_seen[name]) % switches.sample_every == 0


def _step_of(origin: Origin) -> int | None:
    request = context.current_request.get()
    if request is not None:
        return request.step
    process = context.process
    return process.current_step() if process.is_trainer or process.step_known else origin.step


class _Traced:
    """What functions and client operations have in common: who they are, and their lines."""

    mark = ""
    wanted = False

    def __init__(self, call_id: str, origin: Origin, step: int | None, *, sampled: bool) -> None:
        self.id = call_id
        self.origin = origin
        self.trace_id = origin.text
        self.step = step
        self.sampled = sampled
        self.begin_ns = now()

    def _say(self, *parts: Any) -> None:
        """Print the line that `_line` makes of these parts, soon."""
        if self.wanted and self.sampled and lines.are_shown():
            lines.write_soon(self._line, switches.sample_every, *parts)

    def _line(
        self,
        every: int,
        before: str,
        stage: str,
        fields: str,
        moment_ns: int,
        after: str = "",
        status: str = "",
    ) -> str:
        """Put a line together; called from the thread that prints it."""
        text = (
            f"[{self.mark}] trace_id={self.trace_id} | {before}stage={stage} | {fields}"
            f"timestamp={moment_ns / _SECOND:.6f}{after} | call={self.id}"
        )
        if status:
            text += f" | status={status}"
        if every > 1:
            text += f" | sampled={every}"
        if self.step is not None:
            text += f" | step={self.step}"
        return text


class FunctionCall(_Traced):
    """One call of a traced function.

    Args:
        name: The function's `__name__`.
        origin: Which data it works on.
        bridged: Whether verl fetches and stores the data around the function's own code.
        waits: Whether it waits for calls of the same data in other processes, whose times are
            counted there.
    """

    mark = "TQ-TRACE"

    def __init__(self, name: str, origin: Origin, *, bridged: bool, waits: bool) -> None:
        super().__init__(_new_id(), origin, _step_of(origin), sampled=_is_sampled(name))
        self.wanted = switches.trace
        self.name = name
        self.bridged = bridged
        self.waits = waits
        self.operations = itertools.count(1)
        self.stage: str | None = None
        self._before = f"func={name} | "
        self._stage_begin_ns = 0
        self._spent_ns = {"GET": 0, "COMPUTE": 0, "PUT": 0}
        self._depth = 0
        self._ended = False
        self._request = context.current_request.get()
        self._token: Token[FunctionCall | None] | None = None

    def _leave_context(self) -> None:
        # Tasks that began meanwhile keep this object; a token keeps its whole context.
        token, self._token = self._token, None
        if token is not None:
            context.restore(token, self)

    def begin(self) -> FunctionCall:
        """Say so, and enter the first stage."""
        self._token = current.set(self)
        try:
            self._say(f"{self._before}pid={os.getpid()} | ", "FUNCTION_START", "", self.begin_ns)
            self._open("GET" if self.bridged else "COMPUTE")
        except BaseException:
            self._leave_context()
            raise
        return self

    def begin_compute(self) -> bool:
        """Go from GET to COMPUTE; False if this call is past that (a function inside of it)."""
        if not self.bridged or self.stage != "GET":
            return False
        self._close(None)
        self._open("COMPUTE")
        return True

    def end_compute(self, _result: Any, error: BaseException | None) -> None:
        """Leave COMPUTE."""
        if self.stage == "COMPUTE":
            self._close(error)

    def begin_operation(self, stage: str) -> bool:
        """Enter GET or PUT because the queue is read or written; False where that shows nothing."""
        if self._ended:
            return False
        if self.bridged:
            if self.stage is None and stage == "PUT":
                self._open("PUT")
            return False
        self._depth += 1
        if self._depth == 1:
            self._close(None)
            self._open(stage)
        return True

    def end_operation(self, _result: Any, error: BaseException | None) -> None:
        """Go back to COMPUTE with the end of the outermost operation."""
        self._depth -= 1
        if self._depth == 0 and not self._ended:
            self._close(error)
            self._open("COMPUTE")

    def end(self, _result: Any, error: BaseException | None) -> None:
        """Close what is open and say how the time was spent."""
        self._leave_context()
        if self.stage is not None:
            self._close(error)
        self._ended = True
        extra = {
            "func": self.name,
            "call": self.id,
            "trace_id": self.trace_id,
            **{f"{stage.lower()}_s": ns / _SECOND for stage, ns in self._spent_ns.items()},
        }
        if self.origin.rows is not None:
            extra["rows"] = self.origin.rows
        if self.waits:
            extra["waits"] = True
        end_ns = self._record("tq_function", self.begin_ns, extra, error)
        total = end_ns - self.begin_ns
        shares = " | ".join(
            f"{stage.lower()}_ratio={100 * ns / max(total, 1):.2f}%"
            for stage, ns in self._spent_ns.items()
        )
        self._say(
            self._before,
            "FUNCTION_END",
            f"total_duration={total / _SECOND:.6f}s | {shares} | ",
            end_ns,
            " | waits=1" if self.waits else "",
            "ok" if error is None else "error",
        )

    def _open(self, stage: str) -> None:
        self.stage = stage
        self._stage_begin_ns = begin = now()
        rows = self.origin.rows
        fields = f"batch_size={rows} | " if stage == "GET" and rows is not None else ""
        self._say(self._before, f"{stage}_START", fields, begin)

    def _close(self, error: BaseException | None) -> None:
        stage, self.stage = self.stage, None
        if stage is None:
            return
        begin = self._stage_begin_ns
        extra = {"func": self.name, "call": self.id, "trace_id": self.trace_id}
        end = self._record(f"tq_function_{stage.lower()}", begin, extra, error)
        self._spent_ns[stage] += end - begin
        self._say(
            self._before,
            f"{stage}_END",
            f"duration={(end - begin) / _SECOND:.6f}s | ",
            end,
            "",
            "ok" if error is None else "error",
        )

    def _record(
        self, event: str, begin_ns: int, extra: dict[str, Any], error: BaseException | None
    ) -> int:
        """Record one event that ends now; return the moment."""
        end_ns = now()
        # A rollout begins before its request is known and ends after it is over.
        self._request = context.current_request.get() or self._request
        if switches.trace and _records and recorder.active() is not None:
            if self._request is not None:
                extra = {**self._request.identity(), **extra}
            elif context.process.validate:
                extra["validate"] = True
            if error is not None:
                extra |= outcome_of(error)
            recorder.record(event, begin_ns, end_ns, extra, self.step)
        return end_ns


class ClientCall(_Traced):
    """One get or put of TransferQueue's client.

    Args:
        stage: `GET` or `PUT`.
        function: The traced function that it runs in, if any.
        origin: Which data it moves.
        shape: The batch size as the line shows it.
        size_bytes: What a put moves; known of a get when it has ended.
    """

    mark = "TQ-DETAIL"

    def __init__(
        self, stage: str, function: FunctionCall | None, origin: Origin, shape: str, size_bytes: int
    ) -> None:
        if function is None:
            sampled, call_id = _is_sampled(f"client {stage}"), _new_id()
        else:
            sampled, call_id = function.sampled, f"{function.id}.{next(function.operations)}"
        super().__init__(call_id, origin, _step_of(origin), sampled=sampled)
        self.wanted = switches.detail
        self.stage = stage
        self.size_bytes = size_bytes
        self._entered = function if function and function.begin_operation(stage) else None
        self._func = function.name if function else None
        self._who = f" | func={self._func}" if self._func else ""
        self._who += f" | pid={os.getpid()}"
        fields = f"batch_size={shape} | "
        if stage == "PUT":
            fields += f"data_size_mb={size_bytes / _MB:.2f} | "
        self._token: Token[ClientCall | None] | None = current_client.set(self)
        self.begin_ns = now()
        try:
            self._say("", f"TQ_CLIENT_{stage}_START", fields, self.begin_ns, self._who)
        except BaseException as error:
            self._leave_context()
            self._leave_function(error)
            raise

    def end(self, result: Any, error: BaseException | None) -> None:
        """Say how long it took and how fast it was."""
        end = now()
        self._leave_context()
        try:
            if self.stage == "GET" and result is not None:
                self.size_bytes = size_of(result).total
            self._say_end(end, error)
        finally:
            self._leave_function(error)

    def _leave_context(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            context.restore(token, self)

    def _leave_function(self, error: BaseException | None) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.end_operation(None, error)

    def ids(self) -> dict[str, str]:
        """Return the fields of this operation's event about its data and its function."""
        ids = {"trace_id": self.trace_id, "call": self.id}
        return {**ids, "func": self._func} if self._func else ids

    def _say_end(self, end: int, error: BaseException | None) -> None:
        duration = end - self.begin_ns
        megabytes = self.size_bytes / _MB
        size = f"data_size_mb={megabytes:.2f}"
        speed = f"throughput_mbps={megabytes / max(duration, 1) * _SECOND:.2f}"
        # The order of the guide's two examples.
        facts = f"{size} | {speed}" if self.stage == "GET" else f"{speed} | {size}"
        self._say(
            "",
            f"TQ_CLIENT_{self.stage}_END",
            f"duration={duration / _SECOND:.6f}s | {facts} | ",
            end,
            self._who,
            "ok" if error is None else "error",
        )
