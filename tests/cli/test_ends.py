"""How commands end: by signals, closed pipes, full disks and poor encodings; and what they leave."""

import csv
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cached_runs import SMALL

from verl_profiler.cli import main
from verl_profiler.cli.output import csv_text, json_text, replacing, write_whole
from verl_profiler.errors import ReadingError

MAIN = "import sys; from verl_profiler.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory):
    """A run in a folder whose name is not UTF-8."""
    folder = tmp_path_factory.mktemp("odd")
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/r\xff\xfen"))
    return Path(shutil.copytree(SMALL, odd, ignore=shutil.ignore_patterns(".cache")))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_scratch_files(number, tmp_path):
    """In the middle of reading a run: here, of an event file that does not end."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    slow = (
        "import sys, time\n"
        "from verl_profiler.reading import reader\n"
        "def wait(*_, **__):\n"
        "    print('reading', flush=True)\n"
        "    time.sleep(60)\n"
        "reader.find_sources = wait\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", slow + MAIN, "summary", str(SMALL)],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Under nohup it would be ignored, and stay so.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509
    )
    # Whatever guards stdout: what is printed comes through at once.
    assert b"reading\n" == child.stdout.readline()
    assert list(scratch.iterdir()), "the test's place is not where scratch files go"
    child.send_signal(number)
    _, err = child.communicate(timeout=60)

    assert [] == list(scratch.iterdir())
    assert (128 + number, b"") == (child.returncode, err)


def test_a_signal_while_a_file_is_written_leaves_no_part_of_it(tmp_path):
    """Neither under its name nor beside it."""
    target = tmp_path / "out" / "report.html"
    slow = (
        "import sys, time\nfrom pathlib import Path\n"
        "from verl_profiler.cli import output, summary\n"
        "def pieces():\n"
        "    yield 'half'\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        f"summary.run = lambda args: output.write_whole(Path({str(target)!r}), pieces())\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", slow + MAIN, "summary", "x"], stdout=subprocess.PIPE
    )
    assert b"writing\n" == child.stdout.readline()
    assert list(target.parent.iterdir())
    child.terminate()

    assert 143 == child.wait(timeout=60)
    assert [] == list(target.parent.iterdir())
    child.stdout.close()


def test_a_reader_that_leaves_is_no_error():
    """`| head -1`; all of the output fits into the buffer and is written at the end."""
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, "requests", str(SMALL)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()

    assert (0, b"") == (child.wait(timeout=60), err)


def test_output_that_cannot_be_written_is_an_error_in_one_line():
    """A full disk behind `> file`; closed streams (`>&-`, as some job managers start things) are none."""
    with open("/dev/full", "wb") as full:
        words = [sys.executable, "-c", MAIN, "summary", str(SMALL)]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)

    assert 2 == done.returncode
    said = b"standard output cannot be written: No space left on device. (cannot-write)"
    assert said in done.stderr
    assert 1 == done.stderr.count(b"\n")
    closed = f"{sys.executable} -c '{MAIN}' summary {SMALL} >&- 2>&-"
    assert 0 == subprocess.run(closed, shell=True, check=False, timeout=60).returncode


def test_a_terminal_of_ascii_gets_ascii():
    """What it lacks as its escape; bars are of ASCII."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    words = [sys.executable, "-c", MAIN, "requests", str(SMALL), "--request", "31d0b664"]
    done = subprocess.run(words, capture_output=True, check=False, timeout=120, env=environment)

    assert (0, b"") == (done.returncode, done.stderr)
    assert done.stdout.isascii()
    assert not re.search(rb"\\u25[0-9a-f]{2}", done.stdout), "a bar of escapes"


@pytest.mark.parametrize("words", ["report RUN", "diff RUN@1 RUN@2", "summary RUN/missing"])
def test_a_path_that_is_not_utf_8(words, odd_run, capfdbinary):
    """Names are bytes; shown are those that are no text as escapes."""
    status = main([word.replace("RUN", str(odd_run)) for word in words.split()])
    out, err = capfdbinary.readouterr()

    assert (2 if "missing" in words else 0) == status, err
    assert b"Traceback" not in err
    assert b"internal-error" not in err
    (out + err).decode("utf-8")


