"""Who waits for whom in a run that is stuck: from the trainer's phase down to what waits for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.events.open_files import NO_PROGRESS
from verl_profiler.events.vocabulary import COMPUTING_ROLES, WORKER_ROLE
from verl_profiler.live.open_processes import (
    Link,
    Process,
    Verdict,
    age_text,
    calls_another,
    clock_text,
    grouped,
    identity,
    in_collective,
    is_of,
    most_frequent_stack,
    part,
    phase_text,
    place,
    since,
    some,
    standing,
    state_of,
)
from verl_profiler.units import counted, seconds

# The module of verl's queue between rollouter and trainer, in the name of a function.
_QUEUE = ".message_queue:"
_CONTAINERS = ("request", "agent_loop", "postprocess", "turn")
_SHOWN = 3
# Of the calls that requests are in, those that are at least so much as old as the oldest may be the cause.
_AS_OLD = 0.75


def explained(
    processes: Sequence[Process], stuck: Sequence[tuple[Process, Mapping[str, Any]]], last_s: float
) -> Verdict:
    """Follow the waiting.

    Args:
        processes: All of the run.
        stuck: Trainers and their stuck phases, the outermost first; none if a trainer is silent.
        last_s: The run's last sign of life, or the present; seconds since 1970.
    """
    return _Search(processes, last_s).explain(stuck)


def open_now(processes: Sequence[Process], last_s: float) -> list[Link]:
    """Return the oldest calls that are open for long, by the function that they are in."""
    search = _Search(processes, last_s)
    pairs = [(each, row) for each in processes if (row := search.innermost(each)) is not None]
    links = [
        Link(
            some([each.name for each, _ in group]),
            str(group[0][1].get("event")),
            max(search.age(row) for _, row in group),
            at,
        )
        for at, group in grouped(pairs).items()
    ]
    return sorted(links, key=lambda link: -(link.open_s or 0.0))[: 2 * _SHOWN]


class _Search:
    """Follows the waiting from the trainer on."""

    def __init__(self, processes: Sequence[Process], last_s: float) -> None:
        self.processes = processes
        self.last_s = last_s
        self.found = Verdict("stuck", "")

    def of(self, *roles: str) -> list[Process]:
        return [each for each in self.processes if each.role in roles]

    def explain(self, stuck: Sequence[tuple[Process, Mapping[str, Any]]]) -> Verdict:
        silent = [each for each in self.of("trainer") if each.silent_s]
        if silent and not stuck:
            self.found.summary = (
                f"The trainer has written nothing for {seconds(silent[0].silent_s)}."
            )
            self.suspect(silent, [])
            return self.found
        trainer, phase = stuck[-1]
        age_s = self.last_s - since(phase, self.last_s)
        self.found.summary = f"{phase_text(phase)} has taken {seconds(age_s)}{age_text(phase)}."
        if phase.get("event") == NO_PROGRESS:
            flying = phase.get("in_flight")
            self.found.summary = (
                f"{trainer.name} has neither dispatched nor finished a sample for {seconds(age_s)}, "
                + (f"with {flying} in flight." if flying else "and no limit keeps it from it.")
            )
        inner = [row for row in trainer.rows("calls") if since(row, 0) >= since(phase, 0)]
        at = (inner[-1] if inner else phase).get("at")
        what = "no sample" if phase.get("event") == NO_PROGRESS else str(phase.get("event"))
        self.add(trainer.name, what, age_s, at, phase.get("step"))
        if silent:
            self.suspect(silent, [])
        elif phase.get("event") == NO_PROGRESS:
            # The ranks train meanwhile.
            if not self.requests():
                self.others(trainer, phase)
        elif not (self.ranks() or self.requests()):
            self.others(trainer, phase)
        return self.found

    def add(
        self,
        process: str,
        what: str,
        open_s: float | None,
        at: str | None = None,
        step: int | None = None,
        *,
        depth: int | None = None,
    ) -> None:
        """Add what the last one waits for, or `depth` things."""
        if depth is None:
            depth = self.found.chain[-1].depth + 1 if self.found.chain else 0
        self.found.chain.append(Link(process, what, open_s, at, step, depth))

    def end(self, culprit: str, confidence: str, stack: Iterable[str] = ()) -> None:
        self.found.culprit, self.found.confidence = culprit, confidence
        self.found.evidence = list(stack)

    def suspect(self, silent: Sequence[Process], stack: Iterable[str]) -> None:
        names = some([each.name for each in silent])
        states = {state_of(each.header) for each in silent} - {None}
        ends = {
            f"ended at {clock_text(each.heard_s)}" for each in silent if each.ended and each.heard_s
        }
        why = f", which {(states or ends).pop()}" if len(states or ends) == 1 else ""
        host = self.dead_host(silent)
        if host is not None:
            names = f"host {host}, of which no process has a sign of life ({names})"
        depth = self.found.chain[-1].depth + 1 if self.found.chain else 0
        for each in silent[:_SHOWN]:
            self.add(each.name, "no sign of life", each.silent_s, depth=depth)
        self.end(f"{names}{why}", "high" if why else "medium", stack)

    def dead_host(self, silent: Sequence[Process]) -> str | None:
        """Return the host of these processes if it has several, all of them silent, and others are not."""
        hosts = {str(each.header.get("host")) for each in silent}
        members = [each for each in self.processes if str(each.header.get("host")) in hosts]
        alone = len(hosts) != 1 or len(members) < 2 or len(members) == len(self.processes)
        return None if alone or not all(each.silent_s for each in members) else hosts.pop()

    def silence(self, members: Sequence[Process]) -> bool:
        """Suspect those of some processes that are silent, if any are."""
        silent = [each for each in members if each.silent_s]
        if silent:
            self.suspect(silent, [])
        return bool(silent)

    def ranks(self) -> bool:
        """Follow the ranks, if they have anything open."""
        members = self.of(*COMPUTING_ROLES)
        silent = [each for each in members if each.silent_s]
        busy = [(each, self.innermost(each)) for each in members if not each.silent_s]
        working = [(each, row) for each, row in busy if row is not None]
        if not working:
            if silent and not self.old_requests():
                self.suspect(silent, [])
                return True
            return False
        waits = [(each, row) for each, row in working if in_collective(row)]
        works = [(each, row) for each, row in working if not in_collective(row)]
        for group in (waits, works):
            for at, ranks in grouped(group).items():
                what = str(ranks[0][1].get("event"))
                age_s = max(self.age(row) for _, row in ranks)
                self.add(some([each.name for each, _ in ranks]), what, age_s, at, depth=1)
        idle = [each for each, row in busy if row is None]
        if len(members) > 1:
            self.found.facts.append(ranks_text(waits, works, idle, silent))
        apart = {function_of(row) for _, row in waits}
        # No collective waits for a rollouter.
        called = [each for each in self.processes if each.silent_s and each.role != "rollouter"]
        if silent or (called and not works):
            self.suspect(silent or called, [])
        elif works:
            _, row = min(works, key=lambda pair: since(pair[1], 0))
            names = some([one.name for one, other in works if place(other) == place(row)])
            # What stands in a call of another process waits for it; else both may be the cause.
            if called and calls_another(row):
                self.suspect(called, row.get("stack") or ())
            else:
                confidence = "medium" if called else "high"
                self.end(f"{names} in {place(row)}", confidence, row.get("stack") or ())
        elif idle:
            names = some([each.name for each in idle])
            self.end(f"{names}: in no call, while the other ranks wait in a collective", "medium")
        elif len(apart) > 1:
            texts = [
                f"{some([each.name for each, row in waits if function_of(row) == name])} in {name}"
                for name in sorted(apart)
            ]
            self.end(f"ranks in different collectives: {', '.join(texts)}", "medium")
        else:
            _, row = waits[0]
            self.end(
                f"all ranks wait for each other in {place(row)}: a collective that does not match, "
                "or the network",
                "low",
                row.get("stack") or (),
            )
        return True

    def old_requests(self) -> list[tuple[Process, Mapping[str, Any]]]:
        return [(each, row) for each in self.of(WORKER_ROLE) for row in each.rows("requests")]

    def requests(self) -> bool:
        """Follow the requests, if any are open for long."""
        workers = self.of(WORKER_ROLE)
        pairs = self.old_requests()
        still = self.standstill()
        if still is not None and pairs:
            oldest_s = max(self.age(row) for _, row in pairs)
            # They come and go meanwhile.
            pairs = pairs if oldest_s > self.age(still[1]) / 2 else []
        if pairs:
            names = some(sorted({each.name for each, _ in pairs}))
            age_s = max(self.age(row) for _, row in pairs)
            total = sum(
                max(each.open.get("open_requests") or 0, len(each.rows("requests")))
                for each in workers
            )
            steps = {row.get("step") for _, row in pairs}
            step = steps.pop() if len(steps) == 1 else None
            self.add(names, counted(total, "request"), age_s, None, step)
        if self.silence(workers):
            return True
        blocked = [(each, row) for each in workers for row in each.rows("blocked_loops")]
        if blocked:
            for each, row in blocked[:_SHOWN]:
                self.add(each.name, "blocked event loop", self.age(row), place(row), depth=2)
            _, row = max(blocked, key=lambda pair: self.age(pair[1]))
            names = some([each.name for each, _ in blocked])
            self.end(
                f"{place(row)} blocks the event loop of {names}, and all requests there",
                "high",
                row.get("stack") or (),
            )
            return True
        if not pairs:
            return False
        inside = [(each, self.inside(each, row)) for each, row in pairs]
        # Younger ones are no cause, however many there are.
        least_s = max(self.age(row) for _, row in inside) * _AS_OLD
        kinds: dict[str, list[tuple[Process, Mapping[str, Any]]]] = {}
        for each, row in inside:
            kinds.setdefault(str(row.get("event")), []).append((each, row))
        old = {
            kind: [(each, row) for each, row in group if self.age(row) >= least_s]
            for kind, group in kinds.items()
        }
        ordered = sorted(kinds, key=lambda kind: -len(old[kind]))
        for kind in ordered:
            self.add_calls(kind, kinds[kind])
        kind, group = ordered[0], old[ordered[0]]
        confidence = "high" if len(group) == len(pairs) else "medium"
        if max(self.age(row) for _, row in inside) < (self.found.chain[0].open_s or 0.0) / 2:
            confidence = "low"
            self.found.unknown.append(
                "Whether these calls are the cause: they began long after the wait, as others that came and went."
            )
        follow = {
            "engine_call": self.engine,
            "engine_attempt": self.engine,
            "reward": self.reward,
        }.get(kind, self.calls)
        follow(group, confidence)
        return True

    def add_calls(self, kind: str, group: Sequence[tuple[Process, Mapping[str, Any]]]) -> None:
        extras = [mapping_or_empty(row.get("extra")) for _, row in group]
        of = Counter(str(extra.get("tool") or extra.get("server") or "") for extra in extras)
        named = ", ".join(f"{name} {count}" for name, count in of.most_common(_SHOWN) if name)
        what = f"{len(group)} in {kind}" + (f" ({named})" if named else "")
        _, oldest = max(group, key=lambda pair: self.age(pair[1]))
        names = some(sorted({each.name for each, _ in group}))
        self.add(names, what, self.age(oldest), place(oldest), depth=2)

    def calls(self, group: Sequence[tuple[Process, Mapping[str, Any]]], confidence: str) -> None:
        """Name the calls themselves, those of a tool for example; or a process that answers nobody."""
        if self.silence(self.processes):
            return
        _, oldest = max(group, key=lambda pair: self.age(pair[1]))
        tools = Counter(_named(row, "tool") for _, row in group)
        names = [name for name, _ in tools.most_common(_SHOWN) if name]
        who = str(oldest.get("event"))
        if names:
            who = f"tool{'s' if len(names) > 1 else ''} {' and '.join(names)}"
        self.end(
            f"{who}: {counted(len(group), 'call has', 'calls have')} not returned; "
            f"the oldest is in {standing(oldest)}",
            confidence,
            oldest.get("stack") or (),
        )

    def engine(self, group: Sequence[tuple[Process, Mapping[str, Any]]], confidence: str) -> None:
        """Follow generate calls into the engines."""
        servers = Counter(_named(row, "server") for _, row in group)
        named = [name for name, _ in servers.most_common(_SHOWN) if name]
        engines = self.of("engine")
        if self.silence(engines):
            return
        where = f" by {' and '.join(named)}" if named else ""
        calls = (
            f"{counted(len(group), 'generate call is', 'generate calls are')} not answered{where}"
        )
        unknown = [
            each
            for each in engines
            if "engine_resume" in part(part(each.header, "probes"), "missed")
        ]
        if unknown:
            names = some([each.name for each in unknown])
            self.found.unknown.append(
                f"Whether {names} is paused: the end of pauses is not recorded with this verl."
            )
        paused = [
            (each, row)
            for each in engines
            if (row := each.open.get("paused")) and each not in unknown
        ]
        for each, row in paused[:_SHOWN]:
            self.add(each.name, "paused, not resumed", self.age(row), depth=3)
        if paused:
            names = some([each.name for each, _ in paused])
            age_s = max(self.age(row) for _, row in paused)
            version = paused[0][0].open.get("weight_version")
            since_version = "" if version is None else f" at weight version {version}"
            self.end(
                f"{names}, paused for {seconds(age_s)}{since_version} and not resumed: {calls}",
                confidence,
            )
            return
        mute = [
            each
            for each in engines
            if part(each.evidence, "engine").get("unanswered") == "scheduler"
        ]
        if mute:
            names = some([each.name for each in mute])
            self.end(f"the scheduler of {names}, which does not answer: {calls}", confidence)
            return
        holding = [(each, self.innermost(each)) for each in engines]
        # Others are busy with younger calls.
        least_s = max(self.age(row) for _, row in group) / 2
        holding = [(each, row) for each, row in holding if row and self.age(row) > least_s]
        for each, row in holding:
            self.add(each.name, str(row.get("event")), self.age(row), place(row), depth=3)
        if len(holding) == 1:
            each, row = holding[0]
            self.end(
                f"{each.name}: {calls}; it is in {place(row)}", confidence, row.get("stack") or ()
            )
            return
        self.end(calls, "medium" if len(named) == 1 else "low")
        if not holding:
            self.found.unknown.append(
                "No engine process has a request on record that is open for so long: the call may wait in "
                "front of the engine, or in a scheduler, which is not recorded."
            )

    def reward(self, group: Sequence[tuple[Process, Mapping[str, Any]]], confidence: str) -> None:
        """Follow rewards into their workers."""
        members = self.of("reward")
        if self.silence(members):
            return
        threads = [(each, row) for each in members for row in each.rows("threads")]
        calls = [(each, row) for each in members for row in each.rows("calls")]
        found = threads or calls
        if not found:
            self.calls(group, "medium")
            return
        for at, rows in grouped(found).items():
            ages = [self.age(row) for _, row in rows if row.get("since")]
            names = some(sorted({each.name for each, _ in rows}))
            self.add(names, "reward function", max(ages, default=None), at, depth=3)
        _, row = found[0]
        waiting = counted(len(group), "request waits", "requests wait")
        self.end(
            f"the reward function, in {place(row)}; {waiting} for it",
            confidence,
            row.get("stack") or (),
        )

    def others(self, trainer: Process, phase: Mapping[str, Any]) -> None:
        """Nothing is open below the trainer: a silent process, a rollouter, or the trainer itself."""
        inner = trainer.rows("calls")
        row = inner[-1] if inner else phase
        if _QUEUE in str(row.get("at")):
            for queue in self.of("message_queue"):
                if not queue.silent_s:
                    self.add(queue.name, "no sample", None)
        if self.silence(self.processes):
            return
        still = self.standstill()
        if still is not None:
            self.rollouter(*still, trainer)
            return
        self.end(f"{trainer.name}, in {place(row)}", "low", row.get("stack") or ())
        unknown = "No other process has a recorded call that is open for so long."
        if phase.get("event") == "gen" and self.of(WORKER_ROLE):
            # verl's replay buffer polls for as long as a prompt is marked as running.
            unknown += " No agent-loop worker has a request: prompts that the trainer waits for may be lost."
        self.found.unknown.append(unknown)

    def standstill(self) -> tuple[Process, Mapping[str, Any]] | None:
        """Return the rollouter that makes no samples for longest: its blocked event loop, or its phase."""
        members = self.of("rollouter")
        blocked = [(each, row) for each in members for row in each.rows("blocked_loops")]
        idle = [
            (each, row)
            for each in members
            for row in each.rows("phases")
            if row.get("event") == NO_PROGRESS
            and self.age(row) >= (each.open.get("after_s") or 0.0)
        ]
        return max(blocked or idle, key=lambda pair: self.age(pair[1]), default=None)

    def rollouter(self, process: Process, row: Mapping[str, Any], trainer: Process) -> None:
        """Name what keeps a rollouter from making the samples that the trainer waits for."""
        if row.get("event") == NO_PROGRESS:
            stack: Sequence[str] = most_frequent_stack(process.evidence)
            at = stack[-1] if stack else None
            flying = f"{row['in_flight']} in flight" if row.get("in_flight") else ""
            what = f"no sample, {flying}" if flying else "no sample"
            culprit = (
                f"{process.name}, which has neither dispatched nor finished a sample for "
                f"{seconds(self.age(row))}"
            )
            culprit += f", with {flying}" if flying else ""
            culprit += f"; most of its tasks are in {at}" if at else ""
            confidence = "high" if flying and at else "medium"
        else:
            stack, at = row.get("stack") or (), place(row)
            what, confidence = "blocked event loop", "high"
            culprit = f"{at} blocks the event loop of {process.name}, which makes the samples"
        if process is not trainer:
            self.add(process.name, what, self.age(row), at)
        self.end(culprit, confidence, stack)

    def innermost(self, process: Process) -> Mapping[str, Any] | None:
        """Return the innermost of the calls that are open for long, in that which is so longest."""
        after_s = process.open.get("after_s") or 0.0
        rows = [row for row in process.rows("calls") if self.age(row) >= after_s]
        if not rows:
            return None
        oldest = min(rows, key=lambda row: since(row, 0))
        same = [row for row in rows if row.get("thread") == oldest.get("thread")]
        if oldest.get("thread") is None:
            same = [row for row in rows if identity(row) == identity(oldest)]
        return max(same, key=lambda row: since(row, 0))

    def inside(self, process: Process, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the innermost call of a request; the request where there is none."""
        wanted = identity(request)
        rows = [
            row
            for row in process.rows("calls")
            if row.get("event") not in _CONTAINERS and is_of(row, wanted)
        ]
        if rows:
            return max(rows, key=lambda row: since(row, 0))
        rows = [row for row in process.rows("calls") if is_of(row, wanted)]
        return max(rows, key=lambda row: since(row, 0), default=request)

    def age(self, row: Mapping[str, Any]) -> float:
        return self.last_s - since(row, self.last_s)


