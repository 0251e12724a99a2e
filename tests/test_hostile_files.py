"""Files from anywhere: a plain message instead of a traceback, a hang or a full memory."""

import ast
import contextlib
import errno
import io
import json
import os
import random
import sqlite3
import time
import tracemalloc
import zlib
from contextlib import closing, redirect_stderr, redirect_stdout
from itertools import cycle
from pathlib import Path

import nsys_database
import pytest
from hostile import (
    CAPTURE,
    HEADER,
    LINES,
    RUN,
    TORCH,
    VALUES,
    paths_of,
    small_run,
    text_with,
)

import verl_profiler
from verl_profiler.cli import main
from verl_profiler.errors import ReadingError
from verl_profiler.events.files import reason_of
from verl_profiler.exports.perfetto import PerfettoTrace
from verl_profiler.exports.tracks import write_foreign
from verl_profiler.reading.formats import nsys_export
from verl_profiler.reading.formats.nsys_export import take_captures
from verl_profiler.reading.formats.registry import read_trace
from verl_profiler.reading.reader import load
from verl_profiler.reading.tables.tables import Tables

# A command that takes longer than this hangs.
BOUND_S = 100


def call(*arguments):
    """Run a command; return its exit status and everything that it printed."""
    printed = io.StringIO()
    begin_s = time.monotonic()
    with redirect_stdout(printed), redirect_stderr(printed):
        status = main([str(argument) for argument in arguments])
    assert status in (0, 1, 2)
    assert time.monotonic() - begin_s < BOUND_S
    return status, printed.getvalue()


def a_pipe(path):
    os.mkfifo(path)


def a_device(path):
    path.symlink_to("/dev/zero")


def a_folder(path):
    path.mkdir()


def sparse(path):
    with path.open("wb") as file:
        file.truncate(10 << 30)


def deep(path):
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


def its_own_target(path):
    path.symlink_to(path.name)


KINDS = [a_pipe, a_device, a_folder, sparse, deep, its_own_target]
COMMANDS = [("summary", "--no-cache"), ("watch", "--once"), ("stuck", "-v")]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_ordinary_file_costs_its_own_content(tmp_path, kind):
    """Pipes, devices, folders, 10 GB of nothing, and 100,000 brackets in the place of a file."""
    names = ["run.json", "processes/worker_0.json", "step_1/more_0.jsonl"]
    run = small_run(tmp_path)
    for name in names:
        (run / name).unlink(missing_ok=True)
        kind(run / name)

    with load(run, cache=False) as opened:
        assert len(opened.rows("SELECT * FROM events")) == 10
        for name in names:
            assert any(problem.startswith(name) for problem in opened.problems), name
    assert call("watch", run, "--once")[0] == 0


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["run.jsonl", "run.parquet", "run.tar", "run.tar.zst"])
def test_what_is_named_must_be_an_ordinary_file(tmp_path, name, kind):
    kind(tmp_path / name)

    status, printed = call("summary", tmp_path / name, "--no-cache")

    assert status in (1, 2)
    assert printed.count("\n") < 8


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", [a_pipe, a_device, sparse, its_own_target])
def test_parquet_files_of_a_run_are_ordinary_ones(tmp_path, kind):
    kind(tmp_path / "events.parquet")

    status, printed = call("summary", tmp_path, "--no-cache")

    assert status == 2
    assert "holds no event files" in printed


@pytest.mark.parametrize("name", ["a\0b", "n" * 300, "d/" * 3000, "\udcff\udcfe", "~", "~root"])
def test_paths_that_cannot_be_are_named(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)

    for command, option in COMMANDS:
        assert call(command, name, option)[0] == 2


def test_a_step_that_cannot_be_is_left_out(tmp_path):
    """`step_2147483648` does not fit the column, and no training gets there."""
    run = small_run(tmp_path)
    (run / "step_1").rename(run / "step_2147483648")
    (run / "step_2").mkdir()

    status, printed = call("summary", run, "--no-cache")

    assert status in (0, 1)
    assert "step_2147483648/ is not the folder of a step" in printed


def test_files_whose_names_are_no_text(tmp_path):
    """Names of files are bytes."""
    run = small_run(tmp_path)
    odd = os.fsdecode(b"worker_\xff\xfe")
    (run / "step_1" / "worker_0.jsonl").rename(run / "step_1" / f"{odd}.jsonl")
    (run / "processes" / "worker_0.json").rename(run / "processes" / f"{odd}.json")
    run = run.rename(tmp_path / os.fsdecode(b"run\xff"))

    for command, option in COMMANDS:
        status, printed = call(command, run, option)
        assert status == 0
        printed.encode()


