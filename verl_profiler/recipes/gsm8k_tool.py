"""The tool of verl's GSM8K multi-turn example, for `multi_turn.tool_config_path`: see gsm8k_tool.yaml.

verl had it as `verl.tools.gsm8k_tool` until 0.7; later versions have no tool of their own.
"""

from __future__ import annotations

import uuid
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.utils.reward_score import gsm8k

__all__ = ["CalcGsm8kReward"]


class CalcGsm8kReward(BaseTool):
    """Tells the model the reward that its answer would get."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)  # pyright: ignore[reportUnknownMemberType]
        self._ground_truth: dict[str, str] = {}

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Remember the right answer, which comes with the prompt's `tools_kwargs`."""
        instance_id = instance_id or uuid.uuid4().hex
        created = kwargs.get("create_kwargs") or kwargs
        self._ground_truth[instance_id] = str(created.get("ground_truth", ""))
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Score the answer as verl's reward function does; the call itself earns nothing."""
        # verl's flexible comparison takes 1,234 and $5 for other answers than 1234 and 5.
        answer = str(parameters.get("answer", "")).strip().translate({ord(","): "", ord("$"): ""})
        answer = answer if answer.startswith("#### ") else f"#### {answer}"
        reward: float = gsm8k.compute_score(  # pyright: ignore[reportUnknownMemberType]
            answer, self._ground_truth[instance_id], method="flexible", format_score=0.0, score=1.0
        )
        text = f"Current parsed answer={answer.removeprefix('#### ')!r} reward={float(reward)}"
        return ToolResponse(text=text), 0.0, {}

    async def release(self, instance_id: str, **_kwargs: Any) -> None:
        """Forget the right answer."""
        self._ground_truth.pop(instance_id, None)
