"""What the work explains, before a worker, a replica or a rank is named.

Each function takes out what some requests or ranks demand beyond the others (prompts with long responses, a
slow tool, failed calls, prefill, routing, tokens), and measures how much earlier the last one would end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_profiler.analysis.explain.calls import CROWDED, CROWDED_CALLS
from verl_profiler.analysis.explain.changes import without_queue
from verl_profiler.analysis.explain.concentration import (
    Named,
    Place,
    identity,
    lost_in,
    lost_to,
    places_of,
)
from verl_profiler.analysis.explain.engine_speed import (
    MORE,
    ReplicaLoads,
    by_load,
    decoding,
    in_work,
)
from verl_profiler.analysis.explain.model import Call, Tools, Work, measured_us
from verl_profiler.analysis.explain.rebuilding import TOKEN_PART
from verl_profiler.analysis.selection import Rows, Steps, by_run, in_steps
from verl_profiler.reading.tables.derivations import SYNCHRONOUS
from verl_profiler.units import counted, seconds, share

if TYPE_CHECKING:
    from verl_profiler.analysis.explain.model import Request, Stage
    from verl_profiler.analysis.explain.what_if import Cycle
    from verl_profiler.reading.tables.tables import Tables


# A prompt's responses are long if they have so many times the tokens of its step's median prompt, in half
# of its steps, of which there are at least so many.
_LONGER, _OFTEN = 1.5, 3
# A tool is slow among others if it has at most a third of the calls and so many times the
# median of each other, with at least so many calls.
_SLOWER_TOOL, _CALLS = 5, 5
# Few requests at once: at most this share of a step's requests, if most start within this part of the time between
# two starts after another has ended.
_FEW, _AT_ONCE = 0.5, 0.1

_ENDED = """
SELECT run, step, name, request_id, sample, begin_us, end_us, turns, generated_tokens, engine_us, detailed
FROM requests WHERE finished AND NOT validate
"""
# Less of the requests' time than this costs no step of an asynchronous run enough.
LITTLE = 0.01
# A worker is late if its requests start so many times as long after their dispatch as those of the others.
LATER = 3


class Earlier:
    """Measures how much earlier steps end without a part of each request.

    Of a synchronous run, how much earlier each step's last request ends; of an asynchronous one, how much
    shorter its cycle is when it is replayed.

    Attributes:
        finished: Run and step of all finished steps.
    """

    def __init__(self, tables: Tables, steps: Steps, known: Mapping[str, Cycle]) -> None:
        self.tables, self.steps, self.cycles = tables, steps, known
        finished = tables.rows(
            f"SELECT run, step FROM steps WHERE finished AND step > 0 AND {in_steps(steps)}"
        )
        self.finished = {(row["run"], row["step"]) for row in finished}
        counted = Counter(run for run, _ in self.finished)
        self._counts = {run: count for run, count in counted.items() if run in known}
        self._in_steps = not known or len(self._counts) < len(counted)
        self.few = _few_at_once(tables, steps) if self._in_steps else []

    @cached_property
    def cells(self) -> dict[str, Rows]:
        """What `decoding` returns."""
        return decoding(self.tables, self.steps)

    @cached_property
    def loads(self) -> dict[str, ReplicaLoads]:
        """The replicas' time per token and demands, by run."""
        return {run: by_load(own) for run, own in self.cells.items()}

    def __call__(
        self,
        cuts: str,
        of: str,
        parameters: Mapping[str, Any] | None = None,
        slow: Mapping[tuple[str, str], Collection[str]] = {},
    ) -> dict[tuple[str, str], list[Place]]:
        """Measure what steps gain without a part of each request.

        Args:
            cuts: SQL of rows of run, step, name, request_id, who and cut_us; one per request and who.
            of: What the parts are of: `tools`, `decoding`, `tokens` (their decoding), `prefill`, `queue`, `loop`
                (what is outside the engines), `other` or `all`.
            parameters: Of `cuts`.
            slow: Replicas of asynchronous runs that are as fast as the others then, by run and who; `cuts` have no
                decoding of such runs.

        Returns:
            By run and who: a place for each step with a gain, of who, with the last request.
        """
        found = self._replayed(cuts, of, parameters, slow) if self.cycles else {}
        if not self._in_steps:
            return found
        few = {
            f"few_{column}": [row[column] for row in self.few] for column in ("run", "step", "most")
        }
        for row in self.tables.rows(
            f"""
            WITH cuts AS ({cuts}), whos AS (SELECT DISTINCT run, who FROM cuts), ended AS ({_ENDED}),
            few AS (SELECT unnest($few_run::VARCHAR[]) AS run, unnest($few_step::BIGINT[]) AS step,
                unnest($few_most::BIGINT[]) AS most)
            SELECT run, step, who, arg_max(request_id, end_us) AS request_id,
                -- Those that start as others end wait for all of these.
                CASE WHEN any_value(most) IS NULL THEN max(end_us) - max(end_us - coalesce(cut_us, 0))
                    ELSE sum(coalesce(cut_us, 0)) / any_value(most) END / 1e6 AS lost_s
            FROM ended JOIN whos USING (run)
                LEFT JOIN cuts USING (run, step, name, request_id, who) LEFT JOIN few USING (run, step)
            -- What others without details have to cut is unknown; those that end last have them.
            WHERE {SYNCHRONOUS} AND {in_steps(self.steps)} AND (detailed OR cut_us > 0 OR {of == "tokens"})
            GROUP BY run, step, who HAVING lost_s > 0 ORDER BY run, step, who
            """,
            {**(parameters or {}), **few},
        ):
            place = Place(row["step"], {row["who"]: row["lost_s"]}, row["request_id"])
            found.setdefault((row["run"], row["who"]), []).append(place)
        return found

    def of_training(self, run: str, lost_s: float | Mapping[int, float]) -> float:
        """Return how much shorter all steps are with so much less in the trainer's phases, in which others may run.

        In all steps together, or in each.
        """
        steps = self._counts.get(run, 0)
        if not isinstance(lost_s, Mapping):
            return steps * self.cycles[run].trained_s(lost_s / steps) if steps else lost_s
        if not steps:
            return sum(lost_s.values())
        finished = sorted(step for own, step in self.finished if own == run)
        return steps * self.cycles[run].trained_s({s: lost_s.get(s, 0.0) for s in finished})

    def _replayed(
        self,
        cuts: str,
        of: str,
        parameters: Mapping[str, Any] | None,
        slow: Mapping[tuple[str, str], Collection[str]],
    ) -> dict[tuple[str, str], list[Place]]:
        cut_us: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
        for row in self.tables.rows(
            f"SELECT * FROM ({cuts}) WHERE NOT {SYNCHRONOUS} AND cut_us > 0 ORDER BY ALL",
            parameters,
        ):
            own = cut_us.setdefault((row["run"], row["who"]), {})
            own[row["name"], row["request_id"]] = row["cut_us"]
        found: dict[tuple[str, str], list[Place]] = {}
        for run, who in {**slow, **cut_us}:
            cycle, own = self.cycles.get(run), cut_us.get((run, who), {})
            if cycle is None or cycle.refused is not None:
                continue
            requests = cycle.model.requests
            less_us = sum(own.get((each.worker, each.request_id or ""), 0.0) for each in requests)
            replicas = slow.get((run, who), ())
            if not replicas and less_us < LITTLE * sum(each.duration_us for each in requests):
                continue
            places = self.places(
                run,
                who,
                cycle.saved_s(
                    lambda each, own=own: _without(
                        each, own.get((each.worker, each.request_id or ""), 0.0), of
                    ),
                    replicas,
                ),
            )
            if places:
                found[run, who] = places
        return found

    def places(self, run: str, who: str, saved: Mapping[int, float]) -> list[Place]:
        """Return a place for each step of an asynchronous run that is shorter by the seconds that a replay saves."""
        gains = {step: each for step, each in saved.items() if each > 0}
        # The steps that are replayed stand for all.
        part = sum(saved.values()) / sum(gains.values()) if gains else 0.0
        part *= self._counts.get(run, 0) / max(len(saved), 1)
        return [Place(step, {who: part * each}) for step, each in gains.items()] if part > 0 else []


