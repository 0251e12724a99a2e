"""The rehearsal's function tool with five times its latency.

For `actor_rollout_ref.rollout.multi_turn.function_tool_path`, beside slow_tools.yaml.
"""

import asyncio
import itertools
import re

from verl.tools.function_tool import function_tool

from verl_profiler.rehearsal.latency import latency_s

_calls = itertools.count()


@function_tool
async def calculate(expression: str) -> str:
    """Add numbers.

    Args:
        expression: Whole numbers with plus signs between them.
    """
    await asyncio.sleep(5 * latency_s(f"{expression} {next(_calls)}"))
    if not re.fullmatch(r"\s*\d+(\s*\+\s*\d+)*\s*", expression):
        return f"cannot calculate {expression!r}"
    return str(sum(int(number) for number in expression.split("+")))
