"""Console lines: what Ray, terminals and schedulers put around a line is set apart from it."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from verl_profiler.reading.formats.console_log import (
    LINE_LIMIT_BYTES,
    ConsoleLine,
    clean,
    file_lines,
    lines_of,
)

PREFIXES = {
    "(TaskRunner pid=11052) ": ("TaskRunner", 11052, None),
    "(main_task pid=7) ": ("main_task", 7, None),
    "(WorkerDict pid=7, ip=10.0.0.2) ": ("WorkerDict", 7, "10.0.0.2"),
    "(WorkerDict pid=7, ip=fe80::1) ": ("WorkerDict", 7, "fe80::1"),
    "(sglang::scheduler pid=7) ": ("sglang::scheduler", 7, None),
    "(Worker(rank=0, of=2) pid=7) ": ("Worker(rank=0, of=2)", 7, None),
    "(pid=7) ": (None, 7, None),
    "": (None, None, None),
}
# How the color around a prefix looks in files: whole, without its escape byte, and written out.
COLORS = [("", ""), ("\x1b[36m", "\x1b[0m"), ("[36m", "[0m"), ("^[[36m", "^[[0m")]
COLORS += [("#033[36m", "#033[0m"), ("\\u001b[36m", "\\u001b[0m"), ("\x1b[1;36m", "\x1b[0m")]


DEDUPLICATED = (
    "Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log deduplication, or see "
    "https://docs.ray.io/x#log-deduplication for more options."
)


def only(raw: str) -> ConsoleLine:
    (line,) = lines_of(raw, 1)
    return line


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("begin", "end"), COLORS)
def test_a_prefix_is_set_apart_in_every_color(prefix: str, begin: str, end: str) -> None:
    """`[36m(TaskRunner pid=7)[0m text` is `text` by TaskRunner 7, with or without escape byte."""
    line = only(f"{begin}{prefix.rstrip()}{end} step:1 - a/b@1:0.5\n" if prefix else "step:1\n")

    assert (line.process, line.pid, line.ip) == PREFIXES[prefix]
    assert line.text == ("step:1 - a/b@1:0.5" if prefix else "step:1")


@pytest.mark.parametrize(
    "count",
    [
        " [repeated 3x across cluster]",
        "\x1b[32m [repeated 3x across cluster]\x1b[0m",
        f" [repeated 3x across cluster] ({DEDUPLICATED})",
    ],
)
def test_a_repeat_count_is_set_apart(count: str) -> None:
    """Ray says once what several processes printed."""
    line = only(f"(WorkerDict pid=7) loaded{count}\n")

    assert (line.text, line.repeated) == ("loaded", 3)


@pytest.mark.parametrize(
    "text",
    [
        "INFO:2026-11-21 01:48:15,971:Task compute_log_prob (pid=11227) is writing, cost time: 0.03s)",
        "the actor (WorkerDict pid=7) died",
        "ray::WorkerDict.update() (pid=7, ip=10.0.0.2, actor_id=ab, repr=<x>)",
    ],
)
def test_a_process_that_a_line_speaks_of_is_no_prefix(text: str) -> None:
    """The first is verl's own, from TransferQueue."""
    line = only(f"\x1b[36m(WorkerDict pid=11227)\x1b[0m {text}\n")

    assert (line.text, line.pid) == (text, 11227)


def test_a_progress_bar_that_went_back_gives_a_line_each() -> None:
    """tqdm writes a carriage return and no line end."""
    lines = list(lines_of("\r 0%| 0/9\r11%| 1/9(A pid=1) step:1\n", 1))

    assert [line.text for line in lines] == ["", " 0%| 0/9", "step:1"]


@pytest.mark.parametrize(
    "text", ["rate(x[1m])", "a[0]", "[INFO] m", "list[int]", "x[36]m", "[3m 2s]"]
)
def test_brackets_that_are_no_colors_stay(text: str) -> None:
    """Only what a terminal would swallow is taken out."""
    assert clean(text) == text


def test_a_compressed_file_without_its_end_gives_what_is_there(tmp_path: Path) -> None:
    """A copy that broke off loses its last lines only, and that is said."""
    path = tmp_path / "a.log.gz"
    lines = "".join(f"line {number} {random.Random(number).random()}\n" for number in range(5000))
    path.write_bytes(gzip.compress(lines.encode())[:-20_000])
    problems: list[str] = []
    read = list(file_lines(path, problems))

    assert 0 < len(read) < 5000
    assert [text for _, text in read] == lines.splitlines(keepends=True)[: len(read)]
    assert len(problems) == 1
    assert f"after line {len(read)}" in problems[0]


@pytest.mark.timeout(60)
def test_what_would_fill_the_memory_is_cut(tmp_path: Path) -> None:
    """A line of megabytes."""
    path = tmp_path / "console.log"
    path.write_bytes(b"a\n" + b"x" * (3 * LINE_LIMIT_BYTES) + b"\nstep:1 - a:1\n")
    problems: list[str] = []
    lines = [(number, len(text)) for number, text in file_lines(path, problems)]
    assert lines == [(1, 2), (2, LINE_LIMIT_BYTES + 1), (3, 13)]
    assert "1 line is longer than 1 MiB" in problems[0]
