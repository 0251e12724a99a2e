"""Continuous batching of the stand-in engine: requests that share a cache, on transformers."""

# pyright: basic
# torch and transformers' caches have no types.

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class Request:
    """A request: what was asked for, and what was generated so far.

    Args:
        prompt_ids: Its prompt.
        max_new_tokens: Tokens to generate at most.
        temperature: 0 for greedy decoding.
    """

    def __init__(self, prompt_ids: list[int], max_new_tokens: int, temperature: float) -> None:
        self.prompt_ids = prompt_ids
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        # What follows regardless of the samples.
        self.rest: deque[int] = deque()
        self.stop_reason: str | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Timestamps, in seconds.
        self.came = time.monotonic()
        self.began = self.first_token = self.ended = 0.0


class Batch:
    """Requests that share a cache; each forward pass generates one token for each.

    `mask` marks the valid positions of the cache, and the next token; shorter requests are padded on
    the left.
    """

    def __init__(self, requests: list[Request], pad_token_id: int) -> None:
        from transformers import DynamicCache

        width = max(len(request.prompt_ids) for request in requests)
        began = time.monotonic()
        for request in requests:
            request.began = began
        self.requests = requests
        self.cache = DynamicCache()
        self.input_ids = torch.full((len(requests), width), pad_token_id)
        self.mask = torch.zeros((len(requests), width), dtype=torch.long)
        for row, request in enumerate(requests):
            self.input_ids[row, width - len(request.prompt_ids) :] = torch.tensor(
                request.prompt_ids
            )
            self.mask[row, width - len(request.prompt_ids) :] = 1

    def joined(self, other: Batch) -> Batch:
        """Merge two batches that are both prefilled."""
        from transformers import DynamicCache

        if not self.requests or not other.requests:
            return self if self.requests else other
        both = (self, other)
        # Positions that only finished requests used.
        needed = max(int(batch.mask.sum(-1).max()) for batch in both)
        merged = Batch.__new__(Batch)
        merged.requests = [*self.requests, *other.requests]
        merged.input_ids = torch.cat([batch.input_ids for batch in both])
        merged.mask = torch.cat([_of_width(batch.mask, needed) for batch in both])
        merged.cache = DynamicCache()
        # Only transformers' layers with keys and values occur here.
        pairs: Any = zip(self.cache.layers, other.cache.layers, strict=True)
        for number, layers in enumerate(pairs):
            keys, values = (
                torch.cat([_of_width(each.mT, needed - 1).mT for each in tensors])
                for tensors in zip(*((each.keys, each.values) for each in layers), strict=True)
            )
            merged.cache.update(keys, values, number)
        return merged

    @torch.no_grad()
    def step(self, model: Any, eos_token_ids: set[int], filler: Callable[[int], list[int]]) -> None:
        """Sample one token for each request, and remove finished ones.

        `filler` returns the tokens to insert before the end of a response of so many tokens.
        """
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -self.input_ids.shape[1] :]
        logits = model(
            input_ids=self.input_ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        tokens = torch.empty(len(self.requests), dtype=torch.long)
        staying: list[int] = []
        now = time.monotonic()
        for row, request in enumerate(self.requests):
            request.first_token = request.first_token or now
            request.ended = now
            log_probs = torch.log_softmax(logits[row].float() / (request.temperature or 1.0), -1)
            if request.temperature:
                token = int(torch.multinomial(log_probs.exp(), 1))
            else:
                token = int(log_probs.argmax())
            if token in eos_token_ids and not request.rest:
                request.rest.extend([*filler(len(request.token_ids) + 1), token])
            if request.rest:
                token = request.rest.popleft()
            tokens[row] = token
            request.token_ids.append(token)
            request.log_probs.append(float(log_probs[token]))
            if token in eos_token_ids or len(request.token_ids) >= request.max_new_tokens:
                request.stop_reason = "completed"
            else:
                staying.append(row)
        if 0 < len(staying) < len(self.requests):
            rows = torch.tensor(staying)
            self.cache.batch_select_indices(rows)
            self.mask, tokens = self.mask[rows], tokens[rows]
        self.requests = [self.requests[row] for row in staying]
        self.input_ids = tokens[:, None]
        self.mask = torch.cat([self.mask, torch.ones((len(self.mask), 1), dtype=torch.long)], dim=1)


def _of_width(values: torch.Tensor, width: int) -> torch.Tensor:
    """Crop the last dimension from the left, or pad it with zeros on the left."""
    return torch.nn.functional.pad(values, (width - values.shape[-1], 0))
