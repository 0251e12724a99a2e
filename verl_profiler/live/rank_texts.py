"""Where the ranks of a run are, in words: in which collectives, and which of them in none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.live.open_processes import Process, grouped, some

__all__ = ["function_of", "ranks_text"]


def function_of(row: Mapping[str, Any]) -> str:
    """Return the function that a row stands in, without module and line: `all_reduce`."""
    return str(row.get("at")).rpartition(":")[0].rpartition(":")[2].rpartition(".")[2]


def ranks_text(
    waits: Sequence[tuple[Process, Mapping[str, Any]]],
    works: Sequence[tuple[Process, Mapping[str, Any]]],
    idle: Sequence[Process],
    silent: Sequence[Process],
) -> str:
    """Write where the ranks are: `7 of 8 ranks are in all_reduce, actor_5 is in torch.load:3`."""
    count = len(waits) + len(works) + len(idle) + len(silent)
    texts: list[str] = []
    for name, number in Counter(function_of(row) for _, row in waits).most_common():
        texts.append(f"{number} of {count} ranks {'is' if number == 1 else 'are'} in {name}")
    places = grouped(works)
    groups = [([each.name for each, _ in rows], f"in {at}") for at, rows in places.items()]
    groups.append(([each.name for each in idle], "in no recorded call"))
    groups.append(([each.name for each in silent], "without a sign of life"))
    for names, where in groups:
        if names:
            texts.append(f"{some(names)} {'is' if len(names) == 1 else 'are'} {where}")
    return ", ".join(texts)
