"""The conclusion about a run in two sentences, and missing quantities with their reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_profiler.analysis.selection import NOTHING, LeftOut, named, steady
from verl_profiler.events.json_values import is_list, is_mapping
from verl_profiler.events.vocabulary import LAG_THRESHOLD_S
from verl_profiler.render.text import without
from verl_profiler.units import added, seconds, share
from verl_profiler.views.step_text import of_which

__all__ = ["conclusions", "notes"]

Rows = Sequence[Mapping[str, Any]]


def conclusions(
    found: Mapping[str, Rows], listed: Rows, left_out: LeftOut = NOTHING, *, several: bool
) -> list[str]:
    """Return the step times, their largest phases, and the slowest request.

    Args:
        found: The rows of the analyses, by name.
        listed: The rows of `step_times`.
        left_out: The steps that the figures leave out as warm-up.
        several: Whether several runs are shown; steps are then named with their run.
    """
    sentences = [_steps(found, listed, left_out), _slowest(found, several=several)]
    return [sentence for sentence in sentences if sentence]


def notes(
    found: Mapping[str, Rows],
    recorded: Mapping[str, int],
    settings: Mapping[str, Any],
    families: Sequence[str],
) -> dict[str, list[str]]:
    """Return the missing quantities of each section, and how to record them.

    Args:
        found: The rows of the analyses, by name.
        recorded: Number of events by name.
        settings: `profiler.events` of the run.
        families: The probe families.
    """
    excluded, switches = settings.get("exclude"), settings.get("families")
    off = {each for each in families if is_list(excluded) and each in excluded}
    # Runs of earlier versions have one switch per family.
    off |= {each for each in families if is_mapping(switches) and switches.get(each) is False}

    def missing(family: str, text: str) -> list[str]:
        if family in off:
            return [f"{text} profiler.events.exclude had {family}."]
        return [text]

    result: dict[str, list[str]] = {}
    if not any(row["finished"] for row in found["step_times"]):
        result["steps"] = missing(
            "trainer", "No finished steps: none was completed, or the trainer was not recorded."
        )
    if not any(recorded.get(name) for name in ("request", "request_start", "engine_call")):
        for section in ("rollout", "requests", "turns"):
            result[section] = missing("rollout", "No requests were recorded.")
    engine = _engine(found, recorded, settings, missing)
    if engine:
        result["engine"] = engine
    if not found["tool_times"]:
        result["tools"] = missing("rollout", "No tool calls were recorded.")
    if not found["transfer_totals"]:
        result["transfers"] = missing("transfer_queue", "No TransferQueue calls were recorded.")
    if not found["weight_sync"]:
        result["weights"] = missing("weights", "No weight syncs were recorded.")
    if not found["memory_peaks"]:
        text = (
            "Memory was recorded, but the device has no memory counter (a CPU has none)."
            if recorded.get("memory")
            else "Device memory was not recorded."
        )
        result["memory"] = missing("memory", text)
    if not found["loop_lags"]:
        threshold = settings.get("lag_threshold_s", LAG_THRESHOLD_S)
        text = (
            f"No event loop stalled for longer than {seconds(threshold)}."
            if settings and isinstance(threshold, (int, float)) and "event_loop" not in off
            else "No event-loop stalls were recorded."
        )
        result["lags"] = missing("event_loop", text)
    if not any(row["validate"] for row in found["request_times"]):
        result["validation"] = ["No validation requests were recorded."]
    if not found["rank_balance"]:
        result["ranks"] = missing("workers", "No activity of trainer workers was recorded.")
    if not recorded.get("profiler_cost"):
        result["cost"] = ["The profiler's own cost was not recorded."]
    return result


def _engine(
    found: Mapping[str, Rows],
    recorded: Mapping[str, int],
    settings: Mapping[str, Any],
    missing: Any,
) -> list[str]:
    times = found["engine_times"]
    if not times:
        return missing("rollout", "No engine calls were recorded.")
    if not recorded.get("engine_request"):
        return missing(
            "engine",
            "The engine servers were not recorded: engine calls have no components.",
        )
    absent = [
        name
        for name in ("queue", "prefill", "decode")
        if all(r[f"{name}_s"] is None for r in times)
    ]
    if not absent:
        return []
    listed = f"{', '.join(absent[:-1])} and {absent[-1]}" if len(absent) > 1 else absent[0]
    text = f"The engine did not report {listed} times"
    if settings.get("engine_timing") is False:
        return [f"{text}; set profiler.events.engine_timing=true."]
    return [f"{text}."]


def _steps(found: Mapping[str, Rows], listed: Rows, left_out: LeftOut) -> str:
    done = steady([row for row in listed if row["finished"]], left_out)
    finished = [row["duration_s"] for row in done]
    requests = added(row["requests"] for row in listed)
    if not finished:
        if not listed:
            return "No events of any step were recorded."
        span = max((row["seen_s"] or 0 for row in listed), default=0)
        if not requests and all(row["step"] == 0 for row in listed):
            return f"No training step started: {seconds(span)} of startup were recorded."
        return (
            f"No finished steps; {requests or 0:,} requests were recorded, "
            f"the longest step over {seconds(span)}."
        )
    sums: dict[str, float] = {}
    for row in found["step_phases"]:
        if row["share"] is not None and row["step"] not in left_out.get(row["run"], ()):
            sums[row["phase"]] = sums.get(row["phase"], 0.0) + row["duration_s"]
    total = sum(finished)
    count = sum(row["finished"] for row in listed)
    text = f"{count:,} step{'s' * (count != 1)}, "
    if len(finished) == 1:
        text += seconds(finished[0])
    else:
        text += (
            f"mean {seconds(sum(finished) / len(finished))} "
            f"({seconds(min(finished))} to {seconds(max(finished))}{without(named(left_out, listed))})"
        )
    ranked = sorted(sums.items(), key=lambda item: -item[1])[:2]
    if ranked and total:
        text += f"; {share(ranked[0][1] / total)} of it is {ranked[0][0]}"
        if len(ranked) > 1 and ranked[1][1] / total >= 0.1:
            text += f", {share(ranked[1][1] / total)} {ranked[1][0]}"
    unfinished = added(row["unfinished_requests"] for row in listed)
    text += "."
    if unfinished:
        text += f" {unfinished:,} of {requests:,} requests did not finish."
    return text


def _slowest(found: Mapping[str, Rows], *, several: bool) -> str:
    rows = [row for row in found["slowest_requests"] if row["duration_s"] is not None]
    if not rows:
        return ""
    row = max(rows, key=lambda each: each["duration_s"])
    step = f"step {row['step']}" + (f" of {row['run']}" if several else "")
    text = f"The slowest request ({step}, {row['name']}) took {seconds(row['duration_s'])}"
    return f"{text}{of_which(row)}."
