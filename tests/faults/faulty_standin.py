"""The stand-in's server with faults: it hangs, is slow, or lengthens its responses."""

import time
from typing import Any

from rehearsal_faults import setting
from rehearsal_hangs import pause_at, wait_at
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig

from verl_profiler.rehearsal.standin import StandinServer

# Repeated at the end of responses that `response_factor` lengthens.
_FILLER = "Let me think about it. "


class FaultyServer(StandinServer):
    """Its faults are `replica_delay_s`, `response_factor`, and the hangs `engine` and `paused`."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int = 0) -> None:
        super().__init__(config, model_config, replica_rank)
        tokenizer = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig).tokenizer
        self.filler_ids = tokenizer.encode(_FILLER, add_special_tokens=False)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        if self._replica_rank == 0:
            await wait_at("engine")
            await pause_at("paused", self)
        return await super().generate(*args, **kwargs)

    def _step(self, begun: list[Any]) -> None:
        super()._step(begun)
        # Replicas that are added during the run have no delay.
        time.sleep(dict(enumerate(setting("replica_delay_s") or [])).get(self._replica_rank, 0.0))

    def _filler(self, tokens: int) -> list[int]:
        more = round(tokens * (setting("response_factor") - 1))
        return [self.filler_ids[place % len(self.filler_ids)] for place in range(more)]
