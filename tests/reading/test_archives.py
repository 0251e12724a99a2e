"""Archives from anywhere are read like their directory, cost neither disk nor memory, and leave nothing."""

import bz2
import gzip
import io
import re
import shutil
import sys
import tarfile
import tempfile
import tracemalloc
from pathlib import Path

import pytest

from verl_profiler.errors import ReadingError
from verl_profiler.reading import archives
from verl_profiler.reading.reader import load

zstandard = pytest.importorskip("zstandard")

SMALL = Path(__file__).parents[1] / "data" / "small_run"


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


def endless_tar():
    """The same, but without the blocks of zeros, so that more can follow."""
    content = tar_of()
    return content[: -(-len(content.rstrip(b"\0")) // 512) * 512]


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
    return with_sum(header)


def with_sum(header):
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


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


def no_modules(monkeypatch):
    for name in ("compression.zstd", "zstandard", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("run.tar", bytes),
        ("run.tar.gz", gzip.compress),
        ("run.tgz", gzip.compress),
        ("run.tar", bz2.compress),
        ("run.tar.zst", zstd),
        ("program.tar.zst", zstd),
    ],
)
def test_an_archive_is_read_like_its_directory(tmp_path, monkeypatch, name, pack):
    """Whatever it is compressed with; zstd by a module, or else by the program."""
    if name == "program.tar.zst":
        if shutil.which("zstd") is None:
            pytest.skip("the program zstd is not installed")
        no_modules(monkeypatch)
    path = tmp_path / name
    path.write_bytes(pack(tar_of()))

    assert WHOLE == read(path)


def test_zstd_needs_a_module_and_says_which(tmp_path, monkeypatch):
    path = tmp_path / "run.tar.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd")
    no_modules(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: None)

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
        assert any("bad.tar breaks off" in problem for problem in problems)


def sparse():
    """1.5 KB of archive that stand for 1 TB: one piece at the end of the file, and its true size."""
    member = bytearray(raw_header("small/step_1/huge_0.jsonl", 512, b"S"))
    member[386:398] = b"\x80" + ((1 << 40) - 512).to_bytes(11, "big")
    member[398:410] = b"%011o\0" % 512
    member[483:495] = b"\x80" + (1 << 40).to_bytes(11, "big")
    return with_sum(member) + b"x" * 512 + tar_of()


def long_header():
    """200 MB of header behind the run."""
    packer = zstandard.ZstdCompressor().compressobj()
    packed = packer.compress(endless_tar() + raw_header("x", 200 << 20, tarfile.XHDTYPE))
    return packed + b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()


def headers_in_a_row():
    """Each of them is read inside the one before."""
    record = b"13 comment=x\n"
    pax = raw_header("p", len(record), tarfile.XHDTYPE) + record.ljust(512, b"\0")
    return endless_tar() + pax * 5000 + bytes(1024)


def zeros(pack):
    header = raw_header("small/step_1/zeros_0.jsonl", 100 << 20, tarfile.REGTYPE)
    return pack(endless_tar() + header + bytes(100 << 20))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (sparse, "1 links or unsafe paths were left out"),
        (long_header, r"breaks off \(a header of it is too large\)"),
        (headers_in_a_row, "breaks off"),
        (lambda: zeros(gzip.compress), "archive-too-large: .* expands to more than"),
        (lambda: zeros(zstd), "archive-too-large: .* expands to more than"),
        # The header says 1 EB, before any of it comes.
        (
            lambda: endless_tar() + raw_header("small/x.jsonl", 1 << 60, b"0"),
            "archive-too-large: .* more than half of the free disk",
        ),
        (
            lambda: tar_of([(info(f"small/step_1/e_{n}.jsonl"), b"") for n in range(60)]),
            "archive-too-large: .* holds more than 50 files",
        ),
    ],
    ids=["sparse", "long header", "headers", "gzip", "zstd", "1 EB", "many files"],
)
def test_what_would_fill_disk_or_memory_is_left_out_or_refused(
    tmp_path, monkeypatch, content, says
):
    """Refused with nothing read, or the run before it is read."""
    monkeypatch.setattr(archives, "EXPANSION_FROM_BYTES", 16 << 20)
    monkeypatch.setattr(archives, "_MEMBERS_FROM", 50)
    monkeypatch.setattr(archives, "_BYTES_PER_MEMBER", 1 << 20)
    path = tmp_path / "run.tar"
    path.write_bytes(content())

    tracemalloc.start()
    try:
        rows, problems = read(path)
        assert rows == WHOLE[0]
    except ReadingError as error:
        problems = [f"{error.slug}: {error}"]
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert any(re.search(says, problem) for problem in problems), problems
    assert peak_bytes < 100 << 20


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_is_an_error_and_not_a_shorter_run(tmp_path, monkeypatch, error):
    """Also an interrupt leaves nothing."""
    path = tmp_path / "run.tar"
    path.write_bytes(tar_of())

    def fail(*_):
        raise error

    monkeypatch.setattr(archives, "_write", fail)
    with pytest.raises((ReadingError, KeyboardInterrupt)) as raised:
        load(path)
    assert isinstance(error, KeyboardInterrupt) or "does not fit: No space" in str(raised.value)


def test_only_regular_files_inside_the_folder_come_out(tmp_path):
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
    assert any("11 links or unsafe paths were left out" in problem for problem in problems)
    assert not (tmp_path / "outside.jsonl").exists()
