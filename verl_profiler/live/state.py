"""The state of a running training, updated line by line: its step, requests and tools.

Lines are written when something ends, so current activity is inferred: a request is in flight from
its `request_start` on, and phases follow each other in the order of the previous step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from verl_profiler.events.vocabulary import PHASES, WORKER_ROLE
from verl_profiler.live.flow import Flow
from verl_profiler.live.follow import Line
from verl_profiler.reading.descriptions import instant
from verl_profiler.reading.discovery import role_and_rank

__all__ = ["Live", "RequestInFlight", "Step", "Tool"]

# Window of the rates.
RATE_S = 10.0
_KEPT_STEPS = 50
_WORD = 100
# One recorded call stands for at most so many.
_MOST_SAMPLED = 10_000
# Its processes are named after their host and pid.
_ROLLOUTER = "rollouter"
# Events after which a request's next activity is known.
_NEXT = {
    "request_start": "prompt",
    "prompt_build": "engine",
    "server_acquire": "engine",
    "tool_parsing": "tool",
    "tool_call": "engine",
    "tool_execution": "engine",
    "engine_call": "parsing",
    "turn": "engine",
    "agent_loop": "reward",
    "reward": "storing",
    "postprocess": "storing",
}


@dataclass
class RequestInFlight:
    """A request in flight.

    Args:
        begin_s: Start time, in seconds since 1970.
        name: The agent-loop worker.
        sample: None for a request of user code, as is `session`.
        request_id: None until verl has assigned one.
        doing: Its activity after its last line.
    """

    begin_s: float
    name: str
    sample: str | None
    session: str | None
    request_id: str | None = None
    turn: int = 0
    doing: str = "prompt"


@dataclass
class Tool:
    """The calls of one tool in a step."""

    seconds: list[float] = field(default_factory=list[float])
    failed: int = 0


@dataclass
class Step:
    """The progress of one step.

    Args:
        phases: (name, seconds) in the order of their ends.
        ends: End times of its finished training requests, in seconds since 1970.
        end_s: When the trainer's step ended.
    """

    number: int
    begin_s: float
    last_s: float
    duration_s: float | None = None
    end_s: float | None = None
    phases: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    phase_end_s: float | None = None
    seconds: list[float] = field(default_factory=list[float])
    ends: list[float] = field(default_factory=list[float])
    failed: int = 0
    started: int = 0
    tools: dict[str, Tool] = field(default_factory=dict[str, Tool])

    @property
    def phase_seconds(self) -> dict[str, float]:
        """The phases in the order of their first end, with phases of one name added up."""
        sums: dict[str, float] = {}
        for name, length_s in self.phases:
            sums[name] = sums.get(name, 0.0) + length_s
        return sums


class Live:
    """Everything that a frame shows.

    Attributes:
        steps: The latest steps by number.
        in_flight: Requests in flight, by process, step, validation, sample, session, and the id of those
            without a sample.
        newest_s: The latest time on any line, in seconds since 1970.
        rates: (end in seconds since 1970, generated tokens) of the latest engine calls; with sampled
            details, of the latest requests.
        sampled: Whether only some requests' details are on the lines.
        flow: Queues, weight versions and samples of an asynchronous run.
    """

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}
        self.in_flight: dict[tuple[Any, ...], RequestInFlight] = {}
        self.newest_s = 0.0
        self.rates: deque[tuple[float, int]] = deque()
        self.finished: deque[float] = deque()
        self.sampled = False
        self.flow = Flow()
        self._by_id: dict[tuple[str, int, str], tuple[Any, ...]] = {}

    @property
    def current(self) -> Step | None:
        """The latest step with activity; verl's cleanup opens another one."""
        busy = [
            number
            for number, step in self.steps.items()
            if step.started or step.ends or step.phases or step.duration_s is not None
        ]
        return self.steps[max(busy or self.steps)] if self.steps else None

    @property
    def training(self) -> Step | None:
        """The trainer's latest step; requests of later ones may be in flight already."""
        numbers = [number for number, step in self.steps.items() if step.phases or step.duration_s]
        if not numbers:
            return None
        step = self.steps[max(numbers)]
        following = self.steps.get(step.number + 1)
        return step if step.duration_s is None or following is None else following

    def take(self, name: str, number: int, line: Line) -> None:
        """Update the state with one line."""
        moment = instant(line.timestamp)
        if moment is None:
            return
        end_s = moment.timestamp()
        begin_s = end_s - (line.duration_sec or 0)
        self.newest_s = max(self.newest_s, end_s)
        role, _ = role_and_rank(name)
        # Engines assign requests to the step after their weights' version; workers have the real step.
        if role == "engine":
            return
        self.flow.take(line, number, end_s)
        self.flow.has_rollouter |= role.startswith(_ROLLOUTER)
        step = self._step(number, begin_s)
        step.begin_s = min(step.begin_s, begin_s)
        step.last_s = max(step.last_s, end_s)
        if role == "trainer":
            self._trainer(step, line, end_s)
        elif role == WORKER_ROLE:
            self._worker(name, step, line, begin_s, end_s)

    def rate_window(self, now_s: float) -> tuple[float, float]:
        """Return generated tokens and requests of training per second over the last `RATE_S` seconds."""
        for ended in (self.rates, self.finished):
            while ended and _time_of(ended[0]) < now_s - RATE_S:
                ended.popleft()
        return sum(tokens for _, tokens in self.rates) / RATE_S, len(self.finished) / RATE_S

    def phase(self) -> tuple[str, float, float | None] | None:
        """Infer the current phase of the current step.

        Returns:
            Its name, its start in seconds since 1970, and how long it took in the previous step;
            None between steps, or if unknown.
        """
        return None if self.current is None else self.phase_of(self.current)

    def phase_of(self, step: Step) -> tuple[str, float, float | None] | None:
        """Infer the phase of a step, as `phase` does."""
        if step.duration_s is not None or not step.number:
            return None
        begin_s = step.phase_end_s if step.phase_end_s is not None else step.begin_s
        before = self.steps.get(step.number - 1)
        lengths = before.phase_seconds if before else {}
        done = [name for name, _ in step.phases]
        order = [name for name, _ in before.phases] if before else []
        if not done:
            following = PHASES[0]
        elif done == order[: len(done)]:
            following = [*order, "end of step"][len(done)]
        elif done[-1] in order:
            following = [*order, "end of step"][order.index(done[-1]) + 1]
        else:
            following = f"after {done[-1]}"
        return following, begin_s, lengths.get(following)

    def _step(self, number: int, begin_s: float) -> Step:
        step = self.steps.get(number)
        if step is None:
            step = self.steps[number] = Step(number, begin_s, begin_s)
            while len(self.steps) > _KEPT_STEPS:
                del self.steps[min(self.steps)]
        return step

    def _trainer(self, step: Step, line: Line, end_s: float) -> None:
        if line.duration_sec is None:
            return
        if line.event == "step":
            step.duration_s, step.end_s = line.duration_sec, end_s
        elif line.event in PHASES and line.event != "testing":
            step.phases.append((line.event, line.duration_sec))
            step.phase_end_s = end_s

    def _worker(self, name: str, step: Step, line: Line, begin_s: float, end_s: float) -> None:
        extra = line.extra or {}
        validate = bool(extra.get("validate"))
        request_id = extra.get("request_id")
        sample, session = _word_or_none(extra.get("sample")), _word_or_none(extra.get("session"))
        own = None if sample is not None else _word_or_none(request_id)
        key = (name, step.number, validate, sample, session, own)
        if line.event == "request_start":
            self.in_flight[key] = RequestInFlight(end_s, name, sample, session)
            step.started += not validate
        elif line.event == "request":
            self.in_flight.pop(key, None)
            self._by_id.pop((name, step.number, _word(request_id)), None)
            if extra.get("one_in", 1) != 1:
                self.sampled = True
            if not validate:
                if self.sampled:
                    self.rates.append((end_s, _count(extra.get("generated_tokens")) or 0))
                self.finished.append(end_s)
                step.failed += "status" in extra
                step.seconds.append(end_s - begin_s)
                step.ends.append(end_s)
        if line.event == "tool_call" and not validate:
            tool = step.tools.setdefault(_word(extra.get("tool", "?")), Tool())
            calls = min(_count(extra.get("sampled")) or 1, _MOST_SAMPLED)
            tool.seconds += [end_s - begin_s] * calls
            tool.failed += calls if "status" in extra else 0
        elif line.event == "engine_call" and not validate and not self.sampled:
            tokens = _count(extra.get("response_tokens"))
            if tokens is not None:
                self.rates.append((end_s, tokens))
        if request_id is not None and line.event != "request":
            self._follow(key, _word(request_id), line, extra)

    def _follow(self, key: tuple[Any, ...], request_id: str, line: Line, extra: Any) -> None:
        """Record the activity of a request in flight; only its first lines carry sample and session."""
        name, number = key[0], key[1]
        place = self._by_id.get((name, number, request_id))
        if place is None and key in self.in_flight:
            place = self._by_id[name, number, request_id] = key
        request = self.in_flight.get(place) if place is not None else None
        if request is None:
            return
        request.request_id = request_id
        request.turn = max(request.turn, _count(extra.get("turn")) or 0)
        request.doing = _NEXT.get(line.event, request.doing)
        if line.event == "turn":
            request.turn += 1


def _word(value: Any) -> str:
    """Return a value of any type as short text."""
    return value[:_WORD] if isinstance(value, str) else repr(value)[:_WORD]


def _word_or_none(value: Any) -> str | None:
    return None if value is None else _word(value)


def _count(value: Any) -> int | None:
    valid = isinstance(value, int) and 0 <= value < 1 << 31
    return value if valid else None


def _time_of(ended: float | tuple[float, Any]) -> float:
    return ended[0] if isinstance(ended, tuple) else ended
