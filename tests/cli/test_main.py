"""What all commands have in common."""

import os
import signal
import threading

import duckdb
import pytest

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


def test_other_errors_of_that_type_are_told(monkeypatch):
    """Nothing is taken for an interrupt that is none."""

    def failing(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(summary, "run", failing)

    with pytest.raises(RuntimeError, match="new thread"):
        main(["summary", "nowhere"])
