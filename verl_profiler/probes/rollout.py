"""Agent loops: requests, turns, tools, reward; in the agent-loop workers.

The request id is born inside `ToolAgentLoop.run` and every probe below it reads it from the
`Request` that `_run_agent_loop` put into the context.  A tool agent loop has the number of its turn;
for other loops each engine call that follows a finished one begins the next turn.
"""

from __future__ import annotations

import functools
from typing import Any

from verl_profiler.events.json_values import is_list, is_tuple
from verl_profiler.instrumentation.probe import of_family
from verl_profiler.probes.values import plain, scalar
from verl_profiler.recording import context, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now
from verl_profiler.recording.context import Request
from verl_profiler.recording.requests import (
    begin_request,
    close_turn,
    end_request,
    open_turn,
)

_probe = of_family("rollout")

_LOOP = "verl.experimental.agent_loop.agent_loop"
_WORKER = f"{_LOOP}:AgentLoopWorker"
_TOOL_LOOP = "verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop"
_TQ_WORKERS = (
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ",
    # verl 0.8.
    "verl.trainer.main_ppo_sync:AgentLoopWorkerTQ",
)

# verl 0.9.1 turns a tool's failure into text (tool_agent_loop.py:460, :468, :500).
_TOOL_FAILURES = (
    ("Error executing tool '", "tool_error"),
    ("Unknown function '", "unknown_tool"),
    ("Invalid JSON in arguments for '", "bad_arguments"),
)


def _begin_request(call: Call) -> None:
    arguments = call.arguments
    trajectory = arguments["trajectory"]
    step = context.dispatching_step.get()
    if step is None:
        step = int(scalar(trajectory["step"]))
    request = Request(step, validate=bool(trajectory["validate"]))
    request.sample = scalar(trajectory["sample_index"])
    session = arguments.get("session_id")
    request.session = scalar(trajectory["rollout_n"] if session is None else session)
    uid = arguments.get("uid")
    request.uid = None if uid is None else str(scalar(uid))
    agent = arguments.get("agent_name")
    request.agent = None if agent is None else plain(agent)
    context.process.step = request.step or 0
    call.request = request
    call.bind(context.current_request, request)
    begin_request(request)


def _end_request(call: Call, _result: Any) -> None:
    request: Request = call.request
    call.extra = end_request(request, call.end_ns, call.error)


def with_request(call: Call) -> Request | None:
    """Give a call the running request; without one, it records nothing."""
    call.request = request = context.current_request.get()
    if request is None:
        call.event = None
    return request


def _take_request(call: Call) -> None:
    with_request(call)


def _begin_merge(of: str, call: Call) -> None:
    with_request(call)
    call.extra = {"of": of}


def _keep_request_id(_call: Call, result: Any) -> None:
    request = context.current_request.get()
    if request is not None and request.request_id is None and isinstance(result, str):
        request.request_id = plain(result)


def _end_agent_loop(call: Call, _result: Any) -> None:
    request: Request | None = call.request
    if request is not None:
        close_turn(request, call.end_ns, call.error)
        request.turn = None


def _end_prompt(call: Call, result: Any) -> None:
    if is_list(result):
        call.extra = {"tokens": len(result)}


def _begin_generating(call: Call) -> None:
    request = context.current_request.get()
    if request is None:
        return
    agent_data = call.arguments["agent_data"]
    request.explicit_turns = True
    if request.request_id is None:
        request.request_id = plain(agent_data.request_id)
    close_turn(request, call.begin_ns or now())
    open_turn(request, agent_data.assistant_turns)


def _end_generating(call: Call, result: Any) -> None:
    request = context.current_request.get()
    # The turn goes on while its tools run; `_handle_processing_tools_state` closes it.
    if request is not None and getattr(result, "name", None) != "PROCESSING_TOOLS":
        close_turn(request, call.end_ns, call.error)


def _end_processing_tools(call: Call, _result: Any) -> None:
    request = context.current_request.get()
    if request is None:
        return
    if request.tool_begin_ns is not None:
        extra = request.identity()
        extra["tool_calls"] = request.tool_calls
        recorder.record(
            "tool_execution", request.tool_begin_ns, request.tool_end_ns, extra, request.step
        )
        request.tool_begin_ns = None
    close_turn(request, call.end_ns, call.error)


def _end_parsing(call: Call, result: Any) -> None:
    if is_tuple(result) and len(result) > 1 and is_list(result[1]):
        call.extra = {"tool_calls": len(result[1])}


def _begin_tool_call(call: Call) -> None:
    request = with_request(call)
    # The name that the model wrote; it need not be one of a tool.
    call.extra = {"tool": plain(getattr(call.arguments["tool_call"], "name", "?"))}
    if request is not None:
        request.tool_calls += 1
        if request.tool_begin_ns is None:
            request.tool_begin_ns = now()


