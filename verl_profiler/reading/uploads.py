"""Runs in object storage: whether the upload of one has ended, and what is known to be missing.

A run's upload process writes `upload.json` beside it after each round, and at its end that it ended.
Headers are uploaded more often than event files that grow, so that the count of some missing events is
known; of what was written later, only the time from which on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timezone

from verl_profiler.reading.descriptions import instant
from verl_profiler.reading.discovery import Source
from verl_profiler.units import counted, some

__all__ = ["is_incomplete", "upload_problems"]

# Without news for so long, and the interval between two uploads, whoever uploads was killed.
_SILENCE_S = 90.0
_SHOWN = 4


def is_incomplete(source: Source) -> bool:
    """Return whether a run is a copy whose upload has not ended, or could not upload all."""
    upload = source.upload
    return bool(upload) and (upload.get("ended") is None or bool(upload.get("failed")))


def upload_problems(
    source: Source,
    counts: Mapping[str, int] | None,
    recorded: Mapping[str, int],
    now: datetime | None = None,
) -> Iterator[str]:
    """Yield what is missing of a copy.

    Args:
        source: The run.
        counts: Events read, by process; None where not all were read.
        recorded: Events written, by process, according to the last headers.
        now: The present, to distinguish a run that goes on.
    """
    if not is_incomplete(source):
        return
    upload = source.upload
    uploaded, updated = instant(upload.get("uploaded")), instant(upload.get("updated"))
    last = f"last at {uploaded:%Y-%m-%d %H:%M:%S} UTC" if uploaded else "no upload was completed"
    missing, names = _missing(counts, recorded)
    every_s = upload.get("every_s") or 0.0
    now = now or datetime.now(timezone.utc)
    if upload.get("ended") is None and (
        updated is not None and (now - updated).total_seconds() < _SILENCE_S + every_s
    ):
        rest = f"; {missing} have not arrived yet ({names})" if names else ""
        yield f"the run is still being uploaded ({last}), or its upload was killed{rest}"
        return
    if upload.get("ended") is None:
        why = f"the upload of the run did not end, so it was killed ({last})"
        later = "what was written later is missing"
        missed = f"{missing} did not arrive ({names}), and {later}" if names else later
    else:
        failed = counted(upload.get("failed") or 0, "file")
        first = next(iter(upload.get("problems") or ()), "")
        why = f"{failed} could not be uploaded" + (f" ({first})" if first else "")
        missed = f"{missing} did not arrive ({names})" if names else "what they hold is missing"
    directory, url = upload.get("directory") or "RUN", upload.get("url") or "URL"
    host = f" on {upload['host']}" if upload.get("host") else ""
    yield (
        f"{why}; {missed}. The rest is in {directory}{host}: run there: verl-profiler collect "
        f"{directory} --to {url}; if that directory is lost, so is the rest"
    )


def _missing(counts: Mapping[str, int] | None, recorded: Mapping[str, int]) -> tuple[str, str]:
    """Return how many events are known to be missing, and of which processes; empty for none."""
    gaps = {
        name: recorded[name] - counts.get(name, 0)
        for name in recorded
        if counts is not None and recorded[name] > counts.get(name, 0)
    }
    if not gaps:
        return "", ""
    names = sorted(gaps, key=lambda name: (-gaps[name], name))
    known = counted(sum(gaps.values()), "event")
    return f"{known} that its processes had written by their last headers", some(names, _SHOWN)
