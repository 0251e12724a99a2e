"""Events from your own code: a tool, a reward function, an agent loop.

    from verl_profiler import span

    with span("database_lookup", table="users") as lookup:
        rows = query()
        lookup.set(rows=len(rows))

    @span("rerank")
    async def rerank(documents): ...

Request, turn, step and worker come from the context.  Without a running profiler both cost one
function call and write nothing.  docs/api.md has an example for each place.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import time
from collections.abc import Callable, Mapping
from contextvars import Token
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from verl_profiler.events.fields import FIELDS, IDENTITY
from verl_profiler.events.vocabulary import EVENTS
from verl_profiler.recording import context, observers, recorder, requests, values
from verl_profiler.recording.call import outcome_of
from verl_profiler.recording.clock import now, take_anchor
from verl_profiler.recording.encoding import EVENT_NAME_LIMIT, STEP_LIMIT, Logged
from verl_profiler.recording.recorder import SAMPLED
from verl_profiler.recording.values import plain
from verl_profiler.recording.worker_config import UNNAMED_RUN, EventSettings, WorkerConfig

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LogManager", "apart", "log_manager", "span", "start", "stop"]

# Keys of a line that a caller must not give.
_OWN_KEYS = ("timestamp", "duration_sec")
# Bytes of the keys that a caller adds to a line.
_KEYS_LIMIT = 4096
# Thirty years; what is longer is a time of day.
_LONGEST_S = 1e9
# What a caller puts into an event is kept apart from the fields to which readers give a meaning.
_PREFIX = "user_"
# Of any event; `uid` selects requests in exports.
_RESERVED = frozenset({*IDENTITY, "uid"})
# The fields that readers hold as numbers or as text, whatever the event; others they leave as they are.
_COLUMNS = {
    name: str if field.type == "string" else float for name, field in FIELDS.items() if field.column
}
_MEANINGFUL = frozenset({*_RESERVED, *_COLUMNS})
# Readers take what is larger for damage.
_NUMBER_LIMIT = 1 << 53

_current_request = context.current_request.get
_snapshot = values.snapshot

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _record(
    active: recorder.Recorder,
    event: str,
    begin_ns: int,
    fields: dict[str, Any],
    error: BaseException | None,
    named: context.Request | None,
) -> None:
    end = now()
    cpu = 0 if end % SAMPLED else time.thread_time_ns()
    try:
        request = _current_request() if named is None else named
        if request is None:
            step: Any = context.process.current_step()
            extra = apart(fields, {}).copy()
        else:
            step = request.step
            identity = request.full_identity()
            own = identity if request.uid is None else {**identity, "uid": request.uid}
            extra = {**identity, **apart(fields, own)}
        if error is not None:
            extra |= outcome_of(error)
        if active.steps is None or step in active.steps:
            # As in `log_manager.log`, without the calls.
            if type(event) is not str or len(event) > EVENT_NAME_LIMIT:
                event = _name(event)
            if event in EVENTS:
                raise _BadArgumentError(
                    f"span({event!r}) has the name of one of the profiler's own events; choose "
                    f"another, such as my_{event}"
                )
            kept = _snapshot(extra)
            if kept is extra:
                active.append((event, begin_ns, end, extra, step))
            else:
                active.append_long((event, begin_ns, end, kept, step), len(memoryview(kept)))  # type: ignore[arg-type]
    except Exception as problem:  # noqa: BLE001  nothing of ours reaches the host
        active.refuse(_reason(problem))
    if cpu:
        active.add_cpu(cpu)
    active.wrapper_ns += now() - end


class _BadArgumentError(ValueError):
    """An argument of which no event can be made; its text holds none of the caller's."""


def _reason(problem: Exception) -> str:
    return str(problem) if isinstance(problem, _BadArgumentError) else type(problem).__name__


def _name(event: Any) -> str:
    if type(event) is str and len(event) <= EVENT_NAME_LIMIT:
        return event
    if not issubclass(type(event), str):
        raise _BadArgumentError("the event's name is not text")
    return values.text(event, EVENT_NAME_LIMIT)


def _whole(number: Any, problem: str) -> int:
    try:
        whole = type(number) is float and number.is_integer()
        return int(number) if whole else int(operator.index(number))  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  a conversion of the caller's
        raise _BadArgumentError(problem) from None


def _step(step: Any) -> int:
    number = _whole(step, "its step is not a whole number")
    if not -STEP_LIMIT <= number < STEP_LIMIT:
        raise _BadArgumentError("its step does not fit into 32 bits")
    return number


