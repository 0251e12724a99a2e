"""Versions behind at consumption as text for a terminal."""

from __future__ import annotations

from typing import Any

from verl_profiler.analysis.selection import grouped
from verl_profiler.analysis.staleness_causes import CAUSES
from verl_profiler.views.text_tables import Rows, table_text

__all__ = ["by_cause", "by_group", "causes_text", "makers", "staleness_text"]


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


def makers(rows: Rows) -> list[dict[str, Any]]:
    """Return the groups by what can make samples stale: generated tokens, prompt tokens, aborts."""
    lengths = [
        each
        for part in ("length", "prompt_length")
        for each in sorted(by_group(rows, part), key=lambda row: int(row["what"].split()[0]))
    ]
    return lengths + sorted(by_group(rows, "attempts"), key=lambda row: row["what"], reverse=True)


def staleness_text(rows: Rows) -> str:
    """Return how stale a run's samples were, by lengths and by aborts; empty without any."""
    if not rows:
        return ""
    title = "weight versions behind the trainer when the samples were consumed (means)"
    columns = ("what", "samples", "behind", "waited", "spanned", "max_behind", "off_policy_share")
    groups = [*by_group(rows, "all"), *makers(rows)]
    return table_text(title, groups, columns, "staleness") + _logged(rows)


def _logged(rows: Rows) -> str:
    logged = [row for row in rows if row["part"] == "all" and row["logged_behind"] is not None]
    if not logged:
        return ""
    count = sum(row["samples"] for row in logged)
    ours, verls = (
        [sum(row[name] * row["samples"] for row in logged) / count for name in names]
        for names in (("waited", "behind"), ("logged_waited", "logged_behind"))
    )
    return (
        f"\n  verl's trajectory_staleness {verls[0]:.2f} (here in queue: {ours[0]:.2f}), "
        f"trajectory_staleness_worst {verls[1]:.2f} (here behind: {ours[1]:.2f})"
    )


def by_cause(rows: Rows) -> list[dict[str, Any]]:
    """Return the causes over all steps, in the order of `CAUSES`: means over samples."""
    whole = [row for row in rows if row["part"] == "all"]
    samples = sum({row["step"]: row["samples"] for row in whole}.values())
    found: list[dict[str, Any]] = []
    for cause in CAUSES:
        own = [row for row in whole if row["cause"] == cause]
        if own:
            means = {
                name: sum(row[name] * row["samples"] for row in own) / samples
                for name in ("behind", "earlier", "age_s")
            }
            stale = sum(row["stale_samples"] for row in own)
            found.append({"cause": cause, "samples": samples, "stale_samples": stale, **means})
    return found


def causes_text(rows: Rows) -> str:
    """Return what a run's samples were in until they were consumed; empty without any."""
    if not rows:
        return ""
    causes = by_cause(rows)
    behind = sum(row["behind"] for row in causes) or 1.0
    shown = [
        {**row, "share": row["behind"] / behind, "about": CAUSES[row["cause"]]} for row in causes
    ]
    title = "what samples were in from dispatch to consumption, and while they went stale (means)"
    columns = ("cause", "age_s", "behind", "share", "stale_samples", "about")
    return table_text(title, shown, columns, "staleness_causes")
