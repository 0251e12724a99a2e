"""Which events of a run are not here: on nodes with disks of their own, or in an upload that has not ended.

The driver writes `shipping.json` about nodes, a run's upload process `upload.json` beside the copy.
Headers arrive more often than events, so that the count of some missing ones is known; what was
written after the last header is bounded in time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from verl_profiler.reading.descriptions import instant
from verl_profiler.reading.discovery import Source
from verl_profiler.units import counted, some

__all__ = ["arrival_problems", "not_arrived"]

# Without news for so long, and the interval between two rounds, whoever writes them was killed.
_SILENCE_S = 90.0
_SHOWN = 4


def not_arrived(source: Source) -> Collection[str]:
    """Return the processes of which files may be missing for one of these reasons."""
    return source.headers if _is_incomplete(source) else _of_nodes(source).keys()


def arrival_problems(source: Source, gaps: Mapping[str, int] | None) -> Iterator[str]:
    """Yield a sentence for an upload that has not ended, and for each node that did not send everything.

    Args:
        source: The run.
        gaps: By process, how many events its last header counts that were not read; None where not
            all were read.
    """
    now = datetime.now(timezone.utc)
    nodes = _of_nodes(source)
    if _is_incomplete(source):
        known = {name: gap for name, gap in (gaps or {}).items() if gap and name not in nodes}
        yield _of_upload(source.upload, known, now)
    for node in (source.shipping.get("nodes") or ()) if gaps is not None else ():
        names = sorted(name for name, of in nodes.items() if of is node)
        missing = sum((gaps or {}).get(name, 0) for name in names)
        if node.get("state") != "ended":
            yield from _of_node(source.shipping, node, names, missing, now)


def _is_incomplete(source: Source) -> bool:
    """Return whether a run is a copy whose upload has not ended, or could not upload all."""
    upload = source.upload
    return bool(upload) and (upload.get("ended") is None or bool(upload.get("failed")))


def _of_nodes(source: Source) -> dict[str, Mapping[str, Any]]:
    """Return the nodes that did not send everything, by the names of their processes here."""
    found: dict[str, Mapping[str, Any]] = {}
    for node in source.shipping.get("nodes") or ():
        if node.get("state") != "ended":
            processes: Mapping[str, str] = node.get("processes") or {}
            found.update((name, node) for name in processes.values())
    return found


def _goes_on(account: Mapping[str, Any], now: datetime) -> bool:
    updated = instant(account.get("updated"))
    silence_s = _SILENCE_S + (account.get("every_s") or 0.0)
    return (
        account.get("ended") is None
        and updated is not None
        and (now - updated).total_seconds() < silence_s
    )


def _of_upload(upload: Mapping[str, Any], gaps: Mapping[str, int], now: datetime) -> str:
    uploaded = instant(upload.get("uploaded"))
    last = f"last at {uploaded:%Y-%m-%d %H:%M:%S} UTC" if uploaded else "no upload was completed"
    names = some(sorted(gaps, key=lambda name: (-gaps[name], name)), _SHOWN)
    missing = f"{counted(sum(gaps.values()), 'event')} that its processes had written by their last headers"
    if _goes_on(upload, now):
        rest = f"; {missing} have not arrived yet ({names})" if gaps else ""
        return f"the run is still being uploaded ({last}), or its upload was killed{rest}"
    if upload.get("ended") is None:
        why = f"the upload of the run did not end, so it was killed ({last})"
        later = "what was written later is missing"
        missed = f"{missing} did not arrive ({names}), and {later}" if gaps else later
    else:
        failed = counted(upload.get("failed") or 0, "file")
        first = next(iter(upload.get("problems") or ()), "")
        why = f"{failed} could not be uploaded" + (f" ({first})" if first else "")
        missed = f"{missing} did not arrive ({names})" if gaps else "what they hold is missing"
    directory, url = upload.get("directory") or "RUN", upload.get("url") or "URL"
    host = f" on {upload['host']}" if upload.get("host") else ""
    return (
        f"{why}; {missed}. The rest is in {directory}{host}: run there: verl-profiler collect "
        f"{directory} --to {url}; if that directory is lost, so is the rest"
    )


def _of_node(
    shipping: Mapping[str, Any],
    node: Mapping[str, Any],
    names: list[str],
    missing: int,
    now: datetime,
) -> Iterator[str]:
    host = node.get("host") or "a node"
    named = some(names, _SHOWN)
    shipped, seen, left = (instant(node.get(key)) for key in ("shipped", "seen", "left"))
    last = f"its events were last shipped at {_clock(shipped)}" if shipped else "no shipment ended"
    known = f"{counted(missing, 'event')} that its processes had written by {_clock(seen)} did not arrive"
    if left is not None:
        gap_s = (left - (seen or left)).total_seconds()
        yield (
            f"{host} left the cluster by {_clock(left)}; {last}: {known}, and up to {gap_s:.0f} s of "
            f"later events are lost with its disk ({named})"
        )
    elif not _goes_on(shipping, now):
        why = f" ({node['problem']})" if node.get("problem") else ""
        yield (
            f"{host} did not send all of its events{why}; {last}: {known}, later ones are on its disk "
            f"({named}). While the cluster is up, run: verl-profiler collect --ray "
            f"{shipping.get('directory') or 'RUN'}"
        )
    elif missing:
        yield (
            f"{counted(missing, 'event')} of {named} are still on {host}; they are shipped every "
            f"{shipping.get('every_s') or 0.0:g} s"
        )


def _clock(moment: datetime | None) -> str:
    return f"{moment:%H:%M:%S} UTC" if moment is not None else "an unknown time"
