"""A stand-in for an inference engine: one process per replica, transformers on one thread.

It samples from the real model with the real weights and uses continuous batching: waiting requests
are prefilled together, then join the running batch, and each forward pass generates one token for each
request.  It has no paged cache and no memory to release, and its timings do not predict those of SGLang
or vLLM.  It installs in a fraction of SGLang's time.
"""

# pyright: basic
# It subclasses classes of verl and torch that have no types.

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from verl_profiler.recording import evidence
from verl_profiler.rehearsal.batches import Batch, Request


def _actor_name(replica_rank: int) -> str:
    return f"standin_server_{replica_rank}_0"


class StandinServer:
    """The actor of one replica, with verl's rollout server interface."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int = 0) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._config = config
        self._replica_rank = replica_rank
        model_config = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self._model = AutoModelForCausalLM.from_pretrained(
            model_config.local_path, dtype=torch.float32
        )
        tokenizer = model_config.tokenizer
        self._pad_token_id = tokenizer.pad_token_id
        self._eos_token_ids = {tokenizer.eos_token_id}
        self._global_steps: int | None = None
        self._waiting: list[Request] = []
        self._batch: Batch | None = None
        self._loop: asyncio.Task[None] | None = None
        # Held during forward passes, so that weights change only between them.
        self._model_lock = asyncio.Lock()
        # Requests that come during a pause wait for its end, or return at once if `_rejects`.
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._rejects = False
        evidence.add_source_of("engine", self, StandinServer._load)

    def _load(self) -> dict[str, Any]:
        """Return what a real engine's server shows when the run is stuck."""
        counts = {"running_requests": len(self._running()), "waiting_requests": len(self._waiting)}
        return {"paused": not self._resumed.is_set(), "loads": [counts]}

    async def ready(self) -> None:
        """Wait until the model is loaded."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **_kwargs: Any,
    ) -> TokenOutput:
        """Sample a response; of the sampling parameters only the temperature and `max_tokens` are honored.

        During a pause the request waits for its end, or returns without tokens, as in vLLM.
        """
        if image_data or video_data:
            raise ValueError("the stand-in engine supports text only: use --engine sglang")
        while not self._resumed.is_set() and not self._rejects:
            await self._resumed.wait()
        length = self._config.prompt_length + self._config.response_length - len(prompt_ids)
        wanted = sampling_params.get("max_tokens") or self._config.response_length
        request = Request(
            list(prompt_ids),
            max(1, min(wanted, self._config.response_length, length)),
            float(sampling_params.get("temperature", 1.0)),
        )
        if self._resumed.is_set():
            async for _ in self._answered(request):
                pass
        else:
            request.stop_reason = "aborted"
        return TokenOutput(
            token_ids=request.token_ids,
            log_probs=request.log_probs if sampling_params.get("logprobs") else None,
            stop_reason=request.stop_reason,
            extra_fields={"global_steps": self._global_steps},
        )

    async def _answered(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """Run a request, and return its timings under SGLang's `meta_info` names."""
        self._waiting.append(request)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        await request.done
        if request.began:
            yield {
                "meta_info": {
                    "queue_time": request.began - request.came,
                    "forward_entry_time": request.began,
                    "prefill_finished_time": request.first_token,
                    "request_finished_ts": request.ended,
                }
            }

    def _running(self) -> list[Request]:
        return self._batch.requests if self._batch else []

    def _admitted(self) -> list[Request]:
        """Return the waiting requests that can start within `max_num_seqs`."""
        free = max(self._config.max_num_seqs - len(self._running()), 0)
        begun, self._waiting = self._waiting[:free], self._waiting[free:]
        return begun

    async def _run(self) -> None:
        stepped: list[Request] = []
        try:
            while self._waiting or self._running():
                async with self._model_lock:
                    begun = self._admitted()
                    stepped = [*self._running(), *begun]
                    await asyncio.to_thread(self._step, begun)
                for request in stepped:
                    if request.stop_reason and not request.done.done():
                        request.done.set_result(None)
        except Exception as error:  # noqa: BLE001  passed on to the requests
            failed = [*self._waiting, *stepped]
            self._waiting, self._batch = [], None
            for request in failed:
                if not request.done.done():
                    request.done.set_exception(error)

    def _step(self, begun: list[Request]) -> None:
        """Prefill new requests and add them to the batch, or else decode one token for each."""
        batch = Batch(begun, self._pad_token_id) if begun else self._batch
        if batch is None:
            return
        batch.step(self._model, self._eos_token_ids, self._filler)
        if begun:
            self._batch = self._batch.joined(batch) if self._batch else batch

    def _filler(self, tokens: int) -> list[int]:
        """Return what to insert before the end of a response of so many tokens: nothing, without faults."""
        return []

    async def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights with the trainer's."""
        parameters = self._model.state_dict()
        async with self._model_lock:
            with torch.no_grad():
                for name, value in weights:
                    parameters[name].copy_(value)

    async def set_global_steps(self, global_steps: int) -> None:
        """Store the version of the weights."""
        self._global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Finish all requests with the tokens generated so far, and accept none until the generation resumes."""
        self._resumed.clear()
        self._rejects = reject_request
        async with self._model_lock:
            aborted = [*self._waiting, *self._running()]
            self._waiting, self._batch = [], None
        for request in aborted:
            request.stop_reason = "aborted"
            if not request.done.done():
                request.done.set_result(None)

    async def sleep(self) -> None:
        """No memory to release."""

    async def wake_up(self) -> None:
        """No memory to resume."""

    async def _nothing(self, **_kwargs: Any) -> None:
        """It has no cache that outlives its requests, and no profiler of its own."""

    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing

    async def resume_generation(self) -> None:
        """Accept requests again."""
        self._rejects = False
        self._resumed.set()


class StandinReplica(RolloutReplica):
    """Starts the server of one replica."""

    async def launch_servers(self) -> None:
        """Start one actor, regardless of the parallel sizes."""
        server = (
            ray.remote(StandinServer)
            .options(
                name=_actor_name(self.replica_rank),
                max_concurrency=self.max_concurrency,
                num_cpus=0,
            )
            .remote(self.config, self.model_config, self.replica_rank)
        )
        await server.ready.remote()
        self.servers.append(server)  # pyright: ignore[reportArgumentType]
        self._server_handle = server  # pyright: ignore[reportAttributeAccessIssue]
        self._server_address = f"standin-{self.replica_rank}:0"
        print(f"stand-in engine: replica {self.replica_rank} is ready", flush=True)


class StandinAdapter(BaseRollout):
    """The adapter in a trainer rank: sends the weights through Ray."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self._replica_rank = rank // size if replica_rank == -1 else replica_rank
        self._leads = rank % size == 0

    async def resume(self, tags: list[str]) -> None:
        """No memory to resume."""

    async def release(self) -> None:
        """No memory to release."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **_kwargs: Any,
    ) -> None:
        """Send the weights; ranks other than the leader only take part in gathering."""
        if wire_format != "named_tensors":
            raise ValueError(f"the stand-in engine accepts named tensors, not {wire_format!r}")
        named = [
            (name, value.detach().to("cpu", torch.float32))
            async for name, value in ensure_async_iterator(weights)
        ]
        if not self._leads:
            return
        server = ray.get_actor(_actor_name(self._replica_rank))
        await server.load.remote(named)
        if global_steps is not None:
            await server.set_global_steps.remote(global_steps)