def _named(row: Mapping[str, Any], what: str) -> str:
    return str(mapping_or_empty(row.get("extra")).get(what) or "")


def function_of(row: Mapping[str, Any]) -> str:
    """Return the function that a row stands in, without module and line: `all_reduce`."""
    return str(row.get("at")).rpartition(":")[0].rpartition(":")[2].rpartition(".")[2]


def ranks_text(
    waits: Sequence[tuple[Process, Mapping[str, Any]]],
    works: Sequence[tuple[Process, Mapping[str, Any]]],
    idle: Sequence[Process],
    silent: Sequence[Process],
) -> str:
    """Write where the ranks are: `7 of 8 ranks are in all_reduce, actor_5 is in torch.load:3`."""
    count = len(waits) + len(works) + len(idle) + len(silent)
    texts: list[str] = []
    for name, number in Counter(function_of(row) for _, row in waits).most_common():
        texts.append(f"{number} of {count} ranks {'is' if number == 1 else 'are'} in {name}")
    places = grouped(works)
    groups = [([each.name for each, _ in rows], f"in {at}") for at, rows in places.items()]
    groups.append(([each.name for each in idle], "in no recorded call"))
    groups.append(([each.name for each in silent], "without a sign of life"))
    for names, where in groups:
        if names:
            texts.append(f"{some(names)} {'is' if len(names) == 1 else 'are'} {where}")
    return ", ".join(texts)
