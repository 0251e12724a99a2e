"""What the evidence of a hang comes to: a line of each kind that matters, and all of it for `-v`.

The processes gathered it when the trainer's had found that the run is stuck; see docs/stuck.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_profiler.live.open_processes import (
    Process,
    Verdict,
    busy_threads,
    part,
    parts,
    some,
    texts,
)
from verl_profiler.units import counted

__all__ = ["with_evidence"]

_SHOWN = 3


def with_evidence(found: Verdict, processes: Sequence[Process]) -> Verdict:
    """Add to a verdict what the evidence of the processes comes to."""
    found.facts += _facts(processes)
    found.details += _details(processes)
    return found


def _facts(processes: Sequence[Process]) -> list[str]:
    """Return the load of the engines, a line for each."""
    lines = [f"{each.name}: {text}" for each in processes if (text := _engine_text(each))]
    others = len(lines) - _SHOWN * 2
    return lines if others <= 0 else [*lines[:-others], f"{others} other engines: see -v"]


def _engine_text(process: Process) -> str:
    """Write the load of an engine: `3 running, 5 waiting, KV cache 12 % of 16,384 tokens`."""
    found = part(process.evidence, "engine")
    facts: list[str] = []
    unanswered = found.get("unanswered")
    if unanswered == "scheduler":
        facts.append("its scheduler does not answer")
    elif unanswered:
        facts.append(f"its {unanswered} does not answer")
    elif "engine" in texts(process.evidence, "unanswered"):
        facts.append("its server does not answer")
    loads = parts(found, "loads")
    for key, word in (("running_requests", "running"), ("waiting_requests", "waiting")):
        known = [each[key] for each in loads if each.get(key) is not None]
        if known:
            facts.append(f"{sum(known)} {word}")
    capacity = sum(each.get("kv_capacity_tokens") or 0 for each in loads)
    if capacity:
        used = sum(each.get("kv_used_tokens") or 0 for each in loads)
        facts.append(f"KV cache {100 * used / capacity:.0f} % of {capacity:,} tokens")
    if found.get("requests") is not None:
        facts.append(f"{counted(found['requests'], 'request')} in its server")
    if found.get("paused"):
        facts.append("paused")
    ages = [each["age_s"] for each in loads if each.get("age_s") is not None]
    if ages:
        facts.append(f"last iteration {max(ages):.0f} s before")
    return ", ".join(facts)


def _details(processes: Sequence[Process]) -> list[str]:
    """Return the lines of the evidence for `-v`, a few for each process."""
    lines: list[str] = []
    for each in processes:
        own = [*_process_details(each)] if each.evidence else []
        if own:
            lines += [f"{each.name}:", *(f"    {text}" for text in own)]
    return lines


def _process_details(process: Process) -> Iterator[str]:
    found: Mapping[str, Any] = process.evidence
    text = _engine_text(process)
    if text:
        yield f"engine: {text}"
    stacks = part(found, "stacks")
    tasks = [row for row in parts(stacks, "tasks") if texts(row, "stack")]
    for row in tasks[:_SHOWN]:
        awaited = f", awaiting {row['awaits']}" if row.get("awaits") else ""
        stack = texts(row, "stack")
        at = next((each for each in stack[::-1] if not each.startswith("asyncio.")), stack[-1])
        yield f"{counted(row.get('tasks') or 0, 'task')} in {at}{awaited}"
    threads = busy_threads(found)
    if threads:
        yield f"threads in {some(threads)}"
    for name in texts(found, "unanswered"):
        yield f"{name}: no answer in time"
    for name, error in part(found, "errors").items():
        yield f"{name}: not available ({error})"
