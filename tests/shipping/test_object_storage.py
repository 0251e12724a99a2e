"""Runs in object storage, on a real S3 server (moto's, over HTTP) and in folders (`file://`)."""

import contextlib
import gzip
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shipping.copies import another_line, contents, local, taken_by_two_at_once

from verl_profiler.cli import main
from verl_profiler.errors import ConfigError, ReadingError
from verl_profiler.events.remote import RemoteError, connect, has_folders, name_of
from verl_profiler.launch import remote_output
from verl_profiler.reading.reader import load
from verl_profiler.storage.upload import Upload, claim

SMALL = Path(__file__).parents[1] / "data" / "small_run"


@pytest.fixture
def run(tmp_path):
    """A run on this disk."""
    shutil.copytree(SMALL, tmp_path / "my-run", ignore=shutil.ignore_patterns(".cache"))
    return tmp_path / "my-run"


@pytest.fixture(params=["s3", "file"])
def storage(request, tmp_path):
    """The URL of a place that is empty."""
    if request.param == "s3":
        return request.getfixturevalue("s3")
    pytest.importorskip("fsspec")
    (tmp_path / "storage").mkdir()
    request.getfixturevalue("monkeypatch").setenv(
        "VERL_PROFILER_CACHE_HOME", str(tmp_path / "caches")
    )
    return f"file://{tmp_path}/storage"


def files_at(url):
    """Return the files at a URL, without the account of their upload."""
    found = contents(url)
    found.pop("upload.json", None)
    return found


def uploaded(run, url):
    filesystem, target = connect(url)
    upload = Upload(filesystem, target, run, folders=has_folders(url))
    assert [] == upload.round(final=True)
    return upload


def printed(capsys, *argv):
    status = main(list(argv))
    text = capsys.readouterr().out
    # A sum depends on the order of its numbers, in the last digits.
    with contextlib.suppress(ValueError):
        text = json.loads(text, parse_float=lambda digits: f"{float(digits):.9g}")
    return status, text


def test_an_uploaded_run_is_read_with_the_same_answers(run, storage, capsys, monkeypatch, tmp_path):
    """Every byte is there, and `summary` prints the same of the URL; a report of it is written here."""
    url = f"{storage}/deep/my-run"
    uploaded(run, url)
    assert local(run, ".cache") == files_at(url)

    expected = printed(capsys, "summary", str(run), "--json")
    assert expected == printed(capsys, "summary", url, "--json")
    assert expected == printed(capsys, "summary", f"{url}/", "--json")
    assert 0 == expected[0]
    assert printed(capsys, "requests", str(run)) == printed(capsys, "requests", url)
    compared = printed(capsys, "diff", f"{run}@1:1", f"{run}@2:2")[1].replace(str(run), url)
    assert compared == printed(capsys, "diff", f"{url}@1:1", f"{url}@2:2")[1]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert 0 == main(["report", url])
    assert ["my-run-report.html"] == os.listdir(tmp_path / "here")
    assert 2 == main(["summary", f"{storage}/none"])
    assert "does not exist, or is empty" in capsys.readouterr().err


def test_the_python_api_takes_urls_steps_and_files(run, storage):
    """The same rows as those of the folder and file on this disk."""
    url = f"{storage}/my-run"
    uploaded(run, url)
    for part in ("", "/step_2", "/step_2/worker_0.jsonl"):
        with load(f"{run}{part}", cache=False) as here, load(f"{url}{part}", cache=False) as there:
            query = "SELECT * EXCLUDE (run) FROM event_fields ORDER BY ALL"
            assert here.rows(query) == there.rows(query), part
            assert here.rows("SELECT count(*) AS n FROM event_fields")[0]["n"] > 0


