"""The culprit of each finding: rank, worker, replica, host, tool or phase.

Each function collects lost time by place and member; `concentration` tests whether one member stands
out.  `rollout_culprits` has those of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, mode
from typing import Any

from verl_profiler.analysis.device_use import device_use
from verl_profiler.analysis.explain import rollout_culprits, work
from verl_profiler.analysis.explain.concentration import (
    Culprit,
    Found,
    Named,
    Place,
    concentration,
    identity,
    lost_in,
    lost_to,
    places_of,
)
from verl_profiler.analysis.explain.engine_culprits import engines
from verl_profiler.analysis.explain.forward_passes import FORWARD, forward_losses
from verl_profiler.analysis.explain.over_time import over_time
from verl_profiler.analysis.explain.request_parts import request_parts
from verl_profiler.analysis.explain.rules import CHANGES, CULPRITS, RULES
from verl_profiler.analysis.explain.step_rows import TOGETHER
from verl_profiler.analysis.explain.what_if import Cycle, cycles
from verl_profiler.analysis.selection import Rows, Steps, by_run, grouped, in_steps, summed
from verl_profiler.analysis.workers import rank_balance
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import counted, seconds, size

_MIDDLE = "(r.begin_us + r.end_us) // 2"


def culprits(
    tables: Tables,
    segments: Rows,
    steps: Steps = None,
    known: Mapping[str, Cycle] | None = None,
) -> Found:
    """Determine the culprit of each possible finding.

    Args:
        tables: Of a run.
        segments: The rows of `critical_segments` and `between_segments` for the same steps.
        steps: First and last step; None for all.
        known: What `what_if.cycles` returns of these steps.

    Returns:
        By run and finding (a key of `rules.RULES`, and after a blank the culprit of a further one): the culprit, and
        the seconds lost to it alone in all steps together (the saving if it were as fast as the next of its kind;
        None if not measured).
    """
    earlier = work.Earlier(tables, steps, cycles(tables, steps) if known is None else known)
    gathered = [each for gather in _GATHERED for each in gather(earlier)]
    # Where it is known which work of the requests takes longer, it is not also that of the phase.
    changing = {each.run for each in gathered if each.culprit.kind == "work"}
    gathered += over_time(earlier, segments, changing)
    gathered += _forward_only(earlier, segments)
    named: Found = {}
    of_run, in_tools = by_run(segments), work.all_tools(earlier)
    for run in dict.fromkeys((*of_run, *(each.run for each in gathered))):
        own, found = of_run.get(run, []), named.setdefault(run, {})
        for name, (kind, form) in CULPRITS.items():
            places = places_of(
                (row["step"], _named(row, form) or kind, row["duration_s"])
                for row in own
                if row["category"] in RULES[name].categories
            )
            if places:
                culprit = identity(kind, places)
                if len({who for place in places for who in place.lost_s}) == 1:
                    # It leads everywhere, whatever it is.
                    culprit = replace(culprit, where=f"in {counted(len(places), 'step')}")
                only = _FIXABLE.get(name, culprit.who)
                found[name] = replace(culprit, fixable=culprit.who == only), None
        for finding, culprit, lost_s in (each[1:] for each in gathered if each.run == run):
            several = finding in CHANGES and finding in found
            name = f"{finding} {culprit.who}" if several else finding
            _, most_s = found.get(name, (None, None))
            # Of several, the one that costs most.
            more = culprit.evidence and (most_s is None or (lost_s or 0.0) > most_s)
            if more or name not in found:
                in_phases = name in _OF_TRAINER and lost_s is not None
                saved_s = earlier.of_training(run, lost_s or 0.0) if in_phases else lost_s
                found[name] = culprit, saved_s
        if "checkpoint" in found:
            culprit, _ = found["checkpoint"]
            found["checkpoint"] = replace(culprit, because=_last_to_save(tables, run, steps)), None
        for name in {"tool_time", "slow_tools"} & found.keys():
            culprit, lost_s = found[name]
            calls = rollout_culprits.calls_of(tables, run, culprit.who, steps)
            culprit = replace(culprit, because=f"{culprit.because} {calls}".strip())
            found[name] = (
                culprit,
                in_tools.get(run) if name == "tool_time" and lost_s is None else lost_s,
            )
    return named


def _named(row: Mapping[str, Any], form: str) -> str:
    """Return the name of a segment's culprit; empty if it was not recorded."""
    known = {"what": row["what"] or "", "phase": row["phase"] or "between timers"}
    return form.format(**{**row, **known}).strip()


