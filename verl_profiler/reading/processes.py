"""The processes of a run: who they were, how their clocks are aligned, what went wrong in them.

Clocks: processes with the same `boot_id` ran on one kernel and share its monotonic clock.  Their
timestamps were made with up to as many anchors (pairs of monotonic and wall time) as processes;
the reader moves all of them to one, the anchor with the smallest `uncertainty_ns` among them and
`run.json`.  Other hosts' clocks are placed on the driver's where it compared them with its own
(`clock_alignment`); where it did not, they are left as they are: their wall clocks are all there is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_profiler.events.json_values import is_list, mapping_or_empty
from verl_profiler.events.vocabulary import WORKER_ROLE
from verl_profiler.reading.clock_alignment import aheads
from verl_profiler.reading.descriptions import instant
from verl_profiler.reading.discovery import Source, role_and_rank
from verl_profiler.reading.shipments import not_arrived, shipment_problems
from verl_profiler.reading.uploads import is_incomplete, upload_problems
from verl_profiler.units import some

__all__ = ["Process", "process_problems", "processes"]

# A container may hide that two kernels differ; anchors this far apart are not of one clock.
_SAME_CLOCK_LIMIT_US = 3600 * 1_000_000
# The wall clock against the monotonic one: NTP slews up to 500 ppm; anything above is a jump.
_JUMP_S = 0.05
_SLEW = 0.0005
_RANK_LIMIT = 100_000
# A process may record what began so long before its recording.
_EARLY_S = 60
# The reasons that headers have for dropped events.
_DROPPED = {
    "queue_full": "the queue was full",
    "disk": "the disk rejected them",
    "budget": "the byte budget (profiler.events.max_gb) was used up",
    "bad_event": "they could not be encoded",
    "bad_path": "their file could not be opened",
    "removed": "their file was removed during the run",
    "late": "they were recorded after the end, or could not be written within the time limit at exit",
}
# Of more processes than this, one sentence names so many.
_SHOWN = 4
# A line has at least so many: its timestamp, event and step.
_LINE_BYTES = 40


@dataclass
class Process:
    """One row of the table `processes`.

    Args:
        shift_us: Added to every recorded time of this process to align it with all others.
        drift: Added per microsecond after `drift_from_us`, where its clock runs at another speed.
        clock_bound_us: How far its times may be from the driver's axis; 0 on the driver's host,
            None where nothing is known.
        clock_residual_us: How far the comparisons of its clock are from what is corrected.
        first_us: A time before all that it did, by its own clock; None without its header.
        recorded_events: How many were written according to the header; None without one.
    """

    run: str
    name: str
    role: str
    rank: int | None
    replica: int | None = None
    host: str | None = None
    ip: str | None = None
    pid: int | None = None
    ppid: int | None = None
    actor_name: str | None = None
    actor_class: str | None = None
    python: str | None = None
    boot_id: str | None = None
    clock_shared: bool | None = None
    uncertainty_ns: int | None = None
    shift_us: int = 0
    drift: float = 0.0
    drift_from_us: int = 0
    clock_bound_us: int | None = None
    clock_residual_us: int | None = None
    recorded_events: int | None = None
    size_bytes: int | None = None
    dropped: int | None = None
    write_errors: int | None = None
    wrapper_s: float | None = None
    writer_s: float | None = None
    started: str | None = None
    first_us: int | None = None
    updated: str | None = None
    ended: str | None = None
    end_reason: str | None = None
    has_header: bool = False
    header: str | None = None

    def row(self) -> dict[str, Any]:
        """Return the process as a row of the table."""
        row = {**vars(self), "header": json.loads(self.header) if self.header else None}
        del row["first_us"]
        return row


def processes(source: Source) -> dict[str, Process]:
    """Return every process that left a header or a file, by name.

    The fields of headers and `run.json` are of the types that `reading.descriptions` states.
    """
    found: dict[str, Process] = {}
    for name in sorted({*source.headers, *(file.name for file in source.files)}):
        header = source.headers.get(name)
        role, rank = role_and_rank(name)
        process = Process(source.label, name, role, rank)
        if header is not None:
            _describe(process, header)
        found[name] = process
    _align(found, source)
    return found


def process_problems(
    source: Source,
    found: dict[str, Process],
    counts: dict[str, int] | None,
    *,
    original: bool,
) -> Iterator[str]:
    """Return what is missing, dropped and unfinished according to the headers.

    Args:
        source: The run.
        found: Its processes.
        counts: Events read, by process name; None where not all were read.
        original: The files are the original logger's, which wrote no headers.
    """
    if original:
        return
    if not source.launch:
        yield "run.json is missing, so the launch is unknown"
    yield from _not_uploaded(source, found, counts if source.whole else None)
    if source.whole and counts is not None:
        yield from _missing_files(source, found, counts)
        yield from _surplus(found, counts)
    yield from _hosts(found)
    yield from _losses(found.values())
    yield from _probe_problems(found)
    yield from _clock_jumps(found)


def _describe(process: Process, header: dict[str, Any]) -> None:
    counters = mapping_or_empty(header.get("counters"))
    clock = mapping_or_empty(header.get("clock"))
    process.has_header = True
    process.header = json.dumps(header, default=str)
    process.role = header.get("role") or process.role
    process.rank = header.get("rank")
    process.replica = header.get("replica")
    for key in ("host", "ip", "actor_name", "actor_class", "python"):
        setattr(process, key, header.get(key))
    for key in ("started", "updated", "ended", "end_reason"):
        setattr(process, key, header.get(key))
    started = instant(process.started)
    if started is not None:
        # The wall clock may have been set between the anchor, which times follow, and the start.
        moved_s = max(map(abs, _wall_moves(clock)), default=0.0)
        process.first_us = round((started.timestamp() - moved_s - _EARLY_S) * 1e6)
    process.pid = header.get("pid")
    process.ppid = header.get("ppid")
    process.boot_id = clock.get("boot_id") or None
    process.clock_shared = clock.get("shared") if isinstance(clock.get("shared"), bool) else None
    process.uncertainty_ns = clock.get("uncertainty_ns")
    # The last fields of a header are written after every flush, the counters every 15 s.
    process.recorded_events = _larger(counters.get("events"), header.get("written_events"))
    process.size_bytes = counters.get("bytes")
    process.dropped = _larger(counters.get("dropped"), header.get("dropped_events"))
    process.write_errors = counters.get("write_errors")
    process.wrapper_s = counters.get("wrapper_s")
    process.writer_s = counters.get("writer_s")


def _align(found: dict[str, Process], source: Source) -> None:
    """Set `shift_us` so that all processes of one boot use its best anchor."""
    anchors: dict[str, list[tuple[int, str, int]]] = {}
    offsets: dict[str, tuple[str, int]] = {}
    clocks = [("", source.launch.get("clock"))]
    clocks += [(name, source.headers[name].get("clock")) for name in source.headers]
    for name, content in clocks:
        clock = mapping_or_empty(content)
        boot = clock.get("boot_id")
        wall, monotonic = clock.get("wall_ns"), clock.get("monotonic_ns")
        if not boot or wall is None or monotonic is None:
            continue
        uncertainty = clock.get("uncertainty_ns")
        offset = wall - monotonic
        anchors.setdefault(boot, []).append(
            (uncertainty if uncertainty is not None else 1 << 62, name, offset)
        )
        offsets[name] = (boot, offset)
    best = {boot: min(of_boot)[2] for boot, of_boot in anchors.items()}
    others = {boot: (driver, line) for driver, boot, line in aheads(source.headers)}
    driver_boot = mapping_or_empty(source.launch.get("clock")).get("boot_id")
    for name, process in found.items():
        if name not in offsets:
            continue
        boot, offset = offsets[name]
        shift = (best[boot] - offset) // 1000
        if abs(shift) >= _SAME_CLOCK_LIMIT_US:
            continue
        process.shift_us = shift
        if boot == driver_boot:
            process.clock_bound_us = 0
        elif boot in others and others[boot][0] in best:
            driver, line = others[boot]
            # Recorded times are its monotonic clock plus `offset`; the axis is the driver's plus
            # the driver's best anchor.
            process.shift_us = (best[driver] - offset - line.offset_ns) // 1000
            process.drift = -line.drift
            process.drift_from_us = (line.at_ns + offset) // 1000
            # Half a microsecond is lost to rounding, three times.
            process.clock_bound_us = -(-line.bound_ns // 1000) + 2
            process.clock_residual_us = -(-line.residual_ns // 1000)


def _hosts(found: dict[str, Process]) -> Iterator[str]:
    """Say how well the clocks of several hosts are placed on one axis."""
    hosts: dict[str, list[Process]] = {}
    for process in found.values():
        if process.boot_id:
            hosts.setdefault(process.boot_id, []).append(process)
    if len(hosts) < 2:
        return
    aligned: list[str] = []
    for members in hosts.values():
        worst = max(members, key=lambda each: each.clock_bound_us or 0)
        if worst.clock_bound_us:
            drift = f", drift {worst.drift * 1e6:+.1f} ppm" if worst.drift else ""
            aligned.append(
                f"{worst.host} (moved by {worst.shift_us / 1000:+.3f} ms{drift}) to within "
                f"{worst.clock_bound_us / 1000:.2f} ms (residual "
                f"{(worst.clock_residual_us or 0) / 1000:.2f} ms)"
            )
    if aligned:
        yield f"clocks aligned with the driver's: {', '.join(sorted(aligned)[:8])}"
    unknown = sorted(
        {
            str(each.host)
            for members in hosts.values()
            for each in members
            if each.clock_bound_us is None
        }
    )
    if unknown:
        yield (
            f"the run used {len(hosts)} hosts, and the clocks of {some(unknown, _SHOWN)} were not "
            "compared with the driver's; their times are only as accurate as their wall clocks"
        )


def _not_uploaded(
    source: Source, found: Mapping[str, Process], counts: Mapping[str, int] | None
) -> Iterator[str]:
    """Say what is missing of a copy; which shipments did not arrive is said of these alone."""
    elsewhere = not_arrived(source)
    recorded = {
        name: each.recorded_events or 0 for name, each in found.items() if name not in elsewhere
    }
    if source.parquet:
        counts = None
    yield from upload_problems(source, counts, recorded)


def _missing_files(
    source: Source, found: dict[str, Process], counts: dict[str, int]
) -> Iterator[str]:
    headless = [name for name, process in found.items() if not process.has_header]
    if headless:
        yield f"no header in processes/ for {some(headless, _SHOWN)}; their host, clock and losses are unknown"
    recorded_events = {name: each.recorded_events or 0 for name, each in found.items()}
    if source.parquet:
        # Which process an event is of, is in the events only.
        counts = recorded_events
    yield from shipment_problems(source, counts, recorded_events)
    unsent = not_arrived(source)
    if not is_incomplete(source):
        recorded = {
            name: each.recorded_events or 0
            for name, each in found.items()
            if each.has_header and name not in unsent
        }
        yield from _unread(recorded, counts, found)
    ranks = {p.rank for p in found.values() if p.role == WORKER_ROLE and p.rank is not None}
    # Whoever claims a rank in the millions did not count from 0.
    highest = max(ranks, default=-1)
    gaps = sorted(set(range(highest)) - ranks) if highest < _RANK_LIMIT else []
    if gaps:
        names = ", ".join(f"worker_{rank}" for rank in gaps[:8])
        yield f"no file was found of {names}{' and others' if len(gaps) > 8 else ''}"
    fallbacks = [
        f"{name} ({header['fallback']})"
        for name, header in source.headers.items()
        if header.get("fallback")
    ]
    if fallbacks:
        yield f"could not write into the run directory: {', '.join(fallbacks[:5])}"


def _named(names: Sequence[str]) -> str:
    """Write which processes are meant: the name of one, or how many and the first of them."""
    return names[0] if len(names) == 1 else f"{len(names)} processes ({some(names, _SHOWN)})"


def _unread(
    recorded: Mapping[str, int], counts: Mapping[str, int], found: Mapping[str, Process]
) -> Iterator[str]:
    """Say of which processes events are missing."""
    absent = [name for name, events in recorded.items() if events and not counts.get(name, 0)]
    partly = [name for name, events in recorded.items() if 0 < counts.get(name, 0) < events]
    if absent:
        hosts = sorted({str(found[name].host) for name in absent})
        yield (
            f"the event files of {_named(absent)} are missing ({sum(recorded[name] for name in absent)} "
            f"events by their headers); look for them on {some(hosts, _SHOWN)}"
        )
    if partly:
        yield (
            f"{_named(partly)} wrote {sum(recorded[name] for name in partly)} events and "
            f"{sum(counts[name] for name in partly)} were found; the rest is missing"
        )


def _surplus(found: Mapping[str, Process], counts: Mapping[str, int]) -> Iterator[str]:
    """Say which processes have more lines than they wrote; a killed one wrote some after its header."""
    more = {
        name: (process.recorded_events, counts[name])
        for name, process in found.items()
        if process.ended
        and process.recorded_events
        and counts.get(name, 0) > process.recorded_events
        # Some writers of headers do not count.
        and (process.size_bytes or math.inf) >= _LINE_BYTES * process.recorded_events
    }
    if more:
        yield (
            f"{_named([*more])} wrote {sum(each[0] for each in more.values())} events and "
            f"{sum(each[1] for each in more.values())} were found; some are not of this run (another "
            "run's file? an edited copy?), so its numbers may be wrong"
        )


def _losses(found: Iterable[Process]) -> Iterator[str]:
    """Say which processes dropped events or had errors."""
    dropped: dict[tuple[str, ...], dict[str, int]] = {}
    errors: dict[str, int] = {}
    for process in found:
        if process.dropped:
            counters = mapping_or_empty(
                mapping_or_empty(json.loads(process.header or "{}")).get("counters")
            )
            by_reason = mapping_or_empty(counters.get("dropped_by"))
            reasons = tuple(str(key) for key, count in by_reason.items() if count)
            dropped.setdefault(reasons or ("queue_full",), {})[process.name] = process.dropped
        if process.write_errors:
            errors[process.name] = process.write_errors
    for reasons, by_name in dropped.items():
        why = ", ".join(_DROPPED.get(key, key) for key in reasons)
        yield (
            f"{_named([*by_name])} dropped {sum(by_name.values())} events because {why}; totals are "
            "too low"
        )
    if errors:
        yield f"{_named([*errors])} had {sum(errors.values())} write errors"


def _probe_problems(found: dict[str, Process]) -> Iterator[str]:
    """Say once per probe what could not be placed or failed, with the processes concerned."""
    missed: dict[tuple[str, str], list[str]] = {}
    failed: dict[str, dict[str, int]] = {}
    for name, process in found.items():
        probes = mapping_or_empty(
            mapping_or_empty(json.loads(process.header or "{}")).get("probes")
        )
        for probe, reason in mapping_or_empty(probes.get("missed")).items():
            missed.setdefault((str(probe), str(reason)), []).append(name)
        for probe, count in mapping_or_empty(probes.get("errors")).items():
            if count:
                failed.setdefault(str(probe), {})[name] = int(count)
    for (probe, reason), names in sorted(missed.items()):
        yield f"probe {probe} is not installed in {some(names, _SHOWN)}: {reason}"
    for probe, by_name in sorted(failed.items()):
        total = sum(by_name.values())
        yield f"probe {probe} failed {total} times in {some(list(by_name), _SHOWN)}; those events lack fields"


def _clock_jumps(found: dict[str, Process]) -> Iterator[str]:
    jumps: dict[str, tuple[float, list[str]]] = {}
    for name, process in found.items():
        clock = mapping_or_empty(mapping_or_empty(json.loads(process.header or "{}")).get("clock"))
        jump_s = max(_wall_moves(clock), key=abs, default=0.0)
        if jump_s:
            host = process.host or name
            largest, names = jumps.get(host, (0.0, []))
            jumps[host] = (max(largest, jump_s, key=abs), [*names, name])
    for host, (jump_s, names) in sorted(jumps.items()):
        yield (
            f"the wall clock of host {host} was changed by {jump_s:+.3f} s during the run "
            f"(detected by {some(names, _SHOWN)}); times here follow the monotonic clock and are not "
            f"affected"
        )


def _wall_moves(clock: Mapping[str, Any]) -> Iterator[float]:
    """Yield by how many seconds the wall clock was set, seen from each reading of both clocks."""
    readings = clock.get("readings")
    listed = readings if is_list(readings) else []
    pairs: list[tuple[Any, ...]] = [(clock.get("wall_ns"), clock.get("monotonic_ns"))]
    pairs += [tuple(each[:2]) for each in listed if is_list(each) and len(each) > 1]
    pairs.append((clock.get("last_wall_ns"), clock.get("last_monotonic_ns")))
    known = [
        (wall, monotonic) for wall, monotonic in pairs if wall is not None and monotonic is not None
    ]
    for wall, monotonic in known[1:]:
        elapsed_s = (monotonic - known[0][1]) / 1e9
        jump_s = (wall - known[0][0]) / 1e9 - elapsed_s
        if abs(jump_s) > _JUMP_S + _SLEW * abs(elapsed_s):
            yield jump_s


def _larger(*values: Any) -> int | None:
    return max((each for each in values if each is not None), default=None)
