"""What the parts of requests that no device works on cost the steps of asynchronous runs.

In a synchronous run they are categories of the critical path.  No request delays its own step in an asynchronous
one: the cycle is replayed without each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean, median

from verl_profiler.analysis.explain.changes import without_build, without_queue
from verl_profiler.analysis.explain.concentration import (
    Culprit,
    Named,
    Place,
    identity,
    lost_in,
    lost_to,
    places_of,
)
from verl_profiler.analysis.explain.model import (
    Call,
    Model,
    Request,
    Stage,
    Take,
    Tools,
    measured_us,
    tool_lengths,
)
from verl_profiler.analysis.explain.rules import LATE_START
from verl_profiler.analysis.explain.work import LATER, LITTLE, Earlier, in_work
from verl_profiler.analysis.selection import Rows, by_run
from verl_profiler.reading.tables.derivations import SYNCHRONOUS

__all__ = ["request_parts"]

_QUEUE, _LOOP, _POLLING, _TOOLS = "engine_queue", "event_loop", "polling", "tool_time"


def request_parts(earlier: Earlier) -> Iterator[Named]:
    """Find tools, queues, event loops and late starts that steps of asynchronous runs wait for."""
    blocked = by_run(_blocked(earlier)) if earlier.cycles else {}
    for run, cycle in earlier.cycles.items():
        if cycle.refused is not None:
            continue
        model, loops = cycle.model, blocked.get(run, [])
        whole_us = sum(each.duration_us for each in model.requests)
        waiting_us = sum(map(_waiting_us, model.requests))
        for name, without in _WITHOUT.items():
            if name == _LOOP and not loops:
                continue
            less_us = waiting_us - sum(_waiting_us(without(each)) for each in model.requests)
            if less_us >= LITTLE * whole_us:
                places = earlier.places(run, name, cycle.saved_s(without))
                if places:
                    culprit = _culprit(name, model, loops)
                    evidence = lost_to(run, name, "", culprit.who or name, places).culprit.evidence
                    yield Named(run, name, replace(culprit, evidence=evidence), lost_in(places))
        if any(isinstance(each, Take) and each.lag_us for each in model.operations):
            places = earlier.places(run, _POLLING, cycle.saved_with(_without_lags(model)))
            yield lost_to(run, _POLLING, "setting", _POLLING_AT, places)


_POLLING_AT = "poll interval of the replay buffer"


def _changed(change: Callable[[Stage], Stage]) -> Callable[[Request], Request]:
    return lambda request: request._replace(stages=tuple(map(change, request.stages)))


def _without_tools(stage: Stage) -> Stage:
    return stage.changed(lambda _tool, _us: 0.0) if isinstance(stage, Tools) else stage


def _without_loop(stage: Stage) -> Stage:
    """Remove the time in which a request waits for its worker's event loop, or the loop works for it."""
    if isinstance(stage, Call):
        return stage._replace(after_us=0.0)
    if isinstance(stage, Tools):
        stalled_us = stage.stalled_us
        return stage.changed(lambda _, us: max(us - stalled_us, 0.0))._replace(stalled_us=0.0)
    return stage._replace(length_us=0.0) if stage.own else stage


def _at_once(request: Request) -> Request:
    return without_build(request._replace(begin_us=0.0))


_WITHOUT: Mapping[str, Callable[[Request], Request]] = {
    _TOOLS: _changed(_without_tools),
    _QUEUE: _changed(lambda stage: without_queue(stage) if isinstance(stage, Call) else stage),
    LATE_START: _at_once,
    _LOOP: _changed(_without_loop),
}


def _waiting_us(request: Request) -> float:
    """Return how long a request takes from its dispatch, without its calls in the engine."""
    lengths = (
        each.before_us + each.after_us if isinstance(each, Call) else measured_us(each)
        for each in request.stages
    )
    return request.begin_us + sum(lengths)


def _without_lags(model: Model) -> Model:
    operations = (
        each._replace(lag_us=0.0) if isinstance(each, Take) else each for each in model.operations
    )
    return replace(model, operations=tuple(operations))


def _culprit(name: str, model: Model, loops: Rows) -> Culprit:
    """Return the tool, the blocking call or the worker with most of a part's time, if one has it."""
    if name == _TOOLS:
        lengths = tool_lengths([model])
        return identity("tool", [Place(0, {tool: sum(us) for tool, us in lengths.items()})])
    if name == _LOOP:
        call = identity("call", places_of((r["step"], r["during"], r["lost_s"]) for r in loops))
        code = max((row["code"] or "" for row in loops if row["during"] == call.who), default="")
        return replace(call, text=f"{call.text}{code and f' ({code})'}", code=code)
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


_NO_ONE = {LATE_START: "no single worker"}


def _blocked(earlier: Earlier) -> Rows:
    """Return what blocked the event loops of workers in asynchronous runs."""
    return earlier.tables.rows(
        f"""
        SELECT run, step, coalesce(function, during, 'unknown') AS during,
            max(concat(file, ':', line)) FILTER (line IS NOT NULL) AS code,
            sum(duration_us) / 1e6 AS lost_s
        FROM lags WHERE (run, name) IN (SELECT (run, name) FROM requests)
            AND NOT {SYNCHRONOUS} AND {in_work(earlier.steps)}
        GROUP BY ALL ORDER BY ALL
        """
    )
