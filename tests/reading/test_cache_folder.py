"""The cache beside a run: shared by many commands, damaged, forged, removed; it costs time only."""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from verl_profiler.reading import cache_folder, convert
from verl_profiler.reading.cache_folder import CacheFolder
from verl_profiler.reading.reader import load

ROOT = Path(__file__).parents[2]


def cache_of(run):
    return run / ".cache" / "events-1"


def answers(run, *, cache=True):
    with load(run, cache=cache) as opened:
        return asked(opened)


def asked(run):
    return [
        run.rows(f"SELECT * FROM {table} ORDER BY ALL")
        for table in ("event_counts", "requests", "turns", "event_fields")
    ], run.problems


def append(run, lines=1):
    path = run / "step_2" / "worker_0.jsonl"
    content = path.read_text().splitlines()[0].replace('"turn":0', '"turn":7')
    with path.open("a") as file:
        file.write((content + "\n") * lines)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_commands_at_once_print_what_each_prints_alone():
    """Four commands at the same moment, on a run without a cache and on one that grows."""
    command = [sys.executable, str(ROOT / "benchmarks" / "stress_cache.py")]
    options = ["--rounds", "2", "--kind", "cold", "--kind", "growing"]

    done = subprocess.run(
        [*command, *options, "--command", "summary", "--command", "requests"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (0, "") == (done.returncode, done.stderr), done.stdout


def test_an_open_reader_keeps_its_answers_when_another_reads_the_grown_run(run, monkeypatch):
    """Also the tables that it makes after the files of its state were removed."""
    monkeypatch.setattr(cache_folder, "UNUSED_S", 0)
    expected = answers(run, cache=False)

    with load(run) as early:
        early.rows("SELECT * FROM requests")
        append(run)
        later = answers(run)
        assert expected == asked(early)

    assert later == answers(run, cache=False)
    assert later != expected


@pytest.mark.parametrize("made", [True, False])
def test_a_cache_removed_by_hand_costs_time_only(run, made):
    """While a reader is open, whether its tables were made or not."""
    expected = answers(run, cache=False)

    with load(run) as opened:
        if made:
            asked(opened)
        shutil.rmtree(run / ".cache")
        assert expected == asked(opened)

    assert expected == answers(run)


@pytest.mark.parametrize("name", ["worker_0", "trainer_0"])
def test_nothing_is_kept_that_was_read_with_errors(run, monkeypatch, name):
    """A disk that fails for a moment: the next reading is complete.

    The requests' part is made first, and read after the trainer's failed.
    """
    expected = answers(run, cache=False)
    failing = run / "step_1" / f"{name}.jsonl"
    content = failing.read_text()
    failing.write_text("bad\n" + content)
    complete = answers(run, cache=False)

    def broken(path, *args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken_disk:
        broken_disk.setattr(convert, "repair", broken)
        during, problems = answers(run)
    assert during != complete[0]
    assert any("cannot be read (Input/output error)" in problem for problem in problems)
    assert [] == list(cache_of(run).glob("requests-*"))

    assert complete == answers(run)
    assert complete[0] == expected[0]


def test_only_own_files_are_retired(run, monkeypatch):
    """Names that this program does not give, links, folders, and what a command may still be writing stay."""
    monkeypatch.setattr(cache_folder, "UNUSED_S", 0)
    answers(run)
    folder = cache_of(run)
    foreign = ["mine.parquet", "part-of-mine.parquet", "requests-2026.parquet", "notes.json"]
    for name in foreign:
        (folder / name).write_text("precious")
    (folder / "part-0123456789abcdef.parquet").symlink_to(run / "run.json")
    (folder / "part-0123456789abcdee.parquet").mkdir()
    killed, young = (folder / f"new-{digit * 16}.partial" for digit in "01")
    for path in (killed, young):
        path.write_text("half")
    os.utime(killed, (0, 0))
    append(run)

    answers(run)

    left = {path.name for path in folder.iterdir()}
    assert left >= {*foreign, "part-0123456789abcdef.parquet", "part-0123456789abcdee.parquet"}
    assert [False, True] == [killed.exists(), young.exists()]
    parts = {name for name in left - {*foreign} if re.fullmatch(r"part-\w{16}\.parquet", name)}
    assert 2 + 2 == len(parts)


def test_files_that_were_used_lately_stay(run):
    """Another host's reader may have them open."""
    answers(run)
    before = {path.name for path in cache_of(run).iterdir()}
    append(run)

    answers(run)

    assert before < {path.name for path in cache_of(run).iterdir()}


def test_another_users_files_are_not_used_or_removed(run, monkeypatch):
    """The owner counts, not the permission."""
    monkeypatch.setattr(cache_folder, "UNUSED_S", 0)
    answers(run)
    (name,) = {path.stem for path in cache_of(run).glob("requests-*.parquet")}
    folder = CacheFolder(cache_of(run))
    assert folder.find(name) is not None
    folder._owner += 1

    assert folder.find(name) is None
    folder.retire("requests")
    assert (cache_of(run) / f"{name}.parquet").exists()
    folder.close()


def test_a_cache_that_was_copied_with_a_run_is_not_used(run, tmp_path):
    """A forged one would be believed."""
    expected = answers(run)
    with duckdb.connect() as connection:
        for part in list(cache_of(run).glob("part-*.parquet")):
            connection.execute(
                f"COPY (SELECT * REPLACE (2 * duration_us AS duration_us) FROM '{part}') "
                f"TO '{part}.new' (FORMAT parquet)"
            )
            os.replace(f"{part}.new", part)
    assert expected != answers(run)
    place = tmp_path / "elsewhere" / "run"
    subprocess.run(["cp", "-a", str(run), str(place.parent)], check=False)
    shutil.copytree(run, place, dirs_exist_ok=True)

    assert expected == answers(place)


def test_descriptors_are_given_back(run):
    """Also of a run that was not closed."""
    answers(run)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        answers(run)
        load(run)

    assert before == len(os.listdir("/proc/self/fd"))


def test_with_few_descriptors_files_are_read_by_name(run, monkeypatch):
    """A run of many parts opens all the same."""
    monkeypatch.setattr(cache_folder.resource, "getrlimit", lambda kind: (6, 6))

    assert answers(run, cache=False) == answers(run)
    assert answers(run, cache=False) == answers(run)
