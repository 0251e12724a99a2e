"""Archives from anywhere are read like their directory, cost neither disk nor memory, and leave nothing."""

import gzip
import io
import shutil
import sys
import tarfile
import tempfile

import pytest
from cached_runs import SMALL

from verl_profiler.errors import ReadingError
from verl_profiler.reading.reader import load

zstandard = pytest.importorskip("zstandard")


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Nothing may be left where archives are unpacked."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def tar_of(members=()):
    """Return a tar with the small run and more members: (TarInfo, bytes)."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(SMALL, "small", filter=lambda each: None if ".cache" in each.name else each)
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return content.getvalue()


def info(name, **more):
    member = tarfile.TarInfo(name)
    for key, value in more.items():
        setattr(member, key, value)
    return member


def zstd(content):
    """Two frames, as compressors with several threads and `cat` make them."""
    half = len(content) // 2
    return b"".join(
        zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:])
    )


def read(path):
    with load(path, cache=False) as run:
        return run.rows(
            "SELECT name, event, count(*) AS n, sum(duration_us)::BIGINT AS us FROM events GROUP BY ALL ORDER BY ALL"
        ), run.problems


WHOLE = read(SMALL)


@pytest.mark.parametrize(
    ("name", "pack"),
    [("run.tar", bytes), ("run.tgz", gzip.compress), ("run.tar.zst", zstd)],
)
def test_an_archive_is_read_like_its_directory(tmp_path, name, pack):
    """Whatever it is compressed with."""
    path = tmp_path / name
    path.write_bytes(pack(tar_of()))

    assert WHOLE == read(path)


def test_zstd_needs_a_module_and_says_which(tmp_path, monkeypatch):
    path = tmp_path / "run.tar.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, "zstandard", None)

    with pytest.raises(ReadingError, match="pip install zstandard"):
        load(path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
@pytest.mark.parametrize("damage", [b"", b"\0" * 100])
def test_what_came_before_a_cut_or_a_damage_is_read(tmp_path, pack, damage):
    """A download that broke off is not worthless."""
    line = b'{"timestamp":"2026-11-21T02:33:22+00:00","event":"x","extra":{"s":"%d"}}\n'
    noise = b"".join(line % hash(str(number)) for number in range(10_000))
    members = [(info("small/step_1/noise_0.jsonl"), noise)]
    content = pack(tar_of(members))
    middle = len(content) * 2 // 3
    path = tmp_path / "bad.tar"
    path.write_bytes(content[:middle] + (damage + content[middle + 100 :] if damage else b""))

    rows, problems = read(path)

    assert 0 < sum(row["n"] for row in rows)
    if pack is not bytes or not damage:
        assert sum(row["n"] for row in rows) < 10_000
        assert any("bad.tar is truncated" in problem for problem in problems)


def test_what_would_fill_the_disk_is_refused(tmp_path):
    """Before any of it is written: its header has the size."""
    path = tmp_path / "run.tar"
    path.write_bytes(info("small/step_1/zeros_0.jsonl", size=1 << 60).tobuf() + tar_of())

    with pytest.raises(ReadingError, match="more than half of the free disk") as raised:
        load(path)
    assert "archive-too-large" == raised.value.slug


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_is_an_error_and_not_a_shorter_run(tmp_path, monkeypatch, error):
    """Also an interrupt leaves nothing."""
    path = tmp_path / "run.tar"
    path.write_bytes(tar_of())

    def fail(*_):
        raise error

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with pytest.raises((ReadingError, KeyboardInterrupt)) as raised:
        load(path)
    assert isinstance(error, KeyboardInterrupt) or "does not fit: No space" in str(raised.value)


def test_only_regular_files_inside_the_folder_come_out(tmp_path):
    names = [
        "../outside.jsonl",
        "/tmp/outside.jsonl",
        "small/" + "n" * 300 + ".jsonl",
        # A file where a folder is, and below a file.
        "small/step_1",
        "small/run.json/x.jsonl",
        "small/step_1/worker_0.jsonl/y.jsonl",
    ]
    kinds = [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]
    devices = [
        info(f"small/processes/x{n}_0.json", type=kind, linkname="/dev/zero", devmajor=1, devminor=5)
        for n, kind in enumerate(kinds)
    ]  # fmt: skip
    path = tmp_path / "run.tar"
    path.write_bytes(
        tar_of([*((info(name), b"{}\n") for name in names), *((each, b"") for each in devices)])
    )

    rows, problems = read(path)

    assert rows == WHOLE[0]
    # `small/step_1` is not a kind of file that is unpacked.
    assert any("9 links or unsafe paths were left out" in problem for problem in problems)
    assert not (tmp_path / "outside.jsonl").exists()
