"""What the evidence of a hang comes to: a line of each kind that matters, and all of it for `-v`.

The processes gathered it when the trainer's had found that the run is stuck; see docs/stuck.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verl_profiler.host.sockets import connections
from verl_profiler.live.flight_recorders import recorder_facts, recorder_rows
from verl_profiler.live.host_facts import own_pid
from verl_profiler.live.open_processes import (
    Process,
    Verdict,
    busy_threads,
    part,
    parts,
    some,
    texts,
)
from verl_profiler.units import counted, size

__all__ = ["with_evidence"]

_SHOWN = 3
_DETAILS = 20
# Less memory than this share, or less room than so many bytes, matters.
_LOW_MEMORY = 0.03
_LOW_DISK_BYTES = 1 << 30
# So many processes per core want to run.
_HIGH_LOAD = 4
# Bytes that wait: fewer are on their way.
_UNSENT_BYTES = 4096


def with_evidence(found: Verdict, processes: Sequence[Process]) -> Verdict:
    """Add to a verdict what the evidence of the processes comes to."""
    found.facts += _facts(processes)
    found.details += _details(processes)
    return found


def _facts(processes: Sequence[Process]) -> list[str]:
    """Return one line for each kind of evidence that shows something."""
    kinds: tuple[Callable[[Sequence[Process]], Iterator[str]], ...] = (
        _engines,
        recorder_facts,
        _ray,
        _sockets,
        _hosts,
    )
    return [line for kind in kinds for line in kind(processes)]


def _engines(processes: Sequence[Process]) -> Iterator[str]:
    lines = [f"{each.name}: {text}" for each in processes if (text := _engine_text(each))]
    yield from lines[: _SHOWN * 2]
    if len(lines) > _SHOWN * 2:
        yield f"{len(lines) - _SHOWN * 2} other engines: see -v"


def _engine_text(process: Process) -> str:
    """Write the load of an engine: `3 running, 5 waiting, KV cache 12 % of 16,384 tokens`."""
    found = part(process.evidence, "engine")
    facts: list[str] = []
    unanswered = found.get("unanswered")
    if unanswered == "scheduler":
        facts.append("its scheduler does not answer")
    elif unanswered:
        facts.append(f"its {unanswered} does not answer")
    elif "engine" in texts(process.evidence, "unanswered"):
        facts.append("its server does not answer")
    loads = parts(found, "loads")
    for key, word in (("running_requests", "running"), ("waiting_requests", "waiting")):
        known = [each[key] for each in loads if each.get(key) is not None]
        if known:
            facts.append(f"{sum(known)} {word}")
    capacity = sum(each.get("kv_capacity_tokens") or 0 for each in loads)
    if capacity:
        used = sum(each.get("kv_used_tokens") or 0 for each in loads)
        facts.append(f"KV cache {100 * used / capacity:.0f} % of {capacity:,} tokens")
    if found.get("requests") is not None:
        facts.append(f"{counted(found['requests'], 'request')} in its server")
    if found.get("paused"):
        facts.append("paused")
    ages = [each["age_s"] for each in loads if each.get("age_s") is not None]
    if ages:
        facts.append(f"last iteration {max(ages):.0f} s before")
    return ", ".join(facts)


def _ray(processes: Sequence[Process]) -> Iterator[str]:
    for each in processes:
        found = part(each.evidence, "ray")
        dead = parts(found, "not_alive")
        if dead:
            shown = [_actor_text(row, processes) for row in dead]
            yield f"Ray: {'; '.join(shown[:_SHOWN])}" + _more(len(shown) - _SHOWN)
        elif "ray" in texts(each.evidence, "unanswered"):
            yield "Ray: the cluster's control store does not answer"


def _actor_text(row: Mapping[str, Any], processes: Sequence[Process]) -> str:
    pid = row.get("pid")
    names = [each.name for each in processes if pid and each.header.get("pid") == pid]
    who = names[0] if len(names) == 1 else f"{row.get('class')} (pid {pid})"
    restarts = row.get("restarts")
    text = f"{who} is {row.get('state')}" + (f" after {restarts} restarts" if restarts else "")
    return f"{text}: {row['reason']}" if row.get("reason") else text


def _more(count: int) -> str:
    return f"; and {count} more" if count > 0 else ""


def _sockets(processes: Sequence[Process]) -> Iterator[str]:
    """Name connections whose bytes wait: unsent ones, or ones that their receiver does not read."""
    found = [(each, sockets) for each in processes if (sockets := _sockets_of(each))]
    owners = _owners(found)
    rows: list[tuple[int, str]] = []
    for each, sockets in found:
        for row in parts(sockets, "waiting"):
            local, peer = str(row.get("local")), str(row.get("peer"))
            other = owners.get(peer)
            # Another process of the run has them unread: the same bytes, or what led to these.
            unsent, unread = row.get("unsent") or 0, row.get("unread") or 0
            to = f"{other} ({peer})" if other else peer
            if unsent >= _UNSENT_BYTES:
                rows.append((unsent, f"{each.name} has {size(unsent)} unsent to {to}"))
            if unread >= _UNSENT_BYTES:
                rows.append((unread, f"{each.name} has {size(unread)} unread from {to} at {local}"))
    rows.sort(key=lambda pair: -pair[0])
    if rows:
        shown = [text for _, text in rows]
        yield f"Sockets: {'; '.join(shown[:_SHOWN])}" + _more(len(shown) - _SHOWN)


def _sockets_of(process: Process) -> Mapping[str, Any]:
    """Return the sockets of a process, also of one that is stopped, if it is of this host."""
    found = part(process.evidence, "sockets")
    if found or not process.silent_s:
        return found
    pid = own_pid(process.header)
    if pid is None or not os.path.isdir(f"/proc/{pid}"):
        return {}
    try:
        return connections(pid)
    except (OSError, ValueError):
        return {}


def _owners(found: Sequence[tuple[Process, Mapping[str, Any]]]) -> dict[str, str]:
    """Return which process has which address, where only one can."""
    owners: dict[str, set[str]] = {}
    for each, sockets in found:
        hosts = {"127.0.0.1", str(each.header.get("ip"))}
        for port in (*(sockets.get("ports") or ()), *(sockets.get("listening") or ())):
            for host in hosts:
                owners.setdefault(f"{host}:{port}", set()).add(each.name)
    return {address: names.pop() for address, names in owners.items() if len(names) == 1}


def _hosts(processes: Sequence[Process]) -> Iterator[str]:
    """Name what is short on a host: once per host, by its last process."""
    hosts: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for each in processes:
        found = part(each.evidence, "host")
        if found:
            name = str(each.header.get("host") or "a host")
            hosts[name] = found, [*hosts.get(name, ({}, []))[1], each.name]
    for name, (found, _) in hosts.items():
        short = list(_shortages(found))
        if short:
            yield f"{name}: {', '.join(short)}"


def _shortages(found: Mapping[str, Any]) -> Iterator[str]:
    cores, load = found.get("cores"), found.get("load") or ()
    if cores and load and load[0] > _HIGH_LOAD * cores:
        yield f"load {load[0]:.0f} on {cores} cores"
    total, available = found.get("memory_bytes"), found.get("memory_available_bytes")
    if total and available is not None and available < _LOW_MEMORY * total:
        yield f"{size(available)} of {size(total)} memory available"
    limit, used = found.get("cgroup_limit_bytes"), found.get("cgroup_used_bytes")
    if limit and used is not None and limit - used < _LOW_MEMORY * limit:
        yield f"{size(used)} of the container's {size(limit)} used"
    if found.get("oom_kills"):
        yield f"{counted(found['oom_kills'], 'process', 'processes')} killed for lack of memory"
    yield from texts(found, "killed")[-1:]
    for place, room in part(found, "free_bytes").items():
        if room is not None and room < _LOW_DISK_BYTES:
            yield f"{size(room)} free in {place}"


def _details(processes: Sequence[Process]) -> list[str]:
    """Return the lines of the evidence for `-v`, a few for each process."""
    lines: list[str] = []
    for each in processes:
        own = [*_process_details(each)] if each.evidence else []
        if own:
            lines += [f"{each.name}:", *(f"    {text}" for text in own)]
    return lines


def _process_details(process: Process) -> Iterator[str]:
    found: Mapping[str, Any] = process.evidence
    text = _engine_text(process)
    if text:
        yield f"engine: {text}"
    yield from recorder_rows(process)
    ray = part(found, "ray")
    if ray.get("actors"):
        counts = ", ".join(f"{count} {state}" for state, count in ray["actors"].items())
        yield f"Ray: actors: {counts}"
    for row in parts(part(found, "ray_calls"), "calls")[:_DETAILS]:
        yield f"Ray: {row.get('calls')} × {row.get('function')}: {row.get('state')}"
    sockets = _sockets_of(process)
    if sockets.get("states"):
        counts = ", ".join(f"{count} {state}" for state, count in sockets["states"].items())
        yield f"sockets: {counts}"
    for row in parts(sockets, "waiting")[:_SHOWN]:
        yield (
            f"socket {row.get('local')} to {row.get('peer')}: {row.get('unsent')} B unsent, "
            f"{row.get('unread')} B unread"
        )
    stacks = part(found, "stacks")
    tasks = [row for row in parts(stacks, "tasks") if texts(row, "stack")]
    for row in tasks[:_SHOWN]:
        awaited = f", awaiting {row['awaits']}" if row.get("awaits") else ""
        stack = texts(row, "stack")
        at = next((each for each in stack[::-1] if not each.startswith("asyncio.")), stack[-1])
        yield f"{counted(row.get('tasks') or 0, 'task')} in {at}{awaited}"
    threads = busy_threads(found)
    if threads:
        yield f"threads in {some(threads)}"
    for name in texts(found, "unanswered"):
        yield f"{name}: no answer in time"
    for name, error in part(found, "errors").items():
        yield f"{name}: not available ({error})"