def test_only_a_part_is_downloaded_and_only_what_has_changed(run, storage, monkeypatch):
    """A step's folder, the headers and run.json; the second time what a third upload changed."""
    url = f"{storage}/my-run"
    (run / "nsight").mkdir()
    (run / "nsight" / "actor_0.step1.nsys-rep").write_bytes(b"x" * 1000)
    upload = uploaded(run, url)
    filesystem, _ = connect(url)
    taken = []
    original = filesystem.get_file

    def get_file(path, *rest, **more):
        taken.append(path)
        return original(path, *rest, **more)

    # Clients are kept by fsspec, one per protocol and settings.
    monkeypatch.setattr(filesystem, "get_file", get_file)

    with load(f"{url}/step_2") as opened:
        assert opened.rows("SELECT DISTINCT step FROM event_fields") == [{"step": 2}]
    assert taken
    assert not any("step_1" in path or "nsys-rep" in path for path in taken)
    taken.clear()
    with load(url) as opened:
        before = opened.rows("SELECT count(*) AS n FROM event_fields")[0]["n"]
    assert taken
    assert all("step_2" not in path and "nsys-rep" not in path for path in taken)

    taken.clear()
    path = run / "step_2" / "worker_0.jsonl"
    path.write_text(path.read_text() + another_line(path.read_text()))
    upload.round(final=True)
    with load(url) as opened:
        assert before + 1 == opened.rows("SELECT count(*) AS n FROM event_fields")[0]["n"]
    assert ["worker_0.jsonl"] == [path.rpartition("/")[2] for path in taken]


def test_a_file_that_grows_is_uploaded_when_it_is_worth_it(run, storage, monkeypatch):
    """Whole lines; again with a quarter more, or once it no longer grows."""
    url = f"{storage}/my-run"
    filesystem, target = connect(url)
    upload = Upload(filesystem, target, run, folders=has_folders(url))
    path = run / "step_3" / "worker_0.jsonl"
    path.parent.mkdir()
    path.write_text("x\n" * 100 + "cut")
    upload.round()
    assert b"x\n" * 100 == files_at(url)["step_3/worker_0.jsonl"]

    with path.open("a") as file:
        file.write("\n")
    upload.round()
    assert 200 == len(files_at(url)["step_3/worker_0.jsonl"])
    with path.open("a") as file:
        file.write("x\n" * 30)
    upload.round()
    assert path.read_bytes() == files_at(url)["step_3/worker_0.jsonl"]
    with path.open("a") as file:
        file.write("x\n")
    old = time.time() - 100
    os.utime(path, (old, old))
    upload.round()
    assert path.read_bytes() == files_at(url)["step_3/worker_0.jsonl"]


def test_what_was_compressed_and_what_is_over_is_removed_there_and_nothing_else(run, storage):
    """Not the old steps that somebody deleted on this disk to make room."""
    url = f"{storage}/my-run"
    (run / "open").mkdir()
    (run / "open" / "worker_0.json").write_text("{}")
    upload = uploaded(run, url)
    plain = run / "step_2" / "worker_0.jsonl"
    plain.with_name("worker_0.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    (run / "open" / "worker_0.json").unlink()
    shutil.rmtree(run / "step_1")

    upload.round()

    there = files_at(url)
    assert "step_2/worker_0.jsonl.gz" in there
    assert "step_2/worker_0.jsonl" not in there
    assert "open/worker_0.json" not in there
    assert "step_1/worker_0.jsonl" in there


def test_collect_uploads_the_rest_and_refuses_another_runs_place(run, storage, capsys):
    """What a failed upload left; files that are there are not sent again."""
    url = f"{storage}/my-run"
    filesystem, target = connect(url)
    uploaded(run, url)
    filesystem.rm_file(f"{target}/step_2/worker_0.jsonl")

    status, text = printed(capsys, "collect", str(run), "--to", url)

    assert 0 == status
    assert local(run, ".cache") == files_at(url)
    # Headers, run.json and truth.json are sent in any case.
    count = 3 + len(list((run / "processes").iterdir()))
    assert f"in {count} files uploaded" in text
    launch = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**launch, "launched": "2026-01-01T00:00:00+00:00"}))
    before = files_at(url)
    assert 2 == main(["collect", str(run), "--to", url])
    assert "holds another run, launched" in capsys.readouterr().err
    assert before == files_at(url)


