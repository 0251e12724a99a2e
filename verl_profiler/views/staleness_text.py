"""Versions behind at consumption as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.render.text import align
from verl_profiler.units import share

__all__ = ["by_group", "makers", "staleness_text"]

_Rows = Sequence[Mapping[str, Any]]


def by_group(rows: _Rows, part: str) -> list[dict[str, Any]]:
    """Return the rows of one part over all steps: means over samples, sums of samples and tokens."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["part"] == part:
            groups.setdefault(row["what"], []).append(row)
    found: list[dict[str, Any]] = []
    for what, own in groups.items():
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


def makers(rows: _Rows) -> list[dict[str, Any]]:
    """Return the groups by what can make samples stale: generated tokens, prompt tokens, aborts."""
    lengths = [
        each
        for part in ("length", "prompt_length")
        for each in sorted(by_group(rows, part), key=lambda row: int(row["what"].split()[0]))
    ]
    return lengths + sorted(by_group(rows, "attempts"), key=lambda row: row["what"], reverse=True)


def staleness_text(rows: _Rows) -> str:
    """Return how stale a run's samples were, by lengths and by aborts; empty without any."""
    if not rows:
        return ""
    lines = [["", "samples", "behind", "in queue", "generating", "at most", "off-policy tokens"]]
    lines += [
        [
            row["what"],
            str(row["samples"]),
            f"{row['behind']:.2f}",
            f"{row['waited']:.2f}",
            f"{row['spanned']:.2f}",
            str(row["max_behind"]),
            "-" if row["off_policy_share"] is None else share(row["off_policy_share"]),
        ]
        for row in (*by_group(rows, "all"), *makers(rows))
    ]
    title = "weight versions behind the trainer when the samples were consumed (means)"
    return f"{title}\n{align(lines)}{_logged(rows)}"


def _logged(rows: _Rows) -> str:
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