def _nanoseconds(duration: Any) -> int:
    try:
        seconds = float("nan") if issubclass(type(duration), (str, bytes)) else float(duration)
    except Exception:  # noqa: BLE001  a conversion of the caller's
        seconds = float("nan")
    if not 0 <= seconds < _LONGEST_S:
        raise _BadArgumentError("its duration is not a number of seconds, 0 or more")
    return round(seconds * 1e9)


def _workid(workid: Any) -> int | str | None:
    if workid is None or type(workid) is int:
        return workid
    if issubclass(type(workid), str):
        return values.text(workid, EVENT_NAME_LIMIT)
    return _whole(workid, "its workid is neither a whole number nor text")


def _path(log_path: Any) -> Path:
    try:
        path = os.fsdecode(log_path)
        # The writer thread may run in another directory later.
        path = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except Exception:  # noqa: BLE001  a conversion of the caller's, a directory that is gone
        path = "\0"
    if "\0" in path:
        raise _BadArgumentError("its log_path is not a path")
    return Path(path)


class _Span(msgspec.Struct, eq=False):
    """What `span(...)` returns: a context manager, sync and async, and a decorator."""

    _event: str
    _fields: dict[str, Any]
    _begin_ns: int = 0
    # The request that it names, and what takes it out of the context.
    _named: tuple[context.Request, Token[Any]] | None = None
    _range: Any = None

    def set(self, /, **fields: Any) -> None:
        """Set fields that are known only later, such as the size of a result; the last value stays."""
        self._fields.update(fields)

    def add(self, /, **numbers: float) -> None:
        """Add to numeric fields, which start from 0: `lookup.add(rows=3)` in a loop."""
        fields = self._fields
        for name, number in numbers.items():
            before = fields.get(name)
            try:
                fields[name] = number if before is None else before + number
            except Exception:  # noqa: BLE001  operators of the caller's types
                fields[name] = number

    def __enter__(self) -> Self:
        if observers.current is not None:
            self._range = observers.current.span_begins(self._event)
        if "request_id" in self._fields and recorder._active is not None:  # pyright: ignore[reportPrivateUsage]
            request = requests.begin_named_request(
                self._fields["request_id"], self._event, self._fields
            )
            if request is not None:
                self._named = request, context.current_request.set(request)
        self._begin_ns = now()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._range is not None and observers.current is not None:
            observers.current.span_ends(self._range)
            self._range = None
        active = recorder._active  # pyright: ignore[reportPrivateUsage]
        if active is not None:
            named = None if self._named is None else self._named[0]
            _record(active, self._event, self._begin_ns, self._fields, error, named)
        if self._named is not None:
            request, token = self._named
            self._named = None
            requests.end_named_request(request, error)
            context.restore(token, request)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.__exit__(kind, error, traceback)

    def __call__(self, function: _Function) -> _Function:
        return _decorated(function, self._event, self._fields)


def _decorated(function: Any, event: str, fields: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def timed(*args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportRedeclaration]
            with _Span(event, dict(fields)):
                return await function(*args, **kwargs)

    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"@span cannot time the generator {function.__qualname__}: its body runs while the "
            "caller iterates. Put `with span(...)` inside it."
        )
    else:

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with _Span(event, dict(fields)):
                return function(*args, **kwargs)

    return timed


@overload
def span(event: _Function, /) -> _Function: ...
@overload
def span(event: str, /, **fields: Any) -> _Span: ...
def span(event: Any, /, **fields: Any) -> Any:
    """Time a block or a function.

    Args:
        event: The event's name, a singular noun; or, as a bare decorator, the function, whose
            name is then the event's.  Names of the profiler's own events (`step`, `tool_call`:
            docs/events.md) are refused: such a span is counted, not recorded.
        **fields: Attributes; a unit belongs in the name (`size_bytes`).  Outside of verl's agent
            loops, `request_id` names a request: engine calls and spans inside belong to it.

    Returns:
        An object for `with`, `async with` or `@`, with `set(**fields)` and `add(**numbers)`; a
        decorated function when given one.
    """
    if callable(event):
        return _decorated(event, getattr(event, "__name__", "span"), {})
    return _Span(event, fields)


def _named_by(fields: dict[str, Any]) -> dict[str, Any]:
    """Return what `extra` of `log_manager.log` says of the request and the turn."""
    named = ("request_id", "sample", "session", "uid") if "request_id" in fields else ()
    own = {name: values.plain(fields[name]) for name in named if name in fields}
    turn = values.plain(fields.get("turn"))
    if type(turn) is int and abs(turn) < STEP_LIMIT >> 1:
        own["turn"] = turn
    return own


