"""Ask verl's own server with the real vLLM behind it, on a CPU; JSON on stdout.

    python real_vllm.py MODEL

The server is made without Ray and without its start-up, the engine with what verl hands to it.
`test_real_vllm.py` reads the report.
"""

import asyncio
import json
import os
import sys
import tempfile

from other_engines import vllm_server
from reading_back import lines_of
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from verl_profiler.instrumentation import placing
from verl_profiler.instrumentation.status import status
from verl_profiler.probes import select
from verl_profiler.recording import recorder
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig

PROMPT = [7 + place % 90 for place in range(300)]


async def asked(model):
    """Ask for two equal answers, one that is aborted, one that is cancelled, and a wrong one."""
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            kv_cache_memory_bytes=64 << 20,
            disable_log_stats=False,
        )
    )
    server = vllm_server(engine)
    server.config.max_model_len, server.config.response_length = 2048, 1500
    server._rejecting = False
    endless = {"temperature": 1.0, "ignore_eos": True}
    short = {**endless, "max_tokens": 4}
    answers = {}
    await server.set_global_steps(4)
    for name in ("first", "again"):
        answers[name] = await server.generate(PROMPT, dict(short), name)

    async def running(name):
        task = asyncio.create_task(server.generate(PROMPT, dict(endless), name))
        while server._admitting or not engine.output_processor.request_states:
            await asyncio.sleep(0.01)
        return task

    aborted = await running("aborted")
    await server.abort_all_requests()
    answers["aborted"] = await aborted
    await server.resume_generation()
    cancelled = await running("cancelled")
    cancelled.cancel()
    problems = {}
    for name, task in (
        ("cancelled", cancelled),
        ("wrong", server.generate(PROMPT, {"temperature": -1.0}, "wrong")),
    ):
        try:
            await task
        except (asyncio.CancelledError, Exception) as error:
            problems[name] = type(error).__name__
    await server.sleep()
    await server.wake_up(tags=["weights"])
    engine.shutdown()
    return {name: [a.stop_reason, len(a.token_ids)] for name, a in answers.items()}, problems


def main():
    with tempfile.TemporaryDirectory() as folder:
        settings = EventSettings(engine_state=True)
        config = WorkerConfig(folder, folder, settings, take_anchor())
        recorder.start(config, lambda: Identity("engine", 0), dict)
        placing.install(select(["engine", "weights"]))
        answers, problems = asyncio.run(asked(sys.argv[1]))
        errors = dict(status.errors)
        placing.uninstall()
        recorder.stop()
        events = sorted(lines_of(folder), key=lambda line: line["timestamp"])
    report = {"events": events, "answers": answers, "problems": problems, "errors": errors}
    print("REPORT", json.dumps(report), flush=True)
    # vLLM's threads keep the process at its end (vllm 0.27.1).
    os._exit(0)


if __name__ == "__main__":
    main()
