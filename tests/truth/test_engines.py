"""What-if against engines whose speeds, and whose changed runs, are known."""

from dataclasses import replace
from statistics import fmean

import pytest
from truth.engines import Engines, changed, mean_s, steps_of
from truth.synthetic import Phase, run_of

from verl_profiler.analysis.explain.rebuilding import step_models
from verl_profiler.analysis.explain.replay import lengths_us
from verl_profiler.analysis.explain.what_if import what_if
from verl_profiler.analysis.registry import explained

LINES = ((6_000, 700), (11_000, 1_300))
# Prefill that hardly holds decoding up, so that a call's passes are all that it takes.
SLOW = Engines(replicas=LINES, prefill_us=1)
STEPS = 8


def test_each_replica_has_its_own_line_over_all_steps():
    """One model for all steps, whichever replica a step gives few calls."""
    models = step_models(run_of(*steps_of(SLOW, STEPS, 1))[0], range(1, STEPS + 1))
    lines = [model.speeds.slowness_of for model in models]

    assert all(line == lines[0] for line in lines)
    for name, line in zip(("engine_0", "engine_1"), LINES, strict=True):
        for load in (2, 8, 16):
            a, b = lines[0][name]
            assert line[0] + line[1] * load == pytest.approx(a + b * load, rel=0.1)


def test_a_replica_with_few_calls_has_nearly_the_line_of_all():
    """A single step's second replica, of which three calls are left, is not fitted to these alone."""
    steps = steps_of(Engines(prefill_us=1, replicas=LINES[:1]), 4, 1)
    few = steps_of(changed(SLOW, prompts=1, samples=2, turns=(1,)), 1, 2)
    tables, _ = run_of(*steps, *few)
    alone, *_ = step_models(run_of(*steps)[0], [1])
    line = step_models(tables, range(1, 6))[0].speeds.slowness_of["engine_1"]

    own, slow = (a + 8 * b for a, b in (alone.speeds.slowness, LINES[1]))
    assert own < line[0] + 8 * line[1] < (own + slow) / 2


def test_phases_after_the_rollout_go_with_the_tokens():
    """360 us per token beside 300 ms that stay, and nothing where two steps are all there is."""
    tables, _ = run_of(*steps_of(changed(SLOW, step_noise=0.0), 16, 1))
    per_token, error = step_models(tables, range(1, 17))[0].after_token_us

    assert abs(per_token - 360) < 2 * error < 180
    assert (0.0, 0.0) == step_models(tables, [1, 2])[0].after_token_us


@pytest.mark.parametrize("stall_us", [7_200_000_000, 4_000_000])
def test_a_stalled_step_does_not_go_with_the_tokens(stall_us):
    """Two hours, or four seconds, in one update: fewer tokens save what they save without the stall."""
    steps = steps_of(changed(SLOW, step_noise=0.0), 8, 1)
    stalled = [
        replace(step, phases=(*step.phases[:1], Phase("update_actor", (stall_us,)), step.phases[2]))
        if place == 4
        else step
        for place, step in enumerate(steps)
    ]
    without, rows = (
        {row["what"]: row for row in what_if(run_of(*each)[0])} for each in (steps, stalled)
    )
    for what in ("half_the_requests", "responses_a_quarter_shorter"):
        assert rows[what]["expected_s"] == pytest.approx(without[what]["expected_s"], rel=0.05)


def test_other_batches_are_other_draws():
    """Twice the requests have a longer longest one: copies of the same ones do not."""
    engines = Engines(prompts=4)
    tables, _ = run_of(*steps_of(engines, 14, 1))
    rows = {row["what"]: row for row in what_if(tables)}
    models = step_models(tables, range(2, 15))
    doubled = [m.with_requests([*m.requests, *m.requests]) for m in models]
    copied = (
        fmean(lengths_us(m)[0] - lengths_us(d)[0] for m, d in zip(models, doubled, strict=True))
        / 1e6
    )
    now = mean_s(engines, 40)
    twice = now - mean_s(changed(engines, prompts=8), 40)

    assert twice == pytest.approx(rows["twice_the_requests"]["expected_s"], rel=0.25)
    assert copied > 0.8 * twice


def test_a_slow_replica_is_not_taken_for_routing():
    """What the step saves if it is as fast as the other one, and the finding that names it."""
    engines = Engines(replicas=LINES)
    tables, _ = run_of(*steps_of(engines, STEPS, 3))
    row = next(row for row in what_if(tables) if row["what"] == "replicas_equally_fast")
    names = [found["finding"] for found in explained(tables)["findings"]]
    saved = mean_s(engines, 40) - mean_s(changed(engines, replicas=LINES[:1] * 2), 40)

    assert saved == pytest.approx(row["expected_s"], rel=0.35)
    assert row["low_s"] < saved < row["high_s"]
    assert "slow_replica" in names
    assert "uneven_replicas" not in names


def test_intervals_hold_the_truth():
    """In at least 85 % of runs and changes; benchmarks/bench_simulated_engines.py counts more of them."""
    engines = Engines(prompts=4, run_noise=0.05)
    calm = changed(engines, run_noise=0.0)
    now = mean_s(calm, 40)
    truths = {
        "half_the_requests": now - mean_s(changed(calm, prompts=2), 40),
        "responses_a_quarter_shorter": now - mean_s(changed(calm, tokens_factor=0.75), 40),
        "tools_twice_as_fast": now - mean_s(changed(calm, tool_factor=0.5), 40),
    }
    held = []
    for seed in range(1, 7):
        rows = {row["what"]: row for row in what_if(run_of(*steps_of(engines, 7, seed))[0])}
        for what, truth in truths.items():
            row = rows[what]
            held.append(row["low_s"] <= truth <= row["high_s"])
            assert row["pair_low_s"] < row["low_s"]
            assert row["high_s"] < row["pair_high_s"]

    assert fmean(held) >= 0.85


def test_batches_have_no_answer_where_load_never_varied():
    """How load slows calls down is unknown there, and what more calls would cost with it."""
    few = steps_of(changed(SLOW, prompts=1, samples=2, turns=(1,)), 3, 2)
    rows = {row["what"]: row for row in what_if(run_of(*few)[0])}

    for what in ("half_the_requests", "twice_the_requests"):
        assert rows[what]["saved_s"] is None
        assert rows[what]["about"]
    assert rows["tools_twice_as_fast"]["saved_s"] is not None
