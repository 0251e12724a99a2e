"""Replays with the engines' own iterations, against engines whose passes and changed runs are known."""

import math
from dataclasses import replace

import pytest
from truth.engine_readings import iterations
from truth.engines import (
    Engines,
    changed,
    iteration_events,
    mean_s,
    state_events,
    steps_and_passes,
)
from truth.synthetic import EPOCH, Request, Step, Turn, events_of, run_of, tables_of

from verl_profiler.analysis.explain.iteration_times import pass_times
from verl_profiler.analysis.explain.rebuilding import step_models
from verl_profiler.analysis.explain.speed import time_us
from verl_profiler.analysis.explain.what_if import what_if
from verl_profiler.analysis.registry import explanations
from verl_profiler.views.why_text import why

STEPS = 6
LINES = ((6_000, 700), (11_000, 1_300))


def run_with(made, *, steps=STEPS, seed=3, read=True, states=False, keep=lambda _: True):
    """Make a run of engines, with what the profiler would have read of them."""
    made_steps, passes = steps_and_passes(made, steps, seed)
    events, _ = events_of(*made_steps)
    more = [row for row in iteration_events(events, passes) if keep(row)] if read else []
    more += state_events(events, passes, made) if states else []
    return tables_of([*events, *more])


def rows_of(tables):
    return {row["what"]: row for row in what_if(tables)}


def test_the_time_of_an_iteration_is_that_of_a_pass():
    """6 ms and 700 us per request, and twice as much on the other replica; prefill apart."""
    found = pass_times(run_with(Engines(replicas=LINES)))["made"]

    for name, (a, b) in zip(("engine_0", "engine_1"), LINES, strict=True):
        for batch in (2, 8, 16):
            assert a + b * batch == pytest.approx(time_us(found[name].speed, batch), rel=0.06)
    # Half a pass of 9 ms for each further prompt of 40 tokens.
    assert 9_000 / 2 / 40 == pytest.approx(found["engine_0"].prefill_token_us, rel=0.25)


def test_context_prompts_and_a_bend_are_apart():
    """5 ms, 300 us per request, 2 us per token of context, 20 us per prompt token, 1 ms more above 10."""
    rows = []
    for place in range(200):
        batch, context, prompt = 1 + place % 20, 100 + place * 37 % 400, place * 53 % 90
        per_pass = 5_000 + 300 * batch + 2 * batch * context + 1_000 * max(batch - 10, 0)
        rows.append(
            iterations(
                "engine_0",
                EPOCH + place * 1_000_000 - 500_000,
                EPOCH + place * 1_000_000,
                iterations=10,
                busy_s=(10 * per_pass + 20 * prompt) / 1e6,
                decode_requests=10 * batch,
                prefill_tokens=prompt,
                context_tokens=10 * batch * context,
            )
        )
    found = pass_times(tables_of(rows))["made"]["engine_0"]
    tokens = sum(row["extra"]["context_tokens"] for row in rows)
    context = tokens / sum(row["extra"]["decode_requests"] for row in rows)

    for batch in (1, 5, 10, 15, 20):
        expected = 5_000 + (300 + 2 * context) * batch + 1_000 * max(batch - 10, 0)
        assert expected == pytest.approx(time_us(found.speed, batch), rel=0.02)
    assert 20 == pytest.approx(found.prefill_token_us, rel=0.05)
    assert 20 == found.most


def row_of(place, *, count, decoded, length_us):
    """A row of iterations that decode."""
    end_us = EPOCH + place * 1_000_000
    sums = {"iterations": count, "busy_s": length_us / 1e6, "decode_requests": decoded}
    return iterations("engine_0", end_us - length_us, end_us, **sums)


def test_the_highest_batch_that_was_read_is_no_bend():
    """900 us and 100 us per request; most rows have 6 requests, in 66 or 67 iterations of 100 ms."""
    rows = [
        row_of(place, count=66 + place % 2, decoded=400, length_us=100_000) for place in range(400)
    ] + [
        row_of(400 + place, count=50, decoded=50 * n, length_us=50 * (900 + 100 * n))
        for place, n in enumerate((3, 4, 5) * 60)
    ]
    found = pass_times(tables_of(rows))["made"]["engine_0"]

    assert 6 == found.most
    for batch in (3, 6, 12):
        assert 900 + 100 * batch == pytest.approx(time_us(found.speed, batch), rel=0.03)


