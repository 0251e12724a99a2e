"""A model of a step that can be replayed with a change.

The trainer polls for finished samples at the recorded times, and later at the same interval.
The phases after `gen` keep their duration, unless the number of tokens changes: `after_token_us`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from verl_profiler.analysis.explain.chains import Call, Request
from verl_profiler.analysis.explain.replay import (
    Limits,
    Speed,
    ends_alone_us,
    replicas_of,
    request_ends,
    time_us,
    times_by_load,
)

__all__ = ["POLL_US", "StepModel"]

# Poll interval of verl's replay buffer (0.9.1); used if its polls were not recorded.
POLL_US = 2_000_000


@dataclass(frozen=True)
class StepModel:
    """A model of one step; times are microseconds after its start.

    Args:
        duration_us: As measured.
        requests: The requests that `gen` waited for.
        last_us: End of the last of them.
        wait_end_us: When the trainer had its samples; None if no `gen` waited for requests.
        polls_us: Times of the trainer's polls; empty if no polling was recorded.
        poll_us: Poll interval.
        slowness: (a, b) over all replicas and steps: time per unit of work (a token, if tokens are
            known) is a + b n, with n calls in the replica.  From iterations: of the slowest replica.
        slowness_of: That of each replica, if known.
        slope_error: Relative standard error of b, or of an iteration's time.
        during_prefill: Where the engines' iterations were read: the speed of decoding while a call is
            in prefill, and n is the number of calls that decode.  None: n includes those in prefill.
        most_read: Highest batch of each replica that was read; empty without `during_prefill`.
        load_varied: Whether there were enough calls at sufficiently different loads to fit b.
        max_concurrency: Concurrency limit of a replica, if calls queued for it; None if none did.
        kv_tokens: Size of a replica's KV cache in tokens of its calls, if calls queued for it.
        most_running: Maximum number of concurrent calls in a replica.
        weights_us: Duration of the weight sync.
        uneven_us: Saving in the phases if every rank took the ranks' mean.
        after_token_us: Time per token of the phases after `gen`, and its standard error; zeros with
            too few steps.
    """

    run: str
    step: int
    duration_us: int
    requests: tuple[Request, ...] = ()
    last_us: float = 0.0
    wait_end_us: float | None = None
    polls_us: tuple[float, ...] = ()
    poll_us: float = POLL_US
    slowness: Speed = (1.0, 0.0)
    slowness_of: Mapping[str, Speed] = field(default_factory=dict[str, Speed])
    slope_error: float = 0.0
    load_varied: bool = False
    during_prefill: float | None = None
    most_read: Mapping[str, int] = field(default_factory=dict[str, int])
    max_concurrency: int | None = None
    kv_tokens: float | None = None
    most_running: int = 0
    weights_us: float = 0.0
    uneven_us: float = 0.0
    after_token_us: tuple[float, float] = (0.0, 0.0)

    @property
    def engine(self) -> str:
        """What the engine's speed is from: `iterations` that it reported, or the `calls`."""
        return "calls" if self.during_prefill is None else "iterations"

    @property
    def calls(self) -> int:
        """Number of generate calls, which determines the cost of a replay."""
        return sum(isinstance(stage, Call) for r in self.requests for stage in r.stages)

    def replayed(
        self,
        requests: Sequence[Request] | None = None,
        *,
        polls: bool = True,
        limits: Limits | None = None,
        even: bool = False,
        beyond: str = "line",
        speeds: Mapping[str, Speed] | None = None,
    ) -> float:
        """Return the duration of the replayed step.

        Args:
            requests: Replacement for those of the step.
            polls: Whether the trainer finds its samples only at its next poll.
            limits: Of each replica; None for the measured ones.
            even: Route each call to the replica with the fewest calls, not to the measured one.
            beyond: Assumption for loads that were never observed, a key of `BEYOND`.
            speeds: Replacement for `slowness_of`.
        """
        last_us = self.last_end_us(requests, limits=limits, even=even, beyond=beyond, speeds=speeds)
        return self.length_us(last_us, polls=polls) + self.after_change_us(requests)[0]

    def after_change_us(self, requests: Sequence[Request] | None) -> tuple[float, float]:
        """Return the additional time of the phases after `gen` with these requests, and its error."""
        if requests is None or self.wait_end_us is None or not any(self.after_token_us):
            return 0.0, 0.0
        known = [(self._tokens_of.get(id(request)), request) for request in requests]
        more = sum(r.tokens if tokens is None else tokens for tokens, r in known) - self.tokens
        return self.after_token_us[0] * more, self.after_token_us[1] * abs(more)

    @cached_property
    def tokens(self) -> float:
        """Tokens of all requests, as measured."""
        return sum(self._tokens_of.values())

    @cached_property
    def _tokens_of(self) -> dict[int, float]:
        """Tokens of each of the requests, by its `id`."""
        return {id(request): request.tokens for request in self.requests}

    @cached_property
    def _replicas(self) -> list[str]:
        return replicas_of(self.requests)

    def last_end_us(
        self,
        requests: Sequence[Request] | None = None,
        *,
        limits: Limits | None = None,
        even: bool = False,
        beyond: str = "line",
        speeds: Mapping[str, Speed] | None = None,
    ) -> float:
        """Return the end of the last request; for the arguments see `replayed`."""
        chosen = self.requests if requests is None else requests
        if not chosen:
            return self.last_us
        most = self.most_running or len(chosen)
        known = {**self.slowness_of, **(speeds or {})}
        names = self._replicas if chosen is self.requests else replicas_of(chosen)
        per_work = {
            name: times_by_load(
                beyond,
                known.get(name, self.slowness),
                len(chosen),
                max(most, self.most_read.get(name, 0)),
            )
            for name in names
        }
        return max(
            request_ends(
                chosen,
                per_work,
                self.limits if limits is None else limits,
                even=even,
                known_us=None if speeds else self._alone_ends_us,
                during_prefill=self.during_prefill,
            )
        )

    @property
    def limits(self) -> Limits:
        """The limits of each replica, as measured."""
        return Limits(self.max_concurrency or math.inf, self.kv_tokens or math.inf)

    @cached_property
    def _alone_ends_us(self) -> dict[int, float]:
        """End of each request if it shares no replica, by `id`."""
        flat = {
            name: time_us(self.slowness_of.get(name, self.slowness), 0) for name in self._replicas
        }
        return {id(r): ends_alone_us(r, flat) for r in self.requests}

    def length_us(self, last_us: float, *, polls: bool = True) -> float:
        """Return the duration of the step if its last request ends at this time."""
        if self.wait_end_us is None:
            return self.duration_us
        return self.duration_us - self.wait_end_us + self._found(last_us, polls=polls)

    def from_tokens(self) -> float | None:
        """Return the duration of the step if all tokens are the same work, without polling.

        In `replayed` each call has its measured work; here its work is predicted from its
        tokens, so the difference shows the error of the speed model (token-model error).
        """
        calls = [
            stage
            for request in self.requests
            for stage in request.stages
            if isinstance(stage, Call) and stage.replica is not None
        ]
        tokens = sum(call.tokens or 0 for call in calls)
        if not tokens:
            return None
        per_token = sum(call.work for call in calls if call.tokens) / tokens
        requests = [
            request._replace(
                stages=tuple(
                    stage._replace(work=stage.tokens * per_token)
                    if isinstance(stage, Call) and stage.replica is not None and stage.tokens
                    else stage
                    for stage in request.stages
                )
            )
            for request in self.requests
        ]
        return self.replayed(requests, polls=False)

    def _found(self, last_us: float, *, polls: bool) -> float:
        """Return when the trainer has its samples, if the last request ends at this time."""
        wait_end = self.wait_end_us or 0.0
        if not self.polls_us:
            return last_us + wait_end - self.last_us
        fetching = wait_end - self.polls_us[-1]
        if not polls:
            return last_us + fetching
        place = bisect_left(self.polls_us, last_us - 1)
        if place < len(self.polls_us):
            return self.polls_us[place] + fetching
        further = -((self.polls_us[-1] - (last_us - 1)) // self.poll_us)
        return self.polls_us[-1] + further * self.poll_us + fetching
