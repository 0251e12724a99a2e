"""What runs, processes and captures write about themselves: which fields there are, and of what type.

    faults = Faults()
    launch = described(run / RUN_FILE, RUN_FILE, LAUNCH, faults)
    problems += faults.sentences()

A value that is not what its row below allows is left out and named in a problem, so that whoever reads
these dicts finds a field as stated here, `None`, or nothing.  Fields without a row are kept as they are;
nothing reads those by name.  Over 400 lines, as most of it is tables with a row per field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_profiler.events.files import read_object, reason_of
from verl_profiler.events.json_values import is_list, is_mapping

__all__ = [
    "CAPTURE",
    "EVIDENCE",
    "HEADER",
    "LAUNCH",
    "OPEN",
    "SHIPPING",
    "UPLOAD",
    "Faults",
    "checked",
    "described",
    "instant",
]

_SHOWN = 5


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    # bool is a kind of int.
    return lambda value: type(value) is int and low <= value < high


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e12


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _scalar(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _text(limit: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and len(value) <= limit


def instant(text: Any) -> datetime | None:
    """Return the time that an ISO-8601 text names, in UTC; None for anything else.

    A text without an offset is taken for UTC.
    """
    try:
        moment = datetime.fromisoformat(text)
        if not moment.tzinfo:
            moment = moment.replace(tzinfo=timezone.utc)
        moment = moment.astimezone(timezone.utc)
    except (TypeError, ValueError, OverflowError):
        return None
    return moment if 1970 <= moment.year < 2262 else None


def _moment(value: Any) -> bool:
    return instant(value) is not None


@dataclass(frozen=True)
class _Each:
    """A list of such values."""

    kind: Any


@dataclass(frozen=True)
class _Named:
    """An object with any keys and such values."""

    kind: Any


_COUNT = _whole(0, 1 << 63)
_SMALL = _whole(0, 1 << 31)
_NAME = _text(4_096)
_LONG = _text(1 << 20)
# Nanoseconds since 1970 and since a boot: sums and differences of two stay in 64 bits.
_WALL_NS = _whole(0, 9_214_646_400_000_000_000)
_MONOTONIC_NS = _whole(0, 1 << 62)
_OFFSET_NS = _whole(-(1 << 62), 1 << 62)


def _of(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Allow lists with one value of each kind, and anything behind them."""
    return lambda value: (
        is_list(value)
        and len(value) >= len(kinds)
        and all(kind(each) for kind, each in zip(kinds, value, strict=False))
    )


_CLOCK = {
    "boot_id": _NAME,
    "wall_ns": _WALL_NS,
    "monotonic_ns": _MONOTONIC_NS,
    "uncertainty_ns": _MONOTONIC_NS,
    "shared": _flag,
    # Of each: wall, monotonic, uncertainty.
    "readings": _Each(_of(_WALL_NS, _MONOTONIC_NS)),
    "last_wall_ns": _WALL_NS,
    "last_monotonic_ns": _MONOTONIC_NS,
}

# run.json
LAUNCH: Mapping[str, Any] = {
    "format": _SMALL,
    "experiment": _NAME,
    "launched": _NAME,
    "host": _NAME,
    "pid": _SMALL,
    "command": _Each(_LONG),
    "cwd": _LONG,
    "versions": _Named(_NAME),
    "settings": {
        "output_dir": _LONG,
        "events": {"engine_timing": _flag, "exclude": _Each(_NAME), "families": _Named(_flag)},
        "nsight": {"directory": _LONG},
    },
    "training": {
        "model": _LONG,
        "rollout": _NAME,
        "rollout_n": _SMALL,
        "agent_workers": _SMALL,
        "train_batch_size": _SMALL,
        "nnodes": _SMALL,
        "n_gpus_per_node": _SMALL,
        "memory": {
            "device": _NAME,
            "enable_memory_saver": _flag,
            "free_cache_engine": _flag,
            "tags": _Each(_NAME),
        },
    },
    "clock": _CLOCK,
}