def test_files_have_the_modes_that_the_umask_gives(tmp_path):
    """A report names paths, hosts and settings."""
    before = os.umask(0o077)
    try:
        write_whole(tmp_path / "text.html", ["text"])
        with replacing(tmp_path / "below" / "bytes") as file:
            file.write(b"bytes")
    finally:
        os.umask(before)

    modes = [
        stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("text.html", "below/bytes")
    ]
    assert [0o600, 0o600] == modes
    assert 0o700 == stat.S_IMODE((tmp_path / "below").stat().st_mode)


@pytest.mark.parametrize(
    "words",
    [
        "report RUN --out PLACE/report.html",
        "export perfetto RUN --out PLACE/t.pftrace",
        "plot tool_latencies RUN --out PLACE/plot.png",
        "plot tool_latencies RUN --json --out PLACE/plot.json",
        "export jsonl RUN --out PLACE/tq.jsonl",
    ],
)
def test_nothing_is_overwritten_or_followed_unasked(words, tmp_path, capsys):
    """A link, also to nothing, counts as a file; with --force the link is replaced."""
    place = tmp_path / "place"
    place.mkdir()
    named = {"RUN": SMALL, "PLACE": place}
    arguments = [
        re.sub("RUN|PLACE", lambda found: str(named[found[0]]), word) for word in words.split()
    ]
    target = Path(arguments[-1])
    victim = tmp_path / "victim"
    target.symlink_to(victim)

    assert 2 == main(arguments)
    assert not victim.exists()
    victim.write_text("kept")
    assert 2 == main(arguments)
    assert 0 == main([*arguments, "--force"]), capsys.readouterr().err
    assert "kept" == victim.read_text()
    assert not target.is_symlink()
    assert [target] == list(place.iterdir())


def test_a_device_is_not_replaced(tmp_path):
    """Not even with --force: root would lose it."""
    fifo = tmp_path / "fifo.html"
    os.mkfifo(fifo)

    assert 2 == main(["report", str(SMALL), "--out", str(fifo), "--force"])
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch, capsys):
    """And what was there before."""
    place = tmp_path / "place"
    place.mkdir()
    target = place / "target.png"
    target.write_text("before")
    opened = Path.open

    class Full(io.BufferedRandom):
        def write(self, _content):
            raise OSError(28, "No space left on device")

    def full(path, mode="r", *rest, **more):
        file = opened(path, mode, *rest, **more)
        return Full(file.detach()) if mode == "x+b" else file

    monkeypatch.setattr(Path, "open", full)

    assert 2 == main(["report", str(SMALL), "--out", str(target), "--force"])
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert [target] == list(place.iterdir())
    assert "before" == target.read_text()


def test_json_has_null_where_a_number_is_none():
    """As JSON has no NaN."""

    def refuse(constant):
        raise AssertionError(constant)

    text = json_text({"a": [float("inf"), (1.5, {"b": float("nan")})], "c": "NaN"})
    assert {"a": [None, [1.5, {"b": None}]], "c": "NaN"} == json.loads(text, parse_constant=refuse)


def test_a_spreadsheet_finds_no_formula():
    """Names get an apostrophe, as OWASP advises; numbers stay numbers."""
    cells = {
        **{text: f"'{text}" for text in ("=1+1", "+cmd", "-cmd", "@SUM(A1)", "＝1+1")},
        "\t=1": r"\t=1",
        "\r=1": r"\r=1",
        **{text: text for text in ("-1.5e3", "+7", "a=b", "")},
    }
    rows = list(csv.reader(io.StringIO(csv_text([{"=name": each, "n": -1.5} for each in cells]))))

    assert [["'=name", "n"], *([cell, "-1.5"] for cell in cells.values())] == rows


def test_a_file_in_the_way_of_a_folder_is_an_error(tmp_path):
    """Not a traceback."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ReadingError, match="cannot be written"):
        write_whole(tmp_path / "file" / "report.html", ["text"])
