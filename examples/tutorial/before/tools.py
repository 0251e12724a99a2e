"""The tool of the tutorial, healthy: it waits for its sandbox without blocking the event loop."""

import asyncio
import random

from verl.tools.function_tool import function_tool


async def post(expression: str) -> str:
    """Stand for a request to a sandbox: 0.5 to 0.7 s."""
    await asyncio.sleep(random.uniform(0.5, 0.7))
    return str(sum(int(each) for each in expression.split("+") if each.strip().isdigit()))


@function_tool
async def calculate(expression: str) -> str:
    """Add numbers.

    Args:
        expression: Whole numbers with plus signs between them.
    """
    return await post(expression)
