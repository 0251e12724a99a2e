"""What the page shows, as plain data: the tables of each section, small enough to be inlined.

Every number comes from `verl_profiler.analysis` or from SQL over all events; only what is drawn
request by request is a sample (`verl_profiler.report.timelines`).  Rows name their step by its
place in `steps`; -1 stands for all steps together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verl_profiler import analysis
from verl_profiler.analysis.selection import in_steps
from verl_profiler.events import FAMILIES
from verl_profiler.reader import Run
from verl_profiler.report.conclusions import conclusions, notes
from verl_profiler.report.frames import frame, short_text
from verl_profiler.report.log_section import log_section
from verl_profiler.report.timelines import timelines
from verl_profiler.schemas import SCHEMAS
from verl_profiler.step_lines import LoggedRun
from verl_profiler.tables import Tables

__all__ = ["document"]

Rows = analysis.Rows
Steps = analysis.Steps

WHOLE = -1
# Tables by step are kept for the longest steps and for a systematic sample of the others.
_DETAILED_STEPS = 150
_LONGEST_STEPS = 50
_CHARTED_STEPS = 1_000
_ROWS = 4_000
# These compute inside their event loops: that a loop stands still says nothing there.
_COMPUTING = ("actor", "critic", "ref", "rollout")
_CDF = (*(place / 50 for place in range(50)), 0.985, 0.99, 0.995, 0.999, 1.0)


def document(
    run: Run, steps: Steps = None, log: tuple[LoggedRun, Sequence[str]] | None = None
) -> dict[str, Any]:
    """Gather everything that the page shows.

    Args:
        run: An open run.
        steps: First and last step to show; all when None.
        log: The run in a console log, with what was found while the log was read.

    Returns:
        A JSON object: `about`, `sentences`, `notes` and `problems` for the reader; `steps` and
        one table (`columns`, `rows`) per section; `timelines`; `log`.
    """
    tables = run.tables
    with _kept(tables, steps) as kept:
        found = {
            name: ask(kept if name in ("tool_times", "transfer_totals") else tables, steps)
            for name, ask in _ASKED.items()
        }
        whole = _whole(tables, steps)
    found["turn_times"] = _turn_times(tables, steps)
    found["request_cdf"] = _request_cdf(tables, steps)
    found["requests_in_flight"] = _requests_in_flight(tables, steps)
    found["captures"] = _captures(tables, steps)

    listed = found["step_times"]
    several = len(run.labels) > 1
    places = {(row["run"], row["step"]): place for place, row in enumerate(listed)}
    detailed = _detailed(listed)
    recorded = {row["event"]: row["events"] for row in _recorded(tables)}
    drawn = timelines(tables, steps, listed, places)
    data = {
        "about": _about(run, tables, listed, recorded),
        "steps": _steps(listed, found, several=several),
        "detailed": sorted(detailed),
        "fractions": _CDF,
        "computing": list(_COMPUTING),
        "timelines": drawn,
        "problems": [short_text(problem, 2_000) for problem in run.problems],
    }
    for name, rows in found.items():
        if name in ("step_times", "slowest_requests"):
            continue
        # The chart of the steps needs the phases of all of them.
        chart = name == "step_phases" and len(listed) <= _CHARTED_STEPS
        kept_steps = set(places.values()) if chart else detailed
        kept = _placed(rows, places, kept_steps, 10 * _CHARTED_STEPS if chart else _ROWS)
        kept += [{"s": WHOLE, **row} for row in whole.get(name, ())]
        data[name] = frame(kept, drop=("run", "step"))
    data["longest_lags"] = frame(_longest_lags(tables, steps, places), drop=("run", "step"))
    data["log"] = log and log_section(tables, *log, steps, places, WHOLE)
    data["sentences"] = conclusions(found, listed, several=several)
    data["notes"] = notes(found, recorded, _settings(run), FAMILIES)
    return data


_ASKED = {
    ask.__name__: ask
    for ask in (
        analysis.step_times,
        analysis.step_phases,
        analysis.step_tail,
        analysis.request_times,
        analysis.request_parts,
        analysis.turns_per_request,
        analysis.slowest_requests,
        analysis.tool_times,
        analysis.engine_times,
        analysis.replica_balance,
        analysis.rollout_balance,
        analysis.rank_balance,
        analysis.weight_sync,
        analysis.transfer_totals,
        analysis.loop_lags,
        analysis.memory_peaks,
        analysis.range_times,
        analysis.top_kernels,
        analysis.gpu_idle,
        analysis.profiler_cost,
    )
}


_WHOLE: dict[str, tuple[Callable[[Tables], Rows], tuple[str, ...]]] = {
    # Name of the analysis → what it reads.
    "request_times": (analysis.request_times, ("requests",)),
    "request_parts": (analysis.request_parts, ("requests",)),
    "turns_per_request": (analysis.turns_per_request, ("requests",)),
    "tool_times": (analysis.tool_times, ("tool_calls",)),
    "engine_times": (analysis.engine_times, ("engine_calls",)),
    "replica_balance": (analysis.replica_balance, ("engine_calls",)),
    "rank_balance": (analysis.rank_balance, ("rank_spans",)),
    "transfer_totals": (analysis.transfer_totals, ("transfers",)),
    "loop_lags": (analysis.loop_lags, ("lags",)),
    "memory_peaks": (analysis.memory_peaks, ("memory",)),
}


# Tables that are views of the events, and what the analyses of them read.
_KEPT = {
    "tool_calls": ("run", "step", "validate", "tool", "status", "duration_us"),
    "transfers": ("run", "step", "role", "event", "status", "duration_us", "size_bytes", "rows"),
}


def _whole(tables: Tables, steps: Steps) -> dict[str, Rows]:
    """Ask the same questions of all steps together."""
    with _merged(tables, steps) as merged:
        answers = {name: ask(merged) for name, (ask, _) in _WHOLE.items()}
        answers["turn_times"] = _turn_times(merged, None)
        answers["request_cdf"] = _request_cdf(merged, None)
    for name in ("engine_times", "replica_balance"):
        for row in answers[name]:
            # From the first call to the last there is training in between.
            row["tokens_per_s"] = None
    answers["step_phases"] = tables.rows(
        f"""
        WITH parts AS (
            SELECT phase, duration_us FROM phases
            WHERE parent = 'step' AND {in_steps(steps)}
            UNION ALL
            SELECT 'unaccounted', unaccounted_us FROM steps WHERE finished AND {in_steps(steps)}
        )
        SELECT phase, sum(duration_us) / 1e6 AS duration_s,
            sum(duration_us) / nullif(sum(sum(duration_us)) OVER (), 0) AS share,
            count(*) AS count
        FROM parts GROUP BY phase ORDER BY phase = 'unaccounted', duration_s DESC, phase
        """
    )
    return answers


@contextmanager
def _kept(tables: Tables, steps: Steps) -> Iterator[Tables]:
    """Keep what several analyses read from the events, and give tables that read it from there."""
    connection = tables.connection
    connection.execute("CREATE SCHEMA kept")
    cursor = connection.cursor()
    try:
        cursor.execute("SET search_path = 'kept,main'")
        kept = Tables(cursor)
        for name, columns in _KEPT.items():
            tables.make(name)
            listed = ", ".join(
                f'"{column}"' if column in columns else f'NULL::{kind} AS "{column}"'
                for column, kind in SCHEMAS[name].items()
            )
            connection.execute(
                f"CREATE TABLE kept.{name}_rows AS SELECT {listed} FROM main.{name} "
                f"WHERE {in_steps(steps)}"
            )
            kept.take(name, f"SELECT * FROM kept.{name}_rows")
        yield kept
    finally:
        cursor.close()
        connection.execute("DROP SCHEMA kept CASCADE")


@contextmanager
def _merged(tables: Tables, steps: Steps) -> Iterator[Tables]:
    """Give tables in which all steps are one."""
    names = sorted({name for _, reads in _WHOLE.values() for name in (*reads, "turns")})
    tables.make(*names)
    connection = tables.connection
    connection.execute("CREATE SCHEMA whole")
    cursor = connection.cursor()
    try:
        cursor.execute("SET search_path = 'whole,main'")
        merged = Tables(cursor)
        for name in names:
            source = f"kept.{name}_rows" if name in _KEPT else f"main.{name}"
            merged.take(
                name,
                f"SELECT * REPLACE ('' AS run, 0 AS step) FROM {source} WHERE {in_steps(steps)}",
            )
        yield merged
    finally:
        cursor.close()
        connection.execute("DROP SCHEMA whole CASCADE")


def _recorded(tables: Tables) -> Rows:
    return tables.rows("SELECT event, count(*) AS events FROM events GROUP BY event")


def _detailed(listed: Rows) -> set[int]:
    """Choose the steps whose tables are kept."""
    if len(listed) <= _DETAILED_STEPS:
        return set(range(len(listed)))
    by_length = sorted(range(len(listed)), key=lambda place: -(listed[place]["duration_s"] or 0))
    rest = _DETAILED_STEPS - _LONGEST_STEPS
    spread = {round(place * (len(listed) - 1) / (rest - 1)) for place in range(rest)}
    return spread | set(by_length[:_LONGEST_STEPS])


def _placed(
    rows: Rows, places: Mapping[tuple[Any, Any], int], detailed: set[int], limit: int
) -> Rows:
    placed = []
    for row in rows:
        place = places.get((row["run"], row["step"]))
        if place is not None and place in detailed:
            placed.append({"s": place, **row})
    if len(placed) > limit:
        # Rows come worst first within their step: keep as many of each step as there is room for.
        each = max(1, limit // len({row["s"] for row in placed}))
        counts: dict[int, int] = {}
        for row in placed:
            counts[row["s"]] = counts.get(row["s"], 0) + 1
            row["rank_in_step"] = counts[row["s"]]
        placed = [row for row in placed if row.pop("rank_in_step") <= each]
    return placed


def _steps(listed: Rows, found: Mapping[str, Rows], *, several: bool) -> dict[str, Any]:
    """Bring together what the overview says about each step."""

    def by_step(name: str, **equal: Any) -> dict[tuple[Any, Any], Mapping[str, Any]]:
        chosen: dict[tuple[Any, Any], Mapping[str, Any]] = {}
        for row in found[name]:
            if all(row[key] == value for key, value in equal.items()):
                chosen.setdefault((row["run"], row["step"]), row)
        return chosen

    times = by_step("request_times", validate=False)
    tails = by_step("step_tail")
    phases = by_step("step_phases")
    engines = by_step("engine_times", validate=False)
    costs = by_step("profiler_cost")
    rows = []
    for place, row in enumerate(listed):
        key = (row["run"], row["step"])
        time, tail, phase = times.get(key, {}), tails.get(key, {}), phases.get(key, {})
        engine, cost = engines.get(key, {}), costs.get(key, {})
        name = str(row["step"]) if row["step"] is not None else "none"
        rows.append(
            {
                "s": place,
                "label": f"{name} of {row['run']}" if several else name,
                **{key: value for key, value in row.items() if key != "run"},
                **{
                    key: time.get(key) for key in ("p50_s", "p95_s", "p99_s", "max_s", "mean_turns")
                },
                "failed_requests": time.get("failed"),
                **{key: tail.get(key) for key in ("after_p80_s", "after_p95_s", "after_p99_s")},
                "spread_s": tail.get("spread_s"),
                "poll_s": tail.get("poll_s"),
                "longest_phase": phase.get("phase"),
                "longest_share": phase.get("share"),
                "response_tokens": engine.get("response_tokens"),
                "tokens_per_s": engine.get("tokens_per_s"),
                "profiler_share": cost.get("share"),
            }
        )
    return frame(rows)


def _turn_times(tables: Tables, steps: Steps) -> Rows:
    """Summarize turns by their index."""
    return tables.rows(
        f"""
        SELECT run, step, validate, turn, turns,
            q[1] / 1e6 AS p50_s, q[2] / 1e6 AS p95_s, max_us / 1e6 AS max_s, mean_us / 1e6 AS mean_s,
            engine_us / 1e6 AS engine_s, tool_us / 1e6 AS tool_s, other_us / 1e6 AS other_s,
            prompt_tokens, response_tokens, total_us / nullif(sum(total_us)
                OVER (PARTITION BY run, step, validate), 0) AS share
        FROM (
            SELECT run, step, validate, turn, count(*) AS turns,
                quantile_cont(duration_us, [0.5, 0.95]) AS q, max(duration_us) AS max_us,
                avg(duration_us) AS mean_us, avg(engine_us) AS engine_us, avg(tool_us) AS tool_us,
                avg(duration_us - engine_us - tool_us) AS other_us, sum(duration_us) AS total_us,
                avg(prompt_tokens) AS prompt_tokens, avg(response_tokens) AS response_tokens
            FROM turns WHERE finished AND {in_steps(steps)} GROUP BY run, step, validate, turn
        ) ORDER BY run, step, validate, turn
        """
    )


def _request_cdf(tables: Tables, steps: Steps) -> Rows:
    """Give the durations below which each part of `_CDF` of the finished requests lies."""
    return tables.rows(
        f"""
        SELECT run, step, validate, count(*) AS requests,
            quantile_cont(duration_us / 1e6, {list(_CDF)}) AS quantiles_s
        FROM requests WHERE finished AND {in_steps(steps)}
        GROUP BY run, step, validate ORDER BY run, step, validate
        """
    )


def _requests_in_flight(tables: Tables, steps: Steps) -> Rows:
    """Count the training requests that are open, in 160 equal parts of the step's rollout.

    Returns:
        One row per run and step: begin_s (after the step's begin), spread_s, most, mean, counts
        (the highest count in each part).
    """
    return tables.rows(
        f"""
        WITH spans AS MATERIALIZED (
            SELECT run, step, begin_us, coalesce(end_us, last_us) AS end_us FROM requests
            WHERE NOT validate AND step IS NOT NULL AND {in_steps(steps)}
        ), extents AS (
            SELECT run, step, min(begin_us) AS first_us, max(end_us) AS last_us,
                greatest(max(end_us) - min(begin_us), 1) AS spread_us,
                sum(end_us - begin_us) AS work_us
            FROM spans GROUP BY run, step
        ), changes AS (
            SELECT run, step, begin_us AS at_us, 1 AS change FROM spans
            UNION ALL SELECT run, step, end_us, -1 FROM spans
        ), running AS (
            SELECT run, step, at_us, sum(change) OVER ordered AS open,
                row_number() OVER ordered AS number
            FROM changes
            WINDOW ordered AS (PARTITION BY run, step ORDER BY at_us, change DESC
                ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
        ), parts AS (
            SELECT c.run, c.step,
                least(floor((at_us - first_us) * 160.0 / spread_us), 159)::INTEGER AS part,
                max(open)::INTEGER AS most, arg_max(open, number)::INTEGER AS last
            FROM running AS c JOIN extents USING (run, step) GROUP BY ALL
        )
        SELECT p.run, p.step, (any_value(first_us) - any_value(s.begin_us)) / 1e6 AS begin_s,
            any_value(spread_us) / 1e6 AS spread_s, max(most) AS most,
            any_value(work_us / spread_us) AS mean,
            list([part, most, last] ORDER BY part) AS counts
        FROM parts AS p JOIN extents AS e USING (run, step) JOIN steps AS s USING (run, step)
        GROUP BY p.run, p.step ORDER BY p.run, p.step
        """
    )


def _captures(tables: Tables, steps: Steps) -> Rows:
    return tables.rows(
        f"""
        SELECT run, step, name, host, task, tool, file, size_bytes, problem,
            (end_ns - begin_ns) / 1e9 AS duration_s
        FROM captures WHERE {in_steps(steps)} ORDER BY run, step, name, number
        """
    )


def _longest_lags(tables: Tables, steps: Steps, places: Mapping[tuple[Any, Any], int]) -> Rows:
    rows = tables.rows(
        f"""
        SELECT run, step, name, role, extra->>'$.loop' AS loop, extra->>'$.during' AS during,
            duration_us / 1e6 AS duration_s, begin_us
        FROM events WHERE family = 'event_loop' AND duration_us IS NOT NULL AND {in_steps(steps)}
            AND coalesce(role, '') NOT IN {_COMPUTING}
        ORDER BY duration_us DESC, begin_us, name LIMIT 40
        """
    )
    begins = {(row["run"], row["step"]): row["begin_us"] for row in tables.rows("FROM steps")}
    kept = []
    for row in rows:
        key = (row["run"], row["step"])
        if key in places:
            begin_us = row.pop("begin_us")
            kept.append({"s": places[key], **row, "at_s": (begin_us - begins[key]) / 1e6})
    return kept


def _settings(run: Run) -> dict[str, Any]:
    """Return the `events` settings of the first run that has them."""
    for launch in run.launches.values():
        settings = launch.get("settings")
        events = settings.get("events") if isinstance(settings, dict) else None
        if isinstance(events, dict):
            return events
    return {}


def _about(run: Run, tables: Tables, listed: Rows, recorded: Mapping[str, int]) -> dict[str, Any]:
    launches = []
    for label in run.labels:
        launch = run.launches.get(label) or {}
        facts = [
            [key, short_text(str(launch[key]))]
            for key in ("experiment", "launched", "host", "cwd")
            if launch.get(key) is not None
        ]
        command = launch.get("command")
        if isinstance(command, list):
            facts.append(["command", short_text(" ".join(map(str, command)), 4_000)])
        groups = {}
        for group in ("training", "versions", "settings"):
            value = launch.get(group)
            if isinstance(value, dict):
                groups[group] = [[short_text(key), short_text(text)] for key, text in _flat(value)][
                    :200
                ]
        launches.append({"run": short_text(label), "facts": facts, **groups})
    processes = tables.rows(
        "SELECT run, name, role, rank, host, pid, recorded_events, size_bytes, dropped, "
        "write_errors, wrapper_s, writer_s, ended, end_reason FROM processes "
        "ORDER BY run, role, rank, name"
    )
    missed = tables.rows(
        "SELECT run, name, header->'$.probes.missed' AS missed FROM processes "
        "WHERE json_type(header, '$.probes.missed') = 'OBJECT' ORDER BY run, name"
    )
    return {
        "runs": [short_text(label) for label in run.labels],
        "events": sum(recorded.values()),
        "requests": sum(row["requests"] for row in listed),
        "validation_requests": sum(row["validation_requests"] for row in listed),
        "launches": launches,
        "processes": frame(processes[:_ROWS]),
        "missed": _missed(missed),
    }


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, each in value.items():
        if isinstance(each, dict) and each:
            yield from _flat(each, f"{prefix}{key}.")
        else:
            text = each if isinstance(each, str) else json.dumps(each, default=str)
            yield f"{prefix}{key}", text


def _missed(rows: Rows) -> list[list[str]]:
    """Say which probes were not placed, and in how many processes."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        try:
            missed = json.loads(row["missed"])
        except ValueError:
            continue
        for probe, reason in missed.items():
            found.setdefault((str(probe), str(reason)), []).append(row["name"])
    return [
        [short_text(probe), short_text(reason), f"{len(names)} ({', '.join(names[:3])})"]
        for (probe, reason), names in sorted(found.items())
    ]