def _end_tool_call(call: Call, result: Any) -> None:
    request: Request | None = call.request
    if request is not None:
        request.tool_end_ns = call.end_ns
    text = getattr(result[0], "text", None) if is_tuple(result) and result else None
    if isinstance(text, str):
        for beginning, error in _TOOL_FAILURES:
            if text.startswith(beginning):
                call.extra = {**(call.extra or {}), "status": "error", "error": error}
                break


def _begin_postprocess(call: Call) -> None:
    request = with_request(call)
    if request is None:
        return
    output = call.arguments["output"]
    outputs: list[Any] = output if is_list(output) else [output]
    if outputs:
        request.prompt_tokens = len(outputs[0].prompt_ids)
        request.response_tokens = sum(len(each.response_ids) for each in outputs)
        call.state = outputs[-1]
        generated = [_generated(each) for each in outputs]
        if None not in generated:
            request.generated_tokens = sum(each or 0 for each in generated)
            request.tool_tokens = request.response_tokens - request.generated_tokens


def _generated(output: Any) -> int | None:
    """Count the tokens that the model generated, 1 in verl's mask; 0 are those of tools."""
    mask = getattr(output, "response_mask", None)
    if not is_list(mask) or len(mask) != len(output.response_ids):
        return None
    return int(sum(mask))


def _end_postprocess(call: Call, _result: Any) -> None:
    score = getattr(call.state, "reward_score", None)
    if call.request is not None and score is not None:
        call.request.reward = float(score)


def _begin_reward(call: Call) -> None:
    with_request(call)
    outputs = call.arguments["outputs"]
    call.state = outputs[-1] if outputs else None


def _end_reward(call: Call, _result: Any) -> None:
    score = getattr(call.state, "reward_score", None)
    if score is not None:
        call.extra = {"score": float(score)}


# Each parser overrides the method without calling its base (verl 0.9.1 tool_parser.py).
_PARSERS = (
    "HermesToolParser",
    "GptOssToolParser",
    "Qwen3XMLToolParser",
    "GLMToolParser",
    "SeedToolParser",
    "MiniMaxToolParser",
    "KimiToolParser",
    "DeepSeekV4ToolParser",
    "Gemma4ToolParser",
)

PROBES = (
    _probe(
        "request",
        f"{_WORKER}._run_agent_loop",
        reads=("trajectory", "agent_name"),
        enter=_begin_request,
        leave=_end_request,
    ),
    _probe(
        "agent_loop",
        f"{_TOOL_LOOP}.run",
        "verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop.run",
        enter=_take_request,
        leave=_end_agent_loop,
    ),
    # verl before 0.9.1 makes the id in `run`: then it is read in the first turn.
    _probe(None, f"{_TOOL_LOOP}._make_request_id", leave=_keep_request_id, optional=True),
    _probe(
        "prompt_build",
        f"{_LOOP}:AgentLoopBase.ct_build_initial_tokens",
        f"{_LOOP}:AgentLoopBase.apply_chat_template",
        enter=_take_request,
        leave=_end_prompt,
    ),
    _probe(
        None,
        f"{_TOOL_LOOP}._handle_generating_state",
        reads=("agent_data",),
        enter=_begin_generating,
        leave=_end_generating,
    ),
    _probe(None, f"{_TOOL_LOOP}._handle_processing_tools_state", leave=_end_processing_tools),
    _probe(
        "token_merge",
        f"{_LOOP}:AgentLoopBase.ct_merge_assistant_token",
        enter=functools.partial(_begin_merge, "response"),
    ),
    _probe(
        "token_merge",
        f"{_LOOP}:AgentLoopBase.ct_merge_context_msg",
        f"{_LOOP}:AgentLoopBase.ct_merge_non_assistant_msg",
        enter=functools.partial(_begin_merge, "tool_response"),
    ),
    *(
        _probe(
            "tool_parsing",
            f"verl.experimental.agent_loop.tool_parser:{parser}.extract_tool_calls",
            enter=_take_request,
            leave=_end_parsing,
            optional=True,
        )
        for parser in _PARSERS
    ),
    _probe(
        "tool_call",
        f"{_TOOL_LOOP}._call_tool",
        reads=("tool_call",),
        enter=_begin_tool_call,
        leave=_end_tool_call,
    ),
    *(
        _probe(
            "postprocess",
            *(f"{worker}._agent_loop_postprocess" for worker in workers),
            reads=("output",),
            enter=_begin_postprocess,
            leave=_end_postprocess,
        )
        for workers in ((_WORKER,), _TQ_WORKERS)
    ),
    _probe(
        "reward",
        f"{_WORKER}._compute_score",
        reads=("outputs",),
        enter=_begin_reward,
        leave=_end_reward,
    ),
)