def culprit_rows(named: Found) -> Rows:
    """Return table `culprits`: one row per run and finding; of what changes, one for each that does."""
    return [
        {
            "run": run,
            "finding": name.split(" ")[0],
            "kind": culprit.kind,
            "culprit": culprit.who,
            "text": culprit.text,
            "where": culprit.where,
            "lost_s": lost_s,
            "evidence": culprit.evidence,
            "because": culprit.because,
            "fixable": culprit.fixable,
        }
        for run, found in named.items()
        for name, (culprit, lost_s) in found.items()
    ]


# Findings of the trainer's phases whose gain is that of a replay; of slow ranks it is the upper bound.
_OF_TRAINER = ("uneven_tokens", "gpu_idle", "forward_only", "optimizer_step")
# The only culprit that the fixes of a finding are for.
_FIXABLE = {"late_start": "dispatch"}


def _ranks(earlier: work.Earlier) -> Iterator[Named]:
    """Find the rank, or the host, that the others wait for in the trainer's phases, or who receives weights last.

    It ends last; or starts last, if its collectives keep the others until it comes; or its passes take longest,
    if the others wait for it in the optimizer step.
    """
    steps = earlier.steps
    rows = earlier.tables.rows(
        f"""
        WITH spans AS MATERIALIZED (
            SELECT p.run, p.step, p.phase, p.begin_us AS at_us, r.name, coalesce(o.host, '') AS host,
                CASE WHEN r.role IN ('engine', 'rollout') THEN 'replica' ELSE 'rank' END AS kind,
                r.event, r.begin_us, r.end_us
            FROM phases AS p JOIN rank_spans AS r ON r.run = p.run AND r.step = p.step
                AND (r.role NOT IN ('trainer', 'engine') OR r.event = 'weight_receive')
                AND {_MIDDLE} BETWEEN p.begin_us AND p.end_us
                LEFT JOIN processes AS o ON o.run = r.run AND o.name = r.name
            WHERE p.parent = 'step' AND p.phase <> 'gen' AND {in_steps(steps, "p.step")}
        ), ranks AS MATERIALIZED (
            SELECT run, step, phase, at_us, host, name, kind, 'end' AS moment, max(end_us) AS us,
                NULL::BIGINT AS length_us
            FROM spans GROUP BY ALL
            UNION ALL
            SELECT run, step, phase, at_us, host, name, kind, 'start', min(begin_us),
                arg_min(end_us - begin_us, begin_us)
            FROM spans WHERE event IN ({TOGETHER}) GROUP BY ALL
            UNION ALL
            -- As if without waiting: in collectives, one that comes early has longer passes by as much.
            SELECT run, step, phase, at_us, host, name, kind, 'passes',
                min(begin_us) + sum(end_us - begin_us), NULL
            FROM spans WHERE event = 'forward_backward' GROUP BY ALL
        ), members AS (
            SELECT * EXCLUDE (host, name), us AS least_us, 1 AS ranks, name AS who FROM ranks
            UNION ALL BY NAME
            SELECT run, step, phase, at_us, moment, max(us) AS us, min(us) AS least_us,
                count(*) AS ranks, min(length_us) AS length_us, 'host' AS kind, host AS who
            FROM ranks GROUP BY ALL
        ), placed AS (
            SELECT run, step, phase, at_us, kind, moment, count(*) AS many,
                arg_max(who, (us, who)) AS who, max(us) AS last_us, min(us) AS first_us,
                sum(ranks) AS ranks, arg_max(least_us, (us, who)) > max(us, 2)[2] AS apart,
                -- Of a late start only what the others wait in collectives, which makes theirs longer.
                max(us) - least(max(us) - max(us, 2)[2], CASE WHEN moment = 'start'
                    THEN max(length_us) - arg_max(length_us, (us, who)) END) AS next_us
            FROM members GROUP BY run, step, phase, at_us, kind, moment
        )
        SELECT *, greatest(last_us - coalesce(next_us, last_us), 0) / 1e6 AS late_s,
            -- Two members have no range of the others.
            many > 2 AND last_us - next_us > {_CLEAR} * greatest(next_us - first_us, 1) AS clear
        FROM placed WHERE many > 1
        QUALIFY row_number() OVER (PARTITION BY run, step, phase, at_us, kind
            ORDER BY last_us - next_us DESC NULLS LAST, moment) = 1
        ORDER BY run, step, at_us, kind
        """
    )
    for run, of_run in by_run(rows).items():
        for name, synced in (("slow_ranks", False), ("weight_sync", True)):
            best: list[tuple[Culprit, float, float]] = []
            # The smallest place that explains the waiting: a host only if it explains more than a rank.
            for kind in ("rank", "replica", "host"):
                own = [
                    row
                    for row in of_run
                    if row["kind"] == kind and (row["phase"] in _SYNCS) == synced
                ]
                # Phases in which ranks hardly wait for each other tell nothing of who is slow.
                waited_s = summed(own, "late_s", "phase")
                least_s = _LITTLE * sum(waited_s.values())
                own = [row for row in own if waited_s[row["phase"]] >= least_s]
                if not own:
                    continue
                # Some never led.
                many = max(len({row["who"] for row in own}), *(row["many"] for row in own))
                if all(row["apart"] for row in own):
                    # All ranks of a host come after all others: each might have been any other.
                    many = max(many, *(row["ranks"] for row in own))
                places = [
                    Place(row["step"], {row["who"]: row["late_s"]}, row["phase"]) for row in own
                ]
                clear = all(row["clear"] for row in own)
                culprit = concentration(kind, places, many, unit="phase", clear=clear)
                theirs = [row for row in own if row["who"] == culprit.who]
                lost = sum(row["late_s"] for row in theirs)
                cells: dict[tuple[str, str], float] = {}
                for row in theirs:
                    # What is late at the start waited for its data.
                    late = "transfer" if row["moment"] == "start" else row["phase"]
                    cells[row["phase"], late] = cells.get((row["phase"], late), 0.0) + row["late_s"]
                culprit = replace(culprit, cells=cells)
                if not best or lost > _MORE_THAN_A_RANK * best[0][1]:
                    best = [(culprit, lost, sum(row["late_s"] for row in own))]
            for culprit, lost, every in best:
                # What makes all ranks faster does not help where one is slower than the others.
                nobody = culprit.who is None
                lost_s: float | None = lost if synced else earlier.of_training(run, lost)
                if nobody:
                    # A synchronous run is replayed with even ranks.
                    flows = run in earlier.cycles and not synced
                    lost_s = earlier.of_training(run, every) if flows else None
                yield Named(run, name, replace(culprit, fixable=nobody), lost_s)


