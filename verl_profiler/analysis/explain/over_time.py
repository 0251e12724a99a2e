"""Changes within a run: a step that stands still, growth from step to step, a change since one, two kinds of steps.

Time per token and tokens are told apart: either grows, or the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import StatisticsError, correlation, fmean, linear_regression, median, pvariance
from typing import TYPE_CHECKING, NamedTuple

from verl_profiler.analysis.explain.concentration import EVIDENCE, Culprit, Named
from verl_profiler.analysis.explain.finding import in_few
from verl_profiler.analysis.explain.forward_passes import FORWARD
from verl_profiler.analysis.selection import Rows, Steps, in_steps, nested
from verl_profiler.reading.tables.derivations import IN_ENGINE, SYNCHRONOUS
from verl_profiler.units import counted, seconds

if TYPE_CHECKING:
    from verl_profiler.analysis.explain.work import Earlier
    from verl_profiler.reading.tables.tables import Tables


# Phases whose time is compared with the tokens of their step.
OF_TOKENS = frozenset({"gen", *FORWARD, *FORWARD.values()})

# A step stands out if it has so many times the median, and so many times what the others vary by; of three steps,
# of which two are alike by chance, twice the median.
_TIMES, _SPREADS = 1.5, 8
_TIMES_OF_THREE = 2.0
# Steps that establish growth or a change, and those on either side of a change.
_STEPS, _SIDE = 5, 3
# Normal quantiles of Fisher's z of a correlation: one test, and the best of all places of a change.
_TREND, _CHANGE = 3.3, 3.8
# A change at one step leaves at most this part of the variation that growth leaves, or it is growth: one of
# many places fits by chance.
_CLOSER = 0.6
# Least growth, or change, over the run.
_GROWTH = 0.1
# Steps of another kind are at most this part of all.
_RARE = 0.4
# Or their level is so many standard deviations within either from the other: lognormal values that vary by
# 10, 20 and 40 % have two such levels in 0, 1 and 3 % of 5 steps, and 0, 0.4 and 0.7 % of 10.
_LEVELS = 6
# The part of a phase that is named has at least this share of its variation over the steps.
_MOSTLY = 0.5
# Before the name of a tool, as a part of a phase.
CALLS_OF = "calls of "


class Shape(NamedTuple):
    """How a series changes, and at each step its level without the change divided by the one with it."""

    since: int | None
    first: float
    last: float
    kept: Mapping[int, float]


class Growth(NamedTuple):
    """By how many standard deviations of chance values grow with the steps, and the growth of their logarithm."""

    deviations: float
    rate: float


_NO_GROWTH = Growth(0.0, 0.0)
_Series = Mapping[int, float]


def over_time(earlier: Earlier, segments: Rows, changing: Collection[str]) -> Iterator[Named]:
    """Find what makes some steps of a run longer than others.

    Args:
        earlier: Of the runs.
        segments: The rows of `critical_segments`.
        changing: Runs of which it is known which work of requests takes longer as they go on.
    """
    tables, steps = earlier.tables, earlier.steps
    work = _work(tables, steps)
    longest, growth = _longest(tables, steps), _growth_of_tokens(tables, steps)
    parts = _parts(segments)
    first = {row["run"]: row["step"] for row in tables.rows(FIRST_STEPS)}
    for run, phases in _lengths(tables, steps).items():
        loads = earlier.loads.get(run)
        slow = loads.much_slower() if loads else {}
        last_of = partial(_last_of, tables, run, slow)
        own = phases, work.get(run, {}), longest.get(run, {}), first[run], last_of
        explained = ("gen",) if run in changing else ()
        more = parts.get(run, {}), slow, explained, growth.get(run, _NO_GROWTH)
        for finding, longer_s, culprit in changes_in(*own, *more):
            # The rollout's start on other steps hides no part of a step that stalls.
            stalled = finding == "stalled_step"
            saved_s = sum(longer_s.values()) if stalled else earlier.of_training(run, longer_s)
            yield Named(run, finding, culprit, saved_s)


def changes_in(
    phases: Mapping[str, _Series],
    work: Mapping[str, Mapping[int, tuple[float, float]]],
    longest: _Series,
    first: int,
    last_of: Callable[[int, str], str] = lambda _step, _phase: "",
    parts: Mapping[str, Mapping[str, _Series]] = {},
    slow: Collection[int] = (),
    explained: Collection[str] = (),
    growth: Growth = _NO_GROWTH,
) -> list[tuple[str, Mapping[int, float], Culprit]]:
    """Return finding, lost seconds by step, and culprit of what makes some steps longer than others.

    Args:
        phases: Seconds by phase and step.
        work: Tokens and milliseconds per token by phase and step, where known.
        longest: Tokens of the longest request by step, where known.
        first: The run's first step.
        last_of: Returns what is known of who ended last in a step's phase, as the end of a sentence.
        parts: Seconds by phase, part of it and step, where known.
        slow: Steps in which one of the engines is much slower than the others.
        explained: Phases of which it is known what takes longer, besides tokens.
        growth: Of the prompts' tokens.
    """
    demands = {
        phase: {s: tokens for s, (tokens, _) in each.items()} for phase, each in work.items()
    }
    stalled = _stalled_in(phases, {**demands, "gen": longest}, slow)
    found = [
        (
            "stalled_step",
            {step: lost_s},
            _of_stall(step, phase, phases[phase], last_of(step, phase), parts.get(phase, {})),
        )
        for step, phase, lost_s in stalled
    ]
    without = {step for step, *_ in stalled}
    return found + _changes(phases, work, without, first, parts, explained, growth)


def _lengths(tables: Tables, steps: Steps) -> dict[str, dict[str, dict[int, float]]]:
    """Return the seconds of each of the trainer's phases by run, phase and step."""
    rows = tables.rows(
        f"""
        SELECT p.run, p.phase, p.step, sum(p.end_us - p.begin_us) / 1e6 AS length_s
        FROM phases AS p JOIN steps AS s ON s.run = p.run AND s.step = p.step AND s.finished
        -- An asynchronous step waits in gen for what others have begun.
        WHERE p.parent = 'step' AND NOT p.validate AND p.step > 0 AND (p.phase <> 'gen' OR p.{SYNCHRONOUS})
            AND {in_steps(steps, "p.step")} GROUP BY ALL ORDER BY ALL
        """
    )
    return nested(rows, "length_s", "run", "phase", "step")


