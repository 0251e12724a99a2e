"""A custom agent loop that fetches a hint, then runs verl's tool agent loop."""

import asyncio

from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from verl_profiler import span


class HintedAgentLoop(ToolAgentLoop):
    """Registered in `agent_loops.yaml` under the name that `default_agent_loop` or the data select."""

    async def run(self, sampling_params, **kwargs):
        """Return what the tool agent loop returns."""
        async with span("hint", source="local") as hint:
            await asyncio.sleep(0.05)
            hint.set(messages=len(kwargs["raw_prompt"]))
        return await super().run(sampling_params, **kwargs)