def hostile_texts(content):
    """Yield what to write: `content` with each value in each place; large ones in a seventh."""
    for number, path in enumerate(paths_of(content)):
        for name, value in VALUES.items():
            if len(value) < 1000 or number % 7 == 0:
                yield f"{path} = {name}", text_with(content, path, value)


def test_watch_takes_any_value_in_any_line(tmp_path):
    run = small_run(tmp_path)

    for name, lines in LINES.items():
        for number, line in enumerate(lines):
            others = [json.dumps(each) for each in lines[:number] + lines[number + 1 :]]
            texts = [text for _, text in hostile_texts(line)]
            (run / "step_1" / f"{name}.jsonl").write_text("\n".join([*texts, *others]) + "\n")
            assert call("watch", run, "--once")[0] in (0, 1)


def test_summary_takes_any_value_in_any_header(tmp_path):
    """One process per value: each of them loses one field, and the run nothing else."""
    run = small_run(tmp_path)
    texts = list(hostile_texts(HEADER))[::2]
    for number, (_, text) in enumerate(texts):
        (run / "processes" / f"other_{number}.json").write_text(text)

    status, printed = call("summary", run, "--no-cache")

    assert status == 0
    assert "other_" in printed


def test_summary_takes_any_value_in_run_json(tmp_path):
    """Read as the reader does; the commands see only what passed."""
    from verl_profiler.reading.discovery import find_sources

    run = small_run(tmp_path)
    for place, text in list(hostile_texts(RUN))[2::5]:
        (run / "run.json").write_text(text)
        problems = []
        (source,) = find_sources([run], tmp_path, problems)
        json.dumps(source.launch, allow_nan=False).encode()
        assert all(len(problem) < 2000 for problem in problems), place


def test_any_value_in_a_list_of_captures(tmp_path):
    """167 of 510 ended in a traceback once."""
    run = small_run(tmp_path)
    (run / "nsight").mkdir()
    tables = Tables.of()
    for place, text in list(hostile_texts([CAPTURE, CAPTURE]))[::5]:
        (run / "nsight" / "captures.json").write_text(text)
        problems = take_captures(tables, [("small", run)], tmp_path)
        captures = tables.rows("SELECT * FROM captures")
        assert len(captures) == 2 or problems or text == "[]", place


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_captures_is_an_ordinary_file(tmp_path, kind):
    run = small_run(tmp_path)
    (run / "nsight").mkdir()
    kind(run / "nsight" / "captures.json")
    capture = {**CAPTURE, "file": "a.sqlite", "problem": ""}

    problems = take_captures(Tables.of(), [("small", run)], tmp_path)
    assert "captures.json cannot be read" in problems[0]
    (run / "nsight" / "captures.json").rename(run / "nsight" / "a.sqlite")
    (run / "nsight" / "captures.json").write_text(json.dumps([capture]))
    problems = take_captures(Tables.of(), [("small", run)], tmp_path)
    assert "a.sqlite" in problems[0]
    with pytest.raises(ReadingError, match=r"a\.sqlite"):
        read_trace(run / "nsight" / "a.sqlite")


def test_a_capture_does_not_lead_elsewhere(tmp_path):
    run = small_run(tmp_path)
    (run / "nsight").mkdir()
    nsys_database.write(tmp_path / "outside.sqlite", ranges=[(1, 2, "push", "secret", 3)])
    capture = {**CAPTURE, "file": "../../outside.sqlite"}
    (run / "nsight" / "captures.json").write_text(json.dumps([capture]))
    tables = Tables.of()

    assert "file is invalid" in take_captures(tables, [("small", run)], tmp_path)[0]
    assert tables.rows("SELECT * FROM capture_ranges") == []


# What SQLite may hold in a column of whole numbers.
ODD = [
    None,
    "text",
    b"\xff\x00",
    0.5,
    -1,
    2**63 - 1,
    -(2**63),
    1e300,
    "",
    "x" * 100_000,
    '\r\n,"\0',
]


