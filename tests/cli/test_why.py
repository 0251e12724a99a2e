"""`verl-profiler why`: findings, path, model, replays and stragglers, as text and as JSON."""

import json

import pytest
from cached_runs import REHEARSED, fixable_run
from commands import command
from event_files import ended, write_lines

from verl_profiler.analysis.explain.changes import CHANGES
from verl_profiler.analysis.explain.rules import ONLY_IN_REPORT, RULES, TEXTS
from verl_profiler.analysis.registry import explanations
from verl_profiler.cli import why
from verl_profiler.reading.reader import load
from verl_profiler.views.findings import finding_list
from verl_profiler.views.questions import VIEWS
from verl_profiler.views.why_text import why as view

SCREEN = 45


run = command(why)


def test_no_line_of_a_finding_ends_between_a_number_and_its_unit():
    """A list in full had `tq_put 27` in one line and `%` in the next."""
    with load(REHEARSED) as read:
        row = explanations(read.tables)["findings"][0]
    for length in range(60, 100):
        text = f"{'a' * length} takes 271 % of 1,217 s"
        listed = finding_list([{**row, "message": text, "cause": text}])
        assert 2 == listed.count("271 %") == listed.count("1,217 s")


def test_one_step_of_a_real_run(capsys, tmp_path):
    """In the order in which a tired reader asks: what to do, why, how sure, what else, who."""
    status = run(fixable_run(tmp_path / "rehearsal"), "--steps", "2", "-v")

    text = capsys.readouterr().out
    assert 0 == status
    places = [
        text.index(title)
        for title in (
            "Findings of one step\n1. Validation takes 4.25 s per step, 17 % of the time from step to step.",
            "2. The trainer noticed rollout completion 1.51 s late.",
            "critical path of step 2: 20.1 s, every second attributed to one cause",
            "in order (",
            "what if (mean per step, 1 step replayed, replay error 0 %, engine speed from calls; 90 % intervals ",
            "stragglers (",
            "straggler requests",
        )
    ]
    assert sorted(places) == places
    assert "update_actor" in text
    # What a step is for.
    assert "\n   gain: none measured, of " in text
    # A file to paste keeps its lines.
    assert "paste: trainer.test_freq=5\n" in text
    assert "\n        class FastPoll(ReplayBuffer):\n" in text
    assert all(line.isprintable() for line in text.splitlines())


def test_without_v_a_run_of_any_size_fits_on_one_screen(capsys):
    """Titles, totals and the largest of each kind stay; what is left out is counted or named."""
    assert 0 == run(REHEARSED)
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= SCREEN
    assert "1. Validation takes 2.12 s per step" in text
    assert "\n   gain: " in text
    assert "culprit: poll interval of the replay buffer, in 2 steps" in text
    assert "delay the step by 893 ms (no single operation: tq_get 53 %, " in text
    assert "critical path of " in text
    assert "-v has findings in full" in text

    with load(REHEARSED) as opened:
        found = dict(explanations(opened.tables))
    ranked = found["findings"]
    for name in ("what_if", "stragglers", "straggler_requests"):
        found[name] = found[name] * 100
    found["steady_path"] = [
        {**row, "category": f"{row['category']}_{number}"}
        for number, row in enumerate(found["steady_path"])
    ]
    large = view(found, ranked * 20, verbose=False)
    assert len(large.splitlines()) <= SCREEN
    assert "; 3 of 100" in large
    full = view(found, ranked * 20)
    assert len(full.splitlines()) > SCREEN
    # The rest of the path is one line with its sum.
    (path, *_) = (line for line in large.splitlines() if "more  " in line)
    assert path.split()[1] == "more"


def test_json_holds_all_of_it(capsys):
    """The stretches in order, too; they add up to the steps."""
    run(REHEARSED, "--json")

    content = json.loads(capsys.readouterr().out)
    tables = content["tables"]
    assert {"rehearsal_run"} == {row["run"] for rows in tables.values() for row in rows}
    named = [row["finding"] for row in content["findings"]]
    assert ["validation", "polling", "transfer", "tail", "work"] == named
    assert 21.016081 + 20.106269 == pytest.approx(
        sum(row["duration_s"] for row in tables["critical_segments"])
    )
    acquired = [r["what"] for r in tables["critical_segments"] if r["event"] == "server_acquire"]
    assert {"engine_0", "engine_1"} >= set(acquired) != set(), "replicas, not their addresses"
    unexplained = [r["share"] for r in tables["critical_path"] if r["category"] == "unexplained"]
    assert max(unexplained) < 0.01
    (residual,) = (r["residual_share"] for r in tables["what_if"] if r["what"] == "unchanged")
    assert residual < 1e-6


def test_no_step_with_an_end_is_nothing_to_report(tmp_path, capsys):
    """A run that was killed in its first step, or whose trainer was not recorded."""
    write_lines(tmp_path, worker_0=[ended("request", 4, 1.5, request_id="q", sample=1, session=0)])

    assert 1 == run(tmp_path)
    assert "nothing to report: no step finished" in capsys.readouterr().err


def test_the_tables_of_rules_have_no_name_that_nothing_has():
    """A rule that another one makes superfluous, the texts of a rule elsewhere, and the replay of a change."""
    others = {name for rule in RULES.values() for name in rule.without}
    elsewhere = {name for name, of in TEXTS if of in ("one culprit", "cycle", "engines")}
    changes = {rule.change for rule in RULES.values()} - {None}

    assert others | elsewhere <= RULES.keys()
    assert changes <= CHANGES.keys()


def test_what_findings_point_to_is_a_plot_or_named_as_a_table_of_the_report(capsys):
    """No name for `plot` that it does not have."""
    named = {name for rule in RULES.values() for name in rule.shows}

    assert named - VIEWS.keys() == ONLY_IN_REPORT
    assert 0 == run(REHEARSED, "-v")
    assert "see: critical_path, rollout_tail in the report\n" in capsys.readouterr().out
