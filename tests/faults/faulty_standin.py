"""The stand-in's server with faults: it hangs, is slow, lengthens its responses, or follows a script."""

import asyncio
import random
import time
from typing import Any

from rehearsal_faults import setting
from rehearsal_hangs import pause_at, wait_at
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import TokenOutput

from verl_profiler.rehearsal.dialogue import Tool, dialogue
from verl_profiler.rehearsal.standin import StandinServer

# Repeated in responses that `response_factor` lengthens.
_FILLER = "Let me think about it. "
# Of responses by a script: the tools that they call, and the time of a token.
_TOOLS = [
    Tool("calculate", {"expression": {"type": "string"}}),
    Tool("check_answer", {"answer": {"type": "string"}}),
]
_TOKEN_S = 0.004


class FaultyServer(StandinServer):
    """Its faults are `replica_delay_s`, `response_factor`, `scripted`, and the hangs `engine` and `paused`."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int = 0) -> None:
        super().__init__(config, model_config, replica_rank)
        tokenizer = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig).tokenizer
        self.filler_ids = tokenizer.encode(_FILLER, add_special_tokens=False)
        self.tokenizer = tokenizer

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        if self._replica_rank == 0:
            await wait_at("engine")
            await pause_at("paused", self)
        if setting("scripted"):
            return await self._scripted(*args, **kwargs)
        return await super().generate(*args, **kwargs)

    async def _scripted(self, prompt_ids: list[int], *_args: Any, **_kwargs: Any) -> TokenOutput:
        """Answer by the question and the turn alone, in a time by the tokens alone, without the model."""
        text = self.tokenizer.decode(prompt_ids)
        question = text.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        turn = text.count("<|im_start|>assistant") - 1
        spoken = [
            words
            for role, words in dialogue(random.Random(question), _TOOLS)
            if role == "assistant"
        ]
        words = spoken[min(turn, len(spoken) - 1)] + "<|im_end|>"
        tokens = self.tokenizer.encode(words, add_special_tokens=False)
        tokens = self._filler(len(tokens)) + tokens
        await asyncio.sleep(_TOKEN_S * len(tokens))
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-1.0] * len(tokens),
            stop_reason="completed",
            extra_fields={"global_steps": self._global_steps},
        )

    def _step(self, begun: list[Any]) -> None:
        super()._step(begun)
        # Replicas that are added during the run have no delay.
        time.sleep(dict(enumerate(setting("replica_delay_s") or [])).get(self._replica_rank, 0.0))

    def _filler(self, tokens: int) -> list[int]:
        more = round(tokens * (setting("response_factor") - 1))
        return [self.filler_ids[place % len(self.filler_ids)] for place in range(more)]
