"""What runs, processes and captures write about themselves: which fields there are, and of what type.

    problems = Problems()
    launch = described(run / RUN_FILE, RUN_FILE, Launch, problems)

A file with a value of another type is named in a problem and not used, so that whoever reads these dicts
finds a field as stated here, `None`, or nothing.  Fields that are not stated here are kept as they are; nothing
reads those by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from verl_profiler.events.fields import HEADER
from verl_profiler.events.files import read_object, reason_of
from verl_profiler.events.json_values import is_object
from verl_profiler.reading.problems import Problems

# Sums and differences of two stay in 64 bits.
_Limit = 1 << 62
_Natural = Annotated[int, msgspec.Meta(ge=0, lt=_Limit)]
_Whole = _Natural | None
_Small = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None
_Offset = Annotated[int, msgspec.Meta(gt=-_Limit, lt=_Limit)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)] | None
_Text = str | None
# By the names of types below, and in `events.fields`.
_TYPES: dict[str, Any] = {
    "text": _Text,
    "string": _Text,
    "texts": list[str] | None,
    "flag": bool | None,
    "boolean": bool | None,
    "small": _Small,
    "integer": _Whole,
    "number": _Seconds,
    "list": list[Any] | None,
    "object": dict[str, Any] | None,
    # Of each: own monotonic time, how far the other is ahead, bound.
    "samples": list[tuple[_Natural, _Offset, _Natural]] | None,
}


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


def _type(name: str, fields: str | Iterable[str]) -> Any:
    """Return the type of objects with these fields, all of which may be absent.

    Args:
        name: Of the type, in messages.
        fields: Keys with dots between, `[]` behind a list of objects and `*` for any key; the type stands
            behind a colon, and is a number where the key ends in `_s`, else a text.
    """
    tree: dict[str, Any] = {}
    for each in fields.split() if isinstance(fields, str) else fields:
        path, _, kind = each.partition(":")
        *above, last = path.split(".")
        place = tree
        for key in above:
            place = place.setdefault(key, {})
        place[last] = _TYPES[kind or ("number" if last.endswith("_s") else "text")]
    return _struct(name, tree)


def _struct(name: str, tree: dict[str, Any]) -> Any:
    fields: list[tuple[str, Any, Any]] = []
    for key, value in tree.items():
        kind: Any = value
        if is_object(value) and (each := value.get("*")):
            kind = dict[str, each] | None
        elif is_object(value):
            inner = _struct(f"{name}.{key}", value)
            kind = (list[inner] if key.endswith("[]") else inner) | None
        fields.append((key.removesuffix("[]"), kind, None))
    return msgspec.defstruct(name, fields)


_CLOCK = """
clock.boot_id clock.wall_ns:integer clock.monotonic_ns:integer clock.uncertainty_ns:integer
clock.shared:flag clock.last_wall_ns:integer clock.last_monotonic_ns:integer
"""
# run.json
Launch = _type(
    "Launch",
    f"""{_CLOCK}
    format:small experiment launched host pid:small command:texts cwd versions.*
    settings.output_dir settings.events.engine_timing:flag settings.events.exclude:texts
    settings.events.families.*:flag settings.nsight:object
    training.model training.rollout training.rollout_n:small training.agent_workers:small
    training.train_batch_size:small training.nnodes:small training.n_gpus_per_node:small
    training.memory.device training.memory.enable_memory_saver:flag
    training.memory.free_cache_engine:flag training.memory.tags:texts
    """,
)
_SMALL = {"format", "rank", "replica", "pid", "ppid"}
_COMPARED = "clock_exchange.peers"
# processes/<name>.json
Header = _type(
    "Header",
    [
        *_CLOCK.split(),
        *(
            f"{path}:{'small' if path in _SMALL else field.type}"
            for path, field in HEADER.items()
            if not path.startswith(("clock.", _COMPARED))
        ),
        *(f"{_COMPARED}[].{key}" for key in ("boot_id", "host", "samples:samples")),
    ],
)
# shipping.json; of processes, the names on the node's disk, and here.
Shipping = _type(
    "Shipping",
    """
    format:small directory every_s updated ended nodes[].host nodes[].disk nodes[].state nodes[].shipped
    nodes[].seen nodes[].left nodes[].problem nodes[].bytes:integer nodes[].processes.*
    """,
)
# upload.json
Upload = _type(
    "Upload",
    "format:small host directory url every_s uploaded updated ended failed:integer problems:texts",
)


class _Captured(TypedDict):
    role: str
    rank: _Small
    host: str
    pid: _Natural
    step: _Small
    # Of the folder `nsight`, not of another one.
    file: Annotated[str, msgspec.Meta(pattern=r"^[^/\0]*$")] | None
    problem: _Text


class Capture(_Captured, total=False):
    """One entry of nsight/captures.json."""

    task: _Text
    number: _Small
    tool: _Text
    size_bytes: _Whole
    begin_ns: _Whole
    end_ns: _Whole
    source: _Text


_CALL = "event since open_s step:small extra:object thread at user stack:texts"


def _calls(kind: str, more: str = "") -> list[str]:
    return [f"{kind}.{field}" for field in f"{_CALL} {more}".split()]


# open/<name>.json
Opened = _type(
    "Opened",
    [
        *("format:small", "at", "after_s", "step:small", "weight_version:small"),
        *("paused.since", "paused.open_s", "open_requests:integer", "open_calls:integer"),
        *_calls("failed", "error pid:small ip reason"),
        *_calls("phases[]", "usual_s longest_s in_flight:integer stuck:flag"),
        *(
            field
            for kind in ("requests", "calls", "blocked_loops", "threads")
            for field in _calls(f"{kind}[]")
        ),
    ],
)
# evidence/<number>/<name>.json
Evidence = _type(
    "Evidence",
    """
    format:small name at unanswered:texts errors.*
    stacks.threads[].thread stacks.threads[].stack:texts
    stacks.tasks[].tasks:integer stacks.tasks[].awaits stacks.tasks[].stack:texts
    engine.requests:integer engine.paused:flag engine.unanswered
    engine.loads[].dp_rank:small engine.loads[].running_requests:integer
    engine.loads[].waiting_requests:integer engine.loads[].kv_used_tokens:integer
    engine.loads[].kv_capacity_tokens:integer engine.loads[].running_limit:integer engine.loads[].age_s
    """,
)


def described(path: Path, shown: str, kind: Any, problems: Problems) -> dict[str, Any] | None:
    """Read a JSON object.

    Args:
        path: The file.
        shown: How problems name it.
        kind: One of the types above.
        problems: Takes the file where it cannot be read, or a value is of another type.

    Returns:
        None where it cannot be read, or is not there.
    """
    if not os.path.lexists(path):
        return None
    try:
        content = read_object(path)
        msgspec.convert(content, kind)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        problems.add(
            "such files cannot be read",
            f"{shown} cannot be read ({reason_of(error)}); its content is missing",
        )
        return None
    return content
