"""Nodes with disks of their own: which of their events did not arrive, from `shipping.json`.

A node that dies takes with it what it had not shipped.  Its headers arrive more often than its events,
so that the count of some missing ones is known; what it wrote after its last header is bounded in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from verl_profiler.reading.descriptions import instant
from verl_profiler.reading.discovery import Source
from verl_profiler.units import counted, some

__all__ = ["not_arrived", "shipment_problems"]

# Without news for so long, and the interval between two shipments, the driver has been killed.
_SILENCE_S = 90.0
_SHOWN = 4


def not_arrived(source: Source) -> dict[str, Mapping[str, Any]]:
    """Return the nodes that did not send everything, by the names of their processes here."""
    return {
        process: node
        for node in source.shipping.get("nodes") or ()
        if node.get("state") != "ended"
        for process in _names(node)
    }


def shipment_problems(
    source: Source,
    counts: Mapping[str, int],
    recorded: Mapping[str, int],
    now: datetime | None = None,
) -> Iterator[str]:
    """Yield a sentence for each node that did not send everything.

    Args:
        source: The run.
        counts: Events read, by process.
        recorded: Events written, by process, according to the last headers.
        now: The present, to distinguish a run that goes on.
    """
    for node in source.shipping.get("nodes") or ():
        if node.get("state") == "ended":
            continue
        names = _names(node)
        missing = sum(max(recorded.get(name, 0) - counts.get(name, 0), 0) for name in names)
        yield from _of_node(
            source.shipping, node, names, missing, now or datetime.now(timezone.utc)
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
    updated = instant(shipping.get("updated"))
    every_s = shipping.get("every_s") or 0.0
    left = instant(node.get("left"))
    shipped, seen = instant(node.get("shipped")), instant(node.get("seen"))
    last = f"its events were last shipped at {_clock(shipped)}" if shipped else "no shipment ended"
    known = f"{counted(missing, 'event')} that its processes had written by {_clock(seen)} did not arrive"
    if left is not None:
        gap_s = (left - (seen or left)).total_seconds()
        yield (
            f"{host} left the cluster by {_clock(left)}; {last}: {known}, and up to {gap_s:.0f} s of "
            f"later events are lost with its disk ({named})"
        )
        return
    goes_on = updated is not None and (now - updated).total_seconds() < _SILENCE_S + every_s
    if shipping.get("ended") is None and goes_on:
        if missing:
            yield (
                f"{counted(missing, 'event')} of {named} are still on {host}; they are shipped every "
                f"{every_s:g} s"
            )
        return
    why = f" ({node['problem']})" if node.get("problem") else ""
    yield (
        f"{host} did not send all of its events{why}; {last}: {known}, later ones are on its disk "
        f"({named}). While the cluster is up, run: verl-profiler collect --ray "
        f"{shipping.get('directory') or 'RUN'}"
    )


def _names(node: Mapping[str, Any]) -> list[str]:
    """Return the names of a node's processes in the run directory."""
    processes: Mapping[str, str] = node.get("processes") or {}
    return sorted(processes.values())


def _clock(moment: datetime | None) -> str:
    return f"{moment:%H:%M:%S} UTC" if moment is not None else "an unknown time"