def test_of_many_rows_a_part_is_fitted():
    """The tokens that were decoded are those of all."""
    rows = [
        row_of(place, count=10, decoded=10 * n, length_us=10 * (900 + 100 * n))
        for place, n in enumerate((1, 2, 3, 4) * 100)
    ]
    whole = pass_times(tables_of(rows))["made"]["engine_0"]
    part = pass_times(tables_of(rows), 150)["made"]["engine_0"]

    assert 10 * 10 * 100 == whole.decoded
    assert whole.decoded == pytest.approx(part.decoded, rel=0.3)
    assert time_us(part.speed, 3) == pytest.approx(1_200, rel=0.01)


def test_a_replay_from_iterations_reproduces_the_step_and_predicts_its_calls():
    """Prefill of 30 ms holds decoding up: neither the iterations' line nor one fitted to the calls has it."""
    made = Engines(prefill_us=30_000, tokens=(30, 120))
    read, fitted = (run_with(made, read=each) for each in (True, False))
    row, line = (rows_of(tables)["unchanged"] for tables in (read, fitted))
    model = step_models(read, [2])[0]

    assert ("iterations", "calls") == (row["engine"], line["engine"])
    assert 0 == model.speeds.during_prefill
    assert row["residual_share"] < 0.002
    assert row["tokens_share"] < 0.02
    a, b = step_models(fitted, [2])[0].speeds.slowness
    assert 6_000 + 700 * 8 == pytest.approx(time_us(model.speeds.slowness, 8), rel=0.05)
    assert 6_000 + 700 * 8 == pytest.approx(a + 8 * b, rel=0.05)


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(lambda row: row["name"] == "engine_0", id="one replica was not read"),
        pytest.param(lambda row: row["step"] is None and row["end_us"] % 3 == 0, id="a third was"),
        pytest.param(lambda row: row["end_us"] < EPOCH + 300_000, id="few rows"),
    ],
)
def test_without_enough_iterations_the_line_is_used(keep):
    """And the table says so."""
    tables = run_with(Engines(prompts=4), steps=3, keep=keep)

    assert {"calls"} == {row["engine"] for row in what_if(tables)}
    found = explanations(tables)
    assert "from calls" in why(found, found["findings"])


def test_a_limit_taken_away_has_a_closer_interval():
    """Six calls per replica: the bound of no further slowdown is replaced by the measured slope."""
    made = Engines(slots=6)
    truth = mean_s(made, 30) - mean_s(changed(made, slots=64), 30)
    read, line = (rows_of(run_with(made, read=each))["no_queue"] for each in (True, False))

    assert read["low_s"] < truth < read["high_s"]
    assert read["high_s"] - read["low_s"] < 0.85 * (line["high_s"] - line["low_s"])
    assert abs(read["expected_s"] - truth) < 0.5 * truth


def test_a_kv_cache_that_is_full_limits_the_calls():
    """1,500 tokens per replica: more of them help, a higher number of calls does not."""
    made = Engines(prompts=16, kv_tokens=1_500)
    truth = mean_s(made, 20) - mean_s(changed(made, kv_tokens=3_000), 20)
    tables = run_with(made, states=True)
    rows = rows_of(tables)

    sizes = [model.limits.kv_tokens for model in step_models(tables, range(2, STEPS + 1))]
    assert all(1_400 < size <= 1_500 for size in sizes)
    assert rows["twice_the_kv_cache"]["low_s"] < truth < rows["twice_the_kv_cache"]["high_s"]
    assert 0.4 * truth < rows["twice_the_kv_cache"]["expected_s"]
    assert 0 == rows["twice_the_slots"]["saved_s"]
    assert {math.inf} == {
        model.limits.kv_tokens for model in step_models(run_with(made, states=False), [2, 3])
    }


def test_a_prefix_cache_that_is_kept():
    """Each second call prefills 1,000 tokens again: known from the step without that."""
    first = Turn(prompt=1_000, cached=0, prefill_us=400_000)
    cold = replace(first, prompt=1_100, cached=0, prefill_us=440_000)
    warm = replace(cold, cached=1_050, prefill_us=20_000)
    lost, kept = (
        Step(tuple(Request(turns=(first, second)) for _ in range(3))) for second in (cold, warm)
    )
    row = rows_of(run_of(lost)[0])["prefix_cache_kept"]
    truth = run_of(lost)[1][0].duration_us - run_of(kept)[1][0].duration_us

    assert truth / 1e6 == pytest.approx(row["saved_s"], rel=0.01)
    assert 0 == rows_of(run_of(kept)[0])["prefix_cache_kept"]["saved_s"]