def _last_to_save(tables: Tables, run: str, steps: Steps) -> str:
    """Return which rank saves for much longer than the others, in most checkpoints; empty if none does."""
    rows = [
        row
        for row in rank_balance(tables, steps)
        if (row["run"], row["event"]) == (run, "save_checkpoint")
        and row["role"] != "trainer"
        and row["ranks"] > 2
    ]
    alone = [row for row in rows if row["slowest_s"] > 2 * row["median_s"]]
    who = mode([row["slowest"] for row in alone] or [""])
    own = [row for row in alone if row["slowest"] == who]
    if not own or 2 * len(own) <= len(rows):
        return ""
    most, usual = (fmean(row[each] for row in own) for each in ("slowest_s", "median_s"))
    return (
        f"{who} takes {seconds(most)}, the median rank {seconds(usual)}, "
        f"in {len(own)} of {counted(len(rows), 'checkpoint')}."
    )


_SYNCS = ("update_weights", "param_sync", "sync_rollout_weights")
# The last of a group is clearly late if it is later than the others' ends are apart, so many times.
_CLEAR = 5
_MORE_THAN_A_RANK = 1.25
_LITTLE = 0.1


# Host memory that grows in each of so many steps, by so much on average.
_GROWING_STEPS, _GROWING_BYTES = 4, 1 << 30


def _host_memory(earlier: work.Earlier) -> Iterator[Named]:
    """Find the process whose host memory grows the most, if it grows in each step."""
    held: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in earlier.tables.rows(
        f"SELECT run, name, step, max(rss_bytes) AS most FROM memory_readings WHERE rss_bytes IS NOT NULL "
        f"AND step > 0 AND {in_steps(earlier.steps)} GROUP BY ALL ORDER BY ALL"
    ):
        held.setdefault((row["run"], row["name"]), []).append((row["step"], row["most"]))
    grown: dict[str, tuple[float, Culprit]] = {}
    for (run, name), own in held.items():
        (first, before), (last, after) = own[0], own[-1]
        rises = all(b > a for (_, a), (_, b) in pairwise(own))
        if len(own) < _GROWING_STEPS or not rises:
            continue
        per_step = (after - before) / (last - first)
        if per_step >= max(_GROWING_BYTES, grown[run][0] if run in grown else 0):
            text = f"{name} by {size(per_step)}, from {size(before)} in step {first} to {size(after)} in step {last}"
            grown[run] = per_step, Culprit("process", name, text)
    yield from (Named(run, "host_memory", each, 0.0) for run, (_, each) in grown.items())


# Phases of the trainer in which all devices compute.
_COMPUTING = (*FORWARD, *FORWARD.values())


