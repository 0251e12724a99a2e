"""What makes the trained tokens of an asynchronous run stale, for the finding `too_stale`."""

from __future__ import annotations

from typing import NamedTuple

from verl_profiler.analysis.selection import Rows

__all__ = ["Maker", "maker_of", "stale_share"]

# Tokens more versions behind than this are stale: a step is one or two behind by design.
_STALE = 2
_OLD_TOKENS = "Weights were synced while they were generated."


class Maker(NamedTuple):
    """What makes samples stale; cause and advice are those of the rule if empty."""

    name: str
    cause: str = ""
    advice: str = ""


# By the causes of `staleness_causes` that they stand for; `generating` is told apart by length.
_MAKERS = {
    ("queue", "dispatch"): Maker("the wait in the queue"),
    ("paused", "redone"): Maker(
        "calls aborted by weight syncs",
        "Each sync makes the tokens before the abort one version older.",
        "Sync less often (parameter_sync_step), or let requests finish before a sync.",
    ),
    ("between_calls",): Maker(
        "the time between generate calls (tools, rewards)",
        "Weights are synced while samples wait for tools or rewards; their tokens get older.",
        "Faster tools or rewards (`plot tools`); sync less often (parameter_sync_step).",
    ),
    ("group",): Maker(
        "requests that wait for the slowest one of their prompt",
        "A prompt is consumed when all its requests have finished; the first ones get older meanwhile.",
        "Limit turns or response length, or take fewer samples per prompt (rollout.n): each changes what is "
        "trained.",
    ),
}
_SPANNING = Maker("requests that span syncs", _OLD_TOKENS, "Sync less often (parameter_sync_step).")


def stale_share(rows: Rows) -> float | None:
    """Return the share of the trained tokens that are too old; None if none are known."""
    versions = [row for row in rows if row["part"] == "versions"]
    tokens = sum(row["tokens"] for row in versions)
    stale = sum(row["tokens"] for row in versions if row["max_behind"] > _STALE)
    return stale / tokens if tokens else None


def maker_of(rows: Rows, causes: Rows) -> Maker:
    """Return what made samples old.

    Args:
        rows: Of `staleness`, of one run; where requests have no generate calls, they have the cause.
        causes: Of `staleness_causes`, of the same run; those of the stalest requests decide.
    """
    stalest = [row for row in causes if row["part"] == "request"]
    behind = {
        maker: sum(row["behind"] for row in stalest if row["cause"] in of)
        for of, maker in _MAKERS.items()
    }
    known = sum(row["behind"] for row in stalest)
    most = max(behind, key=lambda maker: behind[maker])
    if known and behind[most] >= known - sum(behind.values()):
        return most
    spanned = _versions(rows, "spanned")
    if not known and _versions(rows, "waited") >= spanned:
        return _MAKERS["queue", "dispatch"]
    lengths = {row["what"] for row in rows if row["part"] == "length"}
    longest = max(lengths, key=lambda what: int(what.split()[0]))
    if _versions(rows, "spanned", longest) > spanned / 2:
        return Maker(
            f"long requests ({longest})",
            _OLD_TOKENS,
            "Sync less often (parameter_sync_step). Limiting turns or response length changes what is trained.",
        )
    return _SPANNING


def _versions(rows: Rows, name: str, what: str | None = None) -> float:
    """Add up versions behind, of the steps and lengths with a stale sample."""
    return sum(
        row[name] * row["samples"]
        for row in rows
        if row["part"] == "length" and what in (None, row["what"]) and row["max_behind"] > _STALE
    )
