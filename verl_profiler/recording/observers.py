"""Who watches calls, spans and turns as they begin and end; NVTX ranges do.

The choice is made once per process.  Where nobody watches, a call costs one comparison more.
"""

from __future__ import annotations

from typing import Any, Protocol

from verl_profiler.recording.call import Call

__all__ = ["Observer", "current"]


class Observer(Protocol):
    """Called in the thread of what it watches, and must not raise."""

    def call_begins(self, call: Call, family: str, in_loop: bool | None) -> None:
        """A probed call begins, after its `enter` hook.

        Args:
            call: Its `range` is the observer's; `call_ends` follows where it is not None.
            family: The family of its probe.
            in_loop: True in a coroutine, None in a generator, False in a plain call.
        """
        ...

    def call_ends(self, call: Call) -> None:
        """A probed call ends, before its `leave` hook."""
        ...

    def span_begins(self, event: str) -> Any:
        """A span of the user's begins; what is returned is handed to `span_ends`."""
        ...

    def span_ends(self, handle: Any) -> None:
        """A span of the user's ends."""
        ...

    def turn_begins(self, request: Any, number: int) -> None:
        """A request's turn begins."""
        ...

    def turn_ends(self, request: Any) -> None:
        """A request's turn ends; also called where none has begun."""
        ...


current: Observer | None = None