def _time_us(stage: Stage, of: str) -> float:
    """Return how long a stage has of what is cut."""
    if of == "all":
        return measured_us(stage)
    if not isinstance(stage, Call):
        kind = "tools" if isinstance(stage, Tools) else "other"
        return stage.length_us if of in (kind, "loop") else 0.0
    decode_us = stage.seen_us - stage.before_us - stage.fixed_us - stage.after_us
    times = {
        "prefill": stage.fixed_us,
        "decoding": decode_us,
        "tokens": decode_us,
        "queue": stage.queue_us,
        "loop": stage.before_us - stage.queue_us + stage.after_us,
    }
    return max(times.get(of, 0.0), 0.0)


def _shorter(stage: Stage, of: str, part: float) -> Stage:
    """Return a stage with a part of what is cut."""
    if isinstance(stage, Work):
        return stage._replace(length_us=part * stage.length_us)
    if isinstance(stage, Tools):
        calls = tuple((part * begin, part * us, tool) for begin, us, tool in stage.calls)
        return stage._replace(calls=calls)
    if of == "queue":
        return without_queue(stage, part)
    if of == "loop":
        before_us = part * stage.before_us + (1 - part) * stage.queue_us
        return stage._replace(before_us=before_us, after_us=part * stage.after_us)
    if of != "prefill":
        tokens = round(part * (stage.tokens or 0)) if of == "tokens" else stage.tokens
        stage = stage._replace(work=part * stage.work, tokens=tokens)
    return stage._replace(fixed_us=part * stage.fixed_us) if of in ("prefill", "all") else stage


def _without(request: Request, cut_us: float, of: str) -> Request:
    """Return a request whose stages of a kind are shorter in proportion."""
    times_us = [_time_us(stage, of) for stage in request.stages]
    part = max(1 - cut_us / max(sum(times_us), 1.0), 0.0)
    if not cut_us or not any(times_us):
        return request
    stages = (
        _shorter(stage, of, part) if time_us else stage
        for stage, time_us in zip(request.stages, times_us, strict=True)
    )
    return request._replace(stages=tuple(stages))