class LogManager:
    """The call shape of the original multi-turn logger."""

    def log(
        self,
        /,
        log_path: str | os.PathLike[str] | None,
        event: str,
        duration: float | None = None,
        extra: dict[str, Any] | None = None,
        workid: int | None = None,
        step: int | None = None,
        **extra_keys: Any,
    ) -> None:
        """Record an event that ends now.  Never raises: an event that cannot be recorded is counted.

        Args:
            log_path: The file; None for this process's own file of the step.  A path under the
                configured `profiler.output_dir` goes into this launch's run directory, and a
                relative one is otherwise taken from the current directory.
            event: The event's name.
            duration: Seconds; None for an instant.
            extra: Further fields; request and turn are added from the context where absent.
            workid: Rank; None for this process's.
            step: verl's global step; None for the current one.
            **extra_keys: Further keys of the line itself.
        """
        end = now()
        active = recorder.active()
        if active is None:
            return
        try:
            request = _current_request()
            if step is None:
                step = context.process.current_step() if request is None else request.step
            number = _step(step)
            if not active.wants(number):
                return
            begin = None if duration is None else end - _nanoseconds(duration)
            path = None if log_path is None else self._place(_path(log_path), active)
            if not isinstance(extra, (Mapping, type(None))):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise _BadArgumentError("its extra is not a dict")
            if any(key in _OWN_KEYS for key in extra_keys):
                raise _BadArgumentError(f"{' and '.join(_OWN_KEYS)} are the recorder's own keys")
            name = _name(event)
            identity = {} if request is None else request.full_identity()
            fields = dict(extra or {})
            if name not in EVENTS:
                fields = apart(fields, _named_by(fields))
                extra_keys = apart(extra_keys, {})
            more = msgspec.Raw(values.encode(extra_keys, _KEYS_LIMIT)) if extra_keys else None
            fields = {**identity, **fields}
            # The caller can change nothing of it any more.
            kept = _snapshot(fields)
            item = (name, begin, end, Logged(kept, _workid(workid), path, more), number)
            if kept is fields:
                active.append(item)
            else:
                active.append_long(item, len(memoryview(kept)))  # type: ignore[arg-type]
        except Exception as problem:  # noqa: BLE001  nothing of ours reaches the host
            active.refuse(_reason(problem))

    @staticmethod
    def _place(path: Path, active: recorder.Recorder) -> Path:
        # The second: code that logs to logs/$EXPERIMENT_NAME may run where that variable is not set.
        for base in (os.path.expanduser(active.config.output_dir), UNNAMED_RUN):
            try:
                return active.directory / path.relative_to(os.path.abspath(base))
            except ValueError:
                continue
        return path


log_manager = LogManager()


def start(
    directory: str | os.PathLike[str], *, role: str = "process", rank: int | None = None
) -> Path:
    """Record in this process without verl, for scripts and tests of your own.

    Args:
        directory: The run directory is made here, or beside it if it holds a run already.
        role: The role in the file names.
        rank: The rank in the file names; without one, host and pid stand there.

    Returns:
        The run directory.

    Raises:
        ConfigError: If the directory cannot be written.
        RuntimeError: If this process records already.
    """
    from verl_profiler.recording import run_directory
    from verl_profiler.recording.identity import Identity

    if recorder.active() is not None:
        raise RuntimeError("this process is already recording; call verl_profiler.stop() first")
    anchor = take_anchor()
    events = EventSettings()
    made = run_directory.make(os.fspath(directory), anchor, events, {})
    config = WorkerConfig(str(made), os.fspath(directory), events, anchor)
    recorder.start(config, lambda: Identity(role, rank))
    return made


def stop() -> None:
    """Write what is left and stop recording in this process."""
    recorder.stop("stopped")


def apart(fields: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's attributes, those that readers would misunderstand under `user_<name>`.

    These are reserved names, and columns of readers with a value of another kind.

    Args:
        fields: The caller's; returned as they are where no name is one of the profiler's.
        own: Reserved names that are what they are called where they have these values: the identity of the
            request that the event belongs to.
    """
    if _MEANINGFUL.isdisjoint(fields):
        return fields
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _RESERVED:
            exact = value if type(value) in (str, int) else plain(value)
            misread = type(exact) not in (str, int) or own.get(name) != exact
        else:
            misread = name in _COLUMNS and not _fits(value, _COLUMNS[name])
        while misread and (name in fields or name in kept):
            name = f"{_PREFIX}{name}"  # noqa: PLW2901
        kept[name] = value
    return kept


def _fits(value: Any, kind: type) -> bool:
    if type(value) not in (str, int, float):
        value = plain(value)
    if kind is str:
        return value is None or type(value) is str
    return value is None or (type(value) in (int, float) and abs(value) <= _NUMBER_LIMIT)
