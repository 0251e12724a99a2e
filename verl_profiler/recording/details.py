"""Which requests' details are written: all of the slow and failed ones, and a share of the others.

Details are the events inside a request: turns, engine calls, tools, prompt building and the user's own
spans.  They wait here, in the thread that writes, until their request has ended, and are then written or
counted as sampled out.  The `request` line is written in any case, with the sums of its details.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from verl_profiler.events.json_values import is_object
from verl_profiler.events.vocabulary import EVENTS
from verl_profiler.recording.encoding import Event, Logged
from verl_profiler.recording.worker_config import one_in

# Written by the agent loop inside a request.
DETAILS = frozenset(
    name for name, event in EVENTS.items() if event.family == "rollout" and event.parent is not None
)
# A step is over for a process once it has no open request of it, and a later one began or so long passed.
# The trainer's process waits for that at the end of training.
QUIET_NS = 2_000_000_000
# Of each step and process the details are written of so many requests that took longest, and of as many
# that ended last.
SLOWEST = 5
# Requests that ended last: late details, of tasks that outlive them, share their fate.
_REMEMBERED = 4096
# Its fate, while it is among the slowest.
_UNDECIDED = -1
# Component of a request by event; all tool calls of a turn together where they are recorded.
_COMPONENTS = {
    "engine_call": "engine",
    "prompt_build": "prompt_build",
    "tool_parsing": "tool_parsing",
    "token_merge": "token_merge",
    "reward": "reward",
    "tool_call": "tool",
    "tool_execution": "tool",
}


@dataclass
class _Ended:
    """A request that ended, while it is among the slowest of its step in this process."""

    duration_ns: int
    end_ns: int
    chosen: int
    details: list[Event]


@dataclass
class _Group:
    """The requests of one step, training and validation apart."""

    open: int = 0
    last_ns: int = 0
    # Every N-th is chosen, from a place that its first request's id decides.
    ended: int | None = None
    slow: dict[str, _Ended] = field(default_factory=dict[str, _Ended])


class Details:
    """Holds the details of requests back until it is decided whether they are written.

    Args:
        share: The share of requests whose details are written; taken as 1/N.
        slowest: Of each step the details of so many requests are written that took longest in this
            process, and of as many that ended last.
        limit: Events held at most; beyond, the details of the request that was begun first are written.
        offset_ns: Between the process's clock and the axis of its lines, on which times are rounded down
            to microseconds.

    Attributes:
        every: N of the share 1/N; 0 for none.  May change at any time.
        slowest: See above.
        waiting: Events that are held.
        sampled_out: Events that were not written.
    """

    def __init__(self, share: float, slowest: int, limit: int, offset_ns: int) -> None:
        self.every = one_in(share)
        self.slowest = slowest
        self.waiting = 0
        self.sampled_out = 0
        self._limit = limit
        self._offset_ns = offset_ns
        # Ids of verl's requests, and of those that a span names, until they end.
        self._known: set[str] = set()
        # Of them, those that have details to hold, by the first of these.
        self._held: dict[str, list[Event]] = {}
        # Requests of which everything is written, since they are first to have an event of some name, or
        # there was no more room.
        self._written: set[str] = set()
        self._groups: dict[tuple[Any, bool], _Group] = {}
        self._open = 0
        self._seen: set[str] = set()
        self._fates: OrderedDict[str, int] = OrderedDict()
        self._sums: dict[str, _Sums] = {}

    def add(self, item: Event) -> Iterable[Event]:
        """Take the next event; return what is to be written now."""
        event, _, _, extra, _ = item
        if event in self._seen and is_object(extra):
            # Most events are these.
            key = extra.get("request_id")
            if type(key) is str and key in self._held:
                self._held[key].append(item)
                self.waiting += 1
                return () if self.waiting <= self._limit else self._make_room()
        if event == "request_start":
            return self._started(item)
        fields = _fields_of(item)
        if event == "request":
            return self._ended(item, fields)
        key = fields.get("request_id")
        if (event not in DETAILS and event in EVENTS) or type(key) is not str:
            return (item,)
        return self._other_detail(key, item)

    def quiet(self, now_ns: int) -> list[Event]:
        """Return the details of steps that are over, as nothing has happened in them for long."""
        return self._release(
            group for group in self._groups.values() if now_ns - group.last_ns >= QUIET_NS
        )

    def close(self) -> list[Event]:
        """Return all that is held; for the end of the process."""
        for group in self._groups.values():
            group.open = 0
        items = self._release(self._groups.values())
        for details in self._held.values():
            items += details
        self._held.clear()
        self.waiting = 0
        return items

    def _started(self, item: Event) -> list[Event]:
        items: list[Event] = []
        key = self._group_of(item)
        if key not in self._groups:
            step, validate = key
            # Validation runs within a step: it does not end it.
            if not validate and type(step) is int:
                items = self._release(
                    group
                    for (other, _), group in self._groups.items()
                    if type(other) is int and other < step
                )
            self._groups[key] = _Group()
        named = _fields_of(item).get("request_id")
        if type(named) is str:
            # An id that is used again is another request's.
            self._fates.pop(named, None)
            self._known.add(named)
        self._groups[key].open += 1
        _, _, self._groups[key].last_ns, _, _ = item
        self._open += 1
        items.append(item)
        return items

    def _other_detail(self, key: str, item: Event) -> Iterable[Event]:
        """Take a request's first detail, one with a name that is new, or one that is written at once."""
        event, _, _, extra, _ = item
        logged = type(extra) is Logged
        if logged and extra.path is not None:
            # It has a file of its own.
            return (item,)
        if key not in self._known:
            fate = self._fates.get(key)
            if fate is not None:
                return self._late(key, fate, item)
            if not self._open or logged:
                # An id that `log_manager.log` was given may be the user's own, which no `request` line
                # follows.  All others are of the request that the code belongs to.
                return (item,)
            # verl chooses most ids after the request has begun.
            self._known.add(key)
        if event not in self._seen or self.every == 1:
            # With all chosen, as within a byte budget, there is nothing to wait for.
            self._seen.add(event)
            self._written.add(key)
        if key in self._written:
            return [*self._written_now(key), *self._counted(key, [item])]
        self._held.setdefault(key, []).append(item)
        self.waiting += 1
        return () if self.waiting <= self._limit else self._make_room()

    def _written_now(self, key: str) -> list[Event]:
        """Write what is held of a request."""
        details = self._held.pop(key, [])
        self.waiting -= len(details)
        return self._counted(key, details)

    def _counted(self, key: str, details: list[Event]) -> list[Event]:
        """Add details that are written before their request ends to its sums."""
        self._sums.setdefault(key, _Sums(self._offset_ns)).add(details)
        return details

    def _late(self, key: str, fate: int, item: Event) -> Iterable[Event]:
        if fate == _UNDECIDED:
            for group in self._groups.values():
                if key in group.slow:
                    group.slow[key].details.append(item)
                    self.waiting += 1
                    return ()
            return (item,)
        if fate == 0:
            self.sampled_out += 1
            return ()
        return (_weighted(item, fate),)

    def _make_room(self) -> list[Event]:
        """Give up holding the request that was begun first, which is among the slowest."""
        for key in self._held:
            self._written.add(key)
            return self._written_now(key)
        return self._release(self._groups.values(), over=False)

    def _ended(self, item: Event, fields: Mapping[str, Any]) -> list[Event]:
        _, begin_ns, end_ns, _, _ = item
        group = self._groups.get(self._group_of(item))
        if group is not None:
            group.open = max(group.open - 1, 0)
            group.last_ns = end_ns
        self._open = max(self._open - 1, 0)
        key = fields.get("request_id")
        if type(key) is not str:
            return [item]
        self._known.discard(key)
        details = self._held.pop(key, [])
        sums = self._sums.pop(key, None) or _Sums(self._offset_ns)
        sums.add(details)
        line = _with_fields(item, {**sums.fields(self.every), **fields})
        self._fates.pop(key, None)
        if key in self._written or "status" in fields or group is None:
            self._written.discard(key)
            return [line, *self._settle(key, 1, details)]
        ended = _Ended(end_ns - (begin_ns or end_ns), end_ns, self._chosen(group, key), details)
        if ended.chosen == 1:
            return [line, *self._settle(key, 1, details)]
        before = group.slow.pop(key, None)
        items = [line] if before is None else [line, *self._settle(key, 1, before.details)]
        self._remember(key, _UNDECIDED)
        group.slow[key] = ended
        return [*items, *self._drop_faster(group)]

    def _drop_faster(self, group: _Group) -> list[Event]:
        """Decide about the requests of a step that are no longer among its slowest."""
        if len(group.slow) <= self.slowest:
            return []
        slow = group.slow
        longest = sorted(slow, key=lambda key: -slow[key].duration_ns)[: self.slowest]
        last = sorted(slow, key=lambda key: -slow[key].end_ns)[: self.slowest]
        kept = {*longest, *last}
        items: list[Event] = []
        for key in [key for key in slow if key not in kept]:
            ended = slow.pop(key)
            items += self._settle(key, ended.chosen, ended.details)
        return items

    def _release(self, groups: Iterable[_Group], *, over: bool = True) -> list[Event]:
        """Return the details of the slowest requests of steps that are over."""
        items: list[Event] = []
        for group in groups:
            if over and group.open:
                continue
            for key, ended in group.slow.items():
                items += self._settle(key, 1, ended.details)
            group.slow.clear()
        if over:
            # One that goes on counts anew.
            self._groups = {
                key: group for key, group in self._groups.items() if group.open or group.slow
            }
        return items

    def _settle(self, key: str, weight: int, details: list[Event]) -> list[Event]:
        """Write the details of a request that stands for `weight` requests, or none for 0."""
        self._remember(key, weight)
        self.waiting -= len(details)
        if weight == 0:
            self.sampled_out += len(details)
            return []
        return details if weight == 1 else [_weighted(item, weight) for item in details]

    def _remember(self, key: str, fate: int) -> None:
        self._fates[key] = fate
        self._fates.move_to_end(key)
        if len(self._fates) > _REMEMBERED:
            self._fates.popitem(last=False)

    def _chosen(self, group: _Group, key: str) -> int:
        """Return N where the request that ended is every N-th of its step; 0 where it is not chosen."""
        if group.ended is None:
            name = f"{key}".encode("utf-8", "replace")
            group.ended = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "big")
        group.ended += 1
        every = self.every
        return every if every and group.ended % every == 0 else 0

    @staticmethod
    def _group_of(item: Event) -> tuple[Any, bool]:
        _, _, _, _, step = item
        return step, _fields_of(item).get("validate") is True


