"""Ask verl's own servers for vLLM and TensorRT-LLM, with fakes of the engines; JSON on stdout.

    python other_engines.py

What is real is verl's class, from the request that it gets to the answer that it gives, and the
probes.  The modules that verl imports from an engine are fakes, and so is the engine: what it answers
has the form of vLLM's `RequestOutput` (vllm 0.27.1 outputs.py, v1/metrics/stats.py) or of
TensorRT-LLM's (its LLM API reference).  `test_other_engines.py` reads the report.
"""

import asyncio
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import sys
import types
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

from reading_back import recorded_events

from verl_profiler.instrumentation import placing
from verl_profiler.instrumentation.status import status
from verl_profiler.probes import select

# And the binding of the driver, which verl imports for TensorRT-LLM.
FAKED = ("vllm", "tensorrt_llm", "pynvml")
PROMPT = [5, 6, 7]
CASES = ("stop", "abort", "error")


@dataclass
class FakeStats:
    """In the place of vLLM's `RequestStateStats`."""

    queued_ts: float = 100.0
    scheduled_ts: float = 100.25
    first_token_ts: float = 100.75
    last_token_ts: float = 102.0


class FakeAsyncLLM:
    """In the place of vLLM's `AsyncLLM`: one answer per token, with the tokens so far."""

    async def generate(self, prompt, sampling_params, request_id, lora_request=None, priority=0):
        if request_id == "error":
            raise ConnectionError(request_id)
        for count in (1, 2, 3):
            await asyncio.sleep(0)
            said = SimpleNamespace(
                token_ids=[1, 2, 3][:count], logprobs=None, finish_reason=request_id
            )
            yield SimpleNamespace(outputs=[said], metrics=FakeStats(), num_cached_tokens=2)

    async def sleep(self, level=1, mode="abort"):
        """Nothing to release."""

    async def wake_up(self, tags=None):
        """Nothing to take back."""

    output_processor = SimpleNamespace(request_states={})

    async def pause_generation(self, wait_for_inflight_requests=False, clear_cache=True):
        """Nothing runs."""

    async def resume_generation(self):
        """Nothing was paused."""

    async def reset_prefix_cache(self, reset_connector=False):
        """No cache."""

    async def reset_encoder_cache(self):
        """No cache."""


class FakeTensorRT:
    """In the place of TensorRT-LLM's `AsyncLLM`: one answer."""

    def __init__(self):
        self.reason = None

    async def generate_async(self, inputs, sampling_params):
        if self.reason == "error":
            raise ConnectionError(self.reason)
        reason = "cancelled" if self.reason == "abort" else self.reason
        said = SimpleNamespace(token_ids=[1, 2, 3], logprobs=None, finish_reason=reason)
        return SimpleNamespace(outputs=[said])

    async def release(self, tags):
        """Nothing to release."""

    async def resume(self, tags):
        """Nothing to take back."""

    async def pause_generation(self):
        """Nothing runs."""

    async def resume_generation(self):
        """Nothing was paused."""

    async def collective_rpc(self, method):
        """No workers."""


@dataclass
class Config:
    """What the servers read of verl's `RolloutConfig`."""

    prompt_length: int = 16
    response_length: int = 16
    max_model_len: int = 32
    full_determinism: bool = False
    enable_rollout_routing_replay: bool = False
    free_cache_engine: bool = True
    enable_prefix_caching: bool = True
    mtp: None = None
    values: dict = field(default_factory=dict)

    def get(self, name, default=None):
        return self.values.get(name, default)


# What has to be more than a class that keeps its arguments.
GIVEN = {
    "vllm.inputs": {"TokensPrompt": dict},
    "vllm.v1.engine.async_llm": {"AsyncLLM": FakeAsyncLLM},
    "tensorrt_llm.llmapi.llm_args": {
        "ExecutorMemoryType": Enum("ExecutorMemoryType", {"KV_CACHE": "kv_cache"})
    },
}


class FakeModule(types.ModuleType):
    """A module of an engine: whatever is asked of it is a class that keeps its arguments."""

    __version__ = "0.24.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        # What verl reads of sampling parameters that were not set.
        made = type(name, (SimpleNamespace,), {"prompt_logprobs": None, "logprobs": None})
        setattr(self, name, made)
        return made


class Fakes(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a fake for each module of the engines."""

    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in FAKED:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return FakeModule(spec.name)

    def exec_module(self, module):
        vars(module).update(GIVEN.get(module.__name__, {}))


def put_fakes():
    """Put fakes in the places of the engines' modules, also where an engine is installed."""
    sys.meta_path.insert(0, Fakes())
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.24.0" if name == "vllm" else version(name)


def vllm_server(engine):
    module = importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")
    server = module.vLLMHttpServer.__new__(module.vLLMHttpServer)
    server.config = Config()
    server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    server.rollout_mode = module.RolloutMode.HYBRID
    server.replica_rank = server.node_rank = server._admitting = 0
    server._disaggregation_role = "null"
    server._submission_paused = server._rejecting = False
    server._resume_event = asyncio.Event()
    server.engine = engine
    return server


def trtllm_server(engine):
    module = importlib.import_module("verl.workers.rollout.trtllm_rollout.trtllm_async_server")
    # verl has made a Ray actor of it already.
    made = module.TRTLLMHttpServer.__ray_metadata__.modified_class
    server = made.__new__(made)
    server.config = Config()
    server.rollout_mode = module.RolloutMode.COLOCATED
    server.sampling_args = {"detokenize": False}
    server._use_torch_sampler = server.is_vlm_model = False
    server._generation_allowed = asyncio.Event()
    server._generation_allowed.set()
    server.llm = engine
    return server


async def asked(server):
    """Ask a server as verl does; return the answers' stop reasons."""
    reasons = {}
    await server.set_global_steps(4)
    for case in CASES:
        engine = getattr(server, "llm", None)
        if engine is not None:
            engine.reason = case
        try:
            answer = await server.generate(PROMPT, {"temperature": 1.0, "top_k": -1}, case)
            reasons[case] = answer.stop_reason
        except ConnectionError as error:
            reasons[case] = type(error).__name__
    await server.sleep()
    await (server.wake_up(tags=["weights"]) if engine is None else server.wake_up())
    if engine is not None:
        engine.reason = "stop"
    await pause(server)
    return reasons


async def pause(server):
    """Pause and resume a server as its replica does; a request comes meanwhile, and one later."""
    await server.abort_all_requests()
    parked = asyncio.create_task(server.generate(PROMPT, {"top_k": -1}, "parked"))
    await asyncio.sleep(0.01)
    await getattr(server, "open_submission_gate", server.resume_generation)()
    await parked
    await server.generate(PROMPT, {"top_k": -1}, "late")


def main():
    put_fakes()
    report = {}
    for name, made, engine in (
        ("vllm", vllm_server, FakeAsyncLLM()),
        ("trtllm", trtllm_server, FakeTensorRT()),
    ):
        with recorded_events() as events:
            placing.install(select(["engine", "weights"]))
            server = made(engine)
            reasons = asyncio.run(asked(server))
            missed = dict(status.missed)
            errors = dict(status.errors)
            placing.uninstall()
        report[name] = {"events": events, "reasons": reasons, "missed": missed, "errors": errors}
    print("REPORT", json.dumps(report))


if __name__ == "__main__":
    main()
