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


def test_a_file_without_permission_for_a_moment_is_read_the_next_time(run):
    """As another user, because root reads everything."""
    script = (
        "import os, sys\n"
        "from verl_profiler.reading.reader import load\n"
        # Modules that are imported late may lie where only this user reads.
        "with load(sys.argv[1], cache=False) as run:\n    run.problems\n"
        "if os.geteuid() == 0:\n    os.setgid(65534)\n    os.setuid(65534)\n"
        "with load(sys.argv[1]) as run:\n"
        "    print(run.rows('SELECT count(*) AS n FROM event_fields')[0]['n'])\n"
        "    print([p for p in run.problems if 'cannot be read' in p])\n"
    )
    # pytest's own folders are closed to others.
    place = Path("/tmp") / f"cache-permission-{os.getpid()}"
    shutil.copytree(run, place)
    try:
        for path in (place, *place.rglob("*")):
            os.chmod(path, 0o777)
        path = place / "step_1" / "worker_0.jsonl"
        path.chmod(0)
        printed = []
        for mode in (0, 0o644):
            if os.geteuid() == 0 or mode:
                path.chmod(mode)
            done = subprocess.run(
                [sys.executable, "-c", script, str(place)],
                capture_output=True, text=True, check=True, cwd="/",
            )  # fmt: skip
            printed.append(done.stdout.splitlines())
    finally:
        shutil.rmtree(place)
    with load(run, cache=False) as whole:
        count = whole.rows("SELECT count(*) AS n FROM event_fields")[0]["n"]

    assert int(printed[0][0]) < count == int(printed[1][0])
    assert "Permission denied" in printed[0][1]
    assert "[]" == printed[1][1]


@pytest.mark.parametrize("where", [".cache", ".cache/events-1"])
def test_a_cache_that_is_a_link_is_not_used(run, tmp_path, where):
    """Nothing outside the run is written or deleted, whatever it is named."""
    expected = answers(run)
    shutil.rmtree(run / ".cache")
    outside = tmp_path / "outside"
    inside = outside / "events-1" if where == ".cache" else outside
    inside.mkdir(parents=True)
    foreign = [
        "part-0123456789abcdef.parquet", "requests-0123456789abcdef.parquet", "mine.parquet",
        "part-0123456789abcdef-10-01234567.parquet", "new-0123456789abcdef.partial", "stamp.json",
    ]  # fmt: skip
    for name in foreign:
        (inside / name).write_text("precious")
        os.utime(inside / name, (0, 0))
    link = run / where
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)

    assert expected == answers(run)
    append(run)
    answers(run)

    assert sorted(foreign) == sorted(path.name for path in inside.iterdir())


def test_only_own_files_are_retired(run, monkeypatch):
    """Names that this program does not give, links, folders, and files in use by others stay."""
    monkeypatch.setattr(cache_folder, "_UNUSED_S", 0, raising=False)
    answers(run)
    folder = cache_of(run)
    foreign = ["mine.parquet", "part-of-mine.parquet", "requests-2026.parquet", "notes.json"]
    for name in foreign:
        (folder / name).write_text("precious")
    (folder / "part-0123456789abcdef.parquet").symlink_to(run / "run.json")
    (folder / "part-0123456789abcdee.parquet").mkdir()
    append(run)

    answers(run)

    left = {path.name for path in folder.iterdir()}
    assert left >= {*foreign, "part-0123456789abcdef.parquet", "part-0123456789abcdee.parquet"}
    assert 2 == len(list(folder.glob("part-*-*-*.parquet")))


def test_files_that_were_used_lately_stay(run):
    """Another host's reader may have them open."""
    answers(run)
    before = {path.name for path in cache_of(run).iterdir()}
    append(run)

    answers(run)

    assert before < {path.name for path in cache_of(run).iterdir()}


def flipped(path, run):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def emptied(path, run):
    path.write_bytes(b"")


def doubled(path, run):
    rewrite(path, f"SELECT * REPLACE (2 * duration_us AS duration_us) FROM '{path}'")


def of_something_else(path, run):
    rewrite(path, "SELECT 1 AS x")


