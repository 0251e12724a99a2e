"""Events from your own code: a tool, a reward function, an agent loop.

    from verl_profiler import span

    with span("database_lookup", table="users"):
        ...

    @span("rerank")
    async def rerank(documents): ...

Request, turn, step and worker come from the context.  Without a running profiler both cost one
function call and write nothing.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from verl_profiler import context, recorder
from verl_profiler.clock import now, take_anchor
from verl_profiler.settings import Carried, EventSettings

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LogManager", "log_manager", "span", "start", "stop"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _record(event: str, begin_ns: int, fields: dict[str, Any], error: BaseException | None) -> None:
    active = recorder.active()
    if active is None:
        return
    end, cpu = active.begin_section()
    request = context.current_request.get()
    extra = dict(fields) if request is None else {**request.full_identity(), **fields}
    if error is not None:
        extra["status"] = "error" if isinstance(error, Exception) else "cancelled"
        extra["error"] = type(error).__name__
    recorder.record(event, begin_ns, end, extra, None if request is None else request.step)
    active.end_section(end, cpu)


class _Span:
    """What `span(...)` returns: a context manager, sync and async, and a decorator."""

    __slots__ = ("_begin_ns", "_event", "_fields", "_range")

    def __init__(self, event: str, fields: dict[str, Any]) -> None:
        self._event = event
        self._fields = fields
        self._begin_ns = 0

    def add(self, **fields: Any) -> None:
        """Add fields that are known only later, for example the size of a result."""
        self._fields.update(fields)

    def __enter__(self) -> Self:
        self._begin_ns = now()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if recorder.active() is not None:
            _record(self._event, self._begin_ns, self._fields, error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.__exit__(kind, error, traceback)

    def __call__(self, function: _Function) -> _Function:
        return _decorated(function, self._event, self._fields)


def _decorated(function: Any, event: str, fields: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def timed(*args: Any, **kwargs: Any) -> Any:
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
            name is then the event's.
        **fields: What else the line should say; a unit belongs in the name (`size_bytes`).

    Returns:
        An object for `with`, `async with` or `@`; a decorated function when given one.
    """
    if callable(event):
        return _decorated(event, getattr(event, "__name__", "span"), {})
    return _Span(event, fields)


class LogManager:
    """The call shape of the original multi-turn logger."""

    def log(
        self,
        log_path: str | os.PathLike[str] | None,
        event: str,
        duration: float | None = None,
        extra: dict[str, Any] | None = None,
        workid: int | None = None,
        step: int | None = None,
        **extra_keys: Any,
    ) -> None:
        """Record an event that ends now.

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
        request = context.current_request.get()
        identity = {} if request is None else request.full_identity()
        if step is None:
            step = context.process.current_step() if request is None else request.step
        if not active.wants(step):
            return
        begin = None if duration is None else end - round(duration * 1e9)
        path = None if log_path is None else str(self._place(Path(log_path), active))
        active.append(
            (event, begin, end, {**identity, **(extra or {})}, step, workid, path, extra_keys)
        )

    @staticmethod
    def _place(path: Path, active: recorder.Recorder) -> Path:
        configured = Path(os.path.expanduser(active.carried.output_dir))
        for base in (configured, Path(os.path.abspath(configured))):
            try:
                return active.directory / path.relative_to(base)
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
    from verl_profiler import run_directory
    from verl_profiler.recorder import Identity

    if recorder.active() is not None:
        raise RuntimeError("this process records already; call verl_profiler.stop() first")
    anchor = take_anchor()
    events = EventSettings(announce=False)
    made = run_directory.make(os.fspath(directory), anchor, events, {})
    carried = Carried(str(made), os.fspath(directory), events, anchor)
    recorder.start(carried, lambda: Identity(role, rank))
    return made


def stop() -> None:
    """Write what is left and stop recording in this process."""
    recorder.stop("stopped")
