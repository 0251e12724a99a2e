"""Archives from anywhere cost neither the disk nor the memory, and leave nothing behind."""

import bz2
import contextlib
import gzip
import io
import os
import struct
import tarfile
import tempfile
import tracemalloc

import pytest
from hostile import small_run

from verl_profiler.errors import ReadingError
from verl_profiler.reading import archives
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


def tar_of(folder, members=(), *, run=True):
    """Return a tar with the small run and more members: (TarInfo, bytes)."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        if run:
            tar.add(small_run(folder), "small")
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return content.getvalue()


def without_end(content):
    """Take the blocks of zeros off, so that more can follow."""
    length = len(content.rstrip(b"\0"))
    return content[: -(-length // 512) * 512]


def info(name, **more):
    member = tarfile.TarInfo(name)
    for key, value in more.items():
        setattr(member, key, value)
    return member


def raw_header(name, size, kind):
    """A header whose size is a lie."""
    header = bytearray(info(name).tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + size.to_bytes(11, "big")
    header[156:157] = kind
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def events_of(path):
    with load(path) as run:
        return run.rows("SELECT count(*) AS n FROM events")[0]["n"], run.problems


@pytest.mark.parametrize("pack", [lambda b: b, gzip.compress, bz2.compress])
def test_an_archive_is_read_whatever_it_is_compressed_with(tmp_path, pack):
    path = tmp_path / "run.tar"
    path.write_bytes(pack(tar_of(tmp_path)))

    assert events_of(path)[0] == 10


@pytest.mark.timeout(30)
def test_a_sparse_member_takes_no_room(tmp_path):
    """1.5 KB of archive that stand for 1 TB."""
    member = bytearray(raw_header("small/step_1/huge_0.jsonl", 512, b"S"))
    # One piece at the end of the file; its true size.
    member[386:398] = b"\x80" + ((1 << 40) - 512).to_bytes(11, "big")
    member[398:410] = b"%011o\0" % 512
    member[483:495] = b"\x80" + (1 << 40).to_bytes(11, "big")
    member[148:156] = b" " * 8
    member[148:156] = b"%06o\0 " % sum(member)
    path = tmp_path / "run.tar"
    path.write_bytes(bytes(member) + b"x" * 512 + tar_of(tmp_path))

    count, problems = events_of(path)

    assert count == 10
    assert any("1 links or unsafe paths were left out" in problem for problem in problems)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_long_header_is_not_read_into_memory(tmp_path, kind):
    """What stands behind the small archive is 600 MB of header."""
    path = tmp_path / "run.tar.zst"
    packer = zstandard.ZstdCompressor().compressobj()
    packed = packer.compress(without_end(tar_of(tmp_path)) + raw_header("x", 600 << 20, kind))
    packed += b"".join(packer.compress(bytes(1 << 20)) for _ in range(600)) + packer.flush()
    path.write_bytes(packed)

    tracemalloc.start()
    try:
        count, problems = events_of(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert count == 10
    assert any("breaks off (a header of it is too large)" in problem for problem in problems)
    assert peak_bytes < 100 << 20


def bomb(pack, folder):
    """100 MB of zeros in a file of the run."""
    content = without_end(tar_of(folder))
    content += info_of_zeros("small/step_1/zeros_0.jsonl", 100 << 20)
    return pack(content)


def info_of_zeros(name, size):
    return raw_header(name, size, tarfile.REGTYPE) + bytes(size)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("run.tar.gz", gzip.compress),
        ("run.tar.bz2.tar", bz2.compress),
        ("run.tar.zst", lambda content: zstandard.ZstdCompressor().compress(content)),
    ],
)
def test_a_bomb_is_stopped_before_it_fills_the_disk(tmp_path, name, pack, monkeypatch):
    path = tmp_path / name
    path.write_bytes(bomb(pack, tmp_path))
    monkeypatch.setattr(archives, "EXPANSION_FROM_BYTES", 16 << 20)

    with pytest.raises(ReadingError, match=r"expands to more than.*\nUnpack it yourself") as raised:
        load(path)

    assert raised.value.slug == "archive-too-large"


@pytest.mark.timeout(30)
def test_files_that_need_more_than_half_of_the_free_disk_are_refused(tmp_path):
    """The header says 1 EB, before any of it comes."""
    path = tmp_path / "run.tar"
    path.write_bytes(without_end(tar_of(tmp_path)) + raw_header("small/x.jsonl", 1 << 60, b"0"))

    with pytest.raises(ReadingError, match="more than half of the free disk") as raised:
        load(path)

    assert raised.value.slug == "archive-too-large"


def test_a_full_disk_is_an_error_and_not_a_shorter_run(tmp_path, monkeypatch):
    path = tmp_path / "run.tar"
    path.write_bytes(tar_of(tmp_path))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archives, "_write", full)
    with pytest.raises(ReadingError, match="does not fit: No space left"):
        load(path)


def test_a_million_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "_MEMBERS_FROM", 50)
    monkeypatch.setattr(archives, "_BYTES_PER_MEMBER", 1 << 20)
    path = tmp_path / "run.tar"
    path.write_bytes(
        tar_of(tmp_path, [(info(f"small/step_1/e_{n}.jsonl"), b"") for n in range(60)])
    )

    with pytest.raises(ReadingError, match="holds more than 50 files"):
        load(path)


def test_names_that_no_file_can_have_are_left_out(tmp_path):
    names = [
        "../outside.jsonl",
        "/tmp/outside.jsonl",
        "small/" + "d/" * 400 + "deep.jsonl",
        "small/" + "n" * 300 + ".jsonl",
        "small/" + "long/" * 250 + "x.jsonl",
        # A file where a folder is, and below a file.
        "small/step_1",
        "small/run.json/x.jsonl",
        "small/step_1/worker_0.jsonl/y.jsonl",
    ]
    path = tmp_path / "run.tar"
    path.write_bytes(tar_of(tmp_path, [(info(name), b"{}\n") for name in names]))

    count, problems = events_of(path)

    assert count == 10
    # `small/step_1` is not a kind of file that is unpacked.
    assert any("7 links or unsafe paths were left out" in problem for problem in problems)
    assert not (tmp_path / "outside.jsonl").exists()


@pytest.mark.parametrize(
    "type_", [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]
)
def test_only_regular_files_come_out(tmp_path, type_):
    member = info(
        "small/processes/x_0.json", type=type_, linkname="/dev/zero", devmajor=1, devminor=5
    )
    path = tmp_path / "run.tar"
    path.write_bytes(tar_of(tmp_path, [(member, b"")]))

    count, problems = events_of(path)

    assert count == 10
    assert any("1 links or unsafe paths were left out" in problem for problem in problems)


def test_the_cache_of_an_archive_is_ignored(tmp_path):
    """Whoever made the archive could have put any numbers there."""
    run = small_run(tmp_path)
    with load(run) as first:
        assert len(first.rows("SELECT * FROM requests")) == 1
    forged = run / ".cache" / "events-1"
    for part in forged.glob("*.parquet"):
        os.truncate(part, part.stat().st_size // 2)
    assert list(forged.glob("part-*.parquet"))
    path = tmp_path / "run.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(run, "small")

    seen = []
    with load(path) as opened:
        (root,) = opened._scratch.glob("archive-*")
        seen += [p for p in root.rglob("*") if ".cache" in p.parts and p.name.startswith("stamp")]
        assert len(opened.rows("SELECT * FROM requests")) == 1
        assert not any("cannot be read" in problem for problem in opened.problems)


def test_an_interrupt_while_unpacking_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "run.tar"
    path.write_bytes(tar_of(tmp_path))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(archives, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(8))
def test_damaged_archives_never_end_in_a_traceback(tmp_path, seed):
    import random

    chance = random.Random(seed)
    whole = tar_of(tmp_path)
    for number in range(12):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 20)):
            # Headers are where damage is interesting: they begin every 512 bytes.
            place = 512 * chance.randrange(len(content) // 512) + chance.randrange(512)
            content[place] = chance.choice(
                [0, 0x80, 0xFF, ord("7"), ord("x"), chance.randrange(256)]
            )
        path = tmp_path / f"{number}.tar"
        path.write_bytes(content)
        target = tmp_path / f"out-{number}"
        with contextlib.suppress(ReadingError):
            archives.unpack(path, target, [])


def test_pax_headers_in_a_row_are_no_recursion(tmp_path):
    """Each of them is read inside the one before."""
    record = b"13 comment=x\n"
    pax = raw_header("p", len(record), tarfile.XHDTYPE) + record.ljust(512, b"\0")
    path = tmp_path / "run.tar"
    path.write_bytes(without_end(tar_of(tmp_path)) + pax * 5000 + struct.pack("1024x"))

    count, problems = events_of(path)

    assert count == 10
    assert any("breaks off" in problem for problem in problems)