def of_other_types(path, run):
    rewrite(path, f"SELECT * REPLACE ('x' AS step) FROM '{path}'")


def rewrite(path, query):
    with duckdb.connect() as connection:
        connection.execute(f"COPY ({query}) TO '{path}.new' (FORMAT parquet)")
    os.replace(f"{path}.new", path)


@pytest.mark.parametrize(
    ("kind", "damage", "consistent"),
    [
        ("part", flipped, False),
        ("part", emptied, False),
        ("part", emptied, True),
        ("part", of_something_else, True),
        ("part", of_other_types, True),
        ("requests", flipped, False),
        ("requests", of_something_else, False),
        ("requests", of_something_else, True),
    ],
)
def test_a_damaged_or_forged_file_is_made_again(run, kind, damage, consistent):
    """A flipped bit, another file under the name; also where the checksum was adapted."""
    expected = answers(run)
    for path in cache_of(run).glob(f"{kind}-*.parquet"):
        damage(path, run)
        if consistent:
            adapt_checksum(path)

    assert expected == answers(run)
    assert expected == answers(run)


def adapt_checksum(path):
    content = path.read_bytes()
    name = "-".join(path.name.split("-")[:2])
    file = f"{name}-{len(content):x}-{zlib.crc32(content):08x}.parquet"
    path.rename(path.with_name(file))
    entry = path.with_name(f"{name}.json")
    body = entry.read_text().splitlines()[0].replace(path.name, file)
    write_entry(entry, body)


def write_entry(entry, body):
    entry.write_text(f"{body}\n{zlib.crc32(body.encode()):08x}\n")


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"file": null, "note": {"counts": {}}}',
        '{"file": null, "note": {"counts": {"worker_0": "x"}, "problems": []}}',
        '{"file": null, "note": {"counts": {"worker_0": 3}, "problems": [3]}}',
        '{"file": null, "note": {"counts": {"worker_0": 3}, "problems": []}}',
    ],
    ids=range(5),
)
def test_a_forged_entry_is_made_again(run, body):
    """Whatever is in it, the events are read from the files."""
    expected = answers(run)
    for entry in cache_of(run).glob("part-*.json"):
        write_entry(entry, body)

    assert expected == answers(run)


@pytest.mark.parametrize(
    "body",
    [
        "", "[]", "{}", "3", '{"file": 3, "note": {}}', '{"file": null, "note": 3}',
        '{"file": "../../run.json", "note": {}}', '{"file": "x.parquet", "note": {}}',
        "[" * 100_000, '{"file": null, "note": ' + '{"x":' * 100_000, " " * (9 << 20),
    ],
    ids=range(11),
)  # fmt: skip
def test_a_damaged_entry_is_none(tmp_path, body):
    """Wrong types, names that lead elsewhere, deep nesting, and 9 MiB."""
    name = "part-0123456789abcdef"
    folder = CacheFolder.of(tmp_path)
    entry = tmp_path / f"{name}.json"
    write_entry(entry, '{"file": null, "note": {"x": 1}}')
    good = folder.find(name)
    found = []
    for write in (write_entry, lambda entry, body: entry.write_text(body)):
        write(entry, body)
        found.append(folder.find(name))
    folder.close()

    assert good is not None
    assert {"x": 1} == good.note
    assert [None, None] == found


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


@pytest.mark.parametrize("way", ["archive", "copy"])
def test_a_cache_that_came_with_a_run_is_not_used(run, tmp_path, way):
    """A forged one would be believed: its checksums can be right."""
    expected = answers(run)
    for path in cache_of(run).glob("*.parquet"):
        if path.name.startswith("part-"):
            doubled(path, run)
            adapt_checksum(path)
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


def test_what_a_killed_command_left_is_removed_after_a_day(run):
    """And not before."""
    answers(run)
    old, young = (cache_of(run) / f"new-{digit * 16}.partial" for digit in "01")
    for path in (old, young):
        path.write_text("half")
    os.utime(old, (0, 0))

    answers(run)

    assert [False, True] == [old.exists(), young.exists()]