def _work(tables: Tables, steps: Steps) -> dict[str, dict[str, dict[int, tuple[float, float]]]]:
    """Return tokens and milliseconds per token by run, phase and step; of gen, those in the engines."""
    rows = tables.rows(
        f"""
        SELECT run, step, 'gen' AS phase, sum(decoded_tokens * coalesce(sampled, 1)) AS tokens,
            sum({IN_ENGINE}) / sum(decoded_tokens) / 1e3 AS token_ms
        FROM engine_call_times WHERE NOT validate AND {IN_ENGINE} > 0 AND decoded_tokens > 0
            AND {in_steps(steps)} GROUP BY run, step
        UNION ALL
        SELECT run, step, phase, tokens, duration_us / tokens / 1e3 FROM phase_tokens
        WHERE tokens > 0 AND {in_steps(steps)} ORDER BY run, phase, step
        """
    )
    pairs = ({**row, "work": (float(row["tokens"]), row["token_ms"])} for row in rows)
    return nested(pairs, "work", "run", "phase", "step")


def _growth_of_tokens(tables: Tables, steps: Steps) -> dict[str, Growth]:
    """Return how the prompts' generated tokens grow with the steps, by run.

    Each step has many prompts: they establish less growth than the sums of few steps do.
    """
    rows = tables.rows(
        f"""
        SELECT run, corr(step, ln(tokens)) AS r, regr_slope(ln(tokens), step) AS rate, count(*) AS many FROM (
            SELECT run, step, coalesce(uid, request_id) AS prompt, avg(generated_tokens) AS tokens FROM requests
            WHERE finished AND NOT validate AND generated_tokens > 0 AND {in_steps(steps)} GROUP BY ALL
        ) GROUP BY run HAVING many > 3 AND isfinite(r)
        """
    )
    return {row["run"]: Growth(_of_correlation(row["r"], row["many"]), row["rate"]) for row in rows}