@pytest.mark.parametrize("first", range(0, len(ODD), 4))
def test_any_value_in_an_export_of_nsys(tmp_path, first):
    """Each column in turn, each with another value; what is possible is read."""
    run = small_run(tmp_path)
    (run / "nsight").mkdir()
    (run / "nsight" / "captures.json").write_text(
        json.dumps([{**CAPTURE, "file": "a.sqlite", "problem": ""}])
    )
    path = run / "nsight" / "a.sqlite"
    nsys_database.write(
        path,
        ranges=[(10, 90, "push", "gemm", 8), (20, 80, "start", "gen", 8)],
        kernels=[(15, 20, 30, "k", 8)],
        copies=[(40, 45)],
    )
    good = path.read_bytes()
    with closing(sqlite3.connect(path)) as connection:
        columns = [
            (table, row[1])
            for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE sql NOT NULL")
            for row in connection.execute(f"PRAGMA table_info({table})")
            if (table, row[1]) != ("StringIds", "id")
        ]
    tables = Tables.of()
    for (table, column), value in zip(columns, cycle([*ODD[first:], *ODD[:first]]), strict=False):
        path.write_bytes(good)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = 1", [value])
        take_captures(tables, [("small", run)], tmp_path)
        tables.rows("SELECT * FROM capture_ranges, capture_work")
        with contextlib.suppress(ReadingError):
            write_foreign(read_trace(path), tables, {}, PerfettoTrace(io.BytesIO(), 0))


@pytest.mark.parametrize("label", ["a\nb", "a\r\nb", 'x\r,"y', "\u2028"])
def test_ends_of_lines_in_names_around_an_export_of_nsys(tmp_path, label):
    """The ranges go through a CSV file, with the name of the run in each line."""
    run = small_run(tmp_path)
    (run / "nsight").mkdir()
    capture = {**CAPTURE, "file": "a.sqlite", "problem": ""}
    (run / "nsight" / "captures.json").write_text(json.dumps([capture]))
    nsys_database.write(run / "nsight" / "a.sqlite", ranges=[(10, 90, "push", "r", 8)])
    tables = Tables.of()

    take_captures(tables, [(label, run)], tmp_path)

    assert tables.rows("SELECT run, event FROM capture_ranges") == [{"run": label, "event": "r"}]


def test_damaged_exports_of_nsys_are_named(tmp_path):
    chance = random.Random(3)
    path = tmp_path / "a.sqlite"
    nsys_database.write(path, ranges=[(n, n + 5, "push", f"r{n}", 8) for n in range(100)])
    good = path.read_bytes()
    for _ in range(60):
        content = bytearray(good)
        for _ in range(chance.randint(1, 200)):
            content[chance.randrange(100, len(content))] = chance.randrange(256)
        path.write_bytes(content)
        with contextlib.suppress(ReadingError):
            nsys_export.read(path)


@pytest.mark.timeout(60)
def test_an_export_of_nsys_cannot_ask_for_hours(tmp_path, monkeypatch):
    """A view in the place of a table is none; a table without keys is searched once per row."""
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE StringIds (id, value)")
        connection.execute(
            "CREATE TABLE NVTX_EVENTS (start, end, eventType, rangeId, category, "
            "color, text, globalTid, endGlobalTid, textId, domainId, uint64Value, int64Value)"
        )
        counted = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60000)"
        connection.execute(f"INSERT INTO StringIds {counted} SELECT 'x' || i, i FROM n")
        connection.execute(
            f"INSERT INTO NVTX_EVENTS (start, end, eventType, textId) {counted} "
            "SELECT i, i + 1, 59, 'y' || i FROM n"
        )

    monkeypatch.setattr(nsys_export, "_STEPS_FROM", 5_000_000)
    monkeypatch.setattr(nsys_export, "_STEPS_PER_BYTE", 1)
    with pytest.raises(ReadingError, match="interrupted"):
        nsys_export.read(path)


def test_any_value_in_a_trace_of_torch(tmp_path):
    """182 of 4,320 ended in a traceback once."""
    path = tmp_path / "trace.json"
    tables = Tables.of()
    for _, text in list(hostile_texts(TORCH))[::3]:
        path.write_text(text)
        for kind in (PerfettoTrace,):
            with contextlib.suppress(ReadingError):
                guest = read_trace(path)
                write_foreign(guest, tables, {}, kind(io.BytesIO(), 1))


def test_every_event_of_a_trace_takes_any_value(tmp_path):
    path = tmp_path / "trace.json"
    events = TORCH["traceEvents"]
    texts = [
        text_with(event, place, value)
        for event in events
        for place in paths_of(event)
        for name, value in VALUES.items()
        if name
        not in (
            "310 digits",
            "object of huge numbers",
            "5000 digits",
            "overflow",
            "minus overflow",
            "NaN",
            "Infinity",
            "surrogate",
            "not JSON",
            "nested",
        )
    ]
    good = [json.dumps(event) for event in events]
    path.write_text(
        '{"baseTimeNanoseconds": 1795234281000000000, "traceEvents": ['
        + ",".join([*good, *texts])
        + "]}"
    )
    guest = read_trace(path)
    written = io.BytesIO()
    write_foreign(guest, Tables.of(), {}, PerfettoTrace(written, 1))

    assert guest.left_out > 100
    assert {"main", "9 2", "0 7"} <= guest.threads.keys()