def prompts(earlier: Earlier) -> Iterator[Named]:
    """Find prompts whose responses are long in each step that has them."""
    tables, steps = earlier.tables, earlier.steps
    rows = tables.rows(
        f"""
        WITH ended AS ({_ENDED}), groups AS (
            SELECT run, step, sample, avg(generated_tokens) AS tokens FROM ended
            WHERE sample IS NOT NULL AND {in_work(steps)} GROUP BY run, step, sample
        ), relative AS (
            SELECT *, tokens / nullif(median(tokens) OVER (PARTITION BY run, step), 0) AS longer
            FROM groups
        )
        SELECT run, sample, median(longer) AS longer, count(*) AS steps,
            count(DISTINCT sample) OVER (PARTITION BY run) AS prompts
        FROM relative GROUP BY run, sample
        HAVING count(*) >= {_OFTEN} ORDER BY run, longer DESC
        """
    )
    for run, own in by_run(rows).items():
        long = [row for row in own if (row["longer"] or 0) >= _LONGER]
        if not long or 4 * len(long) > len(own):
            continue
        names = [str(row["sample"]) for row in long]
        longer = median(row["longer"] for row in long)
        places = earlier(
            f"""
            -- Of an asynchronous run, what they take longer: they delay no others of their step.
            SELECT e.run, e.step, name, request_id, 'long' AS who,
                CASE WHEN e.{SYNCHRONOUS} THEN greatest(end_us - others_us, 0)
                    ELSE engine_us * (1 - 1 / $longer) END AS cut_us
            FROM ({_ENDED}) AS e JOIN (
                SELECT run, step, max(end_us) AS others_us FROM ({_ENDED})
                WHERE NOT list_contains($samples, sample::VARCHAR) GROUP BY run, step
            ) AS o ON o.run = e.run AND o.step = e.step
            WHERE e.run = $run AND list_contains($samples, sample::VARCHAR)
            """,
            "tokens",
            {"run": run, "samples": names, "longer": longer},
        ).get((run, "long"), [])
        if not places:
            continue
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")
        text = (
            f"prompt{'s' * (len(names) != 1)} {listed}: {longer:.1f} times the tokens of the others"
        )
        last = "" if run in earlier.cycles else "last "
        where = f"{last}in {counted(len(places), 'step')}"
        yield lost_to(run, "long_prompts", "prompt group", listed, places, text=text, where=where)


# A request is long among those of its step if its tokens are so many times the median, or its turns so many times
# those that most requests have at most; long ones are at most this part of all, or lengths are of several kinds.
_LONG, _TAIL = 2, 1 / 3
_MOST_REQUESTS = 0.8
# Fewer requests of a step have no spread to be beyond.
_SEVERAL = 8
# Standard deviations of a normal distribution: from its tenth percentile to its median, and of what a tail is beyond.
_TENTH, _BEYOND = 1.2816, 1.5


class Tail(NamedTuple):
    """Requests with many more tokens or turns than the others: a sentence, and what the steps lose to them, in all.

    `who` are those that are longer than lengths are that vary as those below the median do; None without any.
    """

    sentence: str
    sooner_s: float
    who: str | None


def _of_long_requests(tables: Tables, ended: str) -> Rows:
    """Return what the rows of `long_requests` are among those of `ended`: one row per run and who."""
    return tables.rows(
        f"""
        WITH whos AS (
            SELECT run, who, array_agg(DISTINCT name) AS names FROM long_requests GROUP BY run, who
        ), every AS (
            SELECT r.*, w.who, names, c.who IS NOT NULL AS longer, at_limit,
                coalesce(cut_us > 0 AND 2 * cut_us >= most_us, false) AS is_long
            FROM ({ended}) AS r JOIN whos AS w USING (run)
            LEFT JOIN (SELECT *, max(cut_us) OVER (PARTITION BY run, who, step) AS most_us FROM long_requests) AS c
                USING (run, step, name, request_id, who)
            LEFT JOIN (SELECT run, step, name, request_id, bool_or(finish_reason = 'length') AS at_limit
                FROM engine_calls WHERE NOT validate GROUP BY ALL) AS t
                USING (run, step, name, request_id)
        )
        SELECT run, who, count(*) FILTER (is_long) AS long, count(*) AS many,
            count(*) FILTER (longer) AS many_long, count(DISTINCT step) AS steps,
            count(DISTINCT name) FILTER (longer) AS workers,
            count(*) FILTER (list_contains(names, name)) AS theirs,
            median(generated_tokens) FILTER (is_long) / median(generated_tokens) FILTER (NOT is_long) AS times,
            median(turns) FILTER (is_long) AS turns,
            median(turns) FILTER (NOT is_long) AS other_turns,
            count(*) FILTER (is_long AND at_limit) AS at_limit FROM every GROUP BY run, who
        """
    )


