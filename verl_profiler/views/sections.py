"""What the page shows, as plain data: the tables of each section, small enough to be inlined.

Every number comes from `verl_profiler.analysis` or from SQL over all events; only what is drawn
request by request is a sample (`verl_profiler.views.timelines`).  Rows name their step by its
place in `steps`; -1 stands for all steps together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from verl_profiler.analysis.captures import gpu_idle, range_times, top_kernels
from verl_profiler.analysis.engine import engine_times, replica_balance
from verl_profiler.analysis.event_loop import longest_lags, loop_lags
from verl_profiler.analysis.memory import (
    memory_findings,
    memory_peaks,
    memory_timeline,
    release_effects,
    sleep_times,
)
from verl_profiler.analysis.registry import explanations, summarized
from verl_profiler.analysis.requests import request_parts, request_times
from verl_profiler.analysis.selection import Rows, Steps, in_steps, left_out
from verl_profiler.analysis.steps import validation_times
from verl_profiler.analysis.time_tree import time_tree, whole_time_tree
from verl_profiler.analysis.tq_findings import tq_findings
from verl_profiler.analysis.transfers import transfer_totals
from verl_profiler.analysis.workers import rank_balance
from verl_profiler.events.vocabulary import COMPUTING_ROLES
from verl_profiler.reading.reader import Run
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.render.frames import frame, short_text
from verl_profiler.views.about_run import (
    about_run,
    event_settings,
    processes,
    recorded_events,
)
from verl_profiler.views.columns import page_view, shown_columns
from verl_profiler.views.conclusions import engine_notes, families_off
from verl_profiler.views.mean_step import mean_step
from verl_profiler.views.overview_text import head_text
from verl_profiler.views.page_sections import TABLES, page_sections
from verl_profiler.views.page_views import page_views
from verl_profiler.views.step_rows import step_rows
from verl_profiler.views.timelines import timelines
from verl_profiler.views.tq_text import finding_lines

__all__ = ["document"]


# Stands for all steps together.
WHOLE = -1
# Explanations that are tables, and tables with few rows in any step.
_EXPLAINED = ("step_replays", "straggler_requests")
_FEW = frozenset({"longest_lags", "validation_times"})
# Tables by step are kept for the longest steps and for a systematic sample of the others.
_DETAILED_STEPS = 150
_LONGEST_STEPS = 50
_ROWS = 4_000
_VIEW_ROWS = 1_000
# Explanations that leave the warm-up out, where a view has all steps.
_STEADY = frozenset({"stragglers", "straggler_requests"})
# Columns of the lists of steps and of requests, and the tables that describe them.
_STEP_COLUMNS = (
    *("duration_s", "gen_s", "longest_phase", "longest_share", "unaccounted_s", "requests"),
    *("p50_s", "p95_s", "max_s", "after_p80_s", "poll_s"),
    *("generated_tokens_per_s", "engine_tokens_per_s"),
)
_STEP_TABLES = ("step_times", "request_times", "step_tail", "engine_times")
_REQUEST_COLUMNS = (
    *("request_id", "step", "sample", "session", "name", "duration_s", "engine_s", "tool_s"),
    *("other_s", "turns", "generated_tokens", "reward", "status"),
)


def document(
    run: Run,
    steps: Steps = None,
) -> dict[str, Any]:
    """Gather everything that the page shows.

    Args:
        run: An open run.
        steps: First and last step to show; all when None.

    Returns:
        A JSON object: `about`, `sentences`, `mean_step`, `notes`, `problems`; `sections`, as `page_sections` gives
        them; `steps` and the tables (`columns`, `rows`) of the sections; `timelines`.
    """
    tables = run.tables
    with _explaining(tables, steps) as explained:
        found = summarized(tables, steps)
        whole = _whole(tables, steps)
        listed = found["step_times"]
        found |= {each.__name__: each(tables, steps) for each in _MORE}
        found["processes"] = processes(tables)
        warm_up = left_out(tables, steps)
        whole["time_tree"] = whole_time_tree(found["time_tree"])
        several = len(run.labels) > 1
        places = {(row["run"], row["step"]): place for place, row in enumerate(listed)}
        detailed = _detailed(listed)
        recorded = recorded_events(tables, steps)
        drawn = timelines(tables, steps, listed, places)
        whys = explained.result()
    found |= {name: whys[name] for name in ("critical_path", *_EXPLAINED)}
    data: dict[str, Any] = {
        "about": about_run(run, recorded),
        "steps": _steps(found, several=several),
        "detailed": sorted(detailed),
        "computing": list(COMPUTING_ROLES),
        "timelines": drawn,
        "problems": [short_text(problem, 2_000) for problem in run.problems],
    }
    tabled = {name: caption for own in TABLES.values() for name, caption in own.items()}
    frames: dict[str, dict[str, Any]] = {}
    for name in (*tabled, "time_tree"):
        rows = found[name]
        stepped = bool(rows) and "step" in rows[0]
        if stepped:
            # A tree of which rows are missing does not add up.
            limit = len(rows) if name == "time_tree" else _ROWS
            rows = _placed(rows, places, None if name in _FEW else detailed, limit)
            rows += [{"s": WHOLE, **row} for row in whole.get(name, ())]
        drop = ("run", "step") if stepped else () if several else ("run",)
        frames[name] = frame(rows, drop=drop)
    data["time_tree"] = frames["time_tree"]
    data["findings"] = whys["findings"]
    settings = event_settings(run)
    data["about"]["notes"] += families_off(settings)
    data["notes"] = {
        "Rollout": engine_notes(found, recorded, settings),
        "Memory and event loops": [
            f"{row['message']} {row['advice']}".strip()
            for row in memory_findings(tables, steps, launches=run.launches)
        ],
        "Data transfer": [
            short_text("; ".join(finding_lines(row)), 400) for row in tq_findings(tables, steps)
        ],
    }
    known = {name: rows for name, rows in (found | whys).items() if name not in _STEADY}
    views = page_views(run, steps, lambda rows: _placed(rows, places, detailed, _VIEW_ROWS), known)
    views |= {name: page_view(name, caption, frames[name]) for name, caption in tabled.items()}
    data["views"] = views
    data["sections"] = page_sections(views, data["notes"], whys["findings"])
    data["mean_step"] = mean_step(whys)
    data["columns"] = {
        "steps": shown_columns(_STEP_COLUMNS, *_STEP_TABLES),
        "requests": shown_columns(_REQUEST_COLUMNS, "request_breakdown"),
    }
    data["sentences"] = head_text({"step_times": listed}, run.labels, warm_up).split("\n")
    return data


@contextmanager
def _explaining(tables: Tables, steps: Steps) -> Generator[Future[dict[str, Rows]], None, None]:
    """Ask why the steps took so long, in a thread: half of that is Python, and no query."""
    own = tables.beside()
    try:
        with ThreadPoolExecutor(1, "verl_profiler-why") as threads:
            explained = threads.submit(explanations, own, steps)
            try:
                yield explained
            except BaseException:
                while not explained.done():
                    own.connection.interrupt()
                    wait([explained], timeout=0.1)
                raise
    finally:
        own.connection.close()


# Analyses, by the table that each reads.
_WHOLE: tuple[tuple[Callable[[Tables], Rows], str], ...] = (
    (request_times, "requests"),
    (request_parts, "requests"),
    (engine_times, "engine_calls"),
    (replica_balance, "engine_calls"),
    (rank_balance, "rank_spans"),
    (transfer_totals, "transfers"),
    (loop_lags, "lags"),
    (memory_peaks, "memory"),
    (memory_timeline, "memory_readings"),
)


def _whole(tables: Tables, steps: Steps) -> dict[str, Rows]:
    """Ask the same questions of all steps together."""
    with _merged(tables, steps) as merged:
        return {ask.__name__: ask(merged) for ask, _ in _WHOLE}


@contextmanager
def _merged(tables: Tables, steps: Steps) -> Generator[Tables, None, None]:
    """Give tables in which all steps are one."""
    names = sorted({name for _, name in _WHOLE})
    tables.make(*names)
    connection = tables.connection
    connection.execute("CREATE SCHEMA whole")
    cursor = connection.cursor()
    try:
        cursor.execute("SET search_path = 'whole,main'")
        merged = Tables(cursor)
        for name in names:
            merged.create_view(
                name,
                f"SELECT * REPLACE ('' AS run, 0 AS step) FROM main.{name} WHERE {in_steps(steps)}",
            )
        yield merged
    finally:
        cursor.close()
        connection.execute("DROP SCHEMA whole CASCADE")


def _detailed(listed: Rows) -> set[int]:
    """Choose the steps whose tables are kept."""
    if len(listed) <= _DETAILED_STEPS:
        return set(range(len(listed)))
    by_length = sorted(range(len(listed)), key=lambda place: -(listed[place]["duration_s"] or 0))
    rest = _DETAILED_STEPS - _LONGEST_STEPS
    spread = {round(place * (len(listed) - 1) / (rest - 1)) for place in range(rest)}
    return spread | set(by_length[:_LONGEST_STEPS])


def _placed(
    rows: Rows, places: Mapping[tuple[Any, Any], int], detailed: set[int] | None, limit: int
) -> Rows:
    """Name the step of rows by its place on the page, and keep those of some steps; of all when None."""
    placed: Rows = []
    for row in rows:
        place = places.get((row["run"], row["step"]))
        if place is not None and (detailed is None or place in detailed):
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


def _steps(found: Mapping[str, Rows], *, several: bool) -> dict[str, Any]:
    """Collect what the overview shows of each step."""
    rows: Rows = []
    for place, row in enumerate(step_rows(found)):
        name = "none" if row["step"] is None else str(row["step"])
        label = f"{name} of {row.pop('run')}" if several else name
        rows.append({"s": place, "label": label, **row})
    return frame(rows, drop=("run",))


def captures(tables: Tables, steps: Steps) -> Rows:
    """Return the captured processes, and what their files hold."""
    return tables.rows(
        f"""
        SELECT run, step, name, host, task, tool, file, size_bytes, problem,
            (end_ns - begin_ns) / 1e9 AS duration_s
        FROM captures WHERE {in_steps(steps)} ORDER BY run, step, name, number
        """
    )


# Analyses beside those of the summary.
_MORE = (
    *(memory_timeline, sleep_times, release_effects, longest_lags, validation_times, time_tree),
    *(captures, range_times, top_kernels, gpu_idle),
)
