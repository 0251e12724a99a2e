"""The lines of `verl-profiler stuck`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from verl_profiler.live.open_processes import Link, Verdict
from verl_profiler.live.process_files import ProcessFiles
from verl_profiler.live.stuck import verdict
from verl_profiler.units import seconds

__all__ = ["alarm", "lines", "pointer"]

# Without -v, so many of a kind: all of it fits on a screen.
_BRIEF = 6


def pointer(files: ProcessFiles) -> str | None:
    """Return a line for other commands if a run is stuck or failed: on what, and what explains it."""
    opened = files.open_files()
    if not opened:
        # The usual case: no header needs to be read.
        return None
    return alarm(verdict(files.headers(), opened, files.directory), files.directory)


def alarm(found: Verdict, directory: Path) -> str | None:
    """Return that line; None if nobody needs to look at the run."""
    if not found.is_alarm:
        return None
    return f"{found.state}: {found.summary} Culprit: {found.culprit}. See verl-profiler stuck {directory}"


def lines(found: Verdict, *, verbose: bool = False) -> Iterator[str]:
    """Yield the lines that explain a run.

    Args:
        found: What is known of it.
        verbose: With the stack of the culprit and the evidence of each process.
    """
    yield f"{found.state}: {found.summary}"
    if found.chain:
        yield ""
    for link in found.chain:
        yield f"{'   ' * (link.depth - 1) + '└─ ' if link.depth else ''}{_shown(link)}"
    if found.culprit is not None:
        yield ""
        yield f"Culprit: {found.culprit}"
        yield f"Confidence: {found.confidence}"
    if found.facts:
        yield ""
        yield from _first(found.facts, "facts", verbose=verbose)
    if verbose and found.evidence:
        yield ""
        yield "Stack of the culprit, the innermost last:"
        yield from (f"    {place}" for place in found.evidence)
    if verbose and found.details:
        yield ""
        yield "Evidence:"
        yield from found.details
    if found.silent:
        yield ""
        yield from _first(found.silent, "silent processes", verbose=verbose)
    if found.unknown:
        yield ""
        unknown = [f"Not determined: {text}" for text in found.unknown]
        yield from _first(unknown, "points not determined", verbose=verbose)


def _first(texts: Sequence[str], what: str, *, verbose: bool) -> Iterator[str]:
    """Yield the first lines, and how many there are besides; all if verbose."""
    count = len(texts) if verbose or len(texts) == _BRIEF + 1 else _BRIEF
    yield from texts[:count]
    if len(texts) > count:
        yield f"and {len(texts) - count:,} more {what}; -v lists them"


def _shown(link: Link) -> str:
    step = "" if link.step is None else f" of step {link.step}"
    age = "" if link.open_s is None else f", {seconds(link.open_s)}"
    at = "" if link.at is None else f", in {link.at}"
    return f"{link.process}: {link.what}{step}{age}{at}"
