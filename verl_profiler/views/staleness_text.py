"""Versions behind at consumption as text for a terminal."""

from __future__ import annotations

from verl_profiler.analysis.selection import Rows
from verl_profiler.analysis.staleness import staleness_of
from verl_profiler.analysis.staleness_causes import CAUSES, mean_causes
from verl_profiler.views.text_tables import table_text


def staleness_text(rows: Rows) -> str:
    """Return how stale a run's samples were, by lengths and by aborts; empty without any."""
    if not rows:
        return ""
    title = "weight versions behind the trainer when the samples were consumed (means)"
    columns = ("what", "samples", "behind", "waited", "spanned", "max_behind", "off_policy_share")
    groups = staleness_of(rows, "all")
    for part in ("length", "prompt_length"):
        groups += sorted(staleness_of(rows, part), key=lambda row: int(row["what"].split()[0]))
    groups += sorted(staleness_of(rows, "attempts"), key=lambda row: row["what"], reverse=True)
    return table_text(title, groups, columns, "staleness")


def causes_text(rows: Rows) -> str:
    """Return what a run's samples were in until they were consumed; empty without any."""
    if not rows:
        return ""
    shown = [{**row, "about": CAUSES[row["cause"]]} for row in mean_causes(rows)]
    title = "what samples were in from dispatch to consumption, and while they went stale (means)"
    columns = ("cause", "age_s", "behind", "share", "stale_samples", "about")
    return table_text(title, shown, columns, "staleness_causes")