# processes/<name>.json
HEADER: Mapping[str, Any] = {
    "format": _SMALL,
    "role": _NAME,
    "rank": _SMALL,
    "replica": _SMALL,
    "host": _NAME,
    "ip": _NAME,
    "pid": _SMALL,
    "ppid": _SMALL,
    "actor_name": _NAME,
    "actor_class": _NAME,
    "python": _NAME,
    "clock": _CLOCK,
    "clock_exchange": {
        "boot_id": _NAME,
        # Of each sample: own monotonic time, how far the other is ahead, bound.
        "peers": _Each(
            {
                "boot_id": _NAME,
                "host": _NAME,
                "samples": _Each(_of(_MONOTONIC_NS, _OFFSET_NS, _whole(1, 1 << 62))),
            }
        ),
    },
    "counters": {
        "events": _COUNT,
        "bytes": _COUNT,
        "dropped": _COUNT,
        "dropped_by": _Named(_COUNT),
        "write_errors": _COUNT,
        "wrapper_s": _seconds,
        "writer_s": _seconds,
    },
    "flush_interval_s": _seconds,
    "longest_flush_s": _seconds,
    "complete_until": _moment,
    "written_events": _COUNT,
    "written_bytes": _COUNT,
    "waiting_events": _COUNT,
    "dropped_events": _COUNT,
    "started": _moment,
    "updated": _moment,
    "ended": _moment,
    "end_reason": _NAME,
    "directory": _LONG,
    "fallback": _LONG,
    "versions": _Named(_NAME),
    "probes": {
        "installed": _Named(_Each(_NAME)),
        "missed": _Named(_LONG),
        "hits": _Named(_COUNT),
        "errors": _Named(_COUNT),
    },
}


# shipping.json
SHIPPING: Mapping[str, Any] = {
    "format": _SMALL,
    "directory": _LONG,
    "every_s": _seconds,
    "updated": _moment,
    "ended": _moment,
    "nodes": _Each(
        {
            "host": _NAME,
            "disk": _NAME,
            "state": _NAME,
            "shipped": _moment,
            "seen": _moment,
            "left": _moment,
            "problem": _LONG,
            "bytes": _COUNT,
            # Names on the node's disk, and here.
            "processes": _Named(_NAME),
        }
    ),
}


# upload.json
UPLOAD: Mapping[str, Any] = {
    "format": _SMALL,
    "host": _NAME,
    "directory": _LONG,
    "url": _LONG,
    "every_s": _seconds,
    "uploaded": _moment,
    "updated": _moment,
    "ended": _moment,
    "failed": _COUNT,
    "problems": _Each(_LONG),
}


def _file_name(value: Any) -> bool:
    return _NAME(value) and "/" not in value and value not in ("", ".", "..") and "\0" not in value


# One entry of nsight/captures.json.
CAPTURE: Mapping[str, Any] = {
    "role": _NAME,
    "rank": _SMALL,
    "host": _NAME,
    "pid": _COUNT,
    "step": _SMALL,
    "task": _NAME,
    "number": _SMALL,
    "tool": _NAME,
    "file": _file_name,
    "size_bytes": _COUNT,
    "begin_ns": _WALL_NS,
    "end_ns": _WALL_NS,
    "problem": _LONG,
    "source": _LONG,
    "silent": _flag,
}

_STANDS = {"at": _LONG, "user": _LONG, "stack": _Each(_LONG)}
_OPEN_CALL = {
    "event": _NAME,
    "since": _moment,
    "open_s": _seconds,
    "step": _SMALL,
    "extra": _Named(_scalar),
    "thread": _NAME,
    **_STANDS,
}

# open/<name>.json
OPEN: Mapping[str, Any] = {
    "format": _SMALL,
    "at": _moment,
    "after_s": _seconds,
    "step": _SMALL,
    "weight_version": _SMALL,
    "paused": {"since": _moment, "open_s": _seconds},
    "failed": {
        **_OPEN_CALL,
        "error": _NAME,
        "pid": _COUNT,
        "ip": _NAME,
        "reason": _LONG,
    },
    "phases": _Each(
        {
            **_OPEN_CALL,
            "usual_s": _seconds,
            "longest_s": _seconds,
            "in_flight": _COUNT,
            "stuck": _flag,
        }
    ),
    "open_requests": _COUNT,
    "requests": _Each(_OPEN_CALL),
    "open_calls": _COUNT,
    "calls": _Each(_OPEN_CALL),
    "blocked_loops": _Each(_OPEN_CALL),
    "threads": _Each(_OPEN_CALL),
}

