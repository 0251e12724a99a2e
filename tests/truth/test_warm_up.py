"""The first step of a run is left out of means, everywhere by the same rule, and the output states it."""

from dataclasses import replace

from truth.synthetic import run_of
from truth.test_findings import QUIET

from verl_profiler.analysis.explain.findings import explanations
from verl_profiler.analysis.overview import phase_totals
from verl_profiler.analysis.selection import left_out
from verl_profiler.analysis.steps import step_phases, step_times
from verl_profiler.units import seconds
from verl_profiler.views.findings import findings
from verl_profiler.views.overview_text import TABLES, overview_text
from verl_profiler.views.why_text import why

SLOW_START = replace(QUIET, save_us=9_000_000)


def texts_of(tables, steps=None):
    found = explanations(tables, steps)
    warm_up = left_out(tables, steps)
    phases = phase_totals(step_phases(tables, steps), left_out=warm_up)
    rows = {
        **{name: [] for name in TABLES},
        "bubble_ledger": found["bubble_ledger"],
        "step_times": step_times(tables, steps),
        "phase_totals": phases,
    }
    about = {"runs": ["made"], "events": 1, "notes": []}
    ranked = findings(found)
    return overview_text(rows, about, ranked, [], warm_up), why(found, ranked, warm_up)


def test_means_leave_the_first_step_out_and_state_it():
    """A first step that takes 9 s longer than the three others changes no mean."""
    tables, truths = run_of(SLOW_START, QUIET, QUIET, QUIET)
    lengths = [truth.duration_us / 1e6 for truth in truths]
    mean = seconds(sum(lengths[1:]) / 3)
    summary, why_text = texts_of(tables)

    assert lengths[0] > lengths[1] + 8.9
    assert f"4 steps, {seconds(sum(lengths))}; mean {mean}" in summary
    assert f"means without step 1 ({seconds(lengths[0])})" in summary
    assert "save_checkpoint" not in summary + why_text
    assert f"critical path of 3 steps, mean, without step 1: {mean}," in why_text
    assert "over all of them, without step 1," in why_text


def test_the_first_step_counts_if_it_is_chosen_or_one_of_two():
    tables, truths = run_of(SLOW_START, QUIET, QUIET)
    chosen = "".join(texts_of(tables, (1, 3)))
    short = "".join(texts_of(run_of(SLOW_START, QUIET)[0]))

    assert "without step" not in chosen + short
    assert "save_checkpoint" in chosen
    assert "save_checkpoint" in short
    assert f"mean {seconds(sum(truth.duration_us for truth in truths) / 3e6)}" in chosen