def tails(earlier: Earlier) -> dict[str, Tail]:
    """Find requests with many more tokens or turns than the others, that steps wait for.

    Of a synchronous run they run when the others have ended: those that are counted run for at least half as long
    then as the last of their step.  Of an asynchronous run only those are found that are longer than lengths
    are that vary as those below the median do.

    Returns:
        By run.
    """
    tables, steps = earlier.tables, earlier.steps
    ended = f"SELECT * FROM ({_ENDED}) WHERE {in_work(steps)}"
    cuts = f"""
        WITH lengths AS (
            SELECT *, {SYNCHRONOUS} AS synchronous,
                ln(nullif(generated_tokens, 0) / nullif(median(generated_tokens) OVER every, 0)) AS more,
                -- Requests of more turns have more tokens.
                generated_tokens / greatest(turns, 1) AS turn_tokens,
                ln(nullif(turn_tokens, 0) / nullif(median(turn_tokens) OVER every, 0)) AS more_in_turn,
                turns / ({_LONG} * quantile_cont(turns, {_MOST_REQUESTS}) OVER every) AS more_turns,
                count(*) OVER every AS many, sqrt(2 * ln(many)) AS deviations,
                coalesce(sample::VARCHAR, request_id) AS prompt
            FROM ({ended}) WINDOW every AS (PARTITION BY run, step)
        ), alike AS (
            -- The requests of a prompt have similar lengths: their mean varies less.
            SELECT *, avg(more_in_turn) OVER own AS more_in_prompt,
                sqrt(2 * ln(many / count(*) OVER own)) AS prompt_deviations
            FROM lengths WINDOW own AS (PARTITION BY run, step, prompt)
        ), spreads AS (
            SELECT run, greatest(quantile_cont(-more, 0.9), quantile_cont(-more_in_turn, 0.9)) / {_TENTH} AS spread,
                quantile_cont(-more_in_prompt, 0.9) / {_TENTH} AS prompt_spread
            FROM alike GROUP BY run
        ), judged AS (
            -- Of so many lognormal lengths the longest is rarely so many deviations longer.
            SELECT *, NOT synchronous AND more > ln({_LONG})
                    AND more_in_prompt > greatest(ln({_LONG}), prompt_deviations * prompt_spread) AS of_prompt,
                many >= {_SEVERAL} AND (more_turns > 1 OR of_prompt
                    OR (more > ln({_LONG}) AND more_in_turn > deviations * spread)) AS beyond
            FROM alike JOIN spreads USING (run)
        ), limits AS (
            SELECT DISTINCT run, 'long' AS who, NULL AS most FROM judged WHERE synchronous
            UNION ALL
            SELECT run, CASE WHEN often THEN 'longer' ELSE 'long' END, CASE WHEN often THEN {_BEYOND} * spread END
            FROM (SELECT run, any_value(spread) AS spread, bool_and(synchronous) AS synchronous,
                    2 * count(DISTINCT step) FILTER (beyond) > count(DISTINCT step) AS often
                FROM judged GROUP BY run) WHERE often OR NOT synchronous
        ), long AS (
            SELECT l.*, who FROM judged AS l JOIN limits USING (run)
            WHERE (more > ln({_LONG}) AND coalesce(more_in_turn > most, true)) OR more_turns > 1 OR of_prompt
        ), others AS (
            SELECT e.run, e.step, who, max(end_us) AS others_us
            FROM ({ended}) AS e JOIN limits USING (run) ANTI JOIN long USING (run, step, name, request_id, who)
            GROUP BY ALL
        )
        -- Of an asynchronous run, what they take longer than the median: they delay no others of their step.
        SELECT run, step, name, request_id, who, CASE WHEN synchronous THEN greatest(end_us - others_us, 0)
            ELSE engine_us * coalesce(1 - exp(-more), 1 - 1 / ({_LONG} * more_turns)) END AS cut_us
        FROM long JOIN others USING (run, step, who)
    """
    # Kept, because most of the time is that of the quantiles over all requests.
    tables.rows(f"CREATE OR REPLACE TEMP TABLE long_requests AS {cuts}")
    sooner = earlier("FROM long_requests", "tokens")
    rows = _of_long_requests(tables, ended) if sooner else []
    tables.rows("DROP TABLE long_requests")
    of_tails = {(row["run"], row["who"]): row for row in rows}
    found: dict[str, Tail] = {}
    # The longer ones are among the long ones, and come after them.
    for (run, who), places in sooner.items():
        row = of_tails[run, who]
        flows = run in earlier.cycles
        of_one = row["workers"] == 1 and 2 * row["many_long"] > row["theirs"]
        # Where most requests of one worker are long, that is where to look.
        rare = not flows and 2 * len(places) <= row["steps"]
        if of_one or rare or row["many_long"] > _TAIL * row["many"]:
            continue
        text = f"{row['long']:,} of {row['many']:,} requests"
        named = text if who == "longer" else None
        # Tokens may not have been recorded.
        text += f" with {row['times']:.1f} times the tokens" if row["times"] else ""
        if (row["turns"] or 0) >= _LONG * (row["other_turns"] or 0) > 0:
            text += f" in {row['turns']:g} turns, others {row['other_turns']:g} (medians)"
        if row["at_limit"]:
            text += f", {row['at_limit']:,} of them at the limit"
        which = "longest" if flows else "last to finish"
        found[run] = Tail(f"The {which} are {text}.", lost_in(places), named)
    return found


# Calls of one turn run side by side, or one after the other; without its own time, a turn's tools take what
# the others take.
_TURNS = """
SELECT run, step, name, request_id, who, CASE
        WHEN sum(own_us) <= 1.01 * (max(end_us) - min(begin_us)) THEN sum(own_us - left_us)
        ELSE max(own_us) - max(left_us) END AS turn_us
FROM ({calls}) GROUP BY run, step, name, request_id, turn, who
"""


def _of_turns(calls: str) -> str:
    turns = _TURNS.format(calls=calls)
    return (
        "SELECT run, step, name, request_id, who, sum(turn_us) AS cut_us "
        f"FROM ({turns}) GROUP BY run, step, name, request_id, who"
    )


