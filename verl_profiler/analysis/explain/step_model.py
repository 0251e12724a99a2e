"""A step that can be run again with something changed.

The trainer looks for finished samples when it was seen to look, and further at the same distance.
What follows `gen` keeps its length, unless the number of tokens changes: `after_token_us`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from verl_profiler.analysis.explain.chains import Call, Request
from verl_profiler.analysis.explain.replay import (
    ends_alone_us,
    replicas_of,
    request_ends,
    times_by_load,
)

__all__ = ["POLL_US", "StepModel"]

# verl's replay buffer sleeps so long between two looks (0.9.1); used where its looks were not seen.
POLL_US = 2_000_000


@dataclass(frozen=True)
class StepModel:
    """One step; times are microseconds after its begin.

    Args:
        duration_us: As measured.
        requests: Those that `gen` waited for.
        last_us: When the last of them ended.
        wait_end_us: When the trainer had its samples; None when no `gen` waited for requests.
        looks_us: When the trainer looked for samples; empty when it was not seen to poll.
        poll_us: Distance of further looks.
        slowness: Time per unit of work (a token, where tokens are known), with n calls in the
            replica, is a + b n: (a, b) over all replicas and steps.
        slowness_of: (a, b) of each replica, where they are known.
        slope_error: Standard error of b, in parts of b.
        load_varied: Whether there were enough calls, at loads that differ enough, to fit b.
        slots: How many calls a replica ran at most, where others waited meanwhile; None where none
            had to.
        most_running: How many calls a replica ran at most.
        weights_us: Length of the weight sync.
        uneven_us: What the phases would save if every rank took the ranks' mean.
        after_token_us: Time per token of the phases after `gen`, and its standard error; zeros where
            too few steps are known.
    """

    run: str
    step: int
    duration_us: int
    requests: tuple[Request, ...] = ()
    last_us: float = 0.0
    wait_end_us: float | None = None
    looks_us: tuple[float, ...] = ()
    poll_us: float = POLL_US
    slowness: tuple[float, float] = (1.0, 0.0)
    slowness_of: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    slope_error: float = 0.0
    load_varied: bool = False
    slots: int | None = None
    most_running: int = 0
    weights_us: float = 0.0
    uneven_us: float = 0.0
    after_token_us: tuple[float, float] = (0.0, 0.0)

    @property
    def calls(self) -> int:
        """Number of generate calls: what a replay costs."""
        return sum(isinstance(stage, Call) for r in self.requests for stage in r.stages)

    def replayed(
        self,
        requests: Sequence[Request] | None = None,
        *,
        polls: bool = True,
        slots: int | None = None,
        even: bool = False,
        beyond: str = "line",
        speeds: Mapping[str, tuple[float, float]] | None = None,
    ) -> float:
        """Return how long the step takes.

        Args:
            requests: In place of those of the step.
            polls: Whether the trainer finds its samples at its next look only.
            slots: How many calls a replica runs at once; as measured when None.
            even: A call goes to the replica with the fewest calls, not to the one it went to.
            beyond: What more calls at once do than were seen, a key of `BEYOND`.
            speeds: In place of `slowness_of`.
        """
        last_us = self.last_end_us(requests, slots=slots, even=even, beyond=beyond, speeds=speeds)
        return self.length_us(last_us, polls=polls) + self.after_change_us(requests)[0]

    def after_change_us(self, requests: Sequence[Request] | None) -> tuple[float, float]:
        """Return how much longer the phases after `gen` take with these requests, and the error."""
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
        slots: int | None = None,
        even: bool = False,
        beyond: str = "line",
        speeds: Mapping[str, tuple[float, float]] | None = None,
    ) -> float:
        """Return when the last request ends; `replayed` has the arguments."""
        chosen = self.requests if requests is None else requests
        if not chosen:
            return self.last_us
        most = self.most_running or len(chosen)
        known = {**self.slowness_of, **(speeds or {})}
        names = self._replicas if chosen is self.requests else replicas_of(chosen)
        per_work = {
            name: times_by_load(beyond, *known.get(name, self.slowness), len(chosen), most)
            for name in names
        }
        ends = None if speeds else self._alone_ends_us
        return max(request_ends(chosen, per_work, slots or self.slots, even=even, known_us=ends))

    @cached_property
    def _alone_ends_us(self) -> dict[int, float]:
        """When each of the requests ends if it shares no replica, by its `id`."""
        flat = {name: self.slowness_of.get(name, self.slowness)[0] for name in self._replicas}
        return {id(r): ends_alone_us(r, flat) for r in self.requests}

    def length_us(self, last_us: float, *, polls: bool = True) -> float:
        """Return how long the step takes if its last request ends then."""
        if self.wait_end_us is None:
            return self.duration_us
        return self.duration_us - self.wait_end_us + self._found(last_us, polls=polls)

    def from_tokens(self) -> float | None:
        """Return how long the step takes if all tokens are the same work, without polling.

        In `replayed` each call has the work that it was seen to be; here it is predicted from its
        tokens, so the difference shows what the model of the replicas' speed is worth.
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
        """Return when the trainer has its samples, if the last request ends then."""
        wait_end = self.wait_end_us or 0.0
        if not self.looks_us:
            return last_us + wait_end - self.last_us
        fetching = wait_end - self.looks_us[-1]
        if not polls:
            return last_us + fetching
        place = bisect_left(self.looks_us, last_us - 1)
        if place < len(self.looks_us):
            return self.looks_us[place] + fetching
        further = -((self.looks_us[-1] - (last_us - 1)) // self.poll_us)
        return self.looks_us[-1] + further * self.poll_us + fetching
