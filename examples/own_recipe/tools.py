"""A custom function tool: the rehearsal trains its model to call the tools in this file."""

import time

from verl.tools.function_tool import function_tool

from verl_profiler import span


@function_tool
def look_up(word: str, limit: int) -> str:
    """Look a word up.

    Args:
        word: What to look up.
        limit: How many entries to return.
    """
    # Not a coroutine: verl runs it in a thread.  The event still gets its request and turn.
    with span("dictionary", limit=limit):
        time.sleep(0.2)
    return f"{limit} entries for {word}"
