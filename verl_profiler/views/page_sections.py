"""The sections of the report page, in order, and their tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.views.questions import VIEWS
from verl_profiler.views.view import Section

__all__ = ["SECTIONS", "page_sections", "section_of"]

# By topic, in the order of the page: sections, and the names of those that views bring. Those of views that
# are not listed come last in the first topic.
_LAID_OUT: dict[str, tuple[Section | str, ...]] = {
    "Steps": (
        Section("steps", "Steps"),
        Section("path", "Critical path", link="Path"),
        *("cycle", "async_what_if"),
        Section("validation", "Validation"),
        "spans",
    ),
    "Rollout": (
        Section("requests", "Timeline and requests", link="Timeline"),
        Section("rollout", "Rollout"),
        Section("turns", "Turns"),
        Section("tools", "Tools"),
        "rewards",
        Section("workers", "Workers"),
        *("routing", "engine_lanes", "engine-load"),
        Section("lags", "Event-loop stalls", link="Stalls"),
    ),
    "Training": (
        Section("devices", "Device time", link="Devices"),
        *("pools", "efficiency", "staleness", "staleness_causes"),
    ),
    "Data transfer": (Section("transfers", "Transfers"), "weight_transfers"),
    "Memory and devices": (
        Section("weights", "Weights and memory", link="Weights"),
        "device-use",
        Section("captures", "Captures"),
    ),
    "About this run": (
        Section("launch", "Launch"),
        Section("problems", "Data-quality warnings", link="Warnings"),
        Section("cost", "Profiler cost", link="Cost"),
    ),
}
TOPICS = {
    topic: tuple(each if isinstance(each, str) else each.name for each in own)
    for topic, own in _LAID_OUT.items()
}
# Shown above the topics.
_FIRST = "requests"
# The first section that each of so many findings points to is shown there too.
_POINTING = 3
# Tables of analyses that no view draws, by their section: each with its caption.
TABLES: dict[str, dict[str, str]] = {
    "path": {
        "straggler_requests": "Straggler requests",
        "step_replays": "Replays of each step",
    },
    "rollout": {
        "request_times": "Requests",
        "request_parts": "Request time by component",
        "engine_times": "Engine calls",
    },
    "workers": {
        "rollout_balance": "Agent-loop workers: who was done last",
        "replica_balance": "Replicas",
        "rank_balance": "Ranks: all wait for the slowest",
    },
    "transfers": {"transfer_totals": "TransferQueue calls"},
    "weights": {
        "weight_sync": "Weight syncs",
        "release_effects": "Release and resume, all steps",
        "sleep_times": "Time in sleep and wake, in the slowest process",
        "memory_timeline": "Memory by phase",
        "memory_peaks": "Peak device memory",
    },
    "captures": {
        "captures": "Captures",
        "range_times": "Ranges",
        "top_kernels": "Kernels with the most time",
        "gpu_idle": "Idle time of the devices",
    },
    "lags": {"loop_lags": "Event-loop stalls by loop", "longest_lags": "Longest stalls"},
    "validation": {"validation_times": "Validations"},
    "launch": {"processes": "Processes"},
    "cost": {"profiler_cost": "Profiler cost"},
}
# The sections of notes that have another name.
_NOTES = {"engine": "rollout", "memory_saver": "weights"}


def _sections() -> dict[str, Section]:
    own = [view.section for view in VIEWS.values() if isinstance(view.section, Section)]
    laid_out = [each for own in _LAID_OUT.values() for each in own if isinstance(each, Section)]
    known = {section.name: section for section in (*laid_out, *own)}
    first, *others = TOPICS.values()
    listed = {name for names in TOPICS.values() for name in names}
    order = [*first, *(name for name in known if name not in listed), *itertools.chain(*others)]
    return {name: known[name] for name in order}


SECTIONS = _sections()


def section_of(name: str) -> str | None:
    """Return the name of the section with a view's numbers; None when there is none."""
    section = VIEWS[name].section if name in VIEWS else None
    return section.name if isinstance(section, Section) else section


def page_sections(
    views: Mapping[str, Mapping[str, Any]],
    notes: Mapping[str, list[str]],
    findings: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the sections of a page as data.

    Args:
        views: The views and tables of the page by name, with their table each.
        notes: What was not recorded, and how to record it.
        findings: The rows of the findings, the first on top.

    Returns:
        name, title, link and topic of each section, without a topic where it is shown at once: the
        timeline, then what the first findings point to; questions, which its views answer; views, the names
        of those and of tables that it shows; answers, of all views whose numbers it has; notes.
        Sections that only some runs have are left out where their tables have no rows.
    """
    of: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for name in VIEWS:
        of.setdefault(section_of(name) or "", []).append(name)
    optional = {view.section.name for view in VIEWS.values() if isinstance(view.section, Section)}
    shows = {
        section: [
            name
            for name in (*of[section], *TABLES.get(section, ()))
            if views[name]["charts"] or views[name]["table"]["rows"]
        ]
        for section in SECTIONS
    }
    there = [
        section
        for section in SECTIONS.values()
        if shows[section.name] or section.name not in optional | {"captures"}
    ]
    pointing = [row["shows"][0] for row in findings[:_POINTING]]
    pointed = [section_of(name) or "path" for name in pointing] or ["steps"]
    first = [_FIRST, *pointed]
    # The first sections come in the order of the findings.
    there.sort(key=lambda each: first.index(each.name) if each.name in first else len(first))
    topics = {name: topic for topic, names in TOPICS.items() for name in names}
    default, *_ = TOPICS
    return [
        {
            "name": section.name,
            "title": section.title,
            "link": section.link or section.title,
            "topic": None if section.name in first else topics.get(section.name, default),
            "questions": [VIEWS[name].question for name in of[section.name]],
            "views": shows[section.name],
            "answers": of[section.name],
            "notes": _notes(
                section.name, (*of[section.name], *TABLES.get(section.name, ())), views, notes
            ),
        }
        for section in there
    ]


def _notes(
    section: str,
    own: Sequence[str],
    views: Mapping[str, Mapping[str, Any]],
    notes: Mapping[str, list[str]],
) -> list[str]:
    """Return what is to be known of a section, and why views of it have nothing to show."""
    found = [
        text for key, texts in notes.items() if section in (key, _NOTES.get(key)) for text in texts
    ]
    empty = [name for name in own if not views[name]["table"]["rows"]]
    reasons = [text for name in empty for text in views[name]["missing"]]
    if own and len(empty) == len(own) and not reasons:
        reasons = ["Nothing of this was recorded."]
    return [*found, *dict.fromkeys(reasons)]
