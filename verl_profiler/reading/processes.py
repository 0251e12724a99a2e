"""The processes of a run: who they were, how their clocks are aligned, what went wrong in them.

Clocks: processes with the same `boot_id` ran on one kernel and share its monotonic clock.  Their
timestamps were made with up to as many anchors (pairs of monotonic and wall time) as processes;
the reader moves all of them to one, the anchor with the smallest `uncertainty_ns` among them and
`run.json`.  Other hosts' clocks are placed on the driver's where it compared them with its own
(`clock_alignment`); where it did not, they are left as they are: their wall clocks are all there is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.events.vocabulary import WORKER_ROLE
from verl_profiler.reading.arrivals import arrival_problems, not_arrived
from verl_profiler.reading.clock_alignment import aheads
from verl_profiler.reading.descriptions import instant
from verl_profiler.reading.discovery import Source, role_and_rank
from verl_profiler.units import some

__all__ = ["Process", "named", "process_problems", "processes"]

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
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
# The fields of headers that are columns of the table `processes` as they are.
_OF_HEADERS = (
    *("replica", "host", "ip", "pid", "ppid", "actor_name", "actor_class", "python"),
    *("started", "updated", "ended", "end_reason"),
)
# Of more processes than this, one sentence names so many.
_SHOWN = 4
# A line has at least so many: its timestamp, event and step.
_LINE_BYTES = 40


@dataclass
class Process:
    """A process of a run.

    Args:
        run: The label of the run.
        name: The name of its files.
        header: What it wrote about itself, of the types that `reading.descriptions` states; None
            without its header.
        shift_us: Added to every recorded time of this process to align it with all others.
        drift: Added per microsecond after `drift_from_us`, where its clock runs at another speed.
        clock_bound_us: How far its times may be from the driver's axis; 0 on the driver's host,
            None where nothing is known.
        clock_residual_us: How far the comparisons of its clock are from what is corrected.

    Attributes:
        first_us: A time before all that it did, by its own clock; None without its header.
    """

    run: str
    name: str
    header: Mapping[str, Any] | None = None
    shift_us: int = 0
    drift: float = 0.0
    drift_from_us: int = 0
    clock_bound_us: int | None = None
    clock_residual_us: int | None = None
    role: str = field(init=False)
    rank: int | None = field(init=False)
    first_us: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        role, rank = role_and_rank(self.name)
        self.role = self.of("role") or role
        self.rank = rank if self.header is None else self.of("rank")
        started = instant(self.of("started"))
        if started is not None:
            # The wall clock may have been set between the anchor, which times follow, and the start.
            moved_s = max(map(abs, _wall_moves(self)), default=0.0)
            self.first_us = round((started.timestamp() - moved_s - _EARLY_S) * 1e6)

    def of(self, *path: str) -> Any:
        """Return a value of the header, or of an object in it; None where there is none."""
        value: Any = self.header
        for key in path:
            value = mapping_or_empty(value).get(key)
        return value

    @property
    def recorded_events(self) -> int | None:
        """How many events it wrote by its header, whose last fields are newer than the counters."""
        return _larger(self.of("counters", "events"), self.of("written_events"))

    @property
    def dropped(self) -> int | None:
        """How many events it dropped."""
        return _larger(self.of("counters", "dropped"), self.of("dropped_events"))

    def placed_us(self, key: str) -> int | None:
        """Return a time of the header on the run's axis."""
        moment = instant(self.of(key))
        if moment is None:
            return None
        own_us = (moment - _EPOCH) // _MICROSECOND
        return own_us + self.shift_us + round(self.drift * (own_us - self.drift_from_us))

    def row(self) -> dict[str, Any]:
        """Return the process as a row of the table `processes`."""
        return {
            **{key: self.of(key) for key in _OF_HEADERS},
            **{key: self.of("clock", key) for key in ("boot_id", "uncertainty_ns")},
            **{key: self.of("counters", key) for key in ("write_errors", "wrapper_s", "writer_s")},
            **{key: value for key, value in vars(self).items() if key != "first_us"},
            "clock_shared": self.of("clock", "shared"),
            "size_bytes": self.of("counters", "bytes"),
            "recorded_events": self.recorded_events,
            "dropped": self.dropped,
            "has_header": self.header is not None,
        }


