"""The rehearsal's function tool, for verl's `multi_turn.function_tool_path`.

verl runs this file under a generated module name and rejects a second registration of a tool, so it
is separate from the stateful tool, which verl imports by its module's name.
"""

from __future__ import annotations

import itertools
import re

from verl.tools.function_tool import function_tool  # pyright: ignore[reportUnknownVariableType]

from verl_profiler.rehearsal import latency

_calls = itertools.count()


@function_tool
async def calculate(expression: str) -> str:
    """Add numbers.

    Args:
        expression: Whole numbers with plus signs between them.
    """
    await latency.spend(f"{expression} {next(_calls)}", tool="calculate")
    if not re.fullmatch(r"\s*\d+(\s*\+\s*\d+)*\s*", expression):
        return f"cannot calculate {expression!r}"
    return str(sum(int(number) for number in expression.split("+")))
