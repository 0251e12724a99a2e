"""The wrapper around a callable of the host that runs a probe's hooks.

A wrapped callable behaves like the one it replaces: same signature, same result, the same
exception object, still a coroutine function or generator if it was one.  A probe's own failure is
counted, reported once, and never reaches verl.

A wrapper closes over its `Probe`, the original, and functions and modules that can be imported,
and nothing else.  Ray pickles decorated actor classes by value, and what a wrapper closes over
travels with them: a lock makes the class unpicklable, and a `wrapt.FunctionWrapper` is silently
dropped on the way (ray 2.60).  On the other side the wrapper finds the recorder of the process that
it landed in.

One file, slightly over 400 lines: the event-loop watchdog recognizes the frames of wrappers by it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

from verl_profiler.instrumentation.probe import EndTrace, Probe
from verl_profiler.instrumentation.status import FAILURES, failed, status
from verl_profiler.recording import context, event_loop_lag, observers, recorder
from verl_profiler.recording.call import Call, outcome_of
from verl_profiler.recording.clock import now
from verl_profiler.recording.context import EngineCall
from verl_profiler.recording.event_loop_lag import (
    WORTH_NAMING_NS,
    note_blocking_call,
    watch_running_loop,
)
from verl_profiler.recording.recorder import SAMPLED

_NOTHING: dict[str, Any] = {}
# Looked up once: these are read on every probed call.
_current_request = context.current_request.get
_get_running_loop = asyncio._get_running_loop
_watched_loops = event_loop_lag.watched


def wrap(probe: Probe, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable of the same kind that also runs the hooks of `probe`."""
    names = _parameter_names(function)
    enter, leave = _hooks(probe)
    if _is_decorated_coroutine_function(function):
        return _wrap_decorated(probe, names, function)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def traced(*args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportRedeclaration]
            call = enter(probe, names, args, kwargs, True)
            try:
                result = await function(*args, **kwargs)
            except BaseException as error:
                leave(probe, call, None, error)
                raise
            leave(probe, call, result, None)
            return result

    elif inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def traced(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:  # pyright: ignore[reportRedeclaration]
            call = enter(probe, names, args, kwargs, True)
            counts = call is not None and probe.item is not None
            try:
                items = function(*args, **kwargs)
                item = await _first_item(items)
                while True:
                    if counts:
                        _item(probe, call, item)
                    try:
                        sent = yield item
                    except GeneratorExit:
                        await items.aclose()
                        raise
                    except BaseException as error:  # noqa: BLE001  handed on to the host's generator
                        item = await items.athrow(error)
                    else:
                        item = await items.asend(sent)
            except StopAsyncIteration:
                leave(probe, call, None, None)
            except BaseException as error:
                leave(probe, call, None, error)
                raise

    elif inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:  # pyright: ignore[reportRedeclaration]
            call = enter(probe, names, args, kwargs, None)
            try:
                items: Generator[Any, Any, Any] = function(*args, **kwargs)
                result = yield from items
            except BaseException as error:
                leave(probe, call, None, error)
                raise
            leave(probe, call, result, None)
            return result

    else:
        replaced = probe.result

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            call = enter(probe, names, args, kwargs, False)
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                leave(probe, call, None, error)
                raise
            leave(probe, call, result, None, blocking=True)
            # The hook handles its own failures.
            return result if replaced is None else replaced(result)

    return traced


def _hooks(probe: Probe) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return what is called before and after the host's code.

    Chosen when a callable is wrapped: calls without a trace pay nothing for those that have one.
    """
    if probe.trace is None and probe.measures:
        return _enter, _leave
    return _enter_traced, _leave_traced


def _is_decorated_coroutine_function(function: Callable[..., Any]) -> bool:
    """Whether a decorator that is no coroutine function itself stands before one that is."""
    return not inspect.iscoroutinefunction(function) and inspect.iscoroutinefunction(
        inspect.unwrap(function)
    )


def _wrap_decorated(
    probe: Probe, names: tuple[str, ...], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a coroutine function below a decorator that may hand out the coroutine, or run it.

    `torch.no_grad` returns it.  verl's `auto_await` inspects its caller: a coroutine gets it, anyone
    else the result.  So here too it is called from a coroutine if the caller is one.
    """
    enter, leave = _hooks(probe)

    async def record(call: Any, coroutine: Any) -> Any:
        try:
            result = await coroutine
        except BaseException as error:
            leave(probe, call, None, error)
            raise
        leave(probe, call, result, None)
        return result

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        in_coroutine = sys._getframe(1).f_code.co_flags & inspect.CO_COROUTINE  # pyright: ignore[reportPrivateUsage]
        # None, as in a generator: the end may come in another order than the begin.
        call = enter(probe, names, args, kwargs, None)
        try:
            if in_coroutine:
                result = _call_from_coroutine(function, args, kwargs)
            else:
                result = function(*args, **kwargs)
        except BaseException as error:
            leave(probe, call, None, error)
            raise
        if inspect.iscoroutine(result):
            return record(call, result)
        leave(probe, call, result, None)
        return result

    return traced


def _call_from_coroutine(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function, at once, from the frame of a coroutine."""

    async def calling() -> Any:
        return function(*args, **kwargs)

    try:
        calling().send(None)
    except StopIteration as done:
        return done.value


def _first_item(items: Any) -> Any:
    """Begin with an async generator that only its wrapper closes.

    The event loop's hooks would have it closed by the loop too, when it shuts down or when the wrapper
    is dropped, in a second task at the same time: "asynchronous generator is already running".
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return items.__anext__()
    finally:
        sys.set_asyncgen_hooks(*hooks)


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )


# `in_loop`: True in a coroutine, None in a generator, False in a plain call.
def _enter(
    probe: Probe,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_loop: bool | None,
) -> Call | None:
    active = recorder._active  # pyright: ignore[reportPrivateUsage]
    if active is None or not (probe.applies is None or probe.applies()):
        return None
    call = None
    begin = now()
    # `begin_section` and `end_section`, and below `append`, without the calls.
    cpu = 0 if begin % SAMPLED else time.thread_time_ns()
    try:
        if in_loop:
            if probe.requests_wait:
                active.alive_ns = begin
            if id(_get_running_loop()) not in _watched_loops:
                watch_running_loop()
        call = Call(probe.event, begin, names, args, kwargs)
        if probe.enter is not None:
            probe.enter(call)
            if cpu:
                active.add_cpu(cpu)
            # What the hook took counts as ours, not as the host's.
            call.begin_ns = end = now()
            active.wrapper_ns += end - begin
    except FAILURES as error:
        if call is not None:
            _unbind(call)
        failed(probe, error)
        return None
    if observers.current is not None and call.event is not None:
        observers.current.call_begins(call, probe.family, in_loop)
    return call


def _leave(
    probe: Probe,
    call: Call | None,
    result: Any,
    error: BaseException | None,
    *,
    blocking: bool = False,
) -> None:
    if call is None:
        return
    if call.range is not None and observers.current is not None:
        observers.current.call_ends(call)
    active = recorder._active  # pyright: ignore[reportPrivateUsage]
    if active is None:
        if call.binding is not None:
            _unbind(call)
        return
    end = now()
    cpu = 0 if end % SAMPLED else time.thread_time_ns()
    try:
        call.end_ns = end
        status.hits[probe.name] += 1
        begin = call.begin_ns
        if blocking and begin is not None and end - begin > WORTH_NAMING_NS:
            note_blocking_call(probe.name, begin, end)
        if error is not None:
            call.error = error
        if probe.leave is not None:
            probe.leave(call, result)
        if call.binding is not None:
            _unbind(call)
        event = call.event
        if event is not None:
            request = call.request or _current_request()
            step = call.step
            extra = call.extra
            if request is None:
                if step is None:
                    step = context.process.current_step()
                if context.process.validate:
                    extra = {**(extra or _NOTHING), "validate": True}
            else:
                extra = {**request.known_identity(), **extra} if extra else request.identity()
                if step is None:
                    step = request.step
            if error is not None:
                extra = {**(extra or _NOTHING), **outcome_of(error)}
            if active.steps is None or step in active.steps:
                item = (event, call.begin_ns, end, extra, step)
                queue = active.queue
                # One that holds something has its writer running.
                if 0 < len(queue) < active.limit:
                    queue.append(item)
                else:
                    active.append(item)
        if cpu:
            active.add_cpu(cpu)
        active.wrapper_ns += now() - end
    except FAILURES as failure:
        if call.binding is not None:
            _unbind(call)
        failed(probe, failure)
    if error is not None:
        call.release()


def _unbind(call: Call) -> None:
    binding, call.binding = call.binding, None
    if binding is not None:
        token, value = binding
        context.restore(token, value)
        if isinstance(value, EngineCall):
            value.end()


def _item(probe: Probe, call: Any, item: Any) -> None:
    if isinstance(call, Call) and probe.item is not None and recorder._active is not None:  # pyright: ignore[reportPrivateUsage]
        _run(probe, probe.item, call, item)


def _run(probe: Probe, hook: Callable[..., Any], *arguments: Any) -> Any:
    """Run a hook as work of the profiler's own; return None if it fails."""
    active = recorder._active  # pyright: ignore[reportPrivateUsage]
    section = None if active is None else active.begin_section()
    try:
        return hook(*arguments)
    except FAILURES as error:
        failed(probe, error)
        return None
    finally:
        if active is not None and section is not None:
            active.end_section(*section)


def _enter_traced(
    probe: Probe,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_loop: bool | None,
) -> Call | EndTrace | None:
    """Begin the trace, then the measured call if there is one; return what is to be left."""
    end = None if probe.trace is None else _run(probe, probe.trace, args, kwargs)
    if not probe.measures:
        return end
    try:
        call = _enter(probe, names, args, kwargs, in_loop)
    except BaseException as error:
        if end is not None:
            _run(probe, end, None, error)
        raise
    if call is None:
        return end
    call.trace = end
    return call


def _leave_traced(
    probe: Probe,
    call: Call | EndTrace | None,
    result: Any,
    error: BaseException | None,
    *,
    blocking: bool = False,
) -> None:
    if not isinstance(call, Call):
        if call is not None:
            _run(probe, call, result, error)
        return
    end, call.trace = call.trace, None
    try:
        _leave(probe, call, result, error, blocking=blocking)
    finally:
        if end is not None:
            _run(probe, end, result, error)
