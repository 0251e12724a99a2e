"""What the page shows, as plain data: the tables of each section, small enough to be inlined.

Every number comes from `verl_profiler.analysis` or from SQL over all events; only what is drawn
request by request is a sample (`verl_profiler.views.timelines`).  Rows name their step by its
place in `steps`; -1 stands for all steps together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

from verl_profiler.analysis.explain.ledger import ACCOUNTS
from verl_profiler.analysis.explain.rules import BETWEEN, CATEGORIES
from verl_profiler.analysis.launches import launch_command, launch_facts, launch_texts
from verl_profiler.analysis.memory import memory_findings
from verl_profiler.analysis.overview import mean_step
from verl_profiler.analysis.profiler import processes
from verl_profiler.analysis.registry import explanations, reported, summarized
from verl_profiler.analysis.selection import LeftOut, Rows, Steps, by_run, grouped, left_out, spread
from verl_profiler.analysis.steps import step_rows
from verl_profiler.analysis.time_tree import whole_time_tree
from verl_profiler.analysis.tq_findings import finding_lines, tq_findings
from verl_profiler.events.json_values import is_object
from verl_profiler.events.redaction import recorded_values
from verl_profiler.events.vocabulary import COMPUTING_ROLES
from verl_profiler.reading.reader import Run
from verl_profiler.render.colors import ACCOUNT_COLORS, category_color
from verl_profiler.render.frames import frame, short_text
from verl_profiler.views.columns import caption, page_view, section, shown_columns
from verl_profiler.views.overview_text import head_text
from verl_profiler.views.questions import TOPICS, VIEWS
from verl_profiler.views.timelines import timelines
from verl_profiler.views.view import Choice

_RUN = "About this run"
# Tables of analyses that no view draws, by topic; `columns.md` has their captions.
TABLES: dict[str, tuple[str, ...]] = {
    "Steps": ("straggler_requests", "validation_times"),
    "Devices and training": (
        *("critical_cycle", "staleness_causes", "rank_balance", "device_use", "phase_efficiency"),
        *("device_times", "captures", "range_times", "top_kernels", "gpu_idle"),
    ),
    "Rollout": (
        *("request_times", "request_parts", "rollout_tail", "reward_times", "own_spans"),
        *("engine_times", "token_rates", "request_token_rates", "rollout_balance"),
        *("replica_balance", "routes", "engine_load"),
    ),
    "Data transfer": ("transfer_totals", "tq_functions", "weight_sync", "weight_transfers"),
    "Memory and event loops": (
        *("release_effects", "sleep_times", "memory_timeline", "memory_peaks", "loop_lags"),
    ),
    _RUN: ("processes", "profiler_cost"),
}
# Sections that scripts of the page make, by topic; the timeline is shown above all of them.
_MADE = {
    "Steps": {"steps": "Steps"},
    _RUN: {"launch": "Launch", "problems": "Data-quality warnings"},
}
_TIMELINE = {"requests": "Timeline and requests"}
# The first section that each of so many findings points to is shown at once, too.
_POINTING = 3
# Stands for all steps together.
WHOLE = -1
# Explanations that are tables, and tables with few rows in any step.
_EXPLAINED = (
    *("critical_cycle", "straggler_requests", "staleness_causes"),
    *("device_use", "phase_efficiency"),
)
_FEW = frozenset({"validation_times"})
# Tables by step are kept for so many steps: the longest, and others spread evenly.
_DETAILED_STEPS = 150
_ROWS = 4_000
_VIEW_ROWS = 1_000
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
    run: Run, steps: Steps = None, defaults: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Gather everything that the page shows.

    Args:
        run: An open run.
        steps: First and last step to show; all when None.
        defaults: Settings of the profiler that are not shown.

    Returns:
        A JSON object: `about`, `sentences`, `mean_step`, `notes`, `problems`; `sections`, as `_sections` gives
        them; `steps` and the tables (`columns`, `rows`) of the sections; `timelines`.
    """
    tables = run.tables
    whys = explanations(tables, steps)
    found = summarized(tables, steps) | reported(tables, steps)
    listed = found["step_times"]
    found["processes"] = processes(tables)
    found |= {name: whys[name] for name in ("critical_path", *_EXPLAINED)}
    several = len(run.labels) > 1
    places = {(row["run"], row["step"]): place for place, row in enumerate(listed)}
    lengths = {place: row["duration_s"] or 0.0 for place, row in enumerate(listed)}
    detailed = {*spread(lengths, _DETAILED_STEPS)}
    notes = {
        "Memory and event loops": [
            f"{row['message']} {row['advice']}".strip()
            for row in memory_findings(tables, steps, launches=run.launches)
        ],
        "Data transfer": [
            short_text("; ".join(finding_lines(row)), 400) for row in tq_findings(tables, steps)
        ],
    }

    def table(rows: Rows, limit: int, kept: set[int] | None = detailed) -> dict[str, Any]:
        stepped = bool(rows) and "step" in rows[0]
        shown = _placed(rows, places, kept, limit) if stepped else rows
        return frame(shown, drop=("run", "step") if stepped else () if several else ("run",))

    choice = Choice(steps=steps)
    views: dict[str, dict[str, Any]] = {}
    known = found | whys
    asynchronous = {row["run"] for row in tables.rows("SELECT run FROM asynchronous")}
    kinds = {"asynchronous" if each in asynchronous else "synchronous" for each in run.labels}
    for name, view in VIEWS.items():
        rows = view.analysis(tables, choice, known)
        charts, missing = view.charts(rows, run.labels, choice)
        # That a synchronous run has no stale samples is nothing to be told.
        missing = missing if not view.only_of or view.only_of in kinds else []
        shown = table(rows[name], _VIEW_ROWS)
        views[name] = page_view(view.table or name, view.question, shown, charts, missing)
    for name in chain.from_iterable(TABLES.values()):
        shown = table(found[name], _ROWS, None if name in _FEW else detailed)
        views[name] = page_view(name, caption(name), shown)
    # A tree of which rows are missing does not add up.
    tree = _placed(found["time_tree"], places, detailed, len(found["time_tree"]))
    tree += [{"s": WHOLE, **row} for row in whole_time_tree(found["time_tree"])]
    headlines = head_text(
        {"step_times": listed}, run.labels, left_out(tables, steps), whys["findings"]
    )
    return {
        "about": _about_run(run, defaults),
        "columns": {
            "steps": shown_columns(_STEP_COLUMNS, *_STEP_TABLES),
            "requests": shown_columns(_REQUEST_COLUMNS, "request_breakdown"),
        },
        "computing": list(COMPUTING_ROLES),
        "detailed": sorted(detailed),
        "findings": whys["findings"],
        "mean_step": _step_bars(whys, left_out(tables, steps)),
        "notes": notes,
        "problems": [short_text(problem, 2_000) for problem in run.problems],
        "sections": _sections(views, notes, whys["findings"]),
        "sentences": headlines.split("\n"),
        "steps": _steps(found, several=several),
        "time_tree": frame(tree, drop=("run", "step")),
        "timelines": timelines(tables, steps, places),
        "views": views,
    }


