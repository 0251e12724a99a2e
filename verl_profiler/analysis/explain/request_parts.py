"""What the parts of requests other than decoding cost the steps of asynchronous runs.

In a synchronous run they are categories of the critical path.  No request delays its own step in an asynchronous
one: the cycle is replayed without each part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean, median

from verl_profiler.analysis.explain.calls import peak
from verl_profiler.analysis.explain.changes import without_build
from verl_profiler.analysis.explain.concentration import (
    Culprit,
    Named,
    Place,
    identity,
    lost_in,
    lost_to,
)
from verl_profiler.analysis.explain.engine_speed import in_work
from verl_profiler.analysis.explain.model import (
    Call,
    Model,
    Request,
    Stage,
    Take,
    Tools,
    Work,
    measured_us,
    tool_lengths,
)
from verl_profiler.analysis.explain.rules import LATE_START, UNEXPLAINED
from verl_profiler.analysis.explain.work import LATER, LITTLE, Earlier
from verl_profiler.analysis.selection import by_run, grouped
from verl_profiler.reading.tables.derivations import SYNCHRONOUS
from verl_profiler.units import counted, seconds

_POLLING, _TOOLS, _BUILD, _PREFILL = "polling", "tool_time", "prompt_build", "prefill"
_FEW, _RESENT = "few_at_once", "late_resend"
# A request starts as another one ends if it starts within this part of the time between two ends.
_AS_ENDS = 0.1


def request_parts(earlier: Earlier) -> Iterator[Named]:
    """Find tools, prompts, prefill and late starts that steps of asynchronous runs wait for."""
    built = _built(earlier) if earlier.cycles else set[str]()
    few = _few_at_once(earlier) if earlier.cycles else dict[str, str]()
    for run, cycle in earlier.cycles.items():
        if cycle.refused is not None:
            continue
        model = cycle.model
        whole_us = sum(each.duration_us for each in model.requests)
        other_us = sum(map(_other_us, model.requests))
        for name, changed in _WITHOUT.items():
            if name == LATE_START and run in built:
                continue
            without = _at_once if name == _BUILD and run in built else changed
            less_us = other_us - sum(_other_us(without(each)) for each in model.requests)
            if less_us >= LITTLE * whole_us:
                places = earlier.places(run, name, cycle.saved_s(without))
                if places and name == LATE_START and run in few:
                    yield lost_to(run, _FEW, "setting", "limit", places, text=few[run])
                elif places:
                    culprit = _culprit(name, model)
                    evidence = lost_to(run, name, "", culprit.who or name, places).culprit.evidence
                    yield Named(run, name, replace(culprit, evidence=evidence), lost_in(places))
        if any(isinstance(each, Take) and each.lag_us for each in model.operations):
            places = earlier.places(run, _POLLING, cycle.saved_with(_without_lags(model)))
            yield lost_to(run, _POLLING, "setting", _POLLING_AT, places)
        if model.parked_us > 0:
            resent = replace(model, parked_us=0.0)
            places = earlier.places(run, _RESENT, cycle.saved_with(resent))
            text = f"{seconds(model.parked_us / 1e6)} after the replicas run again (median)"
            yield lost_to(run, _RESENT, "setting", "pause", places, text=text)


_POLLING_AT = "poll interval of the replay buffer"


def _changed(change: Callable[[Stage], Stage]) -> Callable[[Request], Request]:
    return lambda request: request._replace(stages=tuple(map(change, request.stages)))


def _without_tools(stage: Stage) -> Stage:
    return stage.changed(lambda _tool, _us: 0.0) if isinstance(stage, Tools) else stage


def _without_gaps(request: Request) -> Request:
    """Leave out what no event covers before and between calls; the work before the first one are prompts."""
    kinds = [isinstance(each, Call) for each in request.stages]
    first = kinds.index(True) if any(kinds) else 0
    stages = [
        each._replace(length_us=0.0)
        if isinstance(each, Work) and place and (each.own or place < first)
        else each
        for place, each in enumerate(request.stages)
    ]
    return request._replace(stages=tuple(stages))


def _without_prefill(stage: Stage) -> Stage:
    return stage._replace(fixed_us=0.0) if isinstance(stage, Call) else stage


def _dispatched(request: Request) -> Request:
    return request._replace(begin_us=0.0)


def _at_once(request: Request) -> Request:
    return without_build(_dispatched(request))


_WITHOUT: Mapping[str, Callable[[Request], Request]] = {
    _TOOLS: _changed(_without_tools),
    LATE_START: _dispatched,
    _BUILD: without_build,
    _PREFILL: _changed(_without_prefill),
    UNEXPLAINED: _without_gaps,
}


def _other_us(request: Request) -> float:
    """Return how long a request takes from its dispatch, without decoding."""
    lengths = (
        each.before_us + each.fixed_us + each.after_us
        if isinstance(each, Call)
        else measured_us(each)
        for each in request.stages
    )
    return request.begin_us + sum(lengths)


def _without_lags(model: Model) -> Model:
    operations = (
        each._replace(lag_us=0.0) if isinstance(each, Take) else each for each in model.operations
    )
    return replace(model, operations=tuple(operations))


def _culprit(name: str, model: Model) -> Culprit:
    """Return the tool or the worker with most of a part's time, if one has it."""
    if name == _TOOLS:
        lengths = tool_lengths([model])
        return identity("tool", [Place(0, {tool: sum(us) for tool, us in lengths.items()})])
    if name == _PREFILL:
        fixed_us: dict[str, float] = {}
        for each in (stage for request in model.requests for stage in request.stages):
            if isinstance(each, Call):
                turn = f"call {each.turn} of a request"
                fixed_us[turn] = fixed_us.get(turn, 0.0) + each.fixed_us
        return identity("phase", [Place(0, fixed_us)])
    if name == LATE_START:
        begins: dict[str, list[float]] = {}
        for each in model.requests:
            begins.setdefault(each.worker, []).append(each.begin_us)
        late_us = {who: fmean(own) for who, own in begins.items()}
        last = max(late_us, key=lambda who: late_us[who])
        others = [us for who, us in late_us.items() if who != last]
        if others and late_us[last] >= LATER * median(others):
            return Culprit("worker", last, last, fixable=False)
    return Culprit("", None, _NO_ONE.get(name, ""))


