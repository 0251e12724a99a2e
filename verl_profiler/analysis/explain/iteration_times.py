"""Time of an engine's iterations as a function of its batch, from its own readings.

An iteration takes a fixed time, a time per request that decodes, a time per token of their context, and a
time per prompt token that it prefills: non-negative, and fitted to rows of consecutive iterations
(`engine_iterations`).  Above some batches a further request may take more: the curve is convex.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from verl_profiler.analysis.explain.speed import Speed
from verl_profiler.analysis.selection import grouped
from verl_profiler.reading.tables.tables import Tables

# Minimum number of rows and iterations, and minimum range of batches, for a fit; a fit whose rows deviate by
# more than this (mean by time) is not used.
_ROWS = 20
_ITERATIONS = 200
_BATCH_RATIO = 1.5
_MOST_OFF = 0.4
# Batches above which a further request may take more, as parts of the highest, if so many of the iterations
# were above: a slope from fewer would be noise, and decide about all higher batches.
_BENDS = (0.5, 0.75)
_ABOVE = 0.05
# Bends must explain this share of the squared residuals of a fit without them.
_BETTER = 0.05


class PassTimes(NamedTuple):
    """Times of a replica's iterations.

    `speed` is the time of an iteration by the number of requests that decode, with the mean context;
    `most` the highest batch that was read, `error` the relative error of rows' times, `decoded` the tokens
    that its iterations decoded.
    """

    speed: Speed
    prefill_token_us: float
    most: int
    error: float
    decoded: int


def pass_times(tables: Tables, fitted_rows: int = 20_000) -> dict[str, dict[str, PassTimes]]:
    """Fit the iterations of each replica, by run and name of the engine's process.

    Replicas whose iterations were not read, or whose fit is bad, are missing.  Of an engine with several
    data-parallel ranks, all ranks count alike.

    Args:
        tables: The tables of the runs.
        fitted_rows: Rows of a run that are fitted, at most: every n-th of more.
    """
    if not tables.has_events("engine_iterations"):
        return {}
    rows = tables.rows(
        f"""
        SELECT run, name, busy_us, iterations, decode_requests, coalesce(prefill_tokens, 0) AS
            prefill_tokens, coalesce(context_tokens, 0) AS context_tokens, every
        FROM (SELECT *, row_number() OVER (PARTITION BY run ORDER BY begin_us) AS place,
                count(*) OVER (PARTITION BY run) // {fitted_rows} + 1 AS every FROM engine_iterations
            WHERE busy_us > 0 AND iterations > 0 AND decode_requests >= 0)
        WHERE place % every = 0 ORDER BY run, name, begin_us
        """
    )
    found: dict[str, dict[str, PassTimes]] = {}
    for (run, name), own in grouped(rows, "run", "name").items():
        fitted = _fitted(own)
        if fitted is not None:
            found.setdefault(run, {})[name] = fitted
    return found


def _fitted(rows: Sequence[Mapping[str, Any]]) -> PassTimes | None:
    # Imported here because few commands need them; scipy has no types.
    np: Any = importlib.import_module("numpy")
    nnls = importlib.import_module("scipy.optimize").nnls
    names = ("iterations", "decode_requests", "context_tokens", "prefill_tokens")
    sums = [np.array([row[name] for row in rows], dtype=float) for name in names]
    iterations, decoded, context, _ = sums
    batches = decoded / iterations
    decoding = batches[batches >= 1]
    if len(rows) < _ROWS or iterations.sum() < _ITERATIONS or not len(decoding):
        return None
    if decoding.max() < _BATCH_RATIO * decoding.min():
        return None
    # The batches at which the curve may bend.
    bends = [
        bend
        for bend in (part * float(batches.max()) for part in _BENDS)
        if bend >= 1 and iterations[batches > bend].sum() >= _ABOVE * iterations.sum()
    ]
    bent = [iterations * np.maximum(batches - bend, 0.0) for bend in bends]
    values = np.stack([*sums, *bent], axis=1)
    busy = np.array([row["busy_us"] for row in rows], dtype=float)
    # The variance of a row's time grows with it.
    weights = 1 / np.sqrt(busy)
    scale = np.maximum(np.abs(values).max(axis=0), 1e-12)
    scaled, wanted = values / scale * weights[:, None], busy * weights
    straight, rest = nnls(scaled[:, : len(sums)], wanted)
    answer, bent_rest = nnls(scaled, wanted)
    if bent_rest**2 > (1 - _BETTER) * rest**2:
        answer = np.concatenate([straight, np.zeros(len(bends))])
    each = answer / scale
    off = float(np.abs(values @ each - busy).sum() / busy.sum())
    if off > _MOST_OFF or not each[:3].any():
        return None
    a, b, per_context, per_prompt, *more = (float(value) for value in each)
    curve = [value for pair in zip(bends, more, strict=True) if pair[1] for value in pair]
    speed = (a, b + per_context * float(context.sum() / max(decoded.sum(), 1)), *curve)
    most = max(round(float(decoding.max())), 1)
    return PassTimes(speed, per_prompt, most, off, int(decoded.sum()) * rows[0]["every"])