def _placed(
    rows: Rows, places: Mapping[tuple[Any, Any], int], detailed: set[int] | None, limit: int
) -> Rows:
    """Name the step of rows by its place on the page, and keep those of some steps; of all when None."""
    placed = [
        {"s": place, **row}
        for row in rows
        if (place := places.get((row["run"], row["step"]))) is not None
        and (detailed is None or place in detailed)
    ]
    if len(placed) <= limit:
        return placed
    # Rows come worst first within their step: keep as many of each step as there is room for.
    by_step = grouped(placed, "s").values()
    each = max(1, limit // len(by_step))
    return [row for own in by_step for row in own[:each]]


def _steps(found: Mapping[str, Rows], *, several: bool) -> dict[str, Any]:
    """Collect what the overview shows of each step."""
    rows: Rows = []
    for place, row in enumerate(step_rows(found)):
        name = "none" if row["step"] is None else str(row["step"])
        label = f"{name} of {row.pop('run')}" if several else name
        rows.append({"s": place, "label": label, **row})
    return frame(rows, drop=("run",))


def _sections(
    views: Mapping[str, Mapping[str, Any]],
    notes: Mapping[str, Sequence[str]],
    findings: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the sections of a page as data.

    Args:
        views: The views and tables of the page by name, with their table each.
        notes: What is to be known of a topic, by topic.
        findings: The rows of the findings, the first on top.

    Returns:
        name, title, link (a shorter title) and topic of each section, without a topic where it is shown at
        once: the timeline, then what the first findings point to; views, the view or table that it shows;
        notes: at the end of a topic, what is to be known of it, and why views of it have nothing to show.
    """
    shown = {name for name, view in views.items() if view["charts"] or view["table"]["rows"]}
    pointed = [
        next((name for name in row["shows"] if name in shown), "steps")
        for row in findings[:_POINTING]
    ] or ["steps"]
    first = [*_TIMELINE, *pointed]
    sections = [section(name, title, None) for name, title in _TIMELINE.items()]
    for topic in (*TOPICS, _RUN):
        own = {view.name: view.question for view in TOPICS.get(topic, ())}
        titles = {
            **_MADE.get(topic, {}),
            **own,
            **{name: caption(name) for name in TABLES[topic]},
        }
        sections += [
            section(name, title, None if name in first else topic, [name] if name in shown else ())
            for name, title in titles.items()
            if name in shown or name not in views
        ]
        reasons = dict.fromkeys(
            text for name in own if name not in shown for text in views[name]["missing"]
        )
        said = [*notes.get(topic, ()), *reasons]
        if said:
            sections.append(section(f"notes-{len(sections)}", f"Notes: {topic}", topic, notes=said))
    # The first sections come in the order of the findings.
    return sorted(
        sections,
        key=lambda each: first.index(each["name"]) if each["topic"] is None else len(first),
    )


def _about_run(run: Run, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was launched.

    Args:
        run: An open run.
        defaults: Settings of the profiler; those of the run that are the same are left out.

    Returns:
        runs (labels), line (date, devices, model, batch and versions, as texts), launches (facts and
        groups of settings), notes (of the reader).
    """
    usual = {*launch_texts(defaults, "settings")}
    launches: list[dict[str, Any]] = []
    for label in run.labels:
        launch = run.launches.get(label) or {}
        facts = [
            [key, short_text(str(recorded_values(launch[key], key)))]
            for key in ("experiment", "launched", "host", "cwd")
            if launch.get(key) is not None
        ]
        if command := launch_command(launch):
            facts.append(["command", short_text(command, 4_000)])
        groups = {
            group: [
                [*map(short_text, each)]
                for each in launch_texts(launch[group], group)
                if each not in usual
            ]
            for group in ("training", "versions", "settings")
            if is_object(launch.get(group))
        }
        launches.append({"run": short_text(label), "facts": facts, **groups})
    every = [launch_facts(run.launches.get(label) or {}) for label in run.labels]
    # What launches differ in is there once for each value.
    line = [
        " / ".join(dict.fromkeys(facts[key] for facts in every if facts[key]))
        for key in launch_facts({})
    ]
    return {
        "runs": [short_text(label) for label in run.labels],
        "line": [short_text(text) for text in line if text],
        "launches": launches,
        "notes": [short_text(note, 2_000) for note in run.notes],
    }


def _step_bars(explained: Mapping[str, Rows], left_out: LeftOut) -> list[dict[str, Any]]:
    """Return the bar of each run; see `analysis.overview.mean_step`.

    Returns:
        Per run: run, whole_s, and parts (name, seconds per step, what it is, color), largest first.
    """
    return [
        step_bar(
            run,
            [
                (row["part"], row["mean_s"], ACCOUNTS[row["part"]], ACCOUNT_COLORS[row["part"]])
                if row["account"]
                else (row["part"], row["mean_s"], _about(row["part"]), category_color(row["part"]))
                for row in rows
            ],
        )
        for run, rows in by_run(mean_step(explained, left_out)).items()
    ]


def _about(category: str) -> str:
    if category == BETWEEN:
        return "between the end of a step and the start of the next, covered by no timer"
    return CATEGORIES.get(category, "a phase of the trainer")


def step_bar(run: str, parts: Sequence[tuple[str, float, str, str]]) -> dict[str, Any]:
    """Return the bar of a run, the largest part first; for the parts see `step_bars`."""
    ordered = sorted(parts, key=lambda part: -part[1])
    return {
        "run": short_text(run),
        "whole_s": sum(part[1] for part in parts),
        "parts": [[short_text(name), *more] for name, *more in ordered],
    }
