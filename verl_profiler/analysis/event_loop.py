"""When event loops stalled, which calls blocked them, and which requests waited meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler.analysis.selection import Rows, Steps, grouped, in_steps
from verl_profiler.events.vocabulary import COMPUTING_ROLES
from verl_profiler.reading.tables.tables import Tables

# The kind to look at first comes first.
STALL_KINDS = ("requests may wait", "no request waits there", "by design")

_SUMS = """count(*) AS lags, sum(duration_us) / 1e6 AS total_s, max(duration_us) / 1e6 AS max_s,
            arg_max(begin_us, (duration_us, -begin_us)) AS worst_begin_us"""
_COMPUTING = ", ".join(f"'{role}'" for role in COMPUTING_ROLES)


def loop_lags(tables: Tables, steps: Steps = None) -> Rows:
    """Sum up event-loop lags by process.

    Returns:
        Table `loop_lags`: one row per run, step, process and loop, worst first.
    """
    return tables.rows(
        f"""
        SELECT run, step, name, role, loop, {_SUMS} FROM lags WHERE {in_steps(steps)}
        GROUP BY run, step, name, role, loop ORDER BY run, step, max_s DESC, name, loop
        """
    )


def loop_suspects(tables: Tables, steps: Steps = None) -> Rows:
    """Group event-loop lags by process and by the call that caused them.

    While a loop is stalled, everything that awaits in it appears slow, wherever it happens to be:
    a lag is a suspect for every slow part that it overlaps.

    Returns:
        Table `loop_suspects`: one row per run, step, process, loop and blocking call, worst
        first.
    """
    return tables.rows(
        f"""
        WITH stalls AS (
            SELECT row_number() OVER (ORDER BY run, step, name, begin_us, duration_us) AS number,
                run, step, name, role, loop, during, file, line, begin_us, end_us, duration_us
            FROM lags WHERE {in_steps(steps)}
        ), hits AS (
            SELECT s.number, r.request_id,
                least(r.end_us, s.end_us) - greatest(r.begin_us, s.begin_us) AS overlap_us
            FROM stalls AS s JOIN requests AS r ON r.run = s.run AND r.name = s.name
                AND r.step = s.step AND r.begin_us < s.end_us AND r.end_us > s.begin_us
            WHERE s.role = 'agent_loop' AND r.finished
        ), touched AS (
            SELECT s.run, s.step, s.name, s.loop, s.during,
                count(DISTINCT h.request_id) AS requests, sum(h.overlap_us) AS overlap_us
            FROM stalls AS s JOIN hits AS h USING (number)
            GROUP BY s.run, s.step, s.name, s.loop, s.during
        ), lengths AS (
            SELECT run, step, duration_us AS step_us FROM steps WHERE finished
        ), summed AS (
            SELECT run, step, name, role, loop, during, {_SUMS},
                max(concat(file, ':', line)) FILTER (line IS NOT NULL) AS code
            FROM stalls GROUP BY run, step, name, role, loop, during
        )
        SELECT c.run, c.step, c.name, c.role, c.loop, c.during, code,
            c.role IN ({_COMPUTING}) AND c.during IS NOT NULL AS by_design, lags, total_s,
            max_s, total_s / nullif(step_us / 1e6, 0) AS step_share, worst_begin_us,
            CASE WHEN c.role = 'agent_loop' THEN coalesce(t.requests, 0) END AS requests,
            CASE WHEN c.role = 'agent_loop' THEN coalesce(t.overlap_us, 0) / 1e6 END AS requests_s
        FROM summed AS c
        LEFT JOIN touched AS t ON t.run = c.run AND t.step IS NOT DISTINCT FROM c.step
            AND t.name = c.name AND t.loop IS NOT DISTINCT FROM c.loop
            AND t.during IS NOT DISTINCT FROM c.during
        LEFT JOIN lengths AS l ON l.run = c.run AND l.step = c.step
        ORDER BY c.run, c.step, by_design, max_s DESC, c.name, c.loop, c.during
        """
    )


def stalls_over_steps(suspects: Rows) -> Rows:
    """Sum the rows of `loop_suspects` over all steps.

    Returns:
        One row per process, loop and blocking call, with its `kind`, of which the first comes first.
    """
    found: Rows = []
    for own in grouped(suspects, "name", "loop", "during").values():
        first = own[0]
        kind = STALL_KINDS[not stall_weight(first)[0]]
        found.append(
            first
            | {name: sum(row[name] for row in own) for name in ("total_s", "lags")}
            | {"max_s": max(row["max_s"] for row in own)}
            | {"kind": STALL_KINDS[2] if first["by_design"] else kind}
        )
    order = STALL_KINDS.index
    return sorted(found, key=lambda row: (order(row["kind"]), -row["total_s"], row["name"]))


def stall_weight(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Return what sorts stalls: one where requests wait matters most, then a long one."""
    waits = row["role"] in ("agent_loop", "engine", "reward", "trainer")
    return waits and (row["step"] or 0) > 0, row["max_s"]
