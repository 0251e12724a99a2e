"""A request as a chain: generate calls, tool calls, and what lies between them in its worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Call", "Request", "Stage", "Tools", "Work"]


class Call(NamedTuple):
    """A generate call: waiting, a time that it surely runs, its decoding, the way back; as measured.

    `queue_us` is the part of `before_us` in the engine's queue.
    """

    before_us: float
    fixed_us: float
    work: float
    after_us: float
    seen_us: float
    replica: str | None
    turn: int | None
    tokens: int | None = None
    queue_us: float = 0.0


class Tools(NamedTuple):
    """The tool calls of one turn: begin (after the first one's), length and tool of each."""

    calls: tuple[tuple[float, float, str], ...]
    turn: int | None

    @property
    def length_us(self) -> float:
        """From the first begin to the last end."""
        return max([begin + length for begin, length, _ in self.calls])

    def changed(self, length_of: Callable[[str, float], float]) -> Tools:
        """Give calls other lengths; one that began after the others had ended still does."""
        lengths = [length_of(tool, length) for _, length, tool in self.calls]
        if all(new == call[1] for new, call in zip(lengths, self.calls, strict=True)):
            return self
        calls: list[tuple[float, float, str]] = []
        seen = moved = shift = 0.0
        for (begin, length, tool), new in sorted(zip(self.calls, lengths, strict=True)):
            if begin >= seen:
                shift = seen - moved
            calls.append((begin - shift, new, tool))
            seen = max(seen, begin + length)
            moved = max(moved, calls[-1][0] + calls[-1][1])
        return self._replace(calls=tuple(calls))


class Work(NamedTuple):
    """Time between calls; `own` when the worker's event loop had to do it itself."""

    length_us: float
    own: bool


Stage = Call | Tools | Work


class Request(NamedTuple):
    """One request: its begin (after the step's), its measured length, and its stages.

    `prompt_tokens` and `response_tokens` are trained on, `generated` is what its calls generated and
    `group` the prompt that it is a sample of; all as measured.
    """

    begin_us: float
    duration_us: float
    worker: str
    turns: int
    stages: tuple[Stage, ...]
    prompt_tokens: int = 0
    response_tokens: int = 0
    generated: int = 0
    group: str | None = None

    @property
    def tokens(self) -> float:
        """Tokens that are trained on: of the response, what its stages still generate."""
        if not self.generated:
            return self.prompt_tokens + self.response_tokens
        left = sum(stage.tokens or 0 for stage in self.stages if isinstance(stage, Call))
        return self.prompt_tokens + self.response_tokens * left / self.generated