def tool_work(earlier: Earlier) -> Iterator[Named]:
    """Measure what tools cost: one that is slow among others, calls at once, far longer calls than others, failed ones."""
    calls = (
        "SELECT run, step, name, request_id, turn, coalesce(tool, 'tool') AS tool, begin_us, end_us, "
        "greatest(duration_us - coalesce(stalled_us, 0), 0) AS own_us, sampled, "
        "coalesce(status = 'error', false) AND coalesce(error, '') NOT IN "
        "('unknown_tool', 'bad_arguments') AS failed "
        f"FROM tool_calls WHERE NOT validate AND duration_us IS NOT NULL AND {in_work(earlier.steps)}"
    )
    slow = f"""
        WITH calls AS ({calls}), tools AS (
            SELECT run, tool AS who, median(own_us) AS typical_us, sum(sampled) AS many,
                sum(many) OVER (PARTITION BY run) AS every
            FROM calls WHERE NOT failed GROUP BY run, tool
        ), others AS (
            SELECT t.run, t.who, max(o.typical_us) AS cap_us FROM tools AS t JOIN tools AS o
                ON o.run = t.run AND o.who <> t.who
            WHERE t.many >= {_CALLS} AND 3 * t.many <= t.every GROUP BY t.run, t.who, t.typical_us
            HAVING t.typical_us >= {_SLOWER_TOOL} * cap_us
        )
        SELECT c.*, o.who, CASE WHEN tool = who THEN least(own_us, cap_us) ELSE own_us END AS left_us
        FROM calls AS c JOIN others AS o USING (run)
    """
    failed = f"""
        SELECT *, 'failed calls' AS who, CASE WHEN failed THEN 0 ELSE own_us END AS left_us FROM ({calls})
    """
    crowded = f"""
        WITH calls AS ({calls}), changes AS (
            SELECT *, begin_us AS at_us, 1 AS change FROM calls
            UNION ALL BY NAME SELECT run, step, tool, end_us AS at_us, -1 AS change, sampled FROM calls
        ), running AS (
            SELECT *, sum(change * sampled) OVER (PARTITION BY run, step, tool ORDER BY at_us, change)
                - sampled AS others FROM changes
        ), loaded AS (
            SELECT * FROM running WHERE change = 1 AND NOT failed
        ), fitted AS (
            SELECT run, tool, regr_slope(own_us, others) AS more_us FROM loaded GROUP BY run, tool
            HAVING count(*) >= {CROWDED_CALLS} AND regr_r2(own_us, others) >= {CROWDED} AND more_us > 0
        ), whole AS (SELECT run, string_agg(tool, ', ' ORDER BY tool) AS who FROM fitted GROUP BY run)
        SELECT c.*, who, greatest(own_us - coalesce(more_us * others, 0), 0) AS left_us
        FROM loaded AS c JOIN whole USING (run) LEFT JOIN fitted USING (run, tool)
    """
    uneven = f"""
        WITH placed AS (
            SELECT *, (sum(sampled) OVER (PARTITION BY run, tool ORDER BY own_us, begin_us
                ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) - sampled / 2)
                / sum(sampled) OVER (PARTITION BY run, tool) AS place,
                -- The normal quantile of the place (Winitzki's approximation).
                ln(1 - (2 * place - 1) ^ 2) / 2 AS half, 2 / (0.147 * pi()) + half AS whole,
                sqrt(2 * (sqrt(whole ^ 2 - half / 0.0735) - whole)) AS deviations
            FROM ({calls}) WHERE NOT failed
        ), typical AS (
            SELECT run, tool, arg_min(own_us, abs(place - 0.5)) AS typical_us,
                ln(typical_us / greatest(arg_min(own_us, abs(place - 0.1)), 1)) / {_TENTH} AS spread
            FROM placed GROUP BY run, tool HAVING sum(sampled) >= {_CALLS} AND typical_us > 0
        )
        -- As if calls above the median varied as those below it do.
        SELECT p.*, tool AS who, CASE WHEN place > 0.5 THEN least(own_us, typical_us * exp(spread * deviations))
            ELSE own_us END AS left_us
        FROM placed AS p JOIN typical USING (run, tool)
    """
    behind = "Calls take longer the more of them run at once, as behind a limit."
    for finding, cuts, because in (
        ("slow_tools", slow, ""),
        ("slow_tools", crowded, behind),
        ("slow_tools", uneven, ""),
        ("failing_tools", failed, ""),
    ):
        for (run, _), places in earlier(_of_turns(cuts), "tools").items():
            culprit = replace(identity("tool", places), because=because)
            yield Named(run, finding, culprit, lost_in(places))


def all_tools(earlier: Earlier) -> dict[str, float]:
    """Return the seconds by which steps of synchronous runs are shorter without tools: less than the last request's."""
    calls = (
        "SELECT run, step, name, request_id, turn, begin_us, end_us, duration_us AS own_us, 0 AS left_us, "
        f"'tools' AS who FROM tool_calls WHERE {SYNCHRONOUS} AND NOT validate AND duration_us IS NOT NULL "
        f"AND {in_steps(earlier.steps)}"
    )
    return {run: lost_in(places) for (run, _), places in earlier(_of_turns(calls), "tools").items()}