@pytest.mark.timeout(60)
def test_a_compressed_trace_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "bomb.json.gz"
    packer = zlib.compressobj(wbits=31)
    path.write_bytes(
        packer.compress(b'{"traceEvents": [')
        + b"".join(packer.compress(b" " * (1 << 20)) for _ in range(200))
        + packer.flush()
    )
    tracemalloc.start()
    try:
        with pytest.raises(ReadingError, match="expands to more than"):
            read_trace(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 300 << 20


@pytest.fixture(scope="module")
def hostile_lines(tmp_path_factory):
    """A run with each value in each field of each line, and the lines as they should be."""
    run = small_run(tmp_path_factory.mktemp("lines"))
    for name, lines in LINES.items():
        texts = [text for line in lines for _, text in hostile_texts(line)]
        good = [json.dumps(line) for line in lines]
        (run / "step_1" / f"{name}.jsonl").write_text("\n".join([*texts, *good]) + "\n")
    return run


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "command", ["summary", "report", "export perfetto", "requests", "memory", "tq", "why"]
)
def test_every_command_takes_any_value_in_any_line(hostile_lines, tmp_path, command):
    """A line that cannot be right is left out and said; the others are read."""
    out = ["-o", tmp_path / "out"] if command in ("report", "export perfetto") else []

    status, printed = call(*command.split(), hostile_lines, *out, "--no-cache")

    assert status in (0, 1)
    if command in ("summary", "requests"):
        json.loads(call(command, hostile_lines, "--json", "--no-cache")[1])


def test_only_one_module_opens_files_of_runs():
    """Whatever is opened is a regular file of bounded size, or written by us."""
    package = Path(verl_profiler.__file__).parent
    folders = ("host", "reading", "analysis", "views", "render", "exports", "live")
    reading = [path for folder in folders for path in (package / folder).rglob("*.py")]
    reading.append(package / "capture" / "node_copy.py")
    found = {
        (path.stem, ast.unparse(node))
        for path in reading
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and _name_of(node) in ("open", "read_text", "read_bytes", "load", "connect", "GzipFile")
        and path.stem != "cache_folder"
        # Written by us, to scratch.
        and not any(isinstance(a, ast.Constant) and str(a.value) in ("w", "wb") for a in node.args)
    }

    assert found == {
        # The kernel's: this boot, a process, its log.
        ("host_facts", "Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii')"),
        ("host_facts", "Path(f'/proc/{pid}/stat').read_bytes()"),
        ("load", "os.open('/dev/kmsg', os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)"),
        ("load", "Path('/proc/meminfo').read_text()"),
        ("load", "Path(f'/proc/pressure/{resource}').read_text()"),
        ("load", "(_CGROUP / limit).read_text()"),
        ("load", "(_CGROUP / used).read_text()"),
        ("load", "(_CGROUP / 'memory.events').read_text()"),
        ("sockets", "open(f'/proc/{pid}/net/{family}', 'rb')"),
        # Bytes of a regular file, of which nothing is run.
        ("flight_recorder", "_PlainUnpickler(io.BytesIO(data)).load()"),
        # What it opens was opened before, or passed `status_of_regular`.
        ("archives", "tarfile.open(fileobj=stream, mode='r|', tarinfo=_Member)"),
        ("nsys_export", "sqlite3.connect(uri, uri=True)"),
        # What another node sent, written here.
        ("node_copy", "part.open('ab' if name == begun else 'wb')"),
        # A store of runs, through fsspec; and the lock of a cache, a file of our own.
        ("remote", "connect(url.rstrip('/'))"),
        ("cache_home", "os.open(folder / _LOCK_FILE, flags, 384)"),
        # In memory, and files of the package.
        ("tables", "duckdb.connect()"),
        ("connection", "duckdb.connect()"),
        ("reader", "connect(scratch, memory_limit, threads)"),
        ("distribute", "connect(place, memory, _THREADS)"),
        ("html", "(_PAGE / name).read_text(encoding='utf-8')"),
        ("derivations", "(_FOLDER / file).read_text(encoding='utf-8')"),
        # The reader's, which is above.
        ("tq_sources", "load(runs, cache=cache)"),
        ("distribute", "load(source.root, steps=steps, memory_limit=memory_limit)"),
    }


def _name_of(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_a_file_that_its_server_dropped_comes_with_advice():
    """The problem line of one file, as Python and as duckdb put it."""
    error = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/nfs/run/step_1/worker_0.jsonl")

    for each in (error, RuntimeError("IO Error: Could not read from file: Stale file handle")):
        assert "run the command again" in reason_of(each)
    assert "again" not in reason_of(PermissionError(errno.EACCES, "Permission denied"))
