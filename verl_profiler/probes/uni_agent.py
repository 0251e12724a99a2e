"""Sessions of uni-agent, which replaces verl's agent loops; in the worker that runs its framework.

`AgentFrameworkRolloutAdapter` hands a batch to one worker (uni_agent/framework/framework.py).  A session is
a request: verl's sample is stored under uid, session and output, and the id that is born in it is what the
gateways, which are actors of their own, pass to verl's client (`conversation` of its generate calls).
"""

from __future__ import annotations

from typing import Any

from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.instrumentation.probe import Probe
from verl_profiler.probes.values import plain, scalar
from verl_profiler.recording import context
from verl_profiler.recording.call import Call
from verl_profiler.recording.context import Request
from verl_profiler.recording.requests import begin_request, end_request

__all__ = ["PROBES"]

_FRAMEWORK = "uni_agent.framework.framework:OpenAICompatibleAgentFramework"
_MANAGER = "uni_agent.gateway.manager:GatewayManager"


def _begin_session(call: Call) -> None:
    arguments = call.arguments
    fields = mapping_or_empty(arguments["sample_fields"])
    step, validate = scalar(arguments["global_steps"]), fields.get("validate")
    request = Request(
        step if isinstance(step, int) else context.process.current_step(),
        validate=validate is not None and bool(scalar(validate)),
    )
    request.sample = scalar(arguments["sample_index"])
    request.session = scalar(arguments["session_index"])
    uid = fields.get("uid")
    request.uid = None if uid is None else str(scalar(uid))
    request.agent = plain(arguments["runner_name"])
    context.process.step = request.step or 0
    call.request = request
    call.bind(context.current_request, request)
    begin_request(request)


def _end_session(call: Call, _result: Any) -> None:
    request: Request | None = call.request
    if request is not None:
        call.extra = end_request(request, call.end_ns, call.error)
        if request.uid is not None:
            call.extra["uid"] = request.uid


def _begin_gateway_session(call: Call) -> None:
    request = context.current_request.get()
    if request is not None and request.request_id is None:
        request.request_id = plain(call.arguments["session_id"])


PROBES = (
    Probe(
        "request",
        "rollout",
        (f"{_FRAMEWORK}._run_session",),
        reads=("sample_fields", "sample_index", "session_index", "global_steps", "runner_name"),
        enter=_begin_session,
        leave=_end_session,
        optional=True,
    ),
    Probe(
        None,
        "rollout",
        (f"{_MANAGER}.create_session",),
        reads=("session_id",),
        enter=_begin_gateway_session,
        optional=True,
    ),
)
