"""The sections of the report page: one for each view and table that has something to show, by topic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_profiler.views.questions import TOPICS

__all__ = ["TABLES", "page_sections"]

_RUN = "About this run"
# Tables of analyses that no view draws, by topic, each with its caption.
TABLES: dict[str, dict[str, str]] = {
    "Steps": {
        "straggler_requests": "Straggler requests",
        "step_replays": "Replays of each step",
        "validation_times": "Validations: not included in any other number",
    },
    "Devices and training": {
        "rank_balance": "Ranks: all wait for the slowest",
        "captures": "Captures",
        "range_times": "Ranges of captures",
        "top_kernels": "Kernels with the most time",
        "gpu_idle": "Idle time of the devices in captures",
    },
    "Rollout": {
        "request_times": "Requests of each step",
        "request_parts": "Request time by component",
        "engine_times": "Engine calls",
        "rollout_balance": "Agent-loop workers: who was done last",
        "replica_balance": "Replicas",
    },
    "Data transfer": {
        "transfer_totals": "TransferQueue calls",
        "weight_sync": "Weight syncs",
    },
    "Memory and event loops": {
        "release_effects": "Release and resume, all steps",
        "sleep_times": "Time in sleep and wake, in the slowest process",
        "memory_timeline": "Memory by phase",
        "memory_peaks": "Peak device memory",
        "loop_lags": "Event-loop stalls by loop",
        "longest_lags": "Longest event-loop stalls",
    },
    _RUN: {"processes": "Processes", "profiler_cost": "Profiler cost"},
}
# Sections that scripts of the page make, by topic; the timeline is shown above all of them.
_MADE = {
    "Steps": {"steps": "Steps"},
    _RUN: {"launch": "Launch", "problems": "Data-quality warnings"},
}
_TIMELINE = {"requests": "Timeline and requests"}
# The first section that each of so many findings points to is shown at once, too.
_POINTING = 3


def page_sections(
    views: Mapping[str, Mapping[str, Any]],
    notes: Mapping[str, Sequence[str]],
    findings: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the sections of a page as data.

    Args:
        views: The views and tables of the page by name, with their table each.
        notes: What is to be known of a topic, by topic.
        findings: The rows of the findings, the first on top.

    Returns:
        name, title, link (a shorter title) and topic of each section, without a topic where it is shown at
        once: the timeline, then what the first findings point to; views, the view or table that it shows;
        notes: at the end of a topic, what is to be known of it, and why views of it have nothing to show.
    """
    shown = {name for name, view in views.items() if view["charts"] or view["table"]["rows"]}
    pointed = [
        next((name for name in row["shows"] if name in shown), "steps")
        for row in findings[:_POINTING]
    ] or ["steps"]
    first = [*_TIMELINE, *pointed]
    sections = [section(name, title, None) for name, title in _TIMELINE.items()]
    for topic in (*TOPICS, _RUN):
        own = {view.name: view.question for view in TOPICS.get(topic, ())}
        titles = {**_MADE.get(topic, {}), **own, **TABLES[topic]}
        sections += [
            section(name, title, None if name in first else topic, [name] if name in shown else ())
            for name, title in titles.items()
            if name in shown or name not in views
        ]
        reasons = dict.fromkeys(
            text for name in own if name not in shown for text in views[name]["missing"]
        )
        said = [*notes.get(topic, ()), *reasons]
        if said:
            sections.append(section(f"notes-{len(sections)}", f"Notes: {topic}", topic, notes=said))
    # The first sections come in the order of the findings.
    return sorted(
        sections,
        key=lambda each: first.index(each["name"]) if each["topic"] is None else len(first),
    )


def section(
    name: str,
    title: str,
    topic: str | None,
    views: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> dict[str, Any]:
    """Return a section of a page as data; for the arguments see `page_sections`."""
    link = name.replace("tq_", "TransferQueue ").replace("_", " ")
    return {
        "name": name,
        "title": title,
        "link": f"{link[0].upper()}{link[1:].partition('-')[0]}",
        "topic": topic,
        "views": [*views],
        "notes": [*notes],
    }
