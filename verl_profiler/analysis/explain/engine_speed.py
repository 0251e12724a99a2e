"""What engines take per token, by what they have to do: a fit to the recorded calls, of whatever details.

A token takes longer the more calls run, the more tokens these hold, and while the engine prefills other calls.
What each of these adds is common to all replicas but for a factor, which is the replica's slowness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from statistics import linear_regression, median
from typing import NamedTuple, TypeAlias

import numpy as np

from verl_profiler.analysis.explain.speed import Speed
from verl_profiler.analysis.selection import Rows, Steps, by_run, grouped, in_steps, nested
from verl_profiler.reading.tables.derivations import IN_ENGINE, SYNCHRONOUS
from verl_profiler.reading.tables.tables import Tables

# Loads, or shares of the requests, differ if one is so many times another.
MORE = 1.3
# Calls are much slower if they take so many times as long as the others.
MUCH_SLOWER = 1.5
# Load explains a replica's speed if the other replicas' line is at most so far off.
_OFF = 0.2


# Steps in whose requests an asynchronous step's samples may have begun, before it.
_BEFORE = 4
# Number of calls at which a replica's own slowness has the same weight as that of all replicas.
_SHRUNK_CALLS = 5
# Number of calls that establish how load slows them down, and the least part of their time that it does.
_FITTED_CALLS, _LITTLE = 20, 0.02
# Loads of calls varied if the highest is so many times the lowest.
_RATIO = 1.5


def in_work(steps: Steps) -> str:
    """Return the SQL condition of the requests of `steps`; those of an asynchronous run begin before them."""
    if steps is None:
        return "true"
    first, last = steps
    early = f"step BETWEEN {int(first) - _BEFORE} AND {int(last)} AND NOT {SYNCHRONOUS}"
    return f"({in_steps(steps)} OR {early})"


# What a token takes longer for: how many calls run, their tokens, and other calls' prefill, per token.
_DEMANDS = {
    "batch": "batch",
    "held": "batch_tokens",
    "prefill": "others_prefill_us / decoded_tokens",
}
_PAIRS = tuple(combinations_with_replacement(_DEMANDS, 2))
_SUMS = {
    "calls": "1",
    "tokens": "decoded_tokens",
    "us": IN_ENGINE,
    "squares": f"{IN_ENGINE} ^ 2 / decoded_tokens",
    **{name: f"{each} * decoded_tokens" for name, each in _DEMANDS.items()},
    **{f"{name}_us": f"{each} * {IN_ENGINE}" for name, each in _DEMANDS.items()},
    **{f"{a}_{b}": f"{_DEMANDS[a]} * {_DEMANDS[b]} * decoded_tokens" for a, b in _PAIRS},
}


def decoding(tables: Tables, steps: Steps, most: int = 100_000) -> dict[str, Rows]:
    """Return sums over the decoded tokens of each step, replica and worker, by run: of time, demands and their products.

    Of more than `most` in all, those of the workers are added up: memory must not grow with the calls.
    """
    rows = tables.rows(
        f"""
        WITH cells AS MATERIALIZED (
            SELECT run, step, engine_name AS replica, name AS worker, count(DISTINCT request_id) AS sessions,
                min(batch) AS least, max(batch) AS most,
                {", ".join(f"sum({each}) AS {name}" for name, each in _SUMS.items())}
            FROM engine_call_times WHERE NOT validate AND engine_name IS NOT NULL AND {IN_ENGINE} > 0
                AND decoded_tokens > 0 AND batch > 0 AND {in_work(steps)} GROUP BY ALL
        )
        SELECT run, step, replica,
            CASE WHEN (SELECT count(*) FROM cells) <= {most} THEN worker ELSE '' END AS worker,
            min(least) AS least, max(most) AS most,
            {", ".join(f"sum({each})::DOUBLE AS {each}" for each in ("sessions", *_SUMS))}
        FROM cells GROUP BY ALL ORDER BY ALL
        """
    )
    return by_run(rows)


def by_load(cells: Rows, who: str = "replica") -> ReplicaLoads:
    """Return how long replicas, or workers, take per token, and by what they have to do besides.

    What each demand adds is that of calls of the same one, so that it is not taken for slow because it has more
    calls than others, longer ones, or more prefill; unknown if its calls all ran at the same load.
    """
    rows: Rows = []
    spread = dict.fromkeys(_PAIRS, 0.0)
    joint = dict.fromkeys(_DEMANDS, 0.0)
    rest = 0.0
    for (step, name), own in grouped(cells, "step", who).items():
        sums = {each: sum(cell[each] for cell in own) for each in ("sessions", *_SUMS)}
        means = {each: sums[each] / sums["tokens"] for each in (*_DEMANDS, "us")}
        for a, b in _PAIRS:
            spread[a, b] += sums[f"{a}_{b}"] - sums[a] * means[b]
        for each in _DEMANDS:
            joint[each] += sums[f"{each}_us"] - sums[each] * means["us"]
        rest += sums["squares"] - sums["us"] * means["us"]
        sizes = {each: sums[each] for each in ("calls", "tokens", "sessions")}
        rows.append({"step": step, "who": name, **sizes, **means, "token_us": means["us"]})
    tokens = sum(row["tokens"] for row in rows)
    means = {each: sum(row[each] * row["tokens"] for row in rows) / tokens for each in _DEMANDS}
    # Demands that differ by less than a tenth establish nothing.
    apart = [
        each for each in _DEMANDS if spread[each, each] / tokens > (0.1 * means[each]) ** 2 > 0
    ]
    slopes = dict.fromkeys(_DEMANDS, 0.0) | _slopes(apart, spread, joint)
    most, least = max(cell["most"] for cell in cells), min(cell["least"] for cell in cells)
    varied = sum(row["calls"] for row in rows) >= _FITTED_CALLS and most >= _RATIO * least
    if "batch" in apart:
        rest -= sum(slope * joint[each] for each, slope in slopes.items())
        variance = max(rest, 0.0) / sum(row["calls"] for row in rows) / spread["batch", "batch"]
        error = variance**0.5 / slopes["batch"] if slopes["batch"] else 0.0
        return ReplicaLoads(rows, slopes, True, varied, error)
    between = _slope_between(rows) if len(rows) > 1 else None
    return ReplicaLoads(rows, slopes | {"batch": between or 0.0}, between is not None, varied)


def _slopes(
    demands: Sequence[str],
    spread: Mapping[tuple[str, str], float],
    joint: Mapping[str, float],
) -> dict[str, float]:
    """Fit what each demand adds to the time per token, to all of them at once; none makes it shorter."""
    kept, fixed = [*demands], dict[str, float]()
    while kept:
        units = [spread[each, each] ** 0.5 for each in kept]
        alike = [
            [spread.get((a, b), spread.get((b, a), 0.0)) / (units[i] * units[j])
             for j, b in enumerate(kept)] for i, a in enumerate(kept)
        ]  # fmt: skip
        own = [joint[each] / unit for each, unit in zip(kept, units, strict=True)]
        found = np.linalg.lstsq(np.array(alike), np.array(own), rcond=None)[0]
        slopes = {e: float(s) / unit for e, s, unit in zip(kept, found, units, strict=True)}
        if found.min() < 0:
            kept.pop(int(found.argmin()))
        elif slopes.get("prefill", 0.0) > 1:
            # At most it stops decoding.
            fixed = {"prefill": 1.0}
            kept.remove("prefill")
            joint = {each: joint[each] - spread[each, "prefill"] for each in kept}
        else:
            return fixed | slopes
    return fixed


# By step and who: microseconds per token, and what the others' median takes with its demands.
Speeds: TypeAlias = "dict[int, dict[str, tuple[float, float]]]"


class ReplicaLoads(NamedTuple):
    """Time per token and demands of each replica, or worker, and step, and what one more of each demand adds.

    `error` is the relative standard error of what one more running call adds, `is_known` whether that is known, and
    `varied` whether calls ran at different loads.
    """

    rows: Rows
    slopes: Mapping[str, float]
    is_known: bool
    varied: bool
    error: float = 0.0

    def lines(self) -> tuple[Speed, dict[str, Speed]]:
        """Return the time per token by the number of running calls, of all replicas and of each.

        Calls hold as many tokens as they do on average.
        """
        tokens = sum(row["tokens"] for row in self.rows)
        batches, held = (
            sum(row[each] * row["tokens"] for row in self.rows) for each in ("batch", "held")
        )
        slope = self.slopes["batch"] + self.slopes["held"] * held / max(batches, 1e-9)
        calls = sum(row["calls"] for row in self.rows)
        spent_us = sum(row["token_us"] * row["tokens"] for row in self.rows)
        if calls < _FITTED_CALLS or slope * batches < _LITTLE * spent_us:
            slope = 0.0
        of = grouped(self.rows, "who")
        own_us = {
            who: sum(
                row["tokens"] * (row["token_us"] - self.slopes["prefill"] * row["prefill"])
                for row in own
            )
            for who, own in of.items()
        }
        loaded_us = {
            who: slope * sum(row["tokens"] * row["batch"] for row in own) for who, own in of.items()
        }
        constant = max(sum(own_us.values()) - sum(loaded_us.values()), 0.0) / tokens
        prior_us = _SHRUNK_CALLS * sum(own_us.values()) / calls
        found: dict[str, Speed] = {}
        for who, own in of.items():
            alike_us = constant * sum(row["tokens"] for row in own) + loaded_us[who]
            factor = (max(own_us[who], 0.0) + prior_us) / (alike_us + prior_us)
            found[who] = factor * constant, factor * slope
        return (constant, slope), found

    def slowness(self) -> Speeds:
        """Return the time per token of each, and that of the others' median with its demands, by step.

        Microseconds.  Empty if loads differ and their effect is unknown.
        """
        found: Speeds = {}
        for step, own in grouped(self.rows, "step").items():
            loads = [row["batch"] for row in own]
            if not self.is_known and max(loads) > MORE * min(loads):
                continue
            # Per token, without others' prefill, which is not this one's speed.
            own_us = {
                row["who"]: row["token_us"] - self.slopes["prefill"] * row["prefill"] for row in own
            }
            more_us = {
                row["who"]: sum(self.slopes[each] * row[each] for each in ("batch", "held"))
                for row in own
            }
            for who, us in own_us.items():
                others = [own_us[other] - more_us[other] for other in own_us if other != who]
                if others and us > 0:
                    alike = max(median(others) + more_us[who], 1.0)
                    found.setdefault(step, {})[who] = us, alike
        return found

    def by_step(self) -> dict[int, float]:
        """Return the seconds per token of each step, as if all steps had the same demands."""
        whole, tokens = dict[int, float](), dict[int, float]()
        for row in self.rows:
            own = sum(slope * row[each] for each, slope in self.slopes.items())
            whole[row["step"]] = whole.get(row["step"], 0.0) + row["tokens"] * own
            tokens[row["step"]] = tokens.get(row["step"], 0.0) + row["tokens"]
        demands = sum(whole.values()) / sum(tokens.values())
        spent = dict.fromkeys(tokens, 0.0)
        for row in self.rows:
            spent[row["step"]] += row["tokens"] * row["token_us"]
        return {
            step: ((spent[step] - whole[step]) / tokens[step] + demands) / 1e6 for step in tokens
        }

    def much_slower(self) -> dict[int, tuple[str, float]]:
        """Return by step which takes most times as long as the others, and how many, if it is much longer."""
        found: dict[int, tuple[str, float]] = {}
        for step, own in self.slowness().items():
            times = {who: us / alike for who, (us, alike) in own.items()}
            most = max(times, key=lambda who: times[who])
            if times[most] >= MUCH_SLOWER:
                found[step] = most, times[most]
        return found


def worker_slowness(cells: Rows) -> Speeds:
    """Return each worker's time per token, and that of the others on the same replicas at its load, by step."""
    sums: dict[tuple[int, str], list[float]] = {}
    for own in grouped(cells, "replica").values():
        tokens = nested(own, "tokens", "step", "worker")
        for step, each in by_load(own, "worker").slowness().items():
            for who, (us, alike) in each.items():
                many = tokens[step][who]
                total = sums.setdefault((step, who), [0.0, 0.0, 0.0])
                for place, more in enumerate((many, us * many, alike * many)):
                    total[place] += more
    found: Speeds = {}
    for (step, who), (many, us, alike) in sums.items():
        found.setdefault(step, {})[who] = us / many, alike / many
    return found


def _slope_between(rows: Rows) -> float | None:
    """Return what load adds to the time per token, over replicas; None unless it explains the slowest one.

    The line is that of the other replicas, at their different loads.
    """
    slowest = max(rows, key=lambda row: row["token_us"])
    others = [row for row in rows if row["who"] != slowest["who"]]
    loads = [row["batch"] for row in others]
    if len(others) < 2 or max(loads) < MORE * min(loads):
        return None
    slope, constant = linear_regression(loads, [row["token_us"] for row in others])
    off = constant + slope * slowest["batch"] - slowest["token_us"]
    return slope if slope > 0 and abs(off) <= _OFF * slowest["token_us"] else None
