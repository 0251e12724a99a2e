"""What all commands have in common."""

import os
import signal
import threading

import duckdb

from verl_profiler.cli import main, summary

LONG = """
    SET threads = 1;
    CREATE TABLE numbers AS FROM range(1_000_000);
    SELECT max(md5(repeat('x', 500 + range % 2))) FROM numbers
"""


def test_an_interrupt_during_a_query_is_no_error(monkeypatch, capsys):
    """However deep in duckdb a command is."""
    interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

    def asking(_):
        interrupt.start()
        duckdb.connect().execute(LONG)

    monkeypatch.setattr(summary, "run", asking)
    # A job in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = main(["summary", "nowhere"])
    finally:
        signal.signal(signal.SIGINT, before)
        interrupt.join()

    assert 130 == status
    assert ("", "") == capsys.readouterr()


def failing(_):
    raise RuntimeError("no\x1b[2J thread\nFORGED")


def test_an_error_of_ours_is_told_in_plain_lines(monkeypatch, capsys):
    """What it was, how to see where it was; a status that no other end has."""
    monkeypatch.setattr(summary, "run", failing)

    assert 3 == main(["summary", "nowhere"])
    out, err = capsys.readouterr()
    assert "" == out
    assert [
        "verl-profiler summary: error in verl-profiler itself: RuntimeError: no\\x1b[2J thread",
        "Please report it with the output of: verl-profiler --traceback summary … (internal-error)",
    ] == err.splitlines()


def test_the_traceback_is_shown_on_request(monkeypatch, capsys):
    """Of errors of ours and of the user's."""
    monkeypatch.setattr(summary, "run", failing)

    assert 3 == main(["--traceback", "summary", "nowhere"])
    assert "in failing" in capsys.readouterr().err
    assert 2 == main(["--traceback", "why", "/nowhere"])
    err = capsys.readouterr().err
    assert "in _run" in err
    assert "(no-such-run)" in err
