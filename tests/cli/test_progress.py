"""What a command that takes long prints on standard error while it reads."""

import json
import sys
from functools import partial

import pytest
from cached_runs import SMALL
from commands import Terminal

from verl_profiler import cli
from verl_profiler.cli import main, terminal


@pytest.fixture
def at_once(monkeypatch):
    """Lines come from the first piece of work on."""
    monkeypatch.setattr(cli, "Progress", partial(terminal.Progress, quiet_s=0.0))


def test_a_command_that_is_done_soon_prints_nothing(capsys, monkeypatch):
    monkeypatch.setattr(cli, "Progress", partial(terminal.Progress, quiet_s=3600.0))
    assert 0 == main(["summary", str(SMALL), "--no-cache"])
    assert "" == capsys.readouterr().err


@pytest.mark.parametrize("command", ["summary", "report"])
def test_a_pipe_gets_the_output_alone(command, capsys, at_once, tmp_path):
    more = ["-o", str(tmp_path / "report.html")] if command == "report" else ["--json"]
    assert 0 == main([command, str(SMALL), "--no-cache", *more])
    printed = capsys.readouterr()
    assert "reading" not in printed.err
    if command == "summary":
        json.loads(printed.out)


def test_on_a_terminal_the_line_is_erased_before_the_output(monkeypatch, at_once):
    """Output and progress are on the same screen."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("NO_COLOR", "1")
    assert 0 == main(["summary", str(SMALL), "--no-cache"])
    before, _, after = screen.getvalue().partition("small_run: 2 steps")
    assert "\r\x1b[Kreading: event files, 1 of 2" in before
    assert "\r\x1b[Kreading: explanations" in before
    assert before.endswith("\r\x1b[K")
    assert "reading" not in after
    assert "\x1b" not in after