_NO_ONE = {LATE_START: "no single worker", UNEXPLAINED: "between calls"}


def _few_at_once(earlier: Earlier) -> dict[str, str]:
    """Return how many requests run at once, of runs whose late requests start as others end: of their worker, or of any."""
    rows = earlier.tables.rows(
        f"""
        SELECT r.run, r.name, begin_us, end_us, coalesce(at_us, min(begin_us) OVER (PARTITION BY r.run, uid)) AS at_us
        FROM requests AS r LEFT JOIN dispatched USING (run, uid)
        WHERE NOT validate AND NOT {SYNCHRONOUS} AND {in_work(earlier.steps)} AND end_us IS NOT NULL
        """
    )
    found: dict[str, str] = {}
    for run, every in by_run(rows).items():
        for where, places in ((" in a worker", grouped(every, "name").values()), ("", [every])):
            late_us = following_us = 0
            for own in places:
                ends = sorted(row["end_us"] for row in own)
                soon_us = _AS_ENDS * (ends[-1] - ends[0]) / len(ends)
                for row in own:
                    place = bisect_right(ends, row["begin_us"]) - 1
                    follows = place >= 0 and row["begin_us"] - ends[place] <= soon_us
                    late_us += row["begin_us"] - row["at_us"]
                    following_us += (row["begin_us"] - row["at_us"]) * follows
            most, many = (
                max(
                    peak([{"started_us": row[start], "ended_us": row["end_us"]} for row in own])
                    for own in places
                )
                for start in ("begin_us", "at_us")
            )
            if 2 * following_us > late_us and 2 * most <= many:
                found[run] = f"{counted(most, 'request')} at a time{where}, of {many}"
    return found


def _built(earlier: Earlier) -> set[str]:
    """Return the runs whose requests are mostly late because their worker builds prompts of others."""
    rows = earlier.tables.rows(
        f"""
        WITH starts AS (
            SELECT r.run, r.name, r.request_id, at_us, begin_us FROM requests AS r JOIN dispatched USING (run, uid)
            WHERE NOT validate AND NOT {SYNCHRONOUS} AND {in_work(earlier.steps)} AND begin_us > at_us
        ), builds AS (
            SELECT run, name, request_id, begin_us, end_us FROM event_fields
            WHERE event = 'prompt_build' AND duration_us IS NOT NULL
        ), covered AS (
            SELECT s.run, sum(least(s.begin_us, b.end_us) - greatest(s.at_us, b.begin_us)) AS us
            FROM starts AS s JOIN builds AS b ON b.run = s.run AND b.name = s.name
                AND b.begin_us < s.begin_us AND b.end_us > s.at_us AND b.request_id <> s.request_id
            GROUP BY s.run
        )
        SELECT run FROM starts JOIN covered USING (run)
        GROUP BY run HAVING 2 * any_value(us) > sum(begin_us - at_us)
        """
    )
    return {row["run"] for row in rows}
