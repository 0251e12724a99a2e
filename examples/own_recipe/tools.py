"""A function tool of one's own: the rehearsal teaches its model to call whatever is here."""

import time

from verl.tools.function_tool import function_tool


@function_tool
def look_up(word: str, limit: int) -> str:
    """Look a word up.

    Args:
        word: What to look up.
        limit: How many entries to return.
    """
    # Not a coroutine: verl runs it in a thread.
    time.sleep(0.2)
    return f"{limit} entries for {word}"
