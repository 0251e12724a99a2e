"""`summary --follow`, on a terminal, while a recorded run is played again."""

import fcntl
import gzip
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from cached_runs import REHEARSED
from recorded import grow, lines_in_order

from verl_profiler.cli import main

# Each reading waits as long as the last one took.
MAIN = "import sys; from verl_profiler.cli import main, summary; summary._REST, summary._INTERVAL_S = 1, 0.05; sys.exit(main())"


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

    def _read(self):
        """Return whether the command still has the terminal."""
        if select.select([self._ours], [], [], 1)[0]:
            try:
                self.written += os.read(self._ours, 1 << 16)
            except OSError:
                return False
        return True

    def wait_for(self, *texts):
        """Read until one of the last whole frames shows all texts."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            frames = self.written.split(b"\x1b[H")
            for shown in frames[-2:]:
                if all(text.encode() in shown for text in texts) and b"\x1b[J" in shown:
                    return
            if not self._read():
                break
        raise AssertionError(f"{texts!r} not shown; the last screen:\n{self.written[-3000:]!r}")

    def end(self, number=None):
        """Send a signal, if one is given, and return the exit status."""
        if number is not None:
            self.process.send_signal(number)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._read():
            pass
        os.close(self._ours)
        return self.process.wait(timeout=10)


def summarized(path, capsys):
    """Return what `summary` prints, without its cache."""
    main(["summary", str(path), "--no-cache"])
    return capsys.readouterr().out


def kept_events(path):
    """Return the number of events of each part of tables in the cache."""
    parts = [json.loads(file.read_text()) for file in path.glob(".cache/*/part-*.json")]
    return [sum(part["counts"].values()) for part in parts]


def test_at_each_moment_the_screen_is_the_summary(tmp_path, capsys):
    """While files grow, a line is torn, and a step is compressed; the phase is the last that ended."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "run.json").write_bytes((REHEARSED / "run.json").read_bytes())
    ordered = lines_in_order(REHEARSED)
    moments = [json.loads(line)["timestamp"] for _, line in ordered]
    shown = 0
    for moment, doing in (
        ("2026-11-21T04:14:47", "after adv of step 2 for "),
        ("9", "after step 2 for "),
    ):
        following = sum(each <= moment for each in moments)
        grow(path, ordered[shown:following])
        shown = following
        torn = next((path / name for name, _ in ordered[shown:]), None)
        if torn is not None:
            torn.parent.mkdir(exist_ok=True)
            with torn.open("ab") as file:
                file.write(ordered[shown][1][:20])
        if shown == len(ordered):
            for file in (path / "step_1").glob("*.jsonl"):
                Path(f"{file}.gz").write_bytes(gzip.compress(file.read_bytes()))
                file.unlink()
        main(["summary", "--follow", str(path)])
        heads, _, text = capsys.readouterr().out.partition("\n\n")
        if torn is not None:
            content = torn.read_bytes()
            expected = summarized(path, capsys)
            torn.write_bytes(content[:-20])
        else:
            expected = summarized(path, capsys)

        assert heads.startswith("running; ")
        assert doing in heads
        assert text == expected


def test_a_run_is_followed_on_a_terminal_until_it_ends(tmp_path, capsys):
    """Before it exists, while it grows and is away for a moment; the cache holds no copies of its end."""
    path = tmp_path / "run"
    terminal = Terminal("summary", "--follow", path)
    try:
        terminal.wait_for("waiting for the run: ")
        ordered = lines_in_order(REHEARSED)
        half = len(ordered) * 3 // 4
        grow(path, ordered[:half])
        head = summarized(path, capsys).splitlines()[0][:80]
        terminal.wait_for(head)
        assert sum(kept_events(path)) > 0
        path.rename(tmp_path / "away")
        terminal.wait_for("cannot be read now: ", head)
        (tmp_path / "away").rename(path)
        grow(path, ordered[half:])
        head = summarized(path, capsys).splitlines()[0][:80]
        terminal.wait_for("after step 2", head)
        shutil.copytree(REHEARSED / "processes", path / "processes")
        terminal.wait_for("ended; last event 2026-11-21T04:14:56+00:00", head)
        assert 0 == terminal.end()
    finally:
        terminal.process.kill()

    frame = terminal.written.decode().split("\x1b[H")[-1].split("\x1b[J")[0]
    lines = [line.strip("\r\n") for line in frame.split("\x1b[K")][:-1]
    expected = [line[:80] for line in summarized(path, capsys).splitlines()]
    assert lines[2:] == expected[:21]
    assert len(lines) <= 23
    assert terminal.written.count(b"\x1b[?25l") == terminal.written.count(b"\x1b[?25h") == 1
    assert b"Traceback" not in terminal.written
    assert sum(kept_events(path)) == len(ordered)
    assert len(kept_events(path)) == len(list(path.glob(".cache/*/part-*.parquet")))


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_cursor_comes_back_when_it_is_ended(tmp_path, number, expected):
    """Ctrl-C, and the SIGTERM of a job manager."""
    terminal = Terminal("summary", "--follow", tmp_path / "none")
    terminal.wait_for("waiting for the run: ")

    assert expected == terminal.end(number)
    assert terminal.written.rstrip().endswith(b"\x1b[?25h")


def test_a_run_without_events_has_nothing_to_show(tmp_path, capsys):
    """It may be starting."""
    (tmp_path / "run.json").write_text('{"format": 1}')

    assert 1 == main(["summary", str(tmp_path)])
    assert capsys.readouterr().err == (
        "nothing to report:\nrunning; before the first step; no events yet; "
        f"verl-profiler stuck {tmp_path} shows what it waits for\nno events were found\n"
    )
    assert 1 == main(["summary", "--follow", str(tmp_path)])
    assert capsys.readouterr().out == (
        "running; before the first step; no events yet\nnothing to report yet; no events were found\n"
    )