def held_up(tables: str, lost_us: str, own_us: str, *, alike: bool = False) -> str:
    """Return the SQL of what prefill costs each request: that of all calls of its replicas, for which the others wait.

    The engines run one batch at a time: what they prefill in it delays the calls in their queue, and those that
    decode.

    Args:
        tables: SQL of calls: a row of `engine_calls`, and what `lost_us` needs.
        lost_us: SQL of what prefill that follows without a break takes too long, of its `length_us`, aggregated over
            its calls.
        own_us: SQL of what a call's own prefill takes too long: the least that its request loses.
        alike: Of prefill of calls without details as much is lost as of the others', relative to its length.
    """
    others = (
        "sum(lost_us) OVER every / sum(length_us) FILTER (is_known) OVER every" if alike else "0"
    )
    return f"""
        WITH known AS ({tables}), calls AS (
            FROM known UNION ALL BY NAME
            -- Calls without details; of their conversation nothing is known.
            SELECT run, name AS engine_name, begin_us AS engine_begin_us, end_us AS engine_end_us, queue_us, prefill_us,
                prompt_tokens, cached_tokens
            FROM engine_requests SEMI JOIN (SELECT run FROM requests WHERE NOT detailed) USING (run)
                ANTI JOIN known USING (run, engine_request_id) WHERE prefill_us > 0
        ), prefills AS (
            SELECT *, least(engine_begin_us + coalesce(parked_us, 0) + coalesce(queue_us, 0), engine_end_us) AS from_us,
                least(from_us + prefill_us, engine_end_us) AS until_us
            FROM calls WHERE engine_begin_us IS NOT NULL AND engine_name IS NOT NULL
        ), apart AS (
            SELECT *, coalesce(from_us > max(until_us) OVER (PARTITION BY run, engine_name ORDER BY from_us, until_us
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true)::INTEGER AS is_apart
            FROM prefills
        ), numbered AS (
            SELECT *, sum(is_apart) OVER (PARTITION BY run, engine_name ORDER BY from_us, until_us) AS number FROM apart
        ), unbroken AS (
            SELECT run, engine_name, min(from_us) AS from_us, max(until_us) - min(from_us) AS length_us,
                least(greatest({lost_us}, 0), length_us) AS lost_us, count(request_id) > 0 AS is_known
            FROM numbered GROUP BY run, engine_name, number
        ), judged AS (
            SELECT * REPLACE (CASE WHEN is_known THEN lost_us ELSE length_us * coalesce({others}, 0) END AS lost_us)
            FROM unbroken WINDOW every AS (PARTITION BY run)
        ), added AS (
            SELECT *, sum(lost_us) OVER (PARTITION BY run, engine_name ORDER BY from_us) - lost_us AS before_us
            FROM judged
        ), moments AS (
            SELECT run, step, name, request_id, engine_name, unnest([engine_begin_us, engine_end_us]) AS at_us,
                unnest([-1, 1]) AS sign, {own_us} AS own_us
            FROM prefills WHERE request_id IS NOT NULL
        )
        SELECT m.run, step, name, request_id, 'prefill' AS who,
            greatest(sum(own_us) FILTER (sign = 1),
                sum(sign * (before_us + lost_us * least((at_us - from_us) / greatest(length_us, 1), 1)))) AS cut_us
        FROM moments AS m ASOF JOIN added AS a
            ON a.run = m.run AND a.engine_name = m.engine_name AND a.from_us <= m.at_us
        GROUP BY ALL HAVING cut_us > 0
    """


def first_prefill(earlier: Earlier) -> Iterator[Named]:
    """Find prefill of the first calls that takes longer per token than that of later turns."""
    # Of calls without details, too.
    tokens = "greatest(prompt_tokens - coalesce(cached_tokens, 0), 1)"
    calls = (
        f"SELECT *, {tokens} AS tokens FROM engine_calls "
        "WHERE NOT validate AND prefill_us IS NOT NULL AND prompt_tokens IS NOT NULL AND turn IS NOT NULL "
        f"AND {in_work(earlier.steps)}"
    )
    rated = f"""
        SELECT * FROM ({calls}) JOIN (
            SELECT run, median(prefill_us / tokens) AS token_us FROM ({calls}) WHERE turn > 0 GROUP BY run
        ) USING (run)
    """
    lost_us = (
        f"(length_us - max(token_us) * sum({tokens})) * sum(tokens) FILTER (turn = 0) / sum(tokens)"
    )
    own_us = "CASE WHEN turn = 0 THEN greatest(prefill_us - token_us * tokens, 0) ELSE 0 END"
    for (run, _), places in earlier(held_up(rated, lost_us, own_us), "all").items():
        (row,) = earlier.tables.rows(
            f"SELECT max(prefill_us) FILTER (turn = 0) / 1e6 AS first_s, "
            f"median(prefill_us) FILTER (turn > 0) / 1e6 AS later_s, "
            f"count(DISTINCT engine_name) AS replicas FROM ({calls}) WHERE run = ?",
            [run],
        )
        text = (
            f"first calls up to {seconds(row['first_s'])}, later ones {seconds(row['later_s'])} (median, "
            f"{counted(row['replicas'], 'replica')})"
        )
        yield lost_to(run, "slow_prefill", "phase", "prefill", places, text=text)


