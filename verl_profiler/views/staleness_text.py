"""Versions behind at consumption as text for a terminal."""

from __future__ import annotations

from typing import Any

from verl_profiler.analysis.selection import grouped
from verl_profiler.analysis.staleness_causes import CAUSES
from verl_profiler.views.text_tables import Rows, table_text


def by_group(rows: Rows, part: str) -> list[dict[str, Any]]:
    """Return the rows of one part over all steps: means over samples, sums of samples and tokens."""
    found: list[dict[str, Any]] = []
    for what, own in grouped((row for row in rows if row["part"] == part), "what").items():
        sums = {
            name: sum(row[name] for row in own)
            for name in ("samples", "tokens", "off_policy_tokens", "unknown_tokens")
        }
        known = sums["tokens"] - sums["unknown_tokens"]
        means = {
            name: sum((row[name] or 0) * row["samples"] for row in own) / max(sums["samples"], 1)
            for name in ("waited", "spanned", "behind")
        }
        found.append(
            {
                "what": what,
                **sums,
                **means,
                "max_behind": max(row["max_behind"] for row in own),
                "off_policy_share": sums["off_policy_tokens"] / known if known else None,
            }
        )
    return found


def staleness_text(rows: Rows) -> str:
    """Return how stale a run's samples were, by lengths and by aborts; empty without any."""
    if not rows:
        return ""
    title = "weight versions behind the trainer when the samples were consumed (means)"
    columns = ("what", "samples", "behind", "waited", "spanned", "max_behind", "off_policy_share")
    groups = by_group(rows, "all")
    for part in ("length", "prompt_length"):
        groups += sorted(by_group(rows, part), key=lambda row: int(row["what"].split()[0]))
    groups += sorted(by_group(rows, "attempts"), key=lambda row: row["what"], reverse=True)
    return table_text(title, groups, columns, "staleness")


def causes_text(rows: Rows) -> str:
    """Return what a run's samples were in until they were consumed; empty without any."""
    if not rows:
        return ""
    whole = [row for row in rows if row["part"] == "all"]
    samples = sum({row["step"]: row["samples"] for row in whole}.values())
    found = grouped(whole, "cause")
    means = {
        cause: {
            name: sum(row[name] * row["samples"] for row in found[cause]) / samples
            for name in ("behind", "age_s")
        }
        for cause in CAUSES
        if cause in found
    }
    behind = sum(each["behind"] for each in means.values()) or 1.0
    shown = [
        {"cause": cause, **each, "share": each["behind"] / behind, "about": CAUSES[cause]}
        | {"stale_samples": sum(row["stale_samples"] for row in found[cause])}
        for cause, each in means.items()
    ]
    title = "what samples were in from dispatch to consumption, and while they went stale (means)"
    columns = ("cause", "age_s", "behind", "share", "stale_samples", "about")
    return table_text(title, shown, columns, "staleness_causes")
