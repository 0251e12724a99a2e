"""What was launched, as data of the report page: command, versions, settings and processes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.events.json_values import is_list, is_object, mapping_or_empty
from verl_profiler.events.redaction import recorded_command, recorded_values
from verl_profiler.reading.reader import Run
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.frames import frame, short_text
from verl_profiler.units import added

__all__ = ["about_run", "event_settings", "recorded_events"]

_ROWS = 4_000


def recorded_events(tables: Tables, steps: Steps = None) -> dict[str, int]:
    """Return how many events of these steps there are of each name."""
    rows = tables.rows(
        "SELECT event, try_cast(sum(events) AS BIGINT) AS events FROM event_counts "
        f"WHERE {in_steps(steps)} GROUP BY event"
    )
    return {row["event"]: row["events"] for row in rows}


def event_settings(run: Run) -> dict[str, Any]:
    """Return the `events` settings of the first run that has them."""
    for launch in run.launches.values():
        events = mapping_or_empty(launch.get("settings")).get("events")
        if is_object(events):
            return events
    return {}


def about_run(run: Run, listed: Rows, recorded: Mapping[str, int]) -> dict[str, Any]:
    """Return what was launched, and in which processes.

    Args:
        run: An open run.
        listed: The rows of `step_times`.
        recorded: How many events there are of each name.

    Returns:
        runs (labels), events, requests and validation_requests (numbers), launches (facts and
        groups of settings), processes (a table), missed (probes that were not placed), notes (of the
        reader).
    """
    tables = run.tables
    launches: list[dict[str, Any]] = []
    for label in run.labels:
        launch = run.launches.get(label) or {}
        facts = [
            [key, short_text(str(recorded_values(launch[key], key)))]
            for key in ("experiment", "launched", "host", "cwd")
            if launch.get(key) is not None
        ]
        command = launch.get("command")
        if is_list(command):
            words = recorded_command([str(word) for word in command])
            facts.append(["command", short_text(" ".join(words), 4_000)])
        groups: dict[str, list[list[str]]] = {}
        for group in ("training", "versions", "settings"):
            value = launch.get(group)
            if is_object(value):
                groups[group] = [
                    [short_text(key), short_text(text)]
                    for key, text in itertools.islice(_flat(recorded_values(value, group)), 200)
                ]
        launches.append({"run": short_text(label), "facts": facts, **groups})
    processes = tables.rows(
        "SELECT run, name, role, rank, host, pid, recorded_events, size_bytes, dropped, "
        "write_errors, wrapper_s, writer_s, ended, end_reason FROM processes "
        "ORDER BY run, role, rank, name"
    )
    missed = tables.rows(
        "SELECT run, name, header->'$.probes.missed' AS missed FROM processes "
        "WHERE json_type(header, '$.probes.missed') = 'OBJECT' ORDER BY run, name"
    )
    return {
        "runs": [short_text(label) for label in run.labels],
        "events": sum(recorded.values()),
        "requests": added(row["requests"] for row in listed),
        "validation_requests": added(row["validation_requests"] for row in listed),
        "launches": launches,
        "processes": frame(processes[:_ROWS]),
        "missed": _missed(missed),
        "notes": [short_text(note, 2_000) for note in run.notes],
    }


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, each in value.items():
        if is_object(each) and each:
            yield from _flat(each, f"{prefix}{key}.")
        else:
            text = each if isinstance(each, str) else json.dumps(each, default=str)
            yield f"{prefix}{key}", text


def _missed(rows: Rows) -> list[list[str]]:
    """Say which probes were not placed, and in how many processes."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        try:
            missed = json.loads(row["missed"])
        except ValueError:
            continue
        for probe, reason in missed.items():
            found.setdefault((str(probe), str(reason)), []).append(row["name"])
    return [
        [short_text(probe), short_text(reason), f"{len(names)} ({', '.join(names[:3])})"]
        for (probe, reason), names in sorted(found.items())
    ]
