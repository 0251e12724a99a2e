"""The time of a step as a tree that adds up: step, phases, components of requests, tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_profiler.analysis.requests import request_parts
from verl_profiler.analysis.selection import Rows, Steps, estimated, grouped, in_steps
from verl_profiler.analysis.steps import rollout_tail, step_phases
from verl_profiler.reading.tables.tables import Tables

# Tools beyond these are summed up as `other`.
_TOOLS = 12


def time_tree(tables: Tables, steps: Steps = None) -> Rows:
    """Cut each finished step into phases, `gen` into components of requests, `tool` into tools.

    Requests run side by side: a component counts its request time divided by the step's max
    concurrency, and `idle slots` is the rest of `gen`.  Calls of tools that overlap share the time
    of `tool` in proportion to their durations; `other` is what no call covers, and the tools
    beyond the first twelve.  Of asynchronous steps, whose requests begin in others, `gen` is not cut.

    Returns:
        Table `time_tree`: one row per node of the tree of each run and step, in preorder.
    """
    keys = ("run", "step")
    timed = (row for row in step_phases(tables, steps) if row["share"] is not None)
    trained = (row for row in request_parts(tables, steps) if not row["validate"])
    phases, parts = grouped(timed, *keys), grouped(trained, *keys)
    tools = grouped(_tools(tables, steps), *keys)
    peaks = {(row["run"], row["step"]): row["peak"] for row in rollout_tail(tables, steps)}
    found: Rows = []
    for key, own in phases.items():
        place = dict(zip(keys, key, strict=True))
        rows = [_row(duration_s=sum(row["duration_s"] for row in own))]
        for phase in own:
            rows.append(_row(phase["phase"], duration_s=phase["duration_s"]))
            if phase["phase"] == "gen" and key in parts and key in peaks:
                rows += _components(phase["duration_s"], peaks[key], parts[key], tools.get(key, []))
        found += [{**place, **row} for row in rows]
    return found


def _components(gen_s: float, peak: int, parts: Rows, tools: Rows) -> Iterator[dict[str, Any]]:
    spent_s = sum(part["total_s"] for part in parts) / peak
    # Components that overlap, or run on after `gen`, are more than it has room for.
    scale = min(1.0, gen_s / spent_s) / peak if spent_s else 0.0
    for part in parts:
        component, duration_s = part["part"], part["total_s"] * scale
        if not duration_s:
            continue
        yield _row("gen", component, duration_s=duration_s)
        if component == "tool" and tools:
            yield from _calls(duration_s, part["total_s"], tools)
    yield _row("gen", "idle slots", duration_s=max(0.0, gen_s - min(spent_s, gen_s)))


def _calls(tool_s: float, total_s: float, tools: Rows) -> Iterator[dict[str, Any]]:
    scale = tool_s / max(total_s, sum(row["total_s"] for row in tools))
    rest_s = tool_s
    for row in tools[:_TOOLS]:
        rest_s -= row["total_s"] * scale
        yield _row("gen", "tool", row["tool"], row["total_s"] * scale)
    if rest_s > 1e-9:
        yield _row("gen", "tool", "other", rest_s)


def _row(
    phase: str | None = None,
    component: str | None = None,
    tool: str | None = None,
    duration_s: float = 0.0,
) -> dict[str, Any]:
    return {"phase": phase, "component": component, "tool": tool, "duration_s": duration_s}


def _tools(tables: Tables, steps: Steps) -> Rows:
    """Sum up the calls of each tool by finished training requests, most time first."""
    return tables.rows(
        f"""
        SELECT c.run, c.step, coalesce(c.tool, '(no name)') AS tool,
            sum(c.duration_us) / 1e6 AS total_s
        FROM {estimated("tool_calls")} AS c SEMI JOIN (
            SELECT * FROM requests WHERE finished AND NOT validate AND {in_steps(steps)}
        ) AS r ON c.run = r.run AND c.step = r.step AND c.name = r.name
            AND c.request_id = r.request_id
        WHERE c.duration_us > 0 AND NOT c.validate GROUP BY ALL ORDER BY c.run, c.step, total_s DESC, tool
        """
    )


def whole_time_tree(rows: Rows) -> Rows:
    """Sum up the trees of all steps, the largest first at each level."""
    sums: dict[tuple[str | None, ...], float] = {}
    for row in rows:
        key = (row["phase"], row["component"], row["tool"])
        sums[key] = sums.get(key, 0.0) + row["duration_s"]

    def place(key: tuple[str | None, ...]) -> list[tuple[float, str]]:
        parents = [(*key[:depth], *[None] * (3 - depth)) for depth in range(1, 4) if key[depth - 1]]
        return [(-sums[parent], str(parent)) for parent in parents]

    return [_row(*key, duration_s=sums[key]) for key in sorted(sums, key=place)]
