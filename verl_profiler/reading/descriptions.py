"""What runs, processes and captures write about themselves: which fields there are, and of what type.

    problems = Problems()
    launch = described(run / RUN_FILE, RUN_FILE, Launch, problems)

A file with a value of another type is named in a problem and not used, so that whoever reads these dicts
finds a field as stated here, `None`, or nothing.  Fields that are not stated here are kept as they are; nothing
reads those by name.
"""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from verl_profiler.events.files import read_object, reason_of
from verl_profiler.reading.problems import Problems

__all__ = [
    "Capture",
    "Evidence",
    "Header",
    "Launch",
    "Opened",
    "Shipping",
    "Upload",
    "described",
    "instant",
]

# Sums and differences of two stay in 64 bits.
_Limit = 1 << 62
_Natural = Annotated[int, msgspec.Meta(ge=0, lt=_Limit)]
_Whole = _Natural | None
_Small = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None
_Offset = Annotated[int, msgspec.Meta(gt=-_Limit, lt=_Limit)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)] | None
_Text = str | None
_Flag = bool | None
_Counts = dict[str, _Whole] | None


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


class _Clock(TypedDict, total=False):
    boot_id: _Text
    wall_ns: _Whole
    monotonic_ns: _Whole
    uncertainty_ns: _Whole
    shared: _Flag
    # Of each: wall, monotonic, uncertainty.
    readings: list[tuple[_Natural, _Natural, _Natural]] | None
    last_wall_ns: _Whole
    last_monotonic_ns: _Whole


class _Memory(TypedDict, total=False):
    device: _Text
    enable_memory_saver: _Flag
    free_cache_engine: _Flag
    tags: list[str] | None


class _Training(TypedDict, total=False):
    model: _Text
    rollout: _Text
    rollout_n: _Small
    agent_workers: _Small
    train_batch_size: _Small
    nnodes: _Small
    n_gpus_per_node: _Small
    memory: _Memory | None


class _Events(TypedDict, total=False):
    engine_timing: _Flag
    exclude: list[str] | None
    families: dict[str, _Flag] | None


class _Settings(TypedDict, total=False):
    output_dir: _Text
    events: _Events | None
    nsight: dict[str, Any] | None


class Launch(TypedDict, total=False):
    """run.json."""

    format: _Small
    experiment: _Text
    launched: _Text
    host: _Text
    pid: _Small
    command: list[str] | None
    cwd: _Text
    versions: dict[str, _Text] | None
    settings: _Settings | None
    training: _Training | None
    clock: _Clock | None


class _Peer(TypedDict, total=False):
    boot_id: _Text
    host: _Text
    # Own monotonic time, how far the other is ahead, bound.
    samples: list[tuple[_Natural, _Offset, _Natural]] | None


class _Exchange(TypedDict, total=False):
    boot_id: _Text
    peers: list[_Peer] | None


class _Counters(TypedDict, total=False):
    events: _Whole
    bytes: _Whole
    dropped: _Whole
    dropped_by: _Counts
    write_errors: _Whole
    wrapper_s: _Seconds
    writer_s: _Seconds


class _Probes(TypedDict, total=False):
    installed: dict[str, list[str] | None] | None
    missed: dict[str, _Text] | None
    hits: _Counts
    errors: _Counts


class Header(TypedDict, total=False):
    """processes/<name>.json."""

    format: _Small
    role: _Text
    rank: _Small
    replica: _Small
    host: _Text
    ip: _Text
    pid: _Small
    ppid: _Small
    actor_name: _Text
    actor_class: _Text
    python: _Text
    clock: _Clock | None
    clock_exchange: _Exchange | None
    counters: _Counters | None
    flush_interval_s: _Seconds
    longest_flush_s: _Seconds
    complete_until: _Text
    written_events: _Whole
    written_bytes: _Whole
    waiting_events: _Whole
    dropped_events: _Whole
    started: _Text
    updated: _Text
    ended: _Text
    end_reason: _Text
    directory: _Text
    fallback: _Text
    versions: dict[str, _Text] | None
    probes: _Probes | None


class _Node(TypedDict, total=False):
    host: _Text
    disk: _Text
    state: _Text
    shipped: _Text
    seen: _Text
    left: _Text
    problem: _Text
    bytes: _Whole
    # Names on the node's disk, and here.
    processes: dict[str, str] | None


class Shipping(TypedDict, total=False):
    """shipping.json."""

    format: _Small
    directory: _Text
    every_s: _Seconds
    updated: _Text
    ended: _Text
    nodes: list[_Node] | None


class Upload(TypedDict, total=False):
    """upload.json."""

    format: _Small
    host: _Text
    directory: _Text
    url: _Text
    every_s: _Seconds
    uploaded: _Text
    updated: _Text
    ended: _Text
    failed: _Whole
    problems: list[str] | None


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


class _Paused(TypedDict, total=False):
    since: _Text
    open_s: _Seconds


class _OpenCall(TypedDict, total=False):
    event: _Text
    since: _Text
    open_s: _Seconds
    step: _Small
    extra: dict[str, Any] | None
    thread: _Text
    at: _Text
    user: _Text
    stack: list[str] | None


class _Failed(_OpenCall, total=False):
    error: _Text
    pid: _Small
    ip: _Text
    reason: _Text


class _Phase(_OpenCall, total=False):
    usual_s: _Seconds
    longest_s: _Seconds
    in_flight: _Whole
    stuck: _Flag


class Opened(TypedDict, total=False):
    """open/<name>.json."""

    format: _Small
    at: _Text
    after_s: _Seconds
    step: _Small
    weight_version: _Small
    paused: _Paused | None
    failed: _Failed | None
    phases: list[_Phase] | None
    open_requests: _Whole
    requests: list[_OpenCall] | None
    open_calls: _Whole
    calls: list[_OpenCall] | None
    blocked_loops: list[_OpenCall] | None
    threads: list[_OpenCall] | None


class _Thread(TypedDict, total=False):
    thread: _Text
    stack: list[str] | None


class _Tasks(TypedDict, total=False):
    tasks: _Whole
    awaits: _Text
    stack: list[str] | None


class _Stacks(TypedDict, total=False):
    threads: list[_Thread] | None
    tasks: list[_Tasks] | None


class _Load(TypedDict, total=False):
    dp_rank: _Small
    running_requests: _Whole
    waiting_requests: _Whole
    kv_used_tokens: _Whole
    kv_capacity_tokens: _Whole
    running_limit: _Whole
    age_s: _Seconds


class _Engine(TypedDict, total=False):
    requests: _Whole
    paused: _Flag
    unanswered: _Text
    loads: list[_Load] | None


class Evidence(TypedDict, total=False):
    """evidence/<number>/<name>.json."""

    format: _Small
    name: _Text
    at: _Text
    stacks: _Stacks | None
    engine: _Engine | None
    unanswered: list[str] | None
    errors: dict[str, _Text] | None


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
