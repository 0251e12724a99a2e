"""The summary's 20 lines: what they show is true, and they stay 20."""

import json
import re
import sys
import textwrap
from statistics import median

import pytest
from cached_runs import SMALL, cached
from commands import Terminal
from event_files import ended, phases, write_lines

from verl_profiler.cli import main
from verl_profiler.render.text import clipped, unbroken, wrapped
from verl_profiler.views.overview_text import TABLES, device_line, of_which, overview_text

STEPS = 100
NAMES = ("rehearsal_run", "colocate_async_run")
RUNS = [SMALL, *map(cached, NAMES)]


def lookup_s(step):
    """Return the length of the user's own span in a step."""
    return 0.1 + 0.01 * (step % 7)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A hundred steps of ten seconds: six in gen, four in update_actor; step 41 takes twelve."""
    folder = tmp_path_factory.mktemp("long") / "long_run"
    begin = 0.0
    for step in range(1, STEPS + 1):
        gen = 8.0 if step == 41 else 6.0
        end = begin + gen + 4.0
        trainer = phases(step, gen, gen + 4.0, begin_s=begin)
        worker = []
        for sample in range(4):
            ids = {"request_id": f"r{step}-{sample}", "sample": sample, "session": 0, "step": step}
            worker += [
                ended("lookup", begin + 1, lookup_s(step), **ids),
                ended("tool_call", begin + 2, 0.5, tool="search", turn=0, **ids),
                ended("request", begin + gen - 0.01, gen - 0.01 - 0.1 * sample, **ids),
            ]
        write_lines(folder, trainer_0=trainer, worker_0=worker)
        begin = end
    return folder


def printed(capsys, *words):
    status = main([*map(str, words)])
    out = capsys.readouterr().out
    assert 0 == status, out
    return out


def test_a_hundred_steps_fit_on_one_screen(long_run, capsys):
    """Figures by hand: 99 steps of 10 s and one of 12 s."""
    out = printed(capsys, "summary", long_run)
    lines = out.splitlines()

    assert len(lines) <= 20
    assert max(map(len, lines)) <= 120
    assert (
        "long_run: 100 steps, 16 min 42 s; mean 10.0 s, 10.0 s to 12.0 s (step 41); "
        "means without step 1 (10.0 s)"
    ) == lines[0]
    rows = {each.split()[0]: each.split() for each in lines if each}
    assert rows["gen"][1:] == ["6.02", "s", "60", "%", "8.00", "s", "(step", "41)"]
    assert rows["update_actor"][1:6] == ["4.00", "s", "40", "%", "4.00"]
    assert "requests    400: " in out
    assert "tools       search 400 × p50 500 ms max 500 ms" in out


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_every_recorded_run_has_20_lines(run, capsys):
    """With its length, its largest phase, a finding with its fix, and the quality of the data."""
    lines = printed(capsys, "summary", run).splitlines()

    assert len(lines) <= 20
    assert " steps, " in lines[0]
    assert lines[1].startswith("phase ")
    gains = [line for line in lines if line.startswith("   gain: ")]
    assert gains
    assert any(line.startswith("   fix: ") for line in lines)
    assert lines[-1].startswith("Data quality")


def test_runs_of_one_summary_share_the_20_lines(capsys):
    lines = printed(capsys, "summary", *RUNS[:2]).splitlines()

    assert len(lines) <= 20
    assert re.match(r"  \w+ \d+ % \(", lines[1])


def test_what_does_not_fit_is_left_out_and_counted():
    """Two hundred phases, tools, spans and warnings, and findings with long sentences."""
    one = {"run": "large"}
    phases = [
        {**one, "phase": f"phase_{n}", "steps": 9, "mean_s": 1.0, "share": 0.005, "max_s": 2.0,
         "max_step": 4, "total_s": 9.0}
        for n in range(200)
    ]  # fmt: skip
    calls = {**one, "calls": 1, "p50_s": 1.0, "max_s": 1.0, "failed": 0, "estimated": False}
    finding = dict.fromkeys(
        ("bound_s", "low_s", "replayed", "mostly_step", "culprit", "culprit_kind", "proof")
    ) | {
        **one, "message": "What happened. " * 30, "cause": "", "advice": "Do. " * 100, "steps": 9,
        "recoverable_s": 1.0, "share": 0.1, "step_s": 200.0, "dominates": False, "unseen": False, "where": "",
        "culprit_text": "a culprit " * 30, "overrides": [], "files": {}, "shows": [],
        "evidence": [],
    }  # fmt: skip
    found = {
        **dict.fromkeys(TABLES, ()),
        "step_times": [
            {**one, "step": n, "finished": True, "duration_s": 200.0} for n in range(1, 10)
        ],
        "phase_totals": phases,
        "tool_latencies": [{**calls, "tool": f"tool_{n}" * 9} for n in range(200)],
        "own_spans": [{**calls, "event": f"span_{n}" * 9} for n in range(200)],
    }
    about = {"runs": ["large"], "notes": ["A note. " * 50], "events": 1}
    text = overview_text(found, about, [finding] * 9, ["A warning. " * 40] * 200)
    lines = text.splitlines()

    assert len(lines) <= 20
    assert max(map(len, lines)) <= 120
    assert "What to change first (gains per step, not additive); 2 of 9, -v has all" in lines
    assert "1 of 200 warnings (-v has all)" in lines[-1]
    assert "phase_0, phase_1, phase_2, phase_3, …" in text


def test_ones_own_spans_are_shown(long_run, capsys):
    """With the figures that this test computes from the lengths it has written."""
    lengths = [lookup_s(step) for step in range(1, STEPS + 1) for _ in range(4)]
    tables = json.loads(printed(capsys, "summary", long_run, "--json"))["tables"]

    (row,) = tables["own_spans"]
    assert ("lookup", 400, ["agent_loop"]) == (row["event"], row["calls"], row["roles"])
    assert row["total_s"] == pytest.approx(sum(lengths))
    assert row["p50_s"] == pytest.approx(median(lengths))
    assert row["max_s"] == pytest.approx(max(lengths))
    assert 0 == (row["slowest_step"] + 1) % 7
    shown = printed(capsys, "summary", long_run)
    assert "your spans  lookup 400 × p50 130 ms max 160 ms" in shown
    assert "prompt_build" not in shown, "it was not recorded"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one, two and three and more", "one, two and …"),
        ("one to three, four and more", "one to three, …"),
        ("a_path_without_spaces_in_it", "a_path_without_spa …"),
    ],
)
def test_what_is_cut_ends_between_parts_or_words(text, line):
    """A note ended with `than the one that dispatc …`; what has neither is cut where it has to."""
    assert line == clipped(text, len("a_path_without_spa …"))


def test_no_line_ends_between_a_number_and_its_unit():
    """The first screen ended with `means without step 1 (12.7`, and ` s)` stood alone below it."""
    text = "a run takes 9 min 7 s; without step 1 (12.7 s), 40 % of 1.5 GiB"
    for width in range(12, 80):
        lines = textwrap.wrap(unbroken(text), width)
        assert not [line for line in lines if re.match(r"(s|min|%|GiB)\b", line)], width
    assert "step 1 (12.7\xa0s), 40\xa0%" in unbroken(text)
    assert [text] == wrapped(text, width=80)


def test_one_step_has_20_lines_too(long_run, capsys):
    """With -v all of its phases."""
    out = printed(capsys, "summary", long_run, "--step", 41)
    whole = printed(capsys, "summary", "-v", long_run, "--step", 41)

    assert out.startswith("long_run: 1 step, 12.0 s\n")
    assert len(out.splitlines()) <= 20
    assert whole.startswith("long_run: 1 step, 12.0 s\n")
    assert re.search(r"\nphase +time +share\ngen +8\.00 s +67 %\n", whole)


def test_no_change_is_promised_where_nothing_was_recorded(tmp_path, capsys):
    """ "No anomaly was found" needs a finished step."""
    write_lines(tmp_path, worker_0=[ended("request", 2, 1, request_id="a")])
    out = printed(capsys, "summary", tmp_path)

    assert "No anomaly" not in out
    assert "no finished steps; 1.00 s were recorded" in out


def test_files_of_the_original_logger_show_phases_workers_and_engine_calls(tmp_path, capsys):
    """They have no steps of the trainer and no requests; worker_3 has the longest call, in step 2."""
    for step, longest in ((1, 20.0), (2, 60.0)):
        for worker in range(4):
            calls = [5.0, 7.0, 9.0] + [longest] * (worker == 3)
            lines = [("engine_async_generate", each) for each in calls]
            lines += [("async_generate_duration", max(calls)), ("total_step_duration", max(calls))]
            path = tmp_path / "lj" / f"step_{step}" / f"worker_{worker}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "".join(
                    json.dumps(
                        {
                            "timestamp": f"2026-05-01T10:{5 * step:02}:{int(spent % 60):02}.500000",
                            "step": step,
                            "worker": worker,
                            "event": event,
                            "duration_sec": spent,
                        }
                    )
                    + "\n"
                    for event, spent in lines
                )
            )
    text = printed(capsys, "summary", tmp_path / "lj")
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert re.search(r"gen 40\.0 s", lines["phases"]), text
    assert "async_generate: worker_3 60.0 s (step 2), median of 4 9.00 s" in lines["workers"]
    assert "26 calls; step 2 has the longest: p50 7.00 s max 60.0 s" in lines["engine"]


def test_a_terminal_gets_colors_and_a_pipe_none(monkeypatch, capsys):
    """NO_COLOR switches them off; names in files cannot add any."""

    def on_a_terminal():
        screen = Terminal()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", screen)
            main(["summary", str(SMALL)])
        return screen.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert on_a_terminal().startswith("\x1b[1msmall_run: ")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in on_a_terminal()
    assert "\x1b[" not in printed(capsys, "summary", SMALL)


@pytest.mark.parametrize(
    ("spent", "text"),
    [
        # A tool call of 981 ms is the longest call, and not what the request consists of.
        ({"tool_s": 0.981, "reward_s": 10.3}, ", 10.3 s of it in its reward"),
        ({"tool_s": 9.0, "engine_s": 0.9}, ", 9.00 s of it in tools"),
        # A chart's title was "took 4 min 3 s, 4 min 3 s of it in engine calls".
        ({"duration_s": 243.0, "engine_s": 242.9}, ", all of it in engine calls"),
    ],
)
def test_the_slowest_request_is_described_by_its_largest_part(spent, text):
    """Not by its longest call."""
    assert text == of_which(spent)


def use(phase, covered_s, idle_s, *, step=1, device=0):
    """A row of `device_use`."""
    times = {"covered_s": covered_s, "idle_s": idle_s}
    return {"run": "r", "step": step, "phase": phase, "host": "one", "device": device, **times}


def test_idle_devices_in_a_line():
    """10 of 40 s of two devices; what is small is left out."""
    rows = [use("gen", 10, 6, device=device) for device in (0, 1)]
    rows += [use("update_actor", 10, 1, device=device) for device in (0, 1)]
    rows += [use("adv", 0.1, 0.1), use("init", 900, 900, step=0)]

    assert (
        "2 devices sampled over 20.1 s of finished phases: idle 35 % of the time "
        "(gen 85 %, update_actor 14 % of that)" == device_line(rows)
    )
    assert "" == device_line([])
    assert "" == device_line([use("gen", 10, None)])
