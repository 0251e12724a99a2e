"""Which step, request and turn the running code belongs to.

Rollouts are concurrent coroutines in one thread, so the identity of a request rides in a
`ContextVar`; `create_task` and `gather` copy it, and the copies point to one mutable `Request`.
The step of code outside a request is kept per process.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar, Token
from typing import Any

import msgspec


class Request(msgspec.Struct, weakref=True, eq=False):
    """One agent-loop run, from its start until its result is stored."""

    step: int | None
    validate: bool = False
    request_id: str | None = None
    sample: Any = None
    session: Any = None
    uid: str | None = None
    agent: str | None = None
    begin_ns: int = 0
    turn: int | None = None
    turns: int = 0
    turn_begin_ns: int | None = None
    explicit_turns: bool = False
    calls_open: int = 0
    # Whether verl gives it no step: then it follows the versions of the weights.
    learns_step: bool = False
    # Attempts of all generate calls; 0 while none was aborted.
    attempts: int = 0
    min_weight_version: int | None = None
    max_weight_version: int | None = None
    tool_begin_ns: int | None = None
    tool_end_ns: int = 0
    tool_calls: int = 0
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    generated_tokens: int | None = None
    tool_tokens: int | None = None
    reward: float | None = None
    _identity: dict[str, Any] | None = None
    _identity_id: str | None = None
    _identity_turn: int | None = None

    def identity(self) -> dict[str, Any]:
        """Return `known_identity` as a new dict."""
        return self.known_identity().copy()

    def known_identity(self) -> dict[str, Any]:
        """Return the identity keys of an event's `extra`, as far as they are known; not to be changed.

        Within a turn these are `request_id` and `turn`: the request's own lines name its
        sample, and most lines of a run lie within turns.
        """
        if (
            self._identity is None
            or self._identity_turn is not self.turn
            or self._identity_id is not self.request_id
        ):
            self._identity = self._make_identity()
            self._identity_turn, self._identity_id = self.turn, self.request_id
        return self._identity

    def _make_identity(self) -> dict[str, Any]:
        if self.request_id is None or self.turn is None:
            return self.full_identity()
        extra: dict[str, Any] = {"request_id": self.request_id, "turn": self.turn}
        if self.validate:
            extra["validate"] = True
        return extra

    def full_identity(self) -> dict[str, Any]:
        """Return all identity keys that are known, as a new dict."""
        extra: dict[str, Any] = {}
        if self.request_id is not None:
            extra["request_id"] = self.request_id
        if self.turn is not None:
            extra["turn"] = self.turn
        if self.sample is not None:
            extra["sample"] = self.sample
        if self.session is not None:
            extra["session"] = self.session
        if self.validate:
            extra["validate"] = True
        return extra


class EngineCall(msgspec.Struct, kw_only=True, eq=False):
    """One generate call or one attempt of it, in the client or in the server, while it runs.

    Args:
        repeats: Whether the call makes attempts until one is not aborted.
        outer: The call that this is an attempt of.
    """

    repeats: bool = False
    outer: EngineCall | None = None
    # Of a call that repeats: attempts that ended, the last one's end, and the aborted ones' tokens.
    attempts: int = 0
    ended_ns: int = 0
    aborted_tokens: int = 0
    # In a server: whether it came during a pause.
    waits: bool = False
    engine_request_id: str | None = None
    # The replica that the load balancer chose.
    server: str | None = None
    # Of a call outside of all requests: what stands for one.
    request: Request | None = None
    # The engine's last answer, as the server got it.
    answer: Any = None
    is_over: bool = False

    def end(self) -> None:
        """Let go of the answer: tasks that began meanwhile keep this object in their context."""
        self.answer = None
        self.is_over = True


class Process:
    """The state of this process outside any request."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; for tests."""
        self.step = 0
        # After a weight sync: the step that begins with this process's next piece of work.
        self.next_step: int | None = None
        # Whether a step's work follows the sync under its number, instead of preceding it.
        self.sync_leads = False
        # True once a call that names the step (a weight sync) was seen in this process.
        self.step_known = False
        self.validate = False
        self.replica: int | None = None
        # In the trainer: the version of the weights that the replicas got last.
        self.weight_version: int | None = None
        self._trainer: weakref.ref[Any] | None = None
        self._counts_steps = True

    @property
    def is_trainer(self) -> bool:
        """Whether verl's trainer object lives in this process."""
        return self._trainer is not None

    @property
    def trainer(self) -> Any:
        """The trainer object of verl, if it lives in this process."""
        return None if self._trainer is None else self._trainer()

    def forget_parent(self) -> None:
        """Forget what is the parent's alone; in a forked child, whose work is that of the same step."""
        step = self.current_step()
        self.reset()
        self.step = step

    def hold_trainer(self, trainer: Any, *, counts_steps: bool = True) -> None:
        """Take the step from `trainer.global_steps` from now on, unless that counts something else."""
        self._trainer = weakref.ref(trainer)
        self._counts_steps = counts_steps

    def learn_step(self, weight_version: int) -> None:
        """Enter the step that tokens of this version are made in, unless the process has its own."""
        if self._trainer is None and not self.step_known:
            self.step = max(self.step, weight_version + 1)

    def begin_work(self) -> None:
        """Enter the step that the last weight sync announced."""
        if self.next_step is not None:
            self.step, self.next_step = self.next_step, None

    def current_step(self) -> int:
        """Return the step that code outside a request belongs to."""
        if self._trainer is not None and self._counts_steps:
            step = getattr(self._trainer(), "global_steps", None)
            if isinstance(step, int):
                self.step = step
        return self.step


current_request: ContextVar[Request | None] = ContextVar("verl_profiler_request", default=None)
# The step that dispatched the prompts of this call, where they came with it.
dispatching_step: ContextVar[int | None] = ContextVar("verl_profiler_step", default=None)
current_engine_call: ContextVar[EngineCall | None] = ContextVar(
    "verl_profiler_engine_call", default=None
)
process = Process()


def restore(token: Token[Any], value: Any) -> None:
    """Undo the `set(value)` that returned this token.

    A call may end in another context than it began in: closed by the garbage collector, or by the
    event loop in a task of its own.  What another call has set there stays.
    """
    variable = token.var
    try:
        variable.reset(token)
    except ValueError:
        if variable.get() is value:
            variable.set(None if token.old_value is Token.MISSING else token.old_value)
