"""The summary's one screen: what it shows is true, and it stays one screen."""

import json
import os
import pty
import subprocess
import sys
from statistics import median

import pytest

from verl_profiler.cli import main

STEPS = 100


def line(event, end_s, duration_s, step, **extra):
    made = {
        "timestamp": f"2026-11-21T{2 + int(end_s) // 3600:02}:{int(end_s) // 60 % 60:02}:{end_s % 60:09.6f}+00:00",
        "event": event,
        "duration_sec": duration_s,
        "workid": 0,
        "step": step,
    }
    return {**made, "extra": extra} if extra else made


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
        trainer = [
            line("gen", begin + gen, gen, step),
            line("update_actor", end, 4.0, step),
            line("step", end, gen + 4.0, step),
        ]
        worker = []
        for sample in range(4):
            ids = {"request_id": f"r{step}-{sample}", "sample": sample, "session": 0}
            worker += [
                line("lookup", begin + 1, lookup_s(step), step, **ids),
                line("tool_call", begin + 2, 0.5, step, tool="search", turn=0, **ids),
                line("request", begin + gen - 0.01, gen - 0.01 - 0.1 * sample, step, **ids),
            ]
        for name, lines in (("trainer_0", trainer), ("worker_0", worker)):
            path = folder / f"step_{step}" / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(each) + "\n" for each in lines))
        begin = end
    return folder


def printed(capsys, *words):
    status = main([*map(str, words), "--no-cache"])
    out = capsys.readouterr().out
    assert 0 == status, out
    return out


def test_a_hundred_steps_fit_on_one_screen(long_run, capsys):
    """Figures by hand: 99 steps of 10 s and one of 12 s."""
    out = printed(capsys, "summary", long_run)
    lines = out.splitlines()

    assert len(lines) <= 40
    assert max(map(len, lines)) <= 200
    assert (
        "long_run: 100 steps, 16 min 42 s; mean 10.0 s, 10.0 s to 12.0 s (step 41); "
        "means without step 1 (10.0 s)"
    ) == lines[0]
    rows = {each.split()[0]: each.split() for each in lines if each}
    assert rows["gen"][1:] == ["6.02", "s", "60", "%", "8.00", "s", "(step", "41)"]
    assert rows["update_actor"][1:6] == ["4.00", "s", "40", "%", "4.00"]
    assert "requests    400: " in out
    assert "tools       search 400 × p50 500 ms max 500 ms" in out


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
    assert "your spans  lookup 400 × p50 130 ms max 160 ms" in printed(capsys, "summary", long_run)


def test_one_step_is_shown_in_full(long_run, capsys):
    """Its own overview, then its block; several steps get none."""
    out = printed(capsys, "summary", long_run, "--step", 41)

    assert out.startswith("long_run: 1 step, 12.0 s\n")
    assert "\nstep 41  12.0 s\n" in out
    assert "requests      4 requests  p50 7.84 s" in out
    assert "\nstep 41  " not in printed(capsys, "summary", long_run, "--steps", "41:43")


def test_no_change_is_promised_where_nothing_was_recorded(tmp_path, capsys):
    """ "No single change is worth 3 %" needs a finished step."""
    path = tmp_path / "step_1" / "worker_0.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(line("request", 2, 1, 1, request_id="a")) + "\n")
    out = printed(capsys, "summary", tmp_path)

    assert "No single change" not in out
    assert "no finished steps; 1.00 s were recorded" in out


def test_a_terminal_gets_colors_and_a_pipe_none(long_run):
    """NO_COLOR switches them off; names in files cannot add any."""
    command = [sys.executable, "-c", "from verl_profiler.cli import main; main()"]
    command += ["summary", str(long_run), "--no-cache"]

    def on_a_terminal(**more):
        ours, theirs = pty.openpty()
        environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
        with subprocess.Popen(
            command, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm", **more}
        ):
            os.close(theirs)
            got = b""
            while True:
                try:
                    piece = os.read(ours, 1 << 16)
                except OSError:
                    piece = b""
                if not piece:
                    break
                got += piece
        os.close(ours)
        return got

    assert on_a_terminal().startswith(b"\x1b[1mlong_run: ")
    assert b"\x1b[" not in on_a_terminal(NO_COLOR="1")
    piped = subprocess.run(command, capture_output=True, check=True, timeout=100).stdout
    assert b"\x1b[" not in piped
