"""A checkpoint engine of verl for machines without a GPU: broadcasts of buckets by gloo.

verl imports this module by `rollout.checkpoint_engine.custom_backend_module` in the trainer's ranks, in
the standalone replicas' and in the trainer itself.  Rank 0 of the trainer sends, each rank of a replica
receives; the group is made anew for each sync.
"""

# pyright: basic
# It subclasses classes of verl and torch that have no types.

from __future__ import annotations

import asyncio
import datetime as dt
import pickle
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
import torch.distributed
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

BACKEND = "gloo"
_TIMEOUT = dt.timedelta(seconds=300)
_Store: Any = torch.distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]


@CheckpointEngineRegistry.register(BACKEND)  # pyright: ignore[reportAttributeAccessIssue]
class GlooCheckpointEngine(CheckpointEngine):
    """Sends the weights in buckets of at most `bucket_size` bytes, each after its description."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.rank = -1
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> tuple[str, int] | None:
        """Open the store where the group meets; return its address in the master."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address()
        self._store = store = _Store(
            host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT
        )
        return host, store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give rank 0 to the trainer's first rank, -1 to its others, 1 and up to the replicas' ranks."""

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {
                "rank": ranks,
                "world_size": [1 + rollout_world_size] * len(ranks),
                "address": [metadata[0]] * len(ranks),
            }

        return (
            arguments([0] + [-1] * (actor_wg_world_size - 1)),
            arguments(list(range(1, 1 + rollout_world_size))),
        )

    def init_process_group(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        """Join the group; a rank of -1 takes no part."""
        self.rank = rank
        if rank < 0:
            return
        if self._store is None:
            self._store = _Store(*address, is_master=False, timeout=_TIMEOUT)
        self._group = torch.distributed.ProcessGroupGloo(self._store, rank, world_size, _TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = self._store = None

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()
        return tensor

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Send all weights; other ranks than 0 only take part in gathering them."""
        described: list[TensorMeta] = []
        parts: list[torch.Tensor] = []
        size = 0
        async for meta, chunk in split_weight_chunks(
            ((name, weight.detach().cpu().contiguous()) for name, weight in weights),
            self.bucket_size,
        ):
            if self._group is None:
                continue
            if size + meta.chunk_size > self.bucket_size:
                await asyncio.to_thread(self.send_bucket, described, torch.cat(parts), False)
                described, parts, size = [], [], 0
            meta.offset = size
            described.append(meta)
            parts.append(chunk)  # pyright: ignore[reportArgumentType]
            size += meta.chunk_size
        if self._group is not None:
            await asyncio.to_thread(self.send_bucket, described, torch.cat(parts), True)

    def send_bucket(
        self, described: list[TensorMeta], bucket: torch.Tensor, is_last: bool
    ) -> torch.Tensor:
        """Send one bucket, of dtype uint8, and return it."""
        description = pickle.dumps((described, bucket.numel(), is_last))
        self._broadcast(torch.tensor([len(description)]))
        self._broadcast(torch.frombuffer(bytearray(description), dtype=torch.uint8))
        return self._broadcast(bucket)

    def receive_bucket(self) -> tuple[list[TensorMeta], bool, torch.Tensor]:
        """Receive one bucket: what is in it, whether it is the last, and its bytes."""
        length = int(self._broadcast(torch.zeros(1, dtype=torch.int64)))
        received = self._broadcast(torch.empty(length, dtype=torch.uint8))
        # From the trainer's rank 0, which runs the same program.
        described, size, is_last = pickle.loads(received.numpy().tobytes())
        return described, is_last, self._broadcast(torch.empty(size, dtype=torch.uint8))

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the name and value of each weight."""
        chunks: Any = self._chunks()
        async for named in merge_weight_chunks(chunks, self.bucket_size):
            yield named

    async def _chunks(self) -> AsyncIterator[tuple[TensorMeta, torch.Tensor]]:
        is_last = False
        while not is_last:
            described, is_last, bucket = await asyncio.to_thread(self.receive_bucket)
            for meta in described:
                # A copy, because a view of another dtype needs an aligned begin.
                yield meta, bucket[meta.offset : meta.offset + meta.chunk_size].clone()
