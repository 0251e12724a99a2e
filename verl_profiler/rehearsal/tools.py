"""The rehearsal's stateful tool, for verl's `multi_turn.tool_config_path`: see tools.yaml.

verl executes it once per call, between `create` and `release`; state that lasts over the calls of one
request is stored under the request's id.
"""

from __future__ import annotations

import uuid
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.rehearsal import latency


class CheckAnswer(BaseTool):
    """Checks whether an answer is correct, and counts the attempts of each request."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)  # pyright: ignore[reportUnknownMemberType]
        self._latency = {key: value for key, value in config.items() if key != "type"}
        self._ground_truth: dict[str, str] = {}
        self._tries: dict[str, int] = {}

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Store the correct answer, from the prompt's `tools_kwargs`."""
        instance_id = instance_id or uuid.uuid4().hex
        created = mapping_or_empty(kwargs.get("create_kwargs"))
        self._ground_truth[instance_id] = str(created.get("ground_truth"))
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Check the answer, after the latency set in the tool's config."""
        answer = str(parameters.get("answer"))
        agent_data = kwargs.get("agent_data")
        request = instance_id if agent_data is None else agent_data.request_id
        tries = self._tries[request] = self._tries.get(request, 0) + 1
        await latency.spend(f"{answer} {request} {tries}", tool=self.name, **self._latency)
        right = answer == self._ground_truth[instance_id]
        text = "right" if right else f"wrong, try {tries}"
        return ToolResponse(text=text), float(right), {"tries": tries}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Discard the correct answer."""
        self._ground_truth.pop(instance_id, None)