def long_inputs(earlier: Earlier) -> Iterator[Named]:
    """Find prompts that are themselves many times as long as the others of their step, in most steps.

    Others wait for their prefill, and decode beside their tokens; and ranks train on more.
    """
    tables, steps = earlier.tables, earlier.steps
    longer = f"""
        SELECT * FROM (
            SELECT run, step, name, request_id, prompt_tokens, prompt_tokens + coalesce(response_tokens, 0) AS tokens,
                prompt_tokens - median(prompt_tokens) OVER every AS more, prompt_tokens / (prompt_tokens - more) AS times
            FROM requests WHERE prompt_tokens > 0 AND NOT validate AND {in_work(steps)}
            WINDOW every AS (PARTITION BY run, step)
        )
    """
    found = tables.rows(
        f"""
        WITH trained AS (
            SELECT run, step, sum(duration_us) / 1e6 AS trained_s FROM phase_tokens GROUP BY ALL
        ), judged AS (
            SELECT run, step, count(*) AS many, count(*) FILTER (times >= {_LONG}) AS long,
                median(times) FILTER (times >= {_LONG}) AS times,
                sum(more) FILTER (times >= {_LONG}) / sum(tokens) AS part
            FROM ({longer}) GROUP BY run, step
        )
        SELECT run, sum(many) AS many, sum(long) AS long, median(times) AS times,
            sum(part * trained_s) FILTER (step IN (SELECT step FROM trained)) AS trained_s
        FROM judged LEFT JOIN trained USING (run, step) GROUP BY run
        HAVING 0 < sum(long) AND 4 * sum(long) <= sum(many) AND 2 * count(long) FILTER (long > 0) >= count(*)
        """
    )
    for row in found:
        loads = earlier.loads.get(row["run"])
        calls = f"""
            SELECT c.*, coalesce(more, 0) AS more,
                least(coalesce(more, 0), greatest(c.prompt_tokens - coalesce(cached_tokens, 0), 0)) AS new,
                greatest(c.prompt_tokens - coalesce(cached_tokens, 0), 1) AS uncached
            FROM engine_calls AS c LEFT JOIN ({longer} WHERE times >= {_LONG})
                USING (run, step, name, request_id) WHERE NOT validate AND run = $run
        """
        waits = held_up(
            f"SELECT * FROM ({calls}) WHERE prefill_us > 0",
            "length_us * sum(new) / sum(uncached)",
            "prefill_us * new / uncached",
            alike=True,
        )
        cuts = f"""
            WITH beside AS (
                SELECT run, step, engine_name, sum(duration_us * more * sampled)
                    / sum(duration_us * (prompt_tokens + coalesce(response_tokens, 0) / 2) * sampled) AS part
                FROM ({calls}) GROUP BY ALL
            )
            SELECT run, step, name, request_id, 'long' AS who, sum(cut_us) AS cut_us FROM (
                SELECT * EXCLUDE (who) FROM ({waits})
                UNION ALL BY NAME
                SELECT run, step, name, request_id, $held * part * batch_tokens * decoded_tokens AS cut_us
                FROM engine_call_times JOIN beside USING (run, step, engine_name)
                WHERE NOT validate AND part > 0 AND batch_tokens > 0 AND {in_work(steps)}
            ) GROUP BY ALL
        """
        parameters = {"run": row["run"], "held": loads.slopes["held"] if loads else 0.0}
        places = earlier(cuts, "all", parameters).get((row["run"], "long"), [])
        lost_s = TOKEN_PART[0] * earlier.of_training(row["run"], row["trained_s"] or 0.0)
        text = f"{row['long']:,} of {row['many']:,} requests have {row['times']:.1f} times the prompt tokens of the others"
        named = lost_to(row["run"], "long_prompts", "prompt group", text, places)
        yield named._replace(lost_s=lost_in(places) + lost_s)


# A replica gets more sessions than others if they are MORE times an equal share, and so many standard
# deviations of chance more.
_DEVIATIONS = 4


def routing(earlier: Earlier) -> Iterator[Named]:
    """Find a replica that gets more sessions than an equal share, or none, and what equal shares would save."""
    tables, steps = earlier.tables, earlier.steps
    # Not those of a reward model, which have requests of their own.
    idle_of = {
        row["run"]: row["idle"]
        for row in tables.rows(
            "SELECT run, count(*) FILTER (NOT served) AS idle FROM (SELECT p.run, "
            "bool_or(e.name IS NOT NULL) AS served FROM processes AS p LEFT JOIN "
            "(SELECT DISTINCT run, name FROM engine_requests) AS e USING (run, name) "
            "WHERE role = 'engine' GROUP BY p.run, coalesce(p.replica, p.rank)) GROUP BY run"
        )
    }
    for run, loads in earlier.loads.items():
        sessions: dict[str, int] = {}
        for row in loads.rows:
            sessions[row["who"]] = sessions.get(row["who"], 0) + round(row["sessions"])
        idle, every = idle_of.get(run, 0), sum(sessions.values())
        many = len(sessions) + idle
        who = max(sessions, key=lambda each: (sessions[each], each))
        equal = every / many
        off = _DEVIATIONS * equal**0.5
        more = sessions[who] >= max(MORE * equal, equal + off)
        if many < 2 or not (more or (idle and equal >= off)):
            continue
        cuts = f"""
            WITH calls AS (
                SELECT run, step, name, request_id, engine_name, batch, batch_tokens, decoded_tokens AS tokens
                FROM engine_call_times WHERE run = $run AND NOT validate AND batch > 0
                    AND {in_work(steps)}
            ), served AS (
                SELECT step, engine_name, sum(tokens) AS own FROM calls GROUP BY step, engine_name
            ), shares AS (
                SELECT *, sum(own) OVER (PARTITION BY step) / $many / own AS equal FROM served
            )
            -- A call runs at least with itself.
            SELECT run, step, name, request_id, $who AS who,
                sum(($slope * (batch - greatest(batch * equal, 1))
                    + $held * batch_tokens * (1 - equal)) * tokens) AS cut_us
            FROM calls JOIN shares USING (step, engine_name) GROUP BY ALL
        """
        slopes = {"slope": loads.slopes["batch"], "held": loads.slopes["held"]}
        parameters = {"run": run, "who": who, "many": many, **slopes}
        places = earlier(cuts, "decoding", parameters).get((run, who), [])
        text = f"{who} serves {share(sessions[who] / every)} of the requests, 1 of {many} replicas"
        if idle:
            text += f", {idle} of which serve{'s' * (idle == 1)} none"
        where = f"in {len(places)} steps"
        yield lost_to(run, "skewed_routing", "replica", who, places, text=text, where=where)


