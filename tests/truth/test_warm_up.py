"""The first step of a run is left out of means, everywhere by the same rule, and the output states it."""

import json
from dataclasses import replace
from statistics import fmean

import pytest
from cached_runs import cached
from reading_back import lines_with_files
from truth.synthetic import events_of, run_of, tables_of
from truth.test_findings import QUIET

from verl_profiler.analysis.explain.finding import Finding, in_order
from verl_profiler.analysis.explain.rules import RULES
from verl_profiler.analysis.overview import headline, phase_totals
from verl_profiler.analysis.registry import explanations
from verl_profiler.analysis.selection import left_out
from verl_profiler.analysis.steps import step_phases, step_times
from verl_profiler.cli import main
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables
from verl_profiler.units import seconds
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
    ranked = found["findings"]
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


@pytest.mark.parametrize("name", ["rehearsal_run", "separate_async_run"])
def test_every_command_has_the_same_headline(name, capsys, tmp_path):
    """Two steps of which both count, and more of which the first does not."""
    from verl_profiler.cli.publishing import _profile
    from verl_profiler.views.sections import document

    run = cached(name)

    def printed(*words):
        main([*map(str, words), "--json"])
        return json.loads(capsys.readouterr().out)

    lines = lines_with_files(run, "trainer_*")
    lengths = {line["step"]: line["duration_sec"] for line in lines if line["event"] == "step"}
    kept = [lengths[step] for step in sorted(lengths)[len(lengths) > 2 :]]
    summary, why = printed("summary", run), printed("why", run)
    step = next(row for row in printed("diff", run, run)["metrics"] if row["metric"] == "step.mean")
    with load(run) as opened:
        page = document(opened)
        (tmp_path / "report.html").touch()
        scalars = _profile(opened, tmp_path / "report.html", "p", "e").scalars
    (figures,) = summary["headline"]

    assert figures["step_mean_s"] == pytest.approx(fmean(kept), abs=1e-3)
    assert figures["steps"] == len(lengths)
    assert [figures] == why["headline"]
    assert f"mean {seconds(figures['step_mean_s'])}" in page["sentences"][0]
    # What the shares of findings are of: validation after the last step included.
    assert f"; {seconds(why['findings'][0]['step_s'])} from step to step" in page["sentences"][0]
    assert step["a"] == pytest.approx(figures["step_mean_s"])
    assert scalars["profile/step_mean_s"] == figures["step_mean_s"]
    assert scalars["profile/steps"] == figures["steps"]
    phases = sum(row["mean_s"] for row in summary["tables"]["phase_totals"])
    assert phases == pytest.approx(figures["step_mean_s"], rel=1e-3)
    useful, whole = 0.0, 0.0
    for row in why["tables"]["bubble_ledger"]:
        if row["step"] not in figures["left_out"]:
            whole += row["device_s"]
            useful += row["device_s"] * (row["account"] in ("training", "generating"))
    assert figures["useful_share"] == pytest.approx(useful / whole)


def test_each_run_of_several_has_its_own_warm_up():
    """A run that went on from step 11 leaves out its step 11; every figure is that of the run alone."""
    events, processes = [], []
    for run, first in (("a", 1), ("b's", 11)):
        made, _ = events_of(SLOW_START, QUIET, QUIET, QUIET)
        events.append([{**each, "run": run, "step": each["step"] + first - 1} for each in made])
        (own,) = [tables_of(made).rows("SELECT * FROM processes")]
        processes.append([{**each, "run": run} for each in own])

    def figures(*which):
        tables = Tables.of(
            {
                "events": [row for each in which for row in events[each]],
                "processes": [row for each in which for row in processes[each]],
            }
        )
        found = explanations(tables)
        times = headline(step_times(tables), found["bubble_ledger"], left_out(tables))
        names = ("steady_path", "stragglers", "culprits", "what_if", "findings")
        rows = {name: found[name] for name in names} | {"headline": times}
        return {
            (run, name): [row for row in own if row["run"] == run]
            for name, own in rows.items()
            for run in ("a", "b's")
        }

    together, first, second = figures(0, 1), figures(0), figures(1)

    assert [[1], [11]] == [together[run, "headline"][0]["left_out"] for run in ("a", "b's")]
    for run, name in together:
        alone = (first if run == "a" else second)[run, name]
        assert together[run, name] == alone, (run, name)
    assert together["b's", "steady_path"]


def test_findings_of_several_runs_have_one_ranking():
    """Whichever run is given first: the most recoverable time first."""
    found = [
        Finding(run, "polling", RULES["polling"], 1, 10.0, recoverable_s=gain, lost_s=gain)
        for run, gain in (("a", 0.7), ("b", 1.32))
    ]

    assert ["b", "a"] == [each.run for each in in_order(found)]