def processes(source: Source) -> dict[str, Process]:
    """Return every process that left a header or a file, by name."""
    names = sorted({*source.headers, *(file.name for file in source.files)})
    found = {name: Process(source.label, name, source.headers.get(name)) for name in names}
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
    gaps = None
    if source.whole and counts is not None:
        # Of Parquet files, which process an event is of is in the events only.
        gaps = {
            name: max((each.recorded_events or 0) - counts.get(name, 0), 0)
            for name, each in found.items()
            if not source.parquet
        }
    yield from arrival_problems(source, gaps)
    if counts is not None and gaps is not None:
        yield from _missing_files(source, found, counts, gaps)
        yield from _surplus(found, counts)
    yield from _hosts(found)
    yield from _losses(found.values())
    yield from _probe_problems(found)


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
        if boot_id := process.of("clock", "boot_id"):
            hosts.setdefault(boot_id, []).append(process)
    if len(hosts) < 2:
        return
    aligned: list[str] = []
    for members in hosts.values():
        worst = max(members, key=lambda each: each.clock_bound_us or 0)
        if worst.clock_bound_us:
            drift = f", drift {worst.drift * 1e6:+.1f} ppm" if worst.drift else ""
            aligned.append(
                f"{worst.of('host')} (moved by {worst.shift_us / 1000:+.3f} ms{drift}) to within "
                f"{worst.clock_bound_us / 1000:.2f} ms (residual "
                f"{(worst.clock_residual_us or 0) / 1000:.2f} ms)"
            )
    if aligned:
        yield f"clocks aligned with the driver's: {', '.join(sorted(aligned)[:8])}"
    unknown = sorted(
        {
            str(each.of("host"))
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


def _missing_files(
    source: Source, found: dict[str, Process], counts: Mapping[str, int], gaps: Mapping[str, int]
) -> Iterator[str]:
    headless = [name for name, process in found.items() if process.header is None]
    if headless:
        yield f"no header in processes/ for {some(headless, _SHOWN)}; their host, clock and losses are unknown"
    late = not_arrived(source)
    yield from _unread([name for name in gaps if gaps[name] and name not in late], counts, found)
    ranks = {p.rank for p in found.values() if p.role == WORKER_ROLE and p.rank is not None}
    # Whoever claims a rank in the millions did not count from 0.
    highest = max(ranks, default=-1)
    absent = sorted(set(range(highest)) - ranks) if highest < _RANK_LIMIT else []
    if absent:
        names = ", ".join(f"worker_{rank}" for rank in absent[:8])
        yield f"no file was found of {names}{' and others' if len(absent) > 8 else ''}"
    fallbacks = [
        f"{name} ({header['fallback']})"
        for name, header in source.headers.items()
        if header.get("fallback")
    ]
    if fallbacks:
        yield f"could not write into the run directory: {', '.join(fallbacks[:5])}"


def named(names: Collection[str]) -> str:
    """Write which processes are meant: the name of one, or how many and the first of them."""
    listed = [*names]
    return listed[0] if len(listed) == 1 else f"{len(listed)} processes ({some(listed, _SHOWN)})"


def _unread(
    names: Sequence[str], counts: Mapping[str, int], found: Mapping[str, Process]
) -> Iterator[str]:
    """Say of which processes events are missing."""
    recorded = {name: found[name].recorded_events or 0 for name in names}
    absent = [name for name in names if not counts.get(name, 0)]
    partly = [name for name in names if counts.get(name, 0)]
    if absent:
        hosts = sorted({str(found[name].of("host")) for name in absent})
        yield (
            f"the event files of {named(absent)} are missing ({sum(recorded[name] for name in absent)} "
            f"events by their headers); look for them on {some(hosts, _SHOWN)}"
        )
    if partly:
        yield (
            f"{named(partly)} wrote {sum(recorded[name] for name in partly)} events and "
            f"{sum(counts[name] for name in partly)} were found; the rest is missing"
        )


def _surplus(found: Mapping[str, Process], counts: Mapping[str, int]) -> Iterator[str]:
    """Say which processes have more lines than they wrote; a killed one wrote some after its header."""
    more = {
        name: (process.recorded_events, counts[name])
        for name, process in found.items()
        if process.of("ended")
        and process.recorded_events
        and counts.get(name, 0) > process.recorded_events
        # Some writers of headers do not count.
        and (process.of("counters", "bytes") or math.inf) >= _LINE_BYTES * process.recorded_events
    }
    if more:
        yield (
            f"{named(more)} wrote {sum(each[0] for each in more.values())} events and "
            f"{sum(each[1] for each in more.values())} were found; some are not of this run (another "
            "run's file? an edited copy?), so its numbers may be wrong"
        )


def _losses(found: Iterable[Process]) -> Iterator[str]:
    """Say which processes dropped events or had errors."""
    dropped: dict[tuple[str, ...], dict[str, int]] = {}
    errors: dict[str, int] = {}
    for process in found:
        if process.dropped:
            by_reason = mapping_or_empty(process.of("counters", "dropped_by"))
            reasons = tuple(str(key) for key, count in by_reason.items() if count)
            dropped.setdefault(reasons or ("queue_full",), {})[process.name] = process.dropped
        if write_errors := process.of("counters", "write_errors"):
            errors[process.name] = write_errors
    for reasons, by_name in dropped.items():
        why = ", ".join(_DROPPED.get(key, key) for key in reasons)
        yield (
            f"{named(by_name)} dropped {sum(by_name.values())} events because {why}; totals are "
            "too low"
        )
    if errors:
        yield f"{named(errors)} had {sum(errors.values())} write errors"


def _probe_problems(found: dict[str, Process]) -> Iterator[str]:
    """Say once per probe what could not be placed or failed, with the processes concerned."""
    missed: dict[tuple[str, str], list[str]] = {}
    failed: dict[str, dict[str, int]] = {}
    for name, process in found.items():
        for probe, reason in mapping_or_empty(process.of("probes", "missed")).items():
            missed.setdefault((str(probe), str(reason)), []).append(name)
        for probe, count in mapping_or_empty(process.of("probes", "errors")).items():
            if count:
                failed.setdefault(str(probe), {})[name] = int(count)
    for (probe, reason), names in sorted(missed.items()):
        yield f"probe {probe} is not installed in {some(names, _SHOWN)}: {reason}"
    for probe, by_name in sorted(failed.items()):
        total = sum(by_name.values())
        yield f"probe {probe} failed {total} times in {some(list(by_name), _SHOWN)}; those events lack fields"


def _wall_moves(process: Process) -> Iterator[float]:
    """Yield by how many seconds the wall clock was set, seen from the last reading of both clocks."""
    clock = mapping_or_empty(process.of("clock"))
    pairs: list[tuple[Any, ...]] = [(clock.get("wall_ns"), clock.get("monotonic_ns"))]
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
