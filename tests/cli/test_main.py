"""What all commands have in common."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import duckdb
import msgspec
import pytest
import wrapt
from cached_runs import SMALL as CACHED

import verl_profiler
from verl_profiler.cli import COMMANDS, main, summary

SMALL = Path(__file__).parents[1] / "data" / "small_run"

LONG = """
    SET threads = 1;
    CREATE TABLE numbers AS FROM range(1_000_000);
    SELECT max(md5(repeat('x', 500 + range % 2))) FROM numbers
"""

LOG = SMALL.parent / "console_logs" / "verl-0.9.1-real.log"


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


def test_an_error_of_ours_is_told_in_plain_lines(monkeypatch, capsys):
    """What it was, how to see where it was, for the user's too; a status that no other end has."""

    def failing(_):
        raise RuntimeError("no\x1b[2J thread\nFORGED")

    monkeypatch.setattr(summary, "run", failing)

    assert 3 == main(["summary", "nowhere"])
    out, err = capsys.readouterr()
    assert "" == out
    assert [
        "verl-profiler summary: error in verl-profiler itself: RuntimeError: no\\x1b[2J thread",
        "Please report it with the output of: verl-profiler --traceback summary … (internal-error)",
    ] == err.splitlines()
    assert 3 == main(["--traceback", "summary", "nowhere"])
    assert "in failing" in capsys.readouterr().err
    assert 2 == main(["--traceback", "why", "/nowhere"])
    err = capsys.readouterr().err
    assert "in run_command" in err
    assert "(no-such-run)" in err


@pytest.mark.parametrize(
    ("words", "slug", "says"),
    [
        ("requests RUN --request zz", "no-such-request", "starts with 'zz'"),
        ("requests RUN --step 9", "no-such-step", "For example --step 2"),
        ("requests RUN --worker 9", "no-such-worker", "worker_0, worker_1"),
        ("requests RUN --slowest 0", "option-value", "--slowest 20"),
        ("summary RUN --step 9", "no-such-step", "it has 0 to 2.\nFor example --step 2"),
        ("why RUN --steps 7", "no-such-step", "step 7 is not in this run; it has 0 to 2."),
        ("summary --follow gone", "no-such-run", "gone"),
        # An archive, or another file, does not grow.
        (f"summary --follow {__file__}", "no-such-run", "test_main.py"),
        ("summary --follow RUN --step 1", "option-not-heeded", "--steps"),
        # The log would be read as a file of events without an event.
        (f"summary RUN {LOG}", "runs-and-logs", "verl-0.9.1-real.log is a log, and "),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(words, slug, says, capsys):
    """Status 2, and nothing on standard output."""
    assert 2 == main([str(CACHED) if word == "RUN" else word for word in words.split()])
    out, err = capsys.readouterr()
    assert "" == out
    assert says in err
    assert f"({slug})" in err


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/nfs/run/step_1/worker_0.jsonl"),
        RuntimeError("IO Error: Could not read from file: Stale file handle"),
    ],
)
def test_a_stale_handle_is_a_message(monkeypatch, capsys, error):
    """One line of what happened, one of what to do, after an NFS server dropped the file."""
    monkeypatch.setattr("verl_profiler.reading.reader.load", Mock(side_effect=error))

    assert 2 == main(["summary", str(SMALL), "--no-cache"])
    printed = capsys.readouterr().err
    assert "stale NFS file handle" in printed
    assert "Run the command again. (stale-handle)" in printed
    assert 2 == printed.count("\n")


