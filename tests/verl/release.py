"""Serve requests through verl's own SGLang server and SGLang's own `generate_request`; JSON on stdout.

    python release.py

Real are both classes, from the request to the answer, and the probes; what tokenizes, schedules and
answers is a stand-in.  `test_release.py` reads the report: what is still alive after each ending.
"""

import asyncio
import contextlib
import gc
import json
import weakref
from types import SimpleNamespace

from sglang.srt.managers import io_struct
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.aio_rwlock import RWLock
from verl.workers.rollout.sglang_rollout import async_sglang_server

from verl_profiler.instrumentation import placing
from verl_profiler.instrumentation.status import status
from verl_profiler.probes import select
from verl_profiler.testing import recorded_events

ENDINGS = ("return", "raise", "cancel", "timeout")
REQUESTS = 20


class Watched(dict):
    """An answer of which a weak reference can be taken."""


class Prompt(list):
    """A prompt of which a weak reference can be taken."""


class Manager(TokenizerManager):
    """SGLang's, without its processes."""

    def __init__(self, ending, watched):
        self.ending, self.watched = ending, watched
        self.server_args = SimpleNamespace(language_only=False, tokenizer_worker_num=1, dp_size=1)
        self.request_logger = SimpleNamespace(log_received_request=lambda *_: None)
        self.tokenizer = None
        self.is_pause, self.is_pause_cond = False, asyncio.Condition()
        self.model_update_lock = RWLock()
        # The base class ends what it has not begun.
        self.__dict__.setdefault("soft_watchdog", None)

    def auto_create_handle_loop(self):
        pass

    def _set_default_priority(self, obj):
        pass

    def _init_req_state(self, obj, request=None):
        pass

    async def _validate_and_resolve_lora(self, obj):
        pass

    async def _tokenize_one_request(self, obj):
        return obj

    def _send_one_request(self, tokenized):
        pass

    async def _wait_one_response(self, obj, request=None):
        self.watched.append(weakref.ref(obj))
        await asyncio.sleep(0)
        if self.ending == "raise":
            raise ValueError("aborted")
        if self.ending != "return":
            await asyncio.Event().wait()
        answer = Watched(output_ids=[1, 2, 3], meta_info={"finish_reason": {"type": "stop"}})
        self.watched.append(weakref.ref(answer))
        yield answer


def server_of(manager):
    """Return verl's server with this engine."""
    async_sglang_server.lora_served_as_adapter = lambda _: False
    kind = async_sglang_server.SGLangHttpServer
    server = object.__new__(kind)
    server.tokenizer_manager = manager
    server.config = SimpleNamespace(
        max_model_len=4096,
        prompt_length=64,
        response_length=64,
        enable_rollout_routing_replay=False,
        skip_tokenizer_init=True,
        mtp=None,
    )
    server.model_config = None
    server._disaggregation_role, server._pd_decode_peers = "null", []
    server.replica_rank, server.global_steps = 0, 4
    return server


async def serve(ending):
    """Return (watched, alive) of the requests, once each has ended."""
    watched = []
    server = server_of(Manager(ending, watched))

    async def one(number):
        prompt = Prompt([5, 6, 7])
        watched.append(weakref.ref(prompt))
        call = server.generate(prompt, {"max_tokens": 8}, f"{ending}-{number}")
        if ending == "cancel":
            task = asyncio.ensure_future(call)
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])
        else:
            with contextlib.suppress(ValueError, asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.05)

    await asyncio.gather(*(one(number) for number in range(REQUESTS)))
    await asyncio.sleep(0.05)
    gc.collect()
    return [len(watched), sum(each() is not None for each in watched)]


def main():
    """Serve bare and probed, and print the report."""
    assert hasattr(io_struct, "GenerateReqInput")
    report = {"bare": {ending: asyncio.run(serve(ending)) for ending in ENDINGS}}
    with recorded_events() as events:
        placing.install(select({"engine"}))
        report["probed"] = {ending: asyncio.run(serve(ending)) for ending in ENDINGS}
        report["installed"] = dict(status.installed)
        report["errors"] = dict(status.errors)
        placing.uninstall()
    report["statuses"] = sorted(
        {
            (
                line["extra"]["engine_request_id"].partition("-")[0],
                line["extra"].get("status", "ok"),
            )
            for line in events
            if line["event"] == "engine_request"
        }
    )
    report["events"] = sum(line["event"] == "engine_request" for line in events)
    print("\nREPORT " + json.dumps(report))


if __name__ == "__main__":
    main()