# evidence/<number>/<name>.json
EVIDENCE: Mapping[str, Any] = {
    "format": _SMALL,
    "name": _NAME,
    "at": _moment,
    "stacks": {
        "threads": _Each({"thread": _NAME, "stack": _Each(_LONG)}),
        "tasks": _Each({"tasks": _COUNT, "awaits": _NAME, "stack": _Each(_LONG)}),
    },
    "engine": {
        "requests": _COUNT,
        "paused": _flag,
        "unanswered": _NAME,
        "loads": _Each(
            {
                "dp_rank": _SMALL,
                "running_requests": _COUNT,
                "waiting_requests": _COUNT,
                "kv_used_tokens": _COUNT,
                "kv_capacity_tokens": _COUNT,
                "running_limit": _COUNT,
                "age_s": _seconds,
            }
        ),
    },
    "unanswered": _Each(_NAME),
    "errors": _Named(_NAME),
}


class Faults:
    """Collects which files cannot be read, and which fields of others were left out."""

    def __init__(self) -> None:
        self._unreadable: list[str] = []
        self._fields: dict[str, list[str]] = {}

    def unreadable(self, shown: str, error: BaseException) -> None:
        """Note a file."""
        self._unreadable.append(
            f"{shown} cannot be read ({reason_of(error)}); its content is missing"
        )

    def field(self, shown: str, place: str) -> None:
        """Note a field."""
        self._fields.setdefault(shown, []).append(place)

    def sentences(self) -> list[str]:
        """Return a sentence per file, for the first few of each kind, and how many more there are."""
        texts = self._unreadable[:_SHOWN]
        if len(self._unreadable) > _SHOWN:
            texts.append(f"{len(self._unreadable) - _SHOWN} more such files cannot be read")
        for shown, places in list(self._fields.items())[:_SHOWN]:
            some = ", ".join(place[:100] for place in places[:_SHOWN])
            more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
            texts.append(f"{shown}: the value of {some}{more} is invalid and ignored")
        if len(self._fields) > _SHOWN:
            texts.append(f"{len(self._fields) - _SHOWN} more such files have invalid values")
        return texts


def described(
    path: Path, shown: str, schema: Mapping[str, Any], faults: Faults
) -> dict[str, Any] | None:
    """Read a JSON object with the fields of `schema`.

    Args:
        path: The file.
        shown: How problems name it.
        schema: `LAUNCH` or `HEADER`.
        faults: Takes the file where it cannot be read, and the fields that are left out.

    Returns:
        None where it cannot be read.
    """
    try:
        content = read_object(path)
    except (OSError, ValueError) as error:
        faults.unreadable(shown, error)
        return None
    return checked(content, schema, shown, faults)


def checked(
    content: Mapping[str, Any], schema: Mapping[str, Any], shown: str, faults: Faults
) -> dict[str, Any]:
    """Return the fields that fit `schema`, and those without a row in it."""
    return _checked(content, schema, "", lambda place: faults.field(shown, place))


def _checked(value: Any, kind: Any, place: str, drop: Callable[[str], None]) -> Any:
    """Return a value if it is of its kind, else None."""
    if value is None:
        return None
    if isinstance(kind, (Mapping, _Named)):
        if not is_mapping(value):
            drop(place)
            return None
        inner = f"{place}." if place else ""
        if isinstance(kind, _Named):
            pairs = {
                key: _checked(each, kind.kind, inner + key, drop) for key, each in value.items()
            }
            return {key: each for key, each in pairs.items() if each is not None}
        return {
            key: _checked(each, kind[key], inner + key, drop) if key in kind else each
            for key, each in value.items()
        }
    if isinstance(kind, _Each):
        if not is_list(value):
            drop(place)
            return None
        found = (_checked(each, kind.kind, f"{place}[]", drop) for each in value)
        return [each for each in found if each is not None]
    if not kind(value):
        drop(place)
        return None
    return value
