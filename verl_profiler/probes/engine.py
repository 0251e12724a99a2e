"""One generate call inside an engine server, with the engine's own account of it.

SGLang reports queue, prefill and decode times in a request's `meta_info`, but only when it runs
with `enable_metrics` (`profiler.events.engine_timing`); verl 0.9.1 reads `meta_info` and drops those
fields.  Fields that the engine did not report are left out, never filled with zero.
"""

from __future__ import annotations

from typing import Any

from verl_profiler import context
from verl_profiler.context import EngineCall
from verl_profiler.probes import Call, Probe

__all__ = ["PROBES"]

_SERVERS = (
    "verl.workers.rollout.sglang_rollout.async_sglang_server:SGLangHttpServer",
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer",
    "verl.workers.rollout.trtllm_rollout.trtllm_async_server:TRTLLMHttpServer",
    "verl_profiler.rehearsal.standin:StandinServer",
)


def _begin_generate(call: Call) -> None:
    context.process.begin_work()
    if context.current_engine_call.get() is not None:
        # Prefill/decode disaggregation enters `generate` again; the outer call is the request.
        call.event = None
        return
    engine_call = EngineCall()
    call.state = (engine_call, context.current_engine_call.set(engine_call))
    call.extra = {
        "engine_request_id": str(call.arguments["request_id"]),
        "prompt_tokens": len(call.arguments["prompt_ids"]),
    }


def _end_generate(call: Call, result: Any) -> None:
    if call.state is None:
        return
    engine_call, token = call.state
    try:
        context.current_engine_call.reset(token)
    except ValueError:
        context.current_engine_call.set(None)
    extra = call.extra or {}
    tokens = getattr(result, "token_ids", result)
    if isinstance(tokens, (list, tuple)):
        extra["response_tokens"] = len(tokens)
    version = (getattr(result, "extra_fields", None) or {}).get("global_steps")
    if version is not None:
        extra["weight_version"] = version
    if engine_call.meta_info:
        extra.update(times_of(engine_call.meta_info))
    call.extra = extra


def times_of(meta_info: dict[str, Any]) -> dict[str, Any]:
    """Return what SGLang's `meta_info` says of one request's time (sglang 0.5.12).

    Returns:
        `cached_tokens`, and in seconds `e2e_s`, `queue_s`, `prefill_s` (first forward pass until
        the first token) and `decode_s` (first token until the last), as far as reported.
    """
    times: dict[str, Any] = {}
    if "cached_tokens" in meta_info:
        times["cached_tokens"] = meta_info["cached_tokens"]
    if "e2e_latency" in meta_info:
        times["e2e_s"] = round(float(meta_info["e2e_latency"]), 6)
    if "queue_time" in meta_info:
        times["queue_s"] = round(float(meta_info["queue_time"]), 6)
    begin = meta_info.get("forward_entry_time")
    first_token = meta_info.get("prefill_finished_time")
    finished = meta_info.get("request_finished_ts")
    if begin and first_token:
        times["prefill_s"] = round(float(first_token) - float(begin), 6)
    if first_token and finished:
        times["decode_s"] = round(float(finished) - float(first_token), 6)
    return times


def _keep_meta_info(_call: Call, item: Any) -> None:
    engine_call = context.current_engine_call.get()
    if engine_call is not None and isinstance(item, dict):
        engine_call.meta_info = item.get("meta_info")


def _end_set_step(call: Call, _result: Any) -> None:
    # The weights of step k serve the rollouts of step k + 1, and the validation after step k.  A
    # server is not told which; a reader takes the step from the client's side of the call.
    step = call.arguments.get("global_steps")
    if isinstance(step, int):
        context.process.next_step = step + 1


PROBES = (
    Probe(
        "engine_request",
        "engine",
        tuple(f"{server}.generate" for server in _SERVERS),
        reads=("prompt_ids", "request_id"),
        enter=_begin_generate,
        leave=_end_generate,
    ),
    Probe(
        None,
        "engine",
        (
            "sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request",
            "verl_profiler.rehearsal.standin:StandinServer._answered",
        ),
        item=_keep_meta_info,
    ),
    Probe(
        None,
        "engine",
        tuple(f"{server}.set_global_steps" for server in _SERVERS),
        leave=_end_set_step,
    ),
)