# Arguments of each command, and the extra that its message names; None where the core suffices.
NEEDS = {
    "summary": {"RUN": "analysis"},
    "why": {"RUN": "analysis"},
    "report": {"RUN": "report"},
    "requests": {"RUN": "analysis"},
    "plot": {"all RUN": "plots", "--list": "plots"},
    "diff": {"RUN RUN": "analysis", "--verify polling RUN RUN": "analysis"},
    "runs": {"RUN": "analysis"},
    "stuck": {"RUN": None},
    "timing": {"LOG": "plots"},
    "tq": {"RUN": "analysis", "LOG": "analysis"},
    "memory": {"RUN": "analysis"},
    "export": {
        "perfetto RUN": "analysis",
        "otlp RUN": "otel",
        "prometheus RUN": "prometheus",
        "trackers RUN": "report",
    },
    "collect": {"RUN": None},
    "check": {"": None},
    "rehearse": {"": None},
}
EACH = """
import contextlib, io, json, sys
from verl_profiler.cli import main
done = {}
for words in json.loads(sys.argv[1]):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        status = main(words)
    done[" ".join(words)] = status, text.getvalue()
print(json.dumps(done))
"""


@pytest.fixture(scope="module")
def with_the_core_alone(tmp_path_factory):
    """Return a function that runs code in a Python that has msgspec, wrapt and this package only."""
    folder = tmp_path_factory.mktemp("core")
    for module in (msgspec, wrapt, verl_profiler):
        source = Path(module.__file__).parent
        (folder / source.name).symlink_to(source)

    def run(*words):
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        done = subprocess.run(
            [sys.executable, "-S", "-c", *words],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
            env={**kept, "PYTHONPATH": str(folder)},
        )
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_each_command_without_its_extra_names_it(with_the_core_alone, tmp_path):
    """`pip install .` on a training node, and then any command there."""
    run = shutil.copytree(SMALL, tmp_path / "run")
    log = SMALL.parent / "console_logs" / "verl-0.3-ppo.log"
    tried = {
        f"{command} {words}".replace("RUN", str(run)).replace("LOG", str(log)).strip(): extra
        for command, each in NEEDS.items()
        for words, extra in each.items()
    }

    done = with_the_core_alone(EACH, json.dumps([line.split() for line in tried]))

    assert {*COMMANDS} == {*NEEDS}
    for line, extra in tried.items():
        status, text = done[line]
        assert "error in verl-profiler itself" not in text, text
        if extra is None:
            assert "missing-extra" not in text, text
            continue
        end = f"{sys.executable} -m pip install 'verl-profiler[{extra}]' (missing-extra)\n"
        assert (2, True) == (status, text.endswith(f"').\n{end}")), text


def test_help_fits_a_terminal_of_80_columns(monkeypatch, capsys):
    """Of every command; `help NAME` prints the same."""
    monkeypatch.setenv("COLUMNS", "80")
    texts = []
    for words in [["--help"], *([name, "--help"] for name in COMMANDS), ["help", COMMANDS[-1]]]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert 0 == ended.value.code
        texts.append(capsys.readouterr().out)
    assert [] == [line for text in texts for line in text.splitlines() if len(line) > 80]
    assert texts[-2] == texts[-1]


@pytest.mark.parametrize(
    "words",
    [
        "plot tool_latencies --csv RUN",
        "requests --slowest 1 RUN",
        "summary RUN --step 1 --json",
        "diff RUN --json RUN",
        "export prometheus --step 1 RUN",
    ],
)
def test_options_may_come_anywhere(words, capsys):
    """Before, between and after what a command reads."""
    assert 0 == main([str(CACHED) if word == "RUN" else word for word in words.split()])
    assert capsys.readouterr().out


def test_an_unknown_option_is_answered_with_the_options_of_its_command(capsys):
    with pytest.raises(SystemExit):
        main(["requests", str(CACHED), "--slowst", "3"])
    err = capsys.readouterr().err
    assert "--slowest COUNT" in err
    assert "verl-profiler requests: error: unrecognized arguments: --slowst" in err


def test_the_example_of_a_missing_step_can_be_pasted(capsys):
    """Of RUN@N too, which takes no blank; a log's has the same form."""
    assert 2 == main(["diff", f"{CACHED}@9", str(CACHED)])
    assert f"For example {CACHED}@2 (no-such-step)" in capsys.readouterr().err
    assert 2 == main(["summary", str(LOG), "--step", "99"])
    assert (
        "step 99 is not in the log; it has 1 to 3.\nFor example --step 3" in capsys.readouterr().err
    )
