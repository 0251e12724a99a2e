"""One generate call inside an engine server, with the engine's own account of it.

SGLang reports it in a request's `meta_info`, but the times only when it runs with `enable_metrics`;
vLLM in a request's `metrics`, but only without `disable_log_stats`.  `profiler.events.engine_timing`
sets both.  verl 0.9.1 reads these answers and drops the times.  Fields that the engine did not report
are left out, never filled with zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from verl_profiler.events.json_values import is_list, is_object, is_tuple, mapping_or_empty
from verl_profiler.instrumentation.placing import is_probed
from verl_profiler.instrumentation.probe import of_family
from verl_profiler.instrumentation.status import missed
from verl_profiler.probes.values import plain
from verl_profiler.recording import context, open_calls, recorder
from verl_profiler.recording.call import Call
from verl_profiler.recording.clock import now
from verl_profiler.recording.context import EngineCall

_probe = of_family("engine")

_SERVERS = (
    "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer",
    "verl.workers.rollout.trtllm_rollout.trtllm_async_server:TRTLLMHttpServer",
    "verl_profiler.rehearsal.standin:StandinServer",
)
# What ends a pause. From verl 0.9.1 on a replica of vLLM resumes its engines first and then opens the gate
# of each server.
_RESUMES = ("open_submission_gate", "resume_generation")
# The stop reason of an aborted call: of vLLM and the stand-in; of SGLang.
_ABORTED = ("aborted", "abort")


class _Server:
    """The engine server of the process: its requests, and its pauses."""

    def __init__(self) -> None:
        self.requests = 0
        self.rejects = False
        # Ends of the last pauses.
        self.resumes: deque[int] = deque(maxlen=64)


_server = _Server()


def _begin_generate(call: Call) -> None:
    context.process.begin_work()
    outer = context.current_engine_call.get()
    if outer is not None and not outer.is_over:
        # Prefill/decode disaggregation enters `generate` again; the outer call is the request.
        call.event = None
        return
    arguments = call.arguments
    call.extra = {
        "engine_request_id": plain(arguments["request_id"]),
        "prompt_tokens": len(arguments["prompt_ids"]),
    }
    call.state = engine_call = EngineCall()
    engine_call.waits = open_calls.paused_ns is not None and not _server.rejects
    _server.requests += 1
    call.bind(context.current_engine_call, engine_call)


def _end_generate(call: Call, result: Any) -> None:
    if call.state is None:
        return
    _server.requests -= 1
    extra = call.extra or {}
    if call.state.waits:
        _record_parked(call)
    if getattr(result, "stop_reason", None) in _ABORTED:
        extra["finish_reason"] = plain(result.stop_reason)
    tokens = getattr(result, "token_ids", result)
    if is_list(tokens) or is_tuple(tokens):
        extra["response_tokens"] = len(tokens)
    version = mapping_or_empty(getattr(result, "extra_fields", None)).get("global_steps")
    if version is not None:
        extra["weight_version"] = plain(version)
    if call.state.answer is not None:
        extra.update(times_of(call.state.answer))
    call.extra = extra


def _record_parked(call: Call) -> None:
    """Record the wait of a request that came during a pause; until now if that has not ended."""
    if call.begin_ns is None:
        return
    # Later pauses abort what runs.
    resumed = (resume for resume in _server.resumes if resume > (call.begin_ns or 0))
    end = min(next(resumed, call.end_ns), call.end_ns)
    if end > call.begin_ns:
        extra = {"engine_request_id": (call.extra or {}).get("engine_request_id")}
        recorder.record("engine_parked", call.begin_ns, end, extra, context.process.current_step())


def _begin_abort(call: Call) -> None:
    arguments = call.arguments
    _server.rejects = bool(arguments.get("reject_request"))
    call.extra = {"aborted": _server.requests}
    if _server.rejects:
        call.extra["reject"] = True
    if open_calls.paused_ns is None and _pauses(arguments["self"]):
        open_calls.paused_ns = now()


def _pauses(server: Any) -> bool:
    """Whether an abort pauses the server until a resume that is recorded."""
    engine = getattr(server, "engine", None)
    if engine is not None and not hasattr(engine, "pause_generation"):
        # vLLM before 0.12 (verl 0.8.0 vllm_async_server.py:695).
        return False
    if any(is_probed(server, name) for name in _RESUMES):
        return True
    missed(_RESUME, f"{type(server).__name__} has no {' or '.join(_RESUMES)} that is probed")
    return False


def _end_resume(call: Call, _result: Any) -> None:
    if open_calls.paused_ns is None:
        call.event = None
        return
    if call.error is not None:
        return
    open_calls.paused_ns = None
    _server.rejects = False
    _server.resumes.append(call.end_ns)


def times_of(answer: Any) -> dict[str, Any]:
    """Return the times of one request from an engine's last answer.

    Args:
        answer: SGLang's answer, a dict with `meta_info` (sglang 0.5.12), or vLLM's `RequestOutput`
            (vllm 0.17 to 0.32).

    Returns:
        `cached_tokens`, and in seconds `queue_s`, `prefill_s` (first forward pass until the first
        token) and `decode_s` (first token until the last), as far as reported; `e2e_s` of SGLang.
        `cached_host_tokens`, `retractions` and `dp_rank`, `draft_tokens` and
        `accepted_draft_tokens`, where there were any.
    """
    if is_object(answer):
        return _of_sglang(mapping_or_empty(answer.get("meta_info")))
    return _of_vllm(answer)


def _of_sglang(meta_info: Mapping[str, Any]) -> dict[str, Any]:
    first_token = meta_info.get("prefill_finished_time")
    cached = mapping_or_empty(meta_info.get("cached_tokens_details"))
    return _reported(
        {
            "cached_tokens": meta_info.get("cached_tokens"),
            "cached_host_tokens": (cached.get("host") or 0) + (cached.get("storage") or 0) or None,
            "retractions": meta_info.get("num_retractions") or None,
            "dp_rank": meta_info.get("dp_rank"),
            "draft_tokens": meta_info.get("spec_num_proposed_drafts"),
            "accepted_draft_tokens": meta_info.get("spec_num_correct_drafts"),
        },
        e2e_s=meta_info.get("e2e_latency"),
        queue_s=meta_info.get("queue_time"),
        prefill_s=_between(meta_info.get("forward_entry_time"), first_token),
        decode_s=_between(first_token, meta_info.get("request_finished_ts")),
    )


def _of_vllm(output: Any) -> dict[str, Any]:
    metrics = getattr(output, "metrics", None)
    queued, scheduled, first_token, last_token = (
        getattr(metrics, f"{moment}_ts", None)
        for moment in ("queued", "scheduled", "first_token", "last_token")
    )
    drafts = getattr(metrics, "request_spec_decode_stats", None)
    return _reported(
        {
            "cached_tokens": getattr(output, "num_cached_tokens", None),
            "retractions": getattr(metrics, "num_preemptions", None) or None,
            "draft_tokens": getattr(drafts, "num_draft_tokens", None),
            "accepted_draft_tokens": getattr(drafts, "num_accepted_tokens", None),
        },
        queue_s=_between(queued, scheduled),
        prefill_s=_between(scheduled, first_token),
        decode_s=_between(first_token, last_token),
    )


def _between(begin: float | None, end: float | None) -> float | None:
    """Return the time between two moments; a moment that was not reached is 0 or None."""
    return end - begin if begin and end else None


def _reported(counts: dict[str, Any], **seconds: float | None) -> dict[str, Any]:
    fields = {name: plain(count) for name, count in counts.items() if count is not None}
    for name, value in seconds.items():
        if value is not None:
            fields[name] = round(float(value), 6)
    return fields


def _begin_answers(call: Call) -> None:
    engine_call = context.current_engine_call.get()
    call.state = None if engine_call is None or engine_call.is_over else engine_call


def _keep_answer(call: Call, item: Any) -> None:
    # vLLM's come once per token.
    if call.state is not None and not call.state.is_over:
        call.state.answer = item


def _end_set_step(call: Call, _result: Any) -> None:
    # The weights of step k serve the rollouts of step k + 1, and the validation after step k.  A
    # server does not receive it; a reader takes the step from the client's side of the call.
    step = call.arguments.get("global_steps")
    if isinstance(step, int):
        context.process.next_step = step + 1


_RESUME = _probe(
    "engine_resume",
    *(
        f"{server}.{name}"
        for server in _SERVERS
        for name in (_RESUMES if "vllm" in server else _RESUMES[1:])
    ),
    leave=_end_resume,
    lost="how long requests wait in paused engines",
)

PROBES = (
    _probe(
        "engine_request",
        *(f"{server}.generate" for server in _SERVERS),
        reads=("prompt_ids", "request_id"),
        enter=_begin_generate,
        leave=_end_generate,
    ),
    _probe(
        "engine_abort", *(f"{server}.abort_all_requests" for server in _SERVERS), enter=_begin_abort
    ),
    _RESUME,
    _probe(
        None,
        "sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request",
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "verl_profiler.rehearsal.standin:StandinServer._answered",
        enter=_begin_answers,
        item=_keep_answer,
    ),
    _probe(None, *(f"{server}.set_global_steps" for server in _SERVERS), leave=_end_set_step),
)