def _longest(tables: Tables, steps: Steps) -> dict[str, dict[int, float]]:
    """Return the most tokens of a request by run and step."""
    rows = tables.rows(
        f"SELECT run, step, max(tokens)::DOUBLE AS tokens FROM (SELECT run, step, name, request_id, "
        f"sum(response_tokens) AS tokens FROM engine_calls WHERE NOT validate AND {in_steps(steps)} "
        "GROUP BY ALL) WHERE tokens > 0 GROUP BY run, step ORDER BY run, step"
    )
    return nested(rows, "tokens", "run", "step")


def _parts(segments: Rows) -> dict[str, dict[str, dict[str, dict[int, float]]]]:
    """Return the seconds of the critical path by run, phase, category or tool, and step."""
    found: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
    for row in segments:
        name = f"{CALLS_OF}{row['what']}" if row["category"] == "tool" else row["category"]
        if row["phase"] is not None and name != row["phase"]:
            own = found.setdefault(row["run"], {}).setdefault(row["phase"], {}).setdefault(name, {})
            own[row["step"]] = own.get(row["step"], 0.0) + row["duration_s"]
    return found


def _mostly(series: _Series, parts: Mapping[str, _Series]) -> str:
    """Return the part that most of a series' variation over the steps is in; empty without one."""
    mean = fmean(series.values())
    off = {step: each - mean for step, each in series.items()}
    whole = sum(each**2 for each in off.values())
    shares = {
        name: sum(off[step] * own.get(step, 0.0) for step in off) / whole if whole else 0.0
        for name, own in parts.items()
    }
    tools = sum(each for name, each in shares.items() if name.startswith(CALLS_OF))
    shares |= {"tool calls": min(tools, _MOSTLY)}
    most = max(shares, key=lambda name: shares[name])
    return most if shares[most] >= _MOSTLY else ""


FIRST_STEPS = "SELECT run, min(step) AS step FROM steps WHERE finished AND step > 0 GROUP BY run"


def _far_above(series: _Series) -> tuple[float, list[int]]:
    """Return the median of a series, and the steps that are far above it."""
    typical = median(series.values())
    spread = median(abs(each - typical) for each in series.values())
    times = _TIMES if len(series) > 3 else _TIMES_OF_THREE
    limit = max(times * typical, typical + _SPREADS * 1.48 * spread)
    return typical, [step for step, each in series.items() if each > limit]


