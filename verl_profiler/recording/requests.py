"""The lines of one request and of its turns, from `request_start` to `request`."""

from __future__ import annotations

import os
import weakref
from typing import Any

from verl_profiler.recording import context, observers, recorder
from verl_profiler.recording.call import outcome_of, status_of
from verl_profiler.recording.clock import now
from verl_profiler.recording.context import Request

_FIELDS = (
    "agent",
    "prompt_tokens",
    "response_tokens",
    "generated_tokens",
    "tool_tokens",
    "reward",
)

_open_requests: weakref.WeakSet[Request] = weakref.WeakSet()
# They end in the parent.
os.register_at_fork(after_in_child=_open_requests.clear)


def begin_request(request: Request) -> None:
    """Begin a request now."""
    request.begin_ns = now()
    _open_requests.add(request)
    extra = request.identity()
    if request.uid is not None:
        extra["uid"] = request.uid
    recorder.record("request_start", None, request.begin_ns, extra, request.step)


def end_request(request: Request, end_ns: int, error: BaseException | None) -> dict[str, Any]:
    """Close the turn of a request that ends, and return the fields of its `request` line."""
    _open_requests.discard(request)
    close_turn(request, end_ns, error)
    request.turn = None
    return _fields(request)


def begin_named_request(request_id: Any, event: str, fields: dict[str, Any]) -> Request | None:
    """Begin a request that the user's code names, outside of verl's agent loops.

    Args:
        request_id: Its id.
        event: The name of the span that it is.
        fields: Of the span; `sample`, `session` and `uid` among them are the request's.

    Returns:
        The request; None where the code belongs to one already, or the id is no text.
    """
    if context.current_request.get() is not None or type(request_id) is not str:
        return None
    request = Request(context.process.current_step(), validate=context.process.validate)
    request.request_id, request.agent = request_id, event
    request.learns_step = True
    for name in ("sample", "session", "uid"):
        value = fields.get(name)
        if type(value) in (int, str):
            setattr(request, name, value)
    begin_request(request)
    return request


def end_named_request(request: Request, error: BaseException | None) -> None:
    """End it now."""
    end = now()
    extra = {**end_request(request, end, error), **request.full_identity()}
    if request.uid is not None:
        extra["uid"] = request.uid
    if error is not None:
        extra |= outcome_of(error)
    recorder.record("request", request.begin_ns, end, extra, request.step)


def open_requests() -> list[Request]:
    """Return the requests that are running."""
    return list(_open_requests)


def finish_open_requests() -> None:
    """Record every request that is still running as unfinished; called when the process ends."""
    end = now()
    for request in list(_open_requests):
        request.turn = None
        extra = {**request.identity(), **_fields(request), "status": "unfinished"}
        recorder.record("request", request.begin_ns, end, extra, request.step)
    _open_requests.clear()


def _fields(request: Request) -> dict[str, Any]:
    fields: dict[str, Any] = {"turns": request.turns}
    for name in _FIELDS:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.min_weight_version != request.max_weight_version:
        fields["min_weight_version"] = request.min_weight_version
        fields["max_weight_version"] = request.max_weight_version
    if request.attempts:
        fields["attempts"] = request.attempts
    return fields


def open_turn(request: Request, number: int) -> None:
    """Begin a turn of a request."""
    request.turn = number
    request.turns = max(request.turns, number + 1)
    request.turn_begin_ns = now()
    request.tool_calls = 0
    request.tool_begin_ns = None
    if observers.current is not None:
        observers.current.turn_begins(request, number)


def close_turn(request: Request, end_ns: int, error: BaseException | None = None) -> None:
    """Record the open turn of a request, if there is one."""
    if observers.current is not None:
        observers.current.turn_ends(request)
    if request.turn_begin_ns is None:
        return
    extra = request.identity()
    if request.tool_calls:
        extra["tool_calls"] = request.tool_calls
    if error is not None:
        extra["status"] = status_of(error)
    recorder.record("turn", request.turn_begin_ns, end_ns, extra, request.step)
    request.turn_begin_ns = None