def _idle_devices(earlier: work.Earlier) -> Iterator[Named]:
    """Find the device, host or phase with the idle time of computing phases.

    Lost time is what the average device was idle: that much earlier would the phases end if all were busy.
    """
    rows = [
        row
        for row in device_use(earlier.tables, earlier.steps)
        if row["phase"] in _COMPUTING
        and row["idle_s"] is not None
        and (row["run"], row["step"]) in earlier.finished
    ]
    for run, own in by_run(rows).items():
        lost_s = sum(_mean_idle(own).values())
        if lost_s:
            yield Named(run, "gpu_idle", _most_idle(own), lost_s)


def _mean_idle(rows: Rows) -> dict[tuple[int, str], float]:
    """Return the mean idle time of the devices, by step and phase."""
    groups = grouped(rows, "step", "phase").items()
    return {key: fmean(row["idle_s"] for row in own) for key, own in groups}


def _most_idle(rows: Rows) -> Culprit:
    several = len({row["host"] for row in rows}) > 1
    rows = [
        {**row, "device": f"{row['device']} on {row['host']}" if several else str(row["device"])}
        for row in rows
    ]
    for kind in ("device", "host"):
        idle: dict[tuple[int, str], dict[str, float]] = {}
        for (step, phase, who), own in grouped(rows, "step", "phase", kind).items():
            idle.setdefault((step, phase), {})[str(who)] = fmean(row["idle_s"] for row in own)
        members = {who for each in idle.values() for who in each}
        # Only what a member is idle beyond the least idle one is its own.
        places = [
            Place(step, {who: lost - min(each.values()) for who, lost in each.items()}, phase)
            for (step, phase), each in idle.items()
            if len(each) == len(members) > 1
        ]
        culprit = concentration(kind, places, len(members), unit="phase", verb="most idle")
        if culprit.who is not None:
            return culprit
    means = _mean_idle(rows)
    places = places_of((step, phase, lost) for (step, phase), lost in means.items())
    return identity("phase", places, verb="most idle")


_TIMED = """
SELECT run, step, phase AS category, duration_us / 1e6 AS duration_s FROM phases
WHERE parent = 'step' AND NOT validate AND {steps}
"""


def _forward_only(earlier: work.Earlier, segments: Rows) -> Iterator[Named]:
    """Compare the phases without a backward pass with the update that has one."""
    timed = _TIMED.format(steps=in_steps(earlier.steps))
    # An asynchronous run has no critical path.
    phases = earlier.tables.rows(timed) if earlier.cycles else Rows()
    for run, own in {**by_run(phases), **by_run(segments)}.items():
        spent: dict[str, dict[int, float]] = {}
        for row in own:
            by_step = spent.setdefault(row["category"], {})
            by_step[row["step"]] = by_step.get(row["step"], 0.0) + row["duration_s"]
        lost = forward_losses(spent)
        if lost:
            compared = dict.fromkeys([*sorted(lost), *(FORWARD[each] for each in sorted(lost))])
            means = {each: fmean(spent[each].values()) for each in compared}
            text = ", ".join(f"{each} {seconds(mean)}" for each, mean in means.items())
            places = places_of(
                (step, phase, s) for phase, each in lost.items() for step, s in each.items()
            )
            culprit = replace(identity("phase", places), text=text, where="")
            yield Named(run, "forward_only", culprit, lost_in(places))


def _optimizer(earlier: work.Earlier) -> Iterator[Named]:
    """Measure the optimizer steps of asynchronous runs, of each that of the rank that does not wait for others in it."""
    rows = earlier.tables.rows(
        f"""
        WITH placed AS (
            SELECT run, step, name, end_us - begin_us AS us,
                row_number() OVER (PARTITION BY run, step, name ORDER BY begin_us) AS place
            FROM rank_spans WHERE event = 'optimizer_step' AND {in_steps(earlier.steps)}
        )
        SELECT run, step, sum(us) / 1e6 AS s FROM (SELECT run, step, place, min(us) AS us FROM placed GROUP BY ALL)
        GROUP BY ALL ORDER BY ALL
        """
    )
    for run, own in by_run(rows).items():
        places = [Place(row["step"], {"optimizer_step": row["s"]}) for row in own]
        if run in earlier.cycles:
            yield lost_to(run, "optimizer_step", "phase", "optimizer_step", places)


_GATHERED: tuple[Callable[[work.Earlier], Iterable[Named]], ...] = (
    _ranks,
    rollout_culprits.requests,
    rollout_culprits.workers,
    rollout_culprits.tools,
    rollout_culprits.replicas,
    rollout_culprits.slow_replicas,
    work.routing,
    work.long_inputs,
    rollout_culprits.slow_hosts,
    work.prompts,
    work.first_prefill,
    work.few_at_once,
    work.rank_tokens,
    engines,
    _optimizer,
    _idle_devices,
    _host_memory,
    rollout_culprits.stalls,
    rollout_culprits.rewards,
    rollout_culprits.transfers,
    rollout_culprits.changing_work,
    request_parts,
)
