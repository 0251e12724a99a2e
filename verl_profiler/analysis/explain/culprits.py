"""The culprit of each finding: rank, worker, replica, host, tool or phase.

Each function collects lost time by place and member; `concentration` tests whether one member stands
out.  `rollout_culprits` has those of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_profiler.analysis.explain import rollout_culprits, work
from verl_profiler.analysis.explain.concentration import Culprit, Place, concentration, identity
from verl_profiler.analysis.explain.device_culprits import idle_devices
from verl_profiler.analysis.explain.engine_culprits import engines
from verl_profiler.analysis.explain.over_time import over_time
from verl_profiler.analysis.explain.rollout_culprits import Found, late_s
from verl_profiler.analysis.selection import Rows, Steps, in_steps
from verl_profiler.analysis.steps import VALIDATIONS
from verl_profiler.reading.tables.tables import Tables

__all__ = ["culprits"]

_MIDDLE = "(r.begin_us + r.end_us) // 2"


def culprits(tables: Tables, segments: Rows, steps: Steps = None) -> Rows:
    """Determine the culprit of each possible finding.

    Args:
        tables: Of a run.
        segments: The rows of `critical_segments` for the same steps.
        steps: First and last step; None for all.

    Returns:
        One row per run and finding: run, finding (a key of `rules.RULES`), kind, culprit (None if no
        single one), text (the culprit, or why there is none), where, lost_s (in all steps together, due
        to the culprit alone: the saving if it were as fast as the next of its kind;
        None if not measured), evidence (rows of step, who, seconds, what), because (a sentence on what
        was measured of it), fixable (whether the rule's fixes are for this culprit).
    """
    by_run: dict[str, Rows] = {}
    for row in segments:
        by_run.setdefault(row["run"], []).append(row)
    rows: Rows = []
    gathered = {name: gather(tables, steps) for name, gather in _GATHERED.items()}
    for run, own in by_run.items():
        found: dict[str, tuple[Culprit, float | None]] = {}
        for name, categories in _BY_CATEGORY.items():
            places = _of_categories(own, *categories)
            if places:
                culprit = identity(*_kind_of(name), places)
                only = _FIXABLE.get(name, culprit.who)
                found[name] = replace(culprit, fixable=culprit.who == only), None
        for gather in gathered.values():
            for name, (culprit, lost_s) in gather.get(run, {}).items():
                if culprit.evidence or name not in found:
                    found[name] = culprit, lost_s
        if "tool_time" in found:
            culprit, _ = found["tool_time"]
            because = rollout_culprits.calls_of(tables, run, culprit.who, steps)
            found["tool_time"] = replace(culprit, because=because), None
        rows += [
            {
                "run": run,
                "finding": name,
                "kind": culprit.kind,
                "culprit": culprit.who,
                "text": culprit.text,
                "where": culprit.where,
                "lost_s": lost_s,
                "evidence": culprit.evidence,
                "because": culprit.because,
                "fixable": culprit.fixable,
            }
            for name, (culprit, lost_s) in found.items()
        ]
    return rows


# Findings whose culprit is a label of the critical path: the categories, and the label.
_BY_CATEGORY: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], str]]] = {
    "tool_time": (("tool",), lambda row: str(row["what"] or "tool")),
    "transfer": (("transfer",), lambda row: f"{row['event']} {row['what'] or ''}".rstrip()),
    "engine_sleep": (("sleep_replicas",), lambda _: "sleep_replicas"),
    "handover": (("handover",), lambda row: str(row["phase"] or "between timers")),
    "unexplained": (("unexplained",), lambda row: str(row["phase"] or "between timers")),
    "late_start": (("dispatch", "prepare_step"), lambda row: str(row["category"])),
    "way_to_engine": (("server_acquire", "transport"), lambda row: str(row["category"])),
    "checkpoint": (("save_checkpoint",), lambda _: "save_checkpoint"),
    "polling": (("polling",), lambda _: "poll interval of the replay buffer"),
    "reward": (("reward",), lambda _: "the reward function"),
}
_KINDS = {
    "tool_time": "tool",
    "transfer": "operation",
    "polling": "setting",
    "checkpoint": "phase",
}
# The only culprit that the fixes of a finding are for.
_FIXABLE = {"late_start": "dispatch"}


def _kind_of(name: str) -> tuple[str]:
    return (_KINDS.get(name, "phase"),)


def _of_categories(
    segments: Iterable[Mapping[str, Any]],
    categories: Sequence[str],
    label: Callable[[Mapping[str, Any]], str],
) -> list[Place]:
    lost: dict[int, dict[str, float]] = {}
    for row in segments:
        if row["category"] in categories:
            own = lost.setdefault(row["step"], {})
            own[label(row)] = own.get(label(row), 0.0) + row["duration_s"]
    return [Place(step, each) for step, each in lost.items()]


def _ranks(tables: Tables, steps: Steps) -> Found:
    """Find the rank, or the host, that the others wait for in the trainer's phases."""
    rows = tables.rows(
        f"""
        WITH ends AS MATERIALIZED (
            SELECT p.run, p.step, p.phase, p.begin_us AS at_us, r.name,
                coalesce(o.host, '') AS host, max(r.end_us) AS end_us
            FROM phases AS p JOIN rank_spans AS r ON r.run = p.run AND r.step = p.step
                AND r.role NOT IN ('trainer', 'engine') AND {_MIDDLE} BETWEEN p.begin_us AND p.end_us
                LEFT JOIN processes AS o ON o.run = r.run AND o.name = r.name
            WHERE p.parent = 'step' AND p.phase <> 'gen' AND {in_steps(steps, "p.step")}
            GROUP BY ALL
        ), hosts AS (
            SELECT run, step, phase, at_us, host, max(end_us) AS end_us FROM ends GROUP BY ALL
        )
        SELECT run, step, phase, at_us, 'rank' AS kind, count(*) AS many,
            arg_max(name, (end_us, name)) AS who, max(end_us) AS last_us,
            max(end_us, 2)[2] AS next_us, min(end_us) AS first_us
        FROM ends GROUP BY run, step, phase, at_us
        UNION ALL
        SELECT run, step, phase, at_us, 'host', count(*), arg_max(host, (end_us, host)),
            max(end_us), max(end_us, 2)[2], min(end_us)
        FROM hosts GROUP BY run, step, phase, at_us
        ORDER BY run, step, at_us, kind
        """
    )
    found: Found = {}
    for run in dict.fromkeys(row["run"] for row in rows):
        for name, synced in (("slow_ranks", False), ("weight_sync", True)):
            best: list[tuple[Culprit, float]] = []
            # The smallest place that explains the waiting: a host only if it explains more than a rank.
            for kind in ("rank", "host"):
                own = [
                    row
                    for row in rows
                    if row["run"] == run
                    and row["kind"] == kind
                    and row["many"] > 1
                    and (row["phase"] == "update_weights") == synced
                ]
                if not own:
                    continue
                shares = _alike(max(row["many"] for row in own), (row["who"] for row in own))
                places = [
                    Place(row["step"], {row["who"]: late_s(row)}, row["phase"]) for row in own
                ]
                # Two members have no range of the others.
                clear = all(
                    row["many"] > 2
                    and late_s(row) * 1e6 > _CLEAR * max(row["next_us"] - row["first_us"], 1)
                    for row in own
                )
                culprit = concentration(kind, places, shares, unit="phase", clear=clear)
                lost = sum(late_s(row) for row in own if row["who"] == culprit.who)
                if not best or lost > _MORE_THAN_A_RANK * best[0][1]:
                    best = [(culprit, lost)]
            for culprit, lost in best:
                # What makes all ranks faster does not help where one is slower than the others.
                nobody = culprit.who is None
                named = replace(culprit, fixable=nobody)
                found.setdefault(run, {})[name] = named, None if nobody else lost
    return found


# The last of a group is clearly late if it is later than the others' ends are apart, so many times.
_CLEAR = 5
_MORE_THAN_A_RANK = 1.25


def _alike(many: int, seen: Iterable[str]) -> dict[str, float]:
    """Return equal shares for all members; those that never led get placeholder names."""
    names = list(dict.fromkeys(seen))
    names += [f"another {number}" for number in range(many - len(names))]
    return dict.fromkeys(names, 1 / max(many, len(names)))


def _between(tables: Tables, steps: Steps) -> Found:
    """Measure validation, and the time between steps outside all timers."""
    rows = tables.rows(
        f"""
        WITH gaps AS (
            SELECT run, step, end_us AS from_us,
                lead(begin_us) OVER (PARTITION BY run ORDER BY step) AS until_us
            FROM steps WHERE finished AND step > 0
        ), tops AS (
            SELECT run, phase, begin_us, end_us FROM phases
            WHERE parent IS NULL AND phase <> 'step'
        )
        SELECT g.run, g.step, g.until_us - g.from_us AS gap_us,
            coalesce(sum(least(t.end_us, g.until_us) - greatest(t.begin_us, g.from_us))
                FILTER (t.begin_us IS NOT NULL), 0)
                AS timed_us
        FROM gaps AS g LEFT JOIN tops AS t ON t.run = g.run AND t.begin_us < g.until_us
            AND t.end_us > g.from_us
        WHERE g.until_us IS NOT NULL AND {in_steps(steps, "g.step")}
        GROUP BY ALL ORDER BY ALL
        """
    )
    tests = tables.rows(
        f"SELECT run, step, testing_us / 1e6 AS lost_s FROM ({VALIDATIONS}) "
        f"WHERE step > 0 AND {in_steps(steps)} ORDER BY run, step"
    )
    found: Found = {}
    for run in dict.fromkeys(row["run"] for row in tests):
        places = [
            Place(row["step"], {"validation": row["lost_s"]}) for row in tests if row["run"] == run
        ]
        culprit = identity("phase", places)
        lost = sum(place.lost_s["validation"] for place in places)
        where = f"in {len(places)} step{'s' * (len(places) != 1)}"
        named = Culprit("phase", "validation", "validation", where, evidence=culprit.evidence)
        found.setdefault(run, {})["validation"] = named, lost
    for run in dict.fromkeys(row["run"] for row in rows):
        places = [
            Place(
                row["step"],
                {"between steps": max(row["gap_us"] - max(row["timed_us"], 0), 0) / 1e6},
            )
            for row in rows
            if row["run"] == run
        ]
        culprit = identity("phase", places)
        lost = sum(place.lost_s["between steps"] for place in places)
        # The last step has no successor.
        per_step = lost / len(places) * (len(places) + 1)
        where = f"after {len(places)} step{'s' * (len(places) != 1)}"
        text = "between the end of a step and the start of the next"
        named = Culprit("phase", "between steps", text, where, evidence=culprit.evidence)
        found.setdefault(run, {})["between_steps"] = named, per_step
    return found


_GATHERED: dict[str, Callable[[Tables, Steps], Found]] = {
    "ranks": _ranks,
    "requests": rollout_culprits.requests,
    "workers": rollout_culprits.workers,
    "tools": rollout_culprits.tools,
    "replicas": rollout_culprits.replicas,
    "speeds": rollout_culprits.slow_replicas,
    "prompts": work.prompts,
    "prefill": work.first_prefill,
    "routing": work.routing,
    "few": work.few_at_once,
    "tokens": work.rank_tokens,
    "time": over_time,
    "engines": engines,
    "devices": idle_devices,
    "stalls": rollout_culprits.stalls,
    "rewards": rollout_culprits.rewards,
    "between": _between,
}
