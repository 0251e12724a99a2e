"""The watch command, on a terminal, while a recorded run is played again."""

import argparse
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from recorded import grow, lines_in_order, unpacked

from verl_profiler.cli import watch
from verl_profiler.errors import ReadingError

MAIN = "import sys; from verl_profiler.cli import main; sys.exit(main())"


def run(*arguments):
    parser = argparse.ArgumentParser()
    watch.add_arguments(parser)
    return watch.run(parser.parse_args([*map(str, arguments)]))


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory):
    return unpacked(tmp_path_factory.mktemp("recorded"))


class Terminal:
    """A terminal of 80 columns by 24 lines with a command in it."""

    def __init__(self, *command):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {
            key: value for key, value in os.environ.items() if key not in ("LINES", "COLUMNS")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *map(str, command)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=environment,
        )
        os.close(theirs)
        self.written = b""

    def wait_for(self, text):
        """Read until the latest whole frame shows `text`; return it."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            frames = self.written.split(b"\x1b[H")
            for shown in frames[-2:]:
                if text.encode() in shown and b"\x1b[J" in shown:
                    return shown.decode()
            if select.select([self._ours], [], [], 1)[0]:
                try:
                    self.written += os.read(self._ours, 1 << 16)
                except OSError:
                    break
        raise AssertionError(f"{text!r} was not shown; the last screen:\n{self.written[-3000:]!r}")

    def end(self, number):
        self.process.send_signal(number)
        status = self.process.wait(timeout=60)
        while select.select([self._ours], [], [], 0.2)[0]:
            try:
                self.written += os.read(self._ours, 1 << 16)
            except OSError:
                break
        os.close(self._ours)
        return status


def test_a_run_is_followed_on_a_terminal(recorded_run, tmp_path):
    """Phase after phase as its files grow; every frame fits, and Ctrl-C leaves the terminal as it was."""
    (tmp_path / "run.json").write_bytes((recorded_run / "run.json").read_bytes())
    ordered = lines_in_order(recorded_run)
    moments = [json.loads(line)["timestamp"] for _, line in ordered]
    terminal = Terminal("watch", tmp_path, "--interval", "0.05")
    try:
        terminal.wait_for("no events yet")
        shown = 0
        for moment, text in (
            ("2026-11-21T04:14:11.5", "19 in flight, 13 of 32 finished (41 %)"),
            ("2026-11-21T04:14:33.9", "2 in flight, 30 of 32 finished (94 %)"),
            ("2026-11-21T04:14:47", "update_actor for"),
            ("9", "step 2  ended after 20.1 s"),
        ):
            following = sum(each <= moment for each in moments)
            grow(tmp_path, ordered[shown:following])
            shown = following
            frame = terminal.wait_for(text)
    finally:
        status = terminal.end(signal.SIGINT)

    lines = [line.split("\x1b[K")[0] for line in frame.split("\r\n")]
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    assert "check_answer" in frame
    assert 0 == status
    assert terminal.written.count(b"\x1b[?25l") == terminal.written.count(b"\x1b[?25h") == 1
    assert b"Traceback" not in terminal.written


def test_once_prints_one_plain_screen(recorded_run, capsys):
    """Of a run that has ended, too."""
    before = sorted(recorded_run.rglob("*"))

    assert 0 == run(recorded_run, "--once")
    printed = capsys.readouterr().out
    assert "rehearsal_run  ended" in printed
    assert "step 2  ended after 20.1 s" in printed
    assert "32 of 32 finished (100 %)" in printed
    assert "\x1b" not in printed
    # The run's folder is as it was.
    assert before == sorted(recorded_run.rglob("*"))


def test_without_a_terminal_one_screen_is_printed(recorded_run, capsys):
    """Into a pipe or a file."""
    assert 0 == run(recorded_run)
    assert "no problems" in capsys.readouterr().out


def test_a_run_without_events_is_said_to_have_none(tmp_path, capsys):
    """It may be starting."""
    (tmp_path / "run.json").write_text("{}")

    assert 1 == run(tmp_path, "--once")
    assert "no events yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "slug"),
    [
        (["gone"], "no-such-run"),
        ([__file__], "no-such-run"),
        ([".", "--interval", "0"], "option-value"),
    ],
)
def test_what_cannot_be_followed_is_refused(arguments, slug):
    """An archive does not grow."""
    with pytest.raises(ReadingError) as raised:
        run(*arguments)
    assert slug == raised.value.slug


def test_watching_needs_only_the_core(recorded_run):
    """It works on a training node: neither duckdb nor matplotlib is imported."""
    code = (
        "import sys; from verl_profiler.cli import main; main(sys.argv[1:]);"
        "print({'duckdb', 'matplotlib', 'jinja2', 'numpy', 'ray', 'verl'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "watch", recorded_run, "--once"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "set()" == done.stdout.splitlines()[-1]
