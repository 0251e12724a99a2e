"""A request as a chain of generate calls, tool calls, and the worker's time between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Call", "Request", "Stage", "Tools", "Work", "measured_us"]


class Call(NamedTuple):
    """A generate call: wait before the engine runs it, fixed time, decoding work, return; as measured.

    `queue_us` is the time in the engine's queue within `before_us`, `cold_us` the prefill within
    `fixed_us` of tokens that the previous call had cached, `kv_tokens` what the call occupies of a KV cache.
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
    cold_us: float = 0.0
    kv_tokens: float = 0.0


class Tools(NamedTuple):
    """The tool calls of one turn: start (relative to the first), duration and tool of each."""

    calls: tuple[tuple[float, float, str], ...]
    turn: int | None

    @property
    def length_us(self) -> float:
        """From the first start to the last end."""
        if len(self.calls) == 1:
            return self.calls[0][0] + self.calls[0][1]
        return max([begin + length for begin, length, _ in self.calls])

    def changed(self, length_of: Callable[[str, float], float]) -> Tools:
        """Change the durations of calls; sequential calls stay sequential."""
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
    """Time between calls; `own` if the worker's event loop was busy with it."""

    length_us: float
    own: bool


Stage = Call | Tools | Work


def measured_us(stage: Stage) -> float:
    """Return the measured duration of a stage."""
    return stage.seen_us if isinstance(stage, Call) else stage.length_us


class Request(NamedTuple):
    """One request: its start (relative to the step's), its measured duration, and its stages.

    `prompt_tokens` and `response_tokens` are the trained tokens, `generated` the tokens that its calls
    generated and `group` its prompt; all as measured.
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
        """Trained tokens; response tokens in proportion to the tokens that its stages still generate."""
        if not self.generated:
            return self.prompt_tokens + self.response_tokens
        left = sum(stage.tokens or 0 for stage in self.stages if isinstance(stage, Call))
        return self.prompt_tokens + self.response_tokens * left / self.generated