def _fields_of(item: Event) -> Mapping[str, Any]:
    """Return an event's fields; none where they are encoded."""
    _, _, _, extra, _ = item
    fields = extra.fields if type(extra) is Logged else extra
    return fields if is_object(fields) else {}


def _with_fields(item: Event, fields: dict[str, Any]) -> Event:
    event, begin_ns, end_ns, extra, step = item
    if type(extra) is Logged:
        return event, begin_ns, end_ns, msgspec.structs.replace(extra, fields=fields), step
    return event, begin_ns, end_ns, fields, step


def _weighted(item: Event, weight: int) -> Event:
    return _with_fields(item, {**_fields_of(item), "sampled": weight})


class _Sums(msgspec.Struct, eq=False):
    """What the details of one request add up to, as the reader adds them up."""

    offset_ns: int
    times_us: dict[str, int] = {}
    calls: dict[str, int] = {}
    # Of what the generate calls returned.
    tokens: int | None = None
    post: tuple[int, int] | None = None
    reward: tuple[int, int] | None = None

    def add(self, details: Iterable[Event]) -> None:
        """Add details; the user's own spans have no component."""
        times_us, calls = self.times_us, self.calls
        offset_ns = self.offset_ns
        for item in details:
            event, begin_ns, end_ns, _, _ = item
            if event not in DETAILS:
                continue
            end_us = (end_ns + offset_ns) // 1000
            begin_us = end_us if begin_ns is None else (begin_ns + offset_ns) // 1000
            if event in times_us:
                times_us[event] += end_us - begin_us
                calls[event] += 1
            else:
                times_us[event] = end_us - begin_us
                calls[event] = 1
            if event == "engine_call":
                tokens = _fields_of(item).get("response_tokens")
                if type(tokens) is int:
                    self.tokens = (self.tokens or 0) + tokens
            elif event == "postprocess":
                self.post = _around(self.post, begin_us, end_us)
            elif event == "reward":
                self.reward = _around(self.reward, begin_us, end_us)

    def fields(self, every: int) -> dict[str, Any]:
        """Return the fields of the `request` line; seconds to the microsecond."""
        times = {
            name: self.times_us[event]
            for event, name in _COMPONENTS.items()
            if event in self.times_us
        }
        if self.post is not None:
            inside = (
                self.reward is not None
                and self.reward[0] >= self.post[0]
                and self.reward[1] <= self.post[1]
            )
            times["postprocess"] = (
                self.post[1] - self.post[0] - (times.get("reward", 0) if inside else 0)
            )
        fields: dict[str, Any] = {
            "one_in": every,
            "components": {name: us / 1e6 for name, us in sorted(times.items())},
            "engine_calls": self.calls.get("engine_call", 0),
        }
        if "tool_call" in self.calls or "tool_execution" not in self.calls:
            fields["tool_calls"] = self.calls.get("tool_call", 0)
        if self.tokens is not None:
            fields["generated_tokens"] = self.tokens
        return fields


def _around(span: tuple[int, int] | None, begin_us: int, end_us: int) -> tuple[int, int]:
    return (begin_us, end_us) if span is None else (min(span[0], begin_us), max(span[1], end_us))
