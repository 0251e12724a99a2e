"""The cache beside a run: shared by many commands, damaged, forged, removed; it costs time only."""

import errno
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import duckdb
import pytest

from verl_profiler.reading import cache_folder, chunks
from verl_profiler.reading.cache_folder import CacheFolder
from verl_profiler.reading.reader import load

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests" / "data" / "small_run"


@pytest.fixture
def run(tmp_path):
    shutil.copytree(SMALL, tmp_path / "run", ignore=shutil.ignore_patterns(".cache"))
    return tmp_path / "run"


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
    options = ["--rounds", "2", "--processes", "1", "--kind", "cold", "--kind", "growing"]

    done = subprocess.run(
        [*command, *options, "--command", "summary", "--command", "requests"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (0, "") == (done.returncode, done.stderr), done.stdout


def test_an_open_reader_keeps_its_answers_when_another_reads_the_grown_run(run, monkeypatch):
    """Also the tables that it makes after the files of its state were removed."""
    monkeypatch.setattr(cache_folder, "_UNUSED_S", 0, raising=False)
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
        broken_disk.setattr(chunks, "repair", broken)
        during, problems = answers(run)
    assert during != complete[0]
    assert any("cannot be read (Input/output error)" in problem for problem in problems)
    assert [] == list(cache_of(run).glob("requests-*"))

    assert complete == answers(run)
    assert complete[0] == expected[0]


def test_only_own_files_are_retired(run, monkeypatch):
    """Names that this program does not give, links, folders, and what a command may still be writing stay."""
    monkeypatch.setattr(cache_folder, "_UNUSED_S", 0, raising=False)
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
    assert 2 == len(list(folder.glob("part-*-*-*.parquet")))


def test_files_that_were_used_lately_stay(run):
    """Another host's reader may have them open."""
    answers(run)
    before = {path.name for path in cache_of(run).iterdir()}
    append(run)

    answers(run)

    assert before < {path.name for path in cache_of(run).iterdir()}


def test_another_users_files_are_not_used_or_removed(run, monkeypatch):
    """The owner counts, not the permission."""
    monkeypatch.setattr(cache_folder, "_UNUSED_S", 0)
    answers(run)
    (name,) = {path.stem for path in cache_of(run).glob("requests-*.json")}
    own = CacheFolder.of(cache_of(run))
    descriptor = os.open(cache_of(run), os.O_RDONLY)
    others = CacheFolder(descriptor, cache_of(run), os.geteuid() + 1)

    assert own.find(name) is not None
    assert others.find(name) is None
    others.retire("part")
    others.retire("requests")

    assert own.find(name) is not None
    assert 2 == len(list(cache_of(run).glob("part-*.parquet")))
    own.close()
    others.close()


def double_durations(part):
    """Forge a part of the cache, with a right checksum."""
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT * REPLACE (2 * duration_us AS duration_us) FROM '{part}') "
            f"TO '{part}.new' (FORMAT parquet)"
        )
    content = Path(f"{part}.new").read_bytes()
    name = "-".join(part.name.split("-")[:2])
    file = f"{name}-{len(content):x}-{zlib.crc32(content):08x}.parquet"
    os.replace(f"{part}.new", part.with_name(file))
    entry = part.with_name(f"{name}.json")
    body = entry.read_text().splitlines()[0].replace(part.name, file)
    entry.write_text(f"{body}\n{zlib.crc32(body.encode()):08x}\n")


@pytest.mark.parametrize("way", ["archive", "copy"])
def test_a_cache_that_came_with_a_run_is_not_used(run, tmp_path, way):
    """A forged one would be believed: its checksums can be right."""
    expected = answers(run)
    for part in list(cache_of(run).glob("part-*.parquet")):
        double_durations(part)
    assert expected != answers(run)
    place = tmp_path / "elsewhere" / "run"
    if way == "archive":
        with tarfile.open(tmp_path / "run.tar", "w") as tar:
            tar.add(run, "run")
        place = tmp_path / "run.tar"
    else:
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