def test_two_launches_at_the_same_moment_take_two_names(run, storage, tmp_path, monkeypatch):
    """Both find nothing before either has written; a later one gets the next, as on a disk."""
    later = f"{storage}/later"
    assert [later, f"{later}-2", f"{later}-3"] == [claim(later, run) for _ in range(3)]
    taken_by_two_at_once(run, f"{storage}/my-run", tmp_path, monkeypatch)


def test_a_driver_uploads_while_it_runs_and_at_its_end(run, storage, capfd):
    """In a process beside it, which ends with it."""
    url = remote_output.claim(f"{storage}/my-run", run)
    remote_output.start(run, url, 0.3)
    end = time.monotonic() + 60
    while "step_1/worker_0.jsonl" not in files_at(url):
        assert time.monotonic() < end
        time.sleep(0.1)
    (run / "step_9").mkdir()
    (run / "step_9" / "worker_0.jsonl").write_text("{}\n")

    remote_output.finish()

    assert local(run, ".cache") == files_at(url)
    assert f"the run was uploaded to {url}" in capfd.readouterr().err


def test_after_a_killed_driver_the_rest_is_uploaded(run, storage, tmp_path):
    """The process ends with the driver, whatever ended it, after a last upload."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from verl_profiler.launch import remote_output\n"
        "run = Path(sys.argv[1])\n"
        "url = remote_output.claim(sys.argv[2], run)\n"
        "remote_output.start(run, url, 3600)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    url = f"{storage}/my-run"
    done = subprocess.run([sys.executable, "-c", script, str(run), url], check=False)
    assert -9 == done.returncode

    end = time.monotonic() + 60
    while local(run, ".cache") != files_at(url):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_storage_that_fails_costs_a_line_and_the_files_stay(run, s3, capfd):
    """The bucket is deleted during the run; the line has the command for later."""
    # Each file is tried for seconds.
    for folder in ("processes", "step_1", "step_2"):
        shutil.rmtree(run / folder)
    url = remote_output.claim(f"{s3}/my-run", run)
    before = local(run, ".cache")
    filesystem, target = connect(s3)
    for path in filesystem.find(target):
        filesystem.rm_file(path)
    filesystem.rmdir(target)

    remote_output.start(run, url, 3600)
    remote_output.finish()

    err = capfd.readouterr().err
    (line,) = [line for line in err.splitlines() if "not-uploaded" in line]
    assert f"Run: verl-profiler collect {run} --to {url}" in line
    assert "NoSuchBucket" in line or "bucket does not exist" in line
    assert before == local(run, ".cache")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://no-such-bucket-{id}/my-run", "nothing can be written to"),
        ("memory://x/my-run", "exists in one process only"),
        ("s3://bucket", "has no folder for the run"),
        ("nope://x/y", "cannot be used"),
    ],
)
def test_a_url_that_cannot_be_written_ends_the_command_before_training(run, s3, url, says):
    """With the reason."""
    with pytest.raises(ConfigError) as caught:
        remote_output.claim(url.format(id=s3[-6:]), run)

    assert "output-url" == caught.value.slug
    assert says in str(caught.value)
    with pytest.raises(RemoteError) as caught:
        name_of("sftp://me:hunter22@host")
    assert "hunter22" not in str(caught.value)
    filesystem, _ = connect(s3)
    # A bucket that was misspelled is not made.
    assert not filesystem.exists(f"no-such-bucket-{s3[-6:]}")


def test_a_missing_package_is_named_with_its_command(run, monkeypatch, tmp_path):
    """Of the recording half, and of the reading half."""
    (tmp_path / "s3fs.py").write_text("raise ImportError(\"No module named 's3fs'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install s3fs"):
        remote_output.claim("s3://bucket/my-run", run)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    registry = importlib.import_module("fsspec.registry")
    # fsspec keeps the classes that it has imported.
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    with pytest.raises(ReadingError, match=r"pip install s3fs[^']*'verl-profiler\[remote\]'"):
        load("s3://bucket/my-run")
