"""Compressed event files are read as those that they were made of."""

import gzip

import pytest
from cached_runs import SMALL

from verl_profiler.cli import main
from verl_profiler.reading import discovery
from verl_profiler.reading.reader import load

EVENTS = "SELECT * EXCLUDE (run) FROM events ORDER BY ALL"
PROCESSES = "SELECT * EXCLUDE (run) FROM processes ORDER BY ALL"


def compress(file, *, keep=False):
    """Compress as `gzip` does."""
    packed = file.with_name(f"{file.name}.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    if not keep:
        file.unlink()
    return packed


def contents(path):
    with load(path) as opened:
        return opened.rows(EVENTS), opened.rows(PROCESSES), opened.problems


@pytest.fixture(scope="module")
def plain():
    """What the small run holds."""
    return contents(SMALL)


@pytest.mark.parametrize("pattern", ["step_*/*.jsonl", "step_2/worker_*.jsonl"])
def test_nothing_changes_with_compression(run, plain, pattern):
    """All files of a run, those of a step, or of some processes; with the cache too."""
    assert plain == contents(run)
    for file in run.glob(pattern):
        compress(file)

    assert plain == contents(run)
    assert plain == contents(run)


def test_a_copy_beside_its_origin_is_read_once(run, plain):
    """As `gzip --keep`, or a kill between the two, leaves it; also where lines followed."""
    for file in run.glob("step_1/*.jsonl"):
        compress(file, keep=True)
    assert plain == contents(run)

    file = run / "step_1" / "worker_0.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    (run / "step_1" / "worker_0.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:5])))
    assert plain == contents(run)


def test_a_copy_that_is_cut_short_is_read_once_too(run, plain):
    """It was still being written."""
    packed = compress(run / "step_1" / "worker_0.jsonl", keep=True)
    for size in (0, 3, 30):
        packed.write_bytes(packed.read_bytes()[:size])
        assert plain[:2] == contents(run)[:2]


@pytest.mark.parametrize(
    ("module", "function"),
    [(discovery, "event_file"), (discovery, "_is_copy")],
)
def test_files_that_are_compressed_while_they_are_listed_are_read(
    run, plain, monkeypatch, module, function
):
    """Before the first of their folder is looked at, between two looks at one, and later."""
    packed = [compress(file, keep=True) for file in run.glob("step_1/*.jsonl")]
    if function == "event_file":
        # Not there yet when the folder is listed.
        contents_of = {file: file.read_bytes() for file in packed}
        for file in packed:
            file.unlink()
    else:
        contents_of = {}
    original = getattr(module, function)

    def then(*arguments):
        for file in packed:
            if file in contents_of:
                file.write_bytes(contents_of[file])
            file.with_suffix("").unlink(missing_ok=True)
        return original(*arguments)

    monkeypatch.setattr(module, function, then)
    assert plain == contents(run)


def test_a_damaged_file_is_read_up_to_there(run, plain):
    """And reported, by its own name."""
    file = run / "step_1" / "worker_0.jsonl"
    count = file.read_bytes().count(b"\n")
    packed = compress(file)
    content = packed.read_bytes()
    packed.write_bytes(content[: len(content) // 2])
    events, _, problems = contents(run)

    assert 0 < len(plain[0]) - len(events) < count
    assert ["step_1/worker_0.jsonl.gz is damaged"] == [
        problem.partition(" (")[0] for problem in problems if "damaged" in problem
    ]


def test_one_file_can_be_named(run, capsys):
    """A command takes it as it takes the plain one."""
    assert 0 == main(["requests", str(run / "step_1" / "worker_0.jsonl"), "--json"])
    expected = capsys.readouterr().out
    packed = compress(run / "step_1" / "worker_0.jsonl")

    assert 0 == main(["requests", str(packed), "--json"])
    assert expected == capsys.readouterr().out