def _stalled_in(
    phases: Mapping[str, _Series], demands: Mapping[str, _Series], slow: Collection[int]
) -> list[tuple[int, str, float]]:
    """Return step, phase and excess of the phases that take many times as long in few steps.

    Not where the step's tokens, or those of its longest request, exceed the median by at least half as much, unless
    an engine is `slow` there.
    """
    found: list[tuple[int, str, float]] = []
    for phase, series in phases.items():
        typical, out = _far_above(series)
        stood = [s for s in series if phase == "gen" and s in slow and series[s] > _TIMES * typical]
        out = sorted({*out, *stood})
        if len(series) < 3 or len(out) > max(len(series) // 10, 1):
            continue
        tokens = demands.get(phase, {})
        usual = median(tokens.values()) if tokens else 0.0
        found += [
            (step, phase, series[step] - typical)
            for step in out
            if not usual
            or step in stood
            or tokens.get(step, 0.0) / usual - 1 < (series[step] / typical - 1) / 2
        ]
    return found


def _last_of(
    tables: Tables, run: str, slow: Mapping[int, tuple[str, float]], step: int, phase: str
) -> str:
    if phase == "gen" and step in slow:
        who, times = slow[step]
        return f"; {who} takes {times:.1f} times as long per token as others at its load, as if it stood still"
    (row,) = tables.rows(
        """
        WITH ends AS (
            SELECT r.name, max(r.end_us) AS end_us, any_value(p.end_us - p.begin_us) AS length_us
            FROM phases AS p JOIN rank_spans AS r ON r.run = p.run AND r.step = p.step
                AND r.role NOT IN ('trainer', 'engine')
                AND (r.begin_us + r.end_us) // 2 BETWEEN p.begin_us AND p.end_us
            WHERE p.run = $run AND p.step = $step AND p.phase = $phase AND p.parent = 'step'
            GROUP BY r.name
            UNION ALL
            SELECT c.engine_name, max(c.end_us), any_value(p.end_us - p.begin_us)
            FROM phases AS p JOIN engine_calls AS c ON c.run = p.run AND c.step = p.step
                AND NOT c.validate AND c.engine_name IS NOT NULL
            WHERE p.run = $run AND p.step = $step AND p.phase = $phase AND p.phase = 'gen'
                AND p.parent = 'step' GROUP BY c.engine_name
        )
        SELECT count(*) AS ranks, arg_max(name, end_us) AS who,
            (max(end_us) - max(end_us, 2)[2]) / any_value(length_us) AS behind,
            (max(end_us) - min(end_us)) / any_value(length_us) AS apart
        FROM ends
        """,
        {"run": run, "step": step, "phase": phase},
    )
    kind = "replicas" if phase == "gen" else "ranks"
    if row["ranks"] > 1 and row["behind"] > 0.5:
        return f"; {row['who']} ends last of {row['ranks']} {kind}"
    return f", all {row['ranks']} {kind} at once" if row["ranks"] > 1 and row["apart"] < 0.1 else ""


def _of_stall(
    step: int, phase: str, series: _Series, last: str, parts: Mapping[str, _Series]
) -> Culprit:
    typical = median(series.values())
    times = series[step] / typical if typical else 0.0
    than = f", {times:,.{int(times < 10)}f} times the median" if times else ""
    more = {
        name: own.get(step, 0.0) - median(own.get(each, 0.0) for each in series)
        for name, own in parts.items()
    }
    most = max(more, key=lambda name: more[name], default="")
    mostly = f", mostly {most}" if most and more[most] >= _MOSTLY * (series[step] - typical) else ""
    text = f"{phase} took {seconds(series[step])} in step {step}{than}{mostly}{last}"
    evidence: Rows = [{"step": step, "who": phase, "seconds": series[step], "what": None}]
    return Culprit("step", f"step {step}", text, evidence=evidence)


def _changes(
    phases: Mapping[str, _Series],
    work: Mapping[str, Mapping[int, tuple[float, float]]],
    without: set[int],
    first: int,
    parts: Mapping[str, Mapping[str, _Series]],
    explained: Collection[str],
    growth: Growth,
) -> list[tuple[str, Mapping[int, float], Culprit]]:
    """Return finding, seconds by step, and culprit of what grows or has changed, since each step."""
    changed: dict[tuple[str, int | None], list[tuple[Mapping[int, float], Culprit]]] = {}

    def add(
        finding: str, shape: Shape, phase: str, series: _Series, text: str, more: str = ""
    ) -> None:
        since = f" since step {shape.since}" if shape.since is not None else ""
        longer = sorted((s for s in series if shape.kept[s] < 1), key=lambda s: -series[s])
        evidence: Rows = [
            {"step": step, "who": phase, "seconds": series[step], "what": None}
            for step in longer[:EVIDENCE]
        ]
        lost = {step: length * (1 - shape.kept[step]) for step, length in series.items()}
        where = in_few(lost).get("where", "") if finding == "uneven_times" else ""
        cells = {(phase, phase): sum(lost.values())} if phase != "gen" else {}
        about = f"{text}{since}{more}"
        culprit = Culprit("phase", phase, about, where, evidence=evidence, cells=cells)
        finding = finding or ("grows" if shape.since is None else "changed")
        changed.setdefault((finding, shape.since), []).append((lost, culprit))

    for phase, lengths in phases.items():
        series = {step: each for step, each in lengths.items() if step not in without}
        known = {step: each for step, each in work.get(phase, {}).items() if step in series}
        shape, more, rate, kinds = shape_of(series, first), None, None, None
        spent = f"{seconds(shape.first)} to {seconds(shape.last)}" if shape else ""
        if len(known) == len(series):
            demand = {step: tokens for step, (tokens, _) in known.items()}
            more = shape_of(demand, first, growth)
            rate = shape_of({step: ms for step, (_, ms) in known.items()}, first)
            kinds = _two_kinds(demand) if more is None else None
            if kinds is not None and kinds.since is not None:
                more, kinds = kinds, None
            if more is not None:
                text = f"{more.first:,.0f} to {more.last:,.0f} tokens per step in {phase}"
                add("more_tokens", more, phase, series, text)
            elif kinds is not None:
                text = f"{kinds.last:,.0f} tokens per step in {phase}, in the other steps {kinds.first:,.0f}"
                add("uneven_steps", kinds, phase, series, text)
            if rate is not None and phase not in explained:
                how = "tokens as before" if more is None else "besides its tokens"
                text = (
                    f"{spent}{', ' * bool(spent)}{rate.first:.3g} to {rate.last:.3g} ms per token"
                )
                add("", rate, phase, series, f"{phase}: {text}", f", {how}")
        if phase in explained:
            continue
        if shape is None and more is None and rate is None:
            # With tokens that differ, only what they do not explain.
            per_token = {step: ms for step, (_, ms) in known.items()}
            times = _two_kinds(per_token if len(known) == len(series) else series)
            if times is not None:
                out = [step for step in series if times.kept[step] < 1]
                last, first_s = (
                    fmean(series[s] for s in series if (s in out) is each) for each in (True, False)
                )
                even = len(known) == len(series) and kinds is None
                if times.since is None:
                    text = f"{seconds(last)} in {counted(len(out), 'step')}, {seconds(first_s)} in the others"
                    how = ", tokens as in the others" if even else ""
                    add("uneven_times", times, phase, series, f"{phase}: {text}{how}")
                else:
                    how = ", tokens as before" if even else ""
                    text = f"{phase}: {seconds(first_s)} to {seconds(last)}"
                    add("", times, phase, series, text, how)
        if shape is not None and more is None and rate is None:
            mostly = _mostly(series, parts.get(phase, {}))
            unknown = "; its tokens were not recorded" if not known and phase in OF_TOKENS else ""
            text = f", mostly {mostly}" if mostly else unknown
            add("", shape, phase, series, f"{phase}: {spent}", text)
    found: list[tuple[str, Mapping[int, float], Culprit]] = []
    for (name, _), each in changed.items():
        _, culprit = max(each, key=lambda own: sum(own[0].values()))
        # Each may have a cause of its own.
        others = [
            f"{other.who} ({seconds(sum(lost.values()) / len(phases[other.who]))} per step)"
            for lost, other in each
            if other is not culprit and other.who
        ]
        text = culprit.text + (f"; also {', '.join(others)}" if others else "")
        steps = dict.fromkeys(step for lost, _ in each for step in lost)
        together = {step: sum(lost.get(step, 0.0) for lost, _ in each) for step in steps}
        cells = {cell: lost_s for _, other in each for cell, lost_s in other.cells.items()}
        # What is lost in gen has no place of its own.
        cells = cells if len(cells) == len(each) else {}
        found.append((name, together, replace(culprit, text=text, cells=cells)))
    return found


def _two_kinds(series: _Series) -> Shape | None:
    """Return whether few steps have many times the value of the others, or at most half of them another level."""
    _, out = _far_above(series)
    if len(series) < _STEPS:
        return None
    if not 0 < len(out) <= _RARE * len(series):
        out = _upper(series)
    if not out:
        return None
    first = fmean(each for step, each in series.items() if step not in out)
    kept = {step: first / each if step in out else 1.0 for step, each in series.items()}
    others = max(step for step in series if step not in out)
    since = min(out) if len(out) > 1 and others < min(out) else None
    return Shape(since, first, fmean(series[step] for step in out), kept)


def _upper(series: _Series) -> list[int]:
    """Return the steps of the higher of two levels; none if there are no two, or most steps have the higher.

    Most steps may have it from one step on.
    """
    ordered = sorted(series, key=lambda step: series[step])
    if series[ordered[0]] <= 0:
        return []
    logs = [math.log(series[step]) for step in ordered]
    at = max(range(2, len(logs) - 1), key=lambda place: logs[place] - logs[place - 1])
    low, high = logs[:at], logs[at:]
    within = len(low) * pvariance(low) + len(high) * pvariance(high)
    apart = max(math.log(_TIMES), _LEVELS * math.sqrt(within / (len(logs) - 2)))
    changed = max(ordered[:at]) < min(ordered[at:])
    # Of steps that alternate, either kind may be one more.
    if fmean(high) - fmean(low) < apart or (2 * at + 1 < len(logs) and not changed):
        return []
    return ordered[at:]


def shape_of(series: _Series, first: int, growth: Growth = _NO_GROWTH) -> Shape | None:
    """Return whether a series grows with the steps, or has grown at one of them; None if neither.

    Args:
        series: Values by step.
        first: The run's first step, whose level growth is measured from.
        growth: Of what the values are sums of, if it is known.
    """
    steps = sorted(series)
    values = [series[step] for step in steps]
    if len(steps) < _STEPS or min(values) <= 0:
        return None
    straight = _r(steps, values)
    trend = _of_correlation(straight, len(values)) / _TREND
    place, r = _largest_step(values)
    best, since = _of_correlation(r, len(values)) / _CHANGE, steps[place]
    if max(trend, best) < 1:
        if growth.deviations < _TREND or math.expm1(growth.rate * (steps[-1] - steps[0])) < _GROWTH:
            return None
        kept = {step: min(math.exp(growth.rate * (first - step)), 1.0) for step in steps}
        return Shape(None, values[0], values[-1], kept)
    if best > trend and (trend < 1 or 1 - r**2 < _CLOSER * (1 - straight**2)):
        before = fmean(series[step] for step in steps if step < since)
        after = fmean(series[step] for step in steps if step >= since)
        kept = {step: before / after if step >= since else 1.0 for step in steps}
        shape = Shape(since, before, after, kept)
    else:
        logs = [math.log(each) for each in values]
        # Growth by a constant share where that fits better.
        shares = _r(steps, logs) > straight
        slope, constant = linear_regression(steps, logs if shares else values)
        line = {step: constant + slope * step for step in (first, *steps)}
        fitted = {s: math.exp(each) if shares else max(each, 1e-9) for s, each in line.items()}
        kept = {step: min(fitted[first] / fitted[step], 1.0) for step in steps}
        shape = Shape(None, values[0], values[-1], kept)
    return shape if shape.last > (1 + _GROWTH) * shape.first else None


def _largest_step(values: Sequence[float]) -> tuple[int, float]:
    """Return the place from which on values are higher, with the best correlation; (0, 0) if none is."""
    number, mean = len(values), fmean(values)
    spread = math.sqrt(sum((each - mean) ** 2 for each in values))
    place, best, above = 0, 0.0, 0.0
    for at, each in enumerate(reversed(values), 1):
        above += each - mean
        if _SIDE <= at <= number - _SIDE and above > 0 and spread:
            r = above / (spread * math.sqrt(at * (number - at) / number))
            if r >= best:
                place, best = number - at, r
    return place, best


def _r(x: Sequence[float], y: Sequence[float]) -> float:
    try:
        return correlation(x, y)
    except StatisticsError:
        return 0.0


def _of_correlation(r: float, number: int) -> float:
    """Return Fisher's z of a correlation, in standard deviations of chance."""
    return math.atanh(min(r, 1 - 1e-12)) * math.sqrt(number - 3)