def _few_at_once(tables: Tables, steps: Steps) -> Rows:
    """Return the steps whose requests start as others end, few at a time: run, step, most at once and lost_s."""
    rows = tables.rows(
        f"""
        WITH ended AS (SELECT * FROM ({_ENDED}) WHERE {SYNCHRONOUS} AND {in_steps(steps)}), changes AS (
            SELECT run, step, begin_us AS at_us, 1 AS change FROM ended
            UNION ALL SELECT run, step, end_us, -1 FROM ended
        ), running AS (
            SELECT run, step, change, sum(change) OVER moments AS running,
                at_us - max(at_us) FILTER (change < 0) OVER moments AS since_us
            FROM changes WINDOW moments AS (PARTITION BY run, step ORDER BY at_us, change)
        ), most AS (
            SELECT run, step, max(running) AS most, median(since_us) FILTER (change > 0) AS since_us
            FROM running GROUP BY run, step
        )
        SELECT run, step, any_value(most) AS most, count(*) AS many,
            any_value(since_us) <= {_AT_ONCE} * (max(end_us) - min(begin_us)) / count(*) AS at_once,
            (max(end_us) - min(begin_us) - max(end_us - begin_us)) / 1e6 AS lost_s,
            arg_max(request_id, end_us) AS request_id
        FROM ended JOIN most USING (run, step) GROUP BY run, step ORDER BY run, step
        """
    )
    found: Rows = []
    for own in by_run(rows).values():
        few = [
            {**row, "steps": len(own)}
            for row in own
            if row["most"] <= _FEW * row["many"] and row["at_once"]
        ]
        found += few if 2 * len(few) > len(own) else []
    return found


def few_at_once(earlier: Earlier) -> Iterator[Named]:
    """Find rollouts in which a step's requests start as others end, and what their prompts cost there."""
    builds = (
        "SELECT run, step, name, request_id, 'prompt_build' AS who, duration_us AS cut_us "
        f"FROM event_fields WHERE event = 'prompt_build' AND NOT validate AND {in_steps(earlier.steps)}"
    )
    built = earlier(builds, "other") if earlier.few else {}
    for run, few in by_run(earlier.few).items():
        places = [Place(row["step"], {"limit": row["lost_s"]}, row["request_id"]) for row in few]
        most, many = max(row["most"] for row in few), max(row["many"] for row in few)
        text = f"{'one request is' if most == 1 else f'{most} requests are'} in flight at a time, of {many}"
        where = f"in {len(few)} of {few[0]['steps']} steps"
        yield lost_to(run, "few_at_once", "setting", "limit", places, text=text, where=where)
        because = f"That of all requests of a step adds up: {text}."
        own = built.get((run, "prompt_build"), [])
        yield lost_to(run, "prompt_build", "phase", "prompt_build", own, because=because)


def rank_tokens(earlier: Earlier) -> Iterator[Named]:
    """Measure what the ranks wait for the one whose batch has the most tokens.

    Ranks of a sharded model end together, because each layer has a collective; so the tokens of their
    batches are what can be compared.
    """
    steps = earlier.steps
    rows: Rows = earlier.tables.rows(
        f"""
        WITH batches AS (
            SELECT run, step, name, event, tokens, duration_us, (begin_us + end_us) // 2 AS at_us,
                row_number() OVER (PARTITION BY run, step, event, name ORDER BY end_us) AS place
            FROM event_fields WHERE event IN ('train_batch', 'infer_batch') AND family = 'workers'
                AND tokens > 0 AND duration_us IS NOT NULL AND {in_steps(steps)}
        ), phased AS (
            SELECT b.*, p.phase, p.begin_us AS phase_us FROM batches AS b ASOF JOIN (
                SELECT * FROM phases WHERE parent = 'step' AND NOT validate) AS p
                ON p.run = b.run AND p.step = b.step AND p.begin_us <= b.at_us
            WHERE b.at_us <= p.end_us
        ), together AS (
            SELECT run, step, phase, event, place, count(*) AS ranks, max(tokens) AS most,
                avg(tokens) AS mean, max(duration_us) AS duration_us, arg_max(name, tokens) AS who
            FROM phased GROUP BY run, step, phase, event, place
        ), fitted AS (
            SELECT *, CASE WHEN count(*) OVER alike >= 4 AND stddev(most) OVER alike >= 0.05 * mean
                THEN regr_slope(duration_us, most) OVER alike END AS token_us
            FROM together WHERE ranks > 1 WINDOW alike AS (PARTITION BY run, phase, event)
        )
        SELECT run, step, phase, who, most, mean, least(duration_us * (1 - mean / most),
            CASE WHEN token_us > 0 THEN token_us * (most - mean) ELSE duration_us END) / 1e6 AS lost_s
        FROM fitted WHERE most > mean ORDER BY run, step, phase, place
        """
    )
    for run, own in by_run(rows).items():
        places = places_of((row["step"], row["phase"], row["lost_s"]) for row in own)
        more = sum(row["most"] for row in own) / sum(row["mean"] for row in own) - 1
        text = f"the largest batch has {share(more)} more tokens than the mean rank's"
        culprit = replace(identity("phase", places), who="tokens of the ranks", text=text, where="")
        yield Named(run, "uneven_tokens", culprit, lost_in(places))
