"""Console logs from anywhere: no line takes more than a moment, and no value ends a command."""

import contextlib
import gzip
import os
import threading
import zlib
from pathlib import Path

import pytest

from verl_profiler.errors import ReadingError
from verl_profiler.reading.formats.console_log import LINE_LIMIT_BYTES, file_lines
from verl_profiler.reading.formats.console_memory import read_logs as read_memory
from verl_profiler.reading.formats.console_steps import logged_runs
from verl_profiler.reading.formats.tq_log import read_logs as read_transfers

GOOD = "step:1 - timing_s/gen:1.5 - perf/x:1\n"
READING = "x, memory allocated (GB): 1.5, memory reserved (GB): 2\n"
N = 100_000

# Each would take an expression that backtracks minutes or years.
LONG = {
    "blanks": " " * N,
    "tabs": "\t" * N,
    "step and blanks": "step:1 -" + " " * N,
    "separators": "step:1" + " - " * N,
    "colons": "step:1 - " + "a:" * N,
    "digits": "step:1 - timing_s/gen:" + "1" * N,
    "slashes": "step:1 - " + "a/" * N + ":x",
    "steps": "step:1 - " * (N // 10),
    "wrapped": "step:1 - timing_s/gen:1.0 - a\n" + ("b" * N + "\n") * 3,
    "opened": "(" * N + "pid=1)",
    "words": "(a" * N + " pid=1)",
    "a word": "(" + "a" * N + " pid=7) pid=",
    "prefixes": "(a pid=1) " * (N // 10),
    "pids": "pid=" * N,
    "repeated": "[repeated " * (N // 10),
    "blanks and repeated": " " * N + "[repeated 1x across cluster",
    "duplicates": "[repeated 1x across cluster] (Ray deduplicates logs by default." * (N // 50),
    "escape": "\x1b[" + "0;" * N,
    "escapes": "\x1b]" * N,
    "escape and blanks": "\x1b[" + " " * N,
    "brackets": "[" * N + "m",
    "colors": "[0;" * N + "m",
    "readings": READING.strip() * (N // 50),
    "reading of digits": "x, memory allocated (GB): 1, memory reserved (GB): " + "1" * N,
    "reading behind blanks": " " * N + READING.strip(),
    "reading behind commas": ", " * N + READING.strip(),
    "capitals": "A" * N,
    "loggers": "A:" * N + READING.strip(),
    "dots": "x, memory allocated (GB): " + "." * N + ", memory reserved (GB): " + "." * N,
    "samples": "Task x (pid=1) is getting " + "len_samples=1 " * (N // 10),
    "tasks": "Task x (pid=1) is getting " * (N // 20),
    "costs": "Task x (pid=1) is getting " + ", cost time: " * (N // 10),
    "cost of digits": "Task x (pid=1) is getting len_samples=1, cost time: " + "1" * N + "e",
    "marks": "[TQ-TRACE] " * (N // 10),
    "bars": "[TQ-TRACE] a=1" + " | " * N,
    "dates": "2026-11-21 " * (N // 10) + "[TQ-LOG] a=b",
    "mark and capitals": "[TQ-LOG] x" + "A" * N + "[TQ-LOG]",
    "mark and loggers": "[TQ-LOG] x" + "A:" * N + "[TQ-LOG]",
    "mark and blanks": "[TQ-LOG] x" + " " * N + "[TQ-LOG]",
    "returns": "\r" * N,
    "zeros": "\0" * N,
    "quotes": ">" * N + "(pid=1) step:1 - a:1",
}
TRACE = "[TQ-TRACE] trace_id=a | func=f | stage=FUNCTION_END | "
ODD = {
    "wide digits": "step:\uff11 - timing_s/gen:\u0661\u0662",
    "overflow": "step:1 - timing_s/gen:1e400 - perf/x:nan - perf/y:-inf",
    "large step": "step:999999999999999999999 - timing_s/gen:1",
    "large reading": "x, memory allocated (GB): " + "9" * 400 + ", memory reserved (GB): 1",
    "reading of dots": "x, memory allocated (GB): 1.2.3, memory reserved (GB): ...",
    "no date": "INFO:2026-99-99 02:33:22,123:" + READING.strip(),
    "year 0": "INFO:0000-01-01 02:33:22,123:" + READING.strip(),
    "numbers": TRACE + "total_duration=999999999999s | timestamp=999999999999",
    "counts": TRACE + "total_duration=1s | step=999999999999999999 | pid=999999999999999999",
    "step": TRACE + "total_duration=1s | step=2147483648",
    "sampled": TRACE + "total_duration=1s | sampled=999999999999999999 | batch_size=" + "9" * 18,
    "rate": "[TQ-DETAIL] trace_id=a | stage=TQ_CLIENT_PUT_END | duration=999999999s | "
    "throughput_mbps=999999999999 | data_size_bytes=999999999999999999",
    "rate only": "[TQ-DETAIL] trace_id=a | stage=TQ_CLIENT_PUT_END | duration=999999999s | "
    "throughput_mbps=999999999999",
    "process": "Task f (pid=" + "9" * 400 + ") is getting len_samples=1, cost time: 1e+99",
    "cost of dots": "Task f (pid=1) is getting len_samples=1, cost time: 1.2.3",
    "pid": "(W pid=9999999999) step:1 - timing_s/gen:1",
    "year 9999": "9999-12-31 23:59:59,999 [TQ-LOG] op=TQ_GET | func=f | stage=END | duration=1s",
    "year 1": "0001-01-01 00:00:00,999 [TQ-LOG] op=TQ_GET | func=f | stage=END | duration=1s | "
    "timestamp=1",
    "surrogates": b"step:1 - timing_s/gen:1 - \xed\xa0\x80\xff:1 [TQ-LOG]".decode("latin-1"),
}


def everything_of(path):
    """Read a log in every way; return how much came out of it."""
    memory, _ = read_memory([path])
    log = read_transfers([path])
    rows = log.tables().rows("SELECT * FROM tq_calls")
    rows += log.tables().rows("SELECT * FROM transfers")
    return (
        len(memory.rows("SELECT * FROM memory")),
        sum(len(run.lines) for run in logged_runs([path], [])),
        len(rows),
    )


@pytest.mark.timeout(60)
def test_no_line_takes_long(tmp_path):
    """4,000 blanks took `memory` 30 s once."""
    path = tmp_path / "console.log"
    path.write_text(GOOD + READING + "\n".join(LONG.values()) + "\n" + GOOD.replace(":1 ", ":9 "))

    readings, steps, _ = everything_of(path)

    assert readings > 1
    assert steps >= 2


@pytest.mark.parametrize("name", list(ODD))
def test_no_value_ends_a_command(tmp_path, name):
    path = tmp_path / "console.log"
    text = GOOD + READING + ODD[name] + "\n" + GOOD.replace(":1 ", ":9 ")
    path.write_text(text, encoding="utf-8", errors="replace")

    readings, steps, _ = everything_of(path)

    assert readings >= 1
    assert steps >= 2


def test_long_lines_are_cut_and_named(tmp_path):
    path = tmp_path / "console.log"
    path.write_bytes(b"a\n" + b"x" * (3 * LINE_LIMIT_BYTES) + b"\nstep:1 - a:1\n")
    problems = []

    lines = list(file_lines(path, problems))

    assert [(1, 2), (2, LINE_LIMIT_BYTES + 1), (3, 13)] == [(n, len(line)) for n, line in lines]
    assert "1 line is longer than 1 MiB" in problems[0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "sparse", "loop"])
def test_a_log_is_an_ordinary_file(tmp_path, kind):
    path = tmp_path / "console.log"
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
        "sparse": lambda: (path.touch(), os.truncate(path, 10 << 30)),
        "loop": lambda: path.symlink_to(path.name),
    }[kind]()

    with pytest.raises(ReadingError, match=r"console\.log cannot be read"):
        everything_of(path)


def test_the_pipe_of_a_shell_is_read():
    """`verl-profiler timing <(zcat console.log.gz)`."""
    out, into = os.pipe()
    with contextlib.closing(os.fdopen(into, "wb")) as file:
        writer = threading.Thread(target=lambda: (file.write(GOOD.encode()), file.close()))
        writer.start()
        try:
            assert [(1, GOOD)] == list(file_lines(Path(f"/dev/fd/{out}"), []))
        finally:
            writer.join()
            os.close(out)


@pytest.mark.timeout(60)
def test_a_compressed_log_that_expands_without_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_profiler.events.files.EXPANSION_FROM_BYTES", 1 << 20)
    path = tmp_path / "console.log.gz"
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(GOOD.encode())
    packed += b"".join(packer.compress(b"\n" * (1 << 20)) for _ in range(20)) + packer.flush()
    path.write_bytes(packed)
    problems = []

    first = next(file_lines(path, problems))
    count = sum(1 for _ in file_lines(path, problems))

    assert (1, GOOD) == first
    assert count < 12 << 20
    assert "expands to more than" in problems[0]


def test_compressed_logs_are_read(tmp_path):
    path = tmp_path / "console.log.gz"
    path.write_bytes(gzip.compress((GOOD + READING).encode()))

    assert (1, 1) == everything_of(path)[:2]
