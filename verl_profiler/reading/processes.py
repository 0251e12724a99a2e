"""The processes of a run: who they were, and how their clocks are aligned.

Clocks: processes with the same `boot_id` ran on one kernel and share its monotonic clock.  Their
timestamps were made with up to as many anchors (pairs of monotonic and wall time) as processes;
the reader moves all of them to one, the anchor with the smallest `uncertainty_ns` among them and
`run.json`.  Other hosts' clocks are placed on the driver's where it compared them with its own during the
run; where it did not, they are left as they are: their wall clocks are all there is.

Each comparison estimates by how much another clock was ahead, to within a bound.  A line through
them (offset and drift) corrects the other node's times.  What is reported about the result is never
better than it is: the stated bound is the largest distance of a comparison from the line, plus that
comparison's own bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from statistics import median
from typing import Any

from verl_profiler.events.json_values import mapping_or_empty
from verl_profiler.reading.descriptions import instant
from verl_profiler.reading.discovery import Source, role_and_rank

# A container may hide that two kernels differ; anchors this far apart are not of one clock.
_SAME_CLOCK_LIMIT_US = 3600 * 1_000_000
# The wall clock against the monotonic one: NTP slews up to 500 ppm; anything above is a jump.
_JUMP_S = 0.05
_SLEW = 0.0005
# A process may record what began so long before its recording.
_EARLY_S = 60
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
# The fields of headers that are columns of the table `processes` as they are.
_OF_HEADERS = (
    *("replica", "host", "ip", "pid", "ppid", "actor_name", "actor_class", "python"),
    *("started", "updated", "ended", "end_reason"),
)
# A drift is estimated from so much time on; two crystals differ by less than the limit.
_DRIFT_FROM_NS = 60 * 10**9
_DRIFT_LIMIT = 5e-4
# Comparisons much less certain than the others say nothing.
_LOOSE = 2


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
            first_s = started.timestamp() - _wall_moved_s(self) - _EARLY_S
            self.first_us = round(first_s * 1e6)

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
    others: dict[str, tuple[str, Ahead]] = {}
    for header in source.headers.values():
        exchange: Mapping[str, Any] = header.get("clock_exchange") or {}
        for peer in exchange.get("peers") or ():
            line = fit(peer.get("samples") or ())
            if line is not None and exchange.get("boot_id") and peer.get("boot_id"):
                others[peer["boot_id"]] = exchange["boot_id"], line
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


def _wall_moved_s(process: Process) -> float:
    """Return by how many seconds the wall clock was set, seen from the last reading of both clocks."""
    clock = mapping_or_empty(process.of("clock"))
    keys = ("wall_ns", "monotonic_ns", "last_wall_ns", "last_monotonic_ns")
    times: list[Any] = [clock.get(key) for key in keys]
    if None in times:
        return 0.0
    wall, monotonic, last_wall, last_monotonic = times
    elapsed_s = (last_monotonic - monotonic) / 1e9
    jump_s = abs((last_wall - wall) / 1e9 - elapsed_s)
    return jump_s if jump_s > _JUMP_S + _SLEW * abs(elapsed_s) else 0.0


def _larger(*values: Any) -> int | None:
    return max((each for each in values if each is not None), default=None)


@dataclass(frozen=True)
class Ahead:
    """How far another node's monotonic clock is ahead of the driver's.

    Args:
        at_ns: A time on the other clock.
        offset_ns: Other minus driver at that time.
        drift: By how much that grows per nanosecond of the other clock.
        bound_ns: How far the line may be from the true offset.
        residual_ns: How far the comparisons are from the line.
        samples: How many comparisons there are.
    """

    at_ns: int
    offset_ns: int
    drift: float
    bound_ns: int
    residual_ns: int
    samples: int


def fit(samples: Sequence[Sequence[int]]) -> Ahead | None:
    """Draw the line through comparisons.

    Args:
        samples: Of each: driver's monotonic ns, other minus driver ns, bound ns.

    Returns:
        None without samples.
    """
    if not samples:
        return None
    limit = _LOOSE * median(bound for _, _, bound in samples)
    # As times of the other clock, so that its events can be placed by what they know.
    points = [(at + ahead, ahead, bound) for at, ahead, bound in samples if bound <= limit]
    weights = [1 / max(bound, 1) ** 2 for _, _, bound in points]
    total = sum(weights)
    first_ns, first_ahead = points[0][0], points[0][1]
    # Small numbers, as differences: a float holds nanoseconds since a boot to microseconds only.
    places = [at - first_ns for at, _, _ in points]
    heights = [ahead - first_ahead for _, ahead, _ in points]
    middle = sum(w * x for w, x in zip(weights, places, strict=True)) / total
    height = sum(w * y for w, y in zip(weights, heights, strict=True)) / total
    spread = sum(w * (x - middle) ** 2 for w, x in zip(weights, places, strict=True))
    drift = 0.0
    if max(places) - min(places) >= _DRIFT_FROM_NS:
        slope = sum(
            w * (x - middle) * (y - height)
            for w, x, y in zip(weights, places, heights, strict=True)
        )
        drift = max(-_DRIFT_LIMIT, min(_DRIFT_LIMIT, slope / spread))
    distances = [
        abs(y - height - drift * (x - middle)) for x, y in zip(places, heights, strict=True)
    ]
    return Ahead(
        at_ns=first_ns + round(middle),
        offset_ns=first_ahead + round(height),
        drift=drift,
        bound_ns=round(
            max(far + bound for far, (_, _, bound) in zip(distances, points, strict=True))
        ),
        residual_ns=round(max(distances)),
        samples=len(points),
    )
