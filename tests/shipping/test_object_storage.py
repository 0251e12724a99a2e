"""Runs in object storage, on a real S3 server (moto's, over HTTP) and in folders (`file://`)."""

import contextlib
import gzip
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time

import pytest
from cached_runs import SMALL
from shipping.copies import another_line, contents, local, wait_until

from verl_profiler import log_manager
from verl_profiler.cli import main
from verl_profiler.errors import ConfigError, ReadingError
from verl_profiler.events.remote import RemoteError, connect, name_of
from verl_profiler.launch import remote_output
from verl_profiler.reading.reader import load
from verl_profiler.recording import recorder
from verl_profiler.recording.identity import Identity
from verl_profiler.storage import upload
from verl_profiler.storage.upload import Upload, claim


@pytest.fixture(params=["s3", "file"])
def storage(request, tmp_path):
    """The URL of a place that is empty."""
    if request.param == "s3":
        return request.getfixturevalue("s3")
    pytest.importorskip("fsspec")
    (tmp_path / "storage").mkdir()
    return f"file://{tmp_path}/storage"


def files_at(url):
    """Return the files at a URL, without the account of their upload."""
    found = contents(url)
    found.pop("upload.json", None)
    return found


def uploaded(run, url):
    made = Upload(url, run)
    assert [] == made.round(final=True)
    return made


def looked(where):
    """Return how many events of the test a reader has, and what it reports of the upload."""
    with load(str(where), cache=False) as opened:
        rows = opened.rows("SELECT count(*) AS n FROM event_fields WHERE event = 'looked'")
        return rows[0]["n"], [each for each in opened.problems if "upload" in each]


def printed(capsys, *argv):
    status = main(list(argv))
    text = capsys.readouterr().out
    # A sum depends on the order of its numbers, in the last digits.
    with contextlib.suppress(ValueError):
        text = json.loads(text, parse_float=lambda digits: f"{float(digits):.9g}")
    return status, text


def test_an_uploaded_run_is_read_with_the_same_answers(run, s3, capsys, monkeypatch, tmp_path):
    """Every byte is there, and `summary` prints the same of the URL; what is made of it is written here."""
    url = f"{s3}/deep/my-run"
    uploaded(run, url)
    assert local(run, ".cache") == files_at(url)

    expected = printed(capsys, "summary", str(run), "--json")
    assert expected == printed(capsys, "summary", f"{url}/", "--json")
    assert 0 == expected[0]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert 0 == main(["export", "otlp", url])
    assert ["my-run-spans.otlp.jsonl"] == os.listdir(tmp_path / "here")
    assert 2 == main(["summary", f"{s3}/none"])
    assert "does not exist, or is empty" in capsys.readouterr().err
    uploaded(run, f"{s3}/deep/other")
    assert 2 == main(["summary", f"{s3}/deep"])
    assert f"`verl-profiler runs {s3}/deep`:\n    {s3}/deep/my-run" in capsys.readouterr().err
    assert 2 == main(["diff", url, f"{s3}/deep"])
    assert f"`verl-profiler runs {s3}/deep`:\n    {s3}/deep/my-run" in capsys.readouterr().err
    listed = printed(capsys, "runs", f"{s3}/deep", "--json", "--sort", "run")[1]["runs"]
    assert ["my-run", "other"] == [row["run"] for row in listed]
    assert "other" == printed(capsys, "runs", f"{s3}/deep/other", "--json")[1]["runs"][0]["run"]
    for part in ("", "/step_2", "/step_2/worker_0.jsonl"):
        with load(f"{run}{part}", cache=False) as here, load(f"{url}{part}", cache=False) as there:
            query = "SELECT * EXCLUDE (run) FROM event_fields ORDER BY ALL"
            assert here.rows(query) == there.rows(query), part
            assert here.rows("SELECT count(*) AS n FROM event_fields")[0]["n"] > 0


def test_only_a_part_is_downloaded_and_only_what_has_changed(run, s3, monkeypatch):
    """A step's folder, the headers and run.json; the second time what a third upload changed."""
    url = f"{s3}/my-run"
    (run / "nsight").mkdir()
    (run / "nsight" / "actor_0.step1.nsys-rep").write_bytes(b"x" * 1000)
    earlier = uploaded(run, url)
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
    earlier.round(final=True)
    with load(url) as opened:
        assert before + 1 == opened.rows("SELECT count(*) AS n FROM event_fields")[0]["n"]
    assert ["worker_0.jsonl"] == [path.rpartition("/")[2] for path in taken]


def test_a_file_that_grows_is_uploaded_when_it_is_worth_it(run, storage, monkeypatch):
    """Whole lines; again with a quarter more, or once it no longer grows."""
    url = f"{storage}/my-run"
    earlier = Upload(url, run)
    path = run / "step_3" / "worker_0.jsonl"
    path.parent.mkdir()
    path.write_text("x\n" * 100 + "cut")
    earlier.round()
    assert b"x\n" * 100 == files_at(url)["step_3/worker_0.jsonl"]

    with path.open("a") as file:
        file.write("\n")
    earlier.round()
    assert 200 == len(files_at(url)["step_3/worker_0.jsonl"])
    with path.open("a") as file:
        file.write("x\n" * 30)
    earlier.round()
    assert path.read_bytes() == files_at(url)["step_3/worker_0.jsonl"]
    with path.open("a") as file:
        file.write("x\n")
    old = time.time() - 100
    os.utime(path, (old, old))
    earlier.round()
    assert path.read_bytes() == files_at(url)["step_3/worker_0.jsonl"]


def test_what_was_compressed_and_what_is_over_is_removed_there_and_nothing_else(run, storage):
    """Not the old steps that somebody deleted on this disk to make room."""
    url = f"{storage}/my-run"
    (run / "open").mkdir()
    (run / "open" / "worker_0.json").write_text("{}")
    earlier = uploaded(run, url)
    plain = run / "step_2" / "worker_0.jsonl"
    plain.with_name("worker_0.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    (run / "open" / "worker_0.json").unlink()
    shutil.rmtree(run / "step_1")

    earlier.round()

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


def test_a_name_that_is_taken_gets_a_random_end(run, storage, monkeypatch):
    """Also where another launch has found it free, too, and writes last."""
    url = f"{storage}/my-run"
    filesystem, target = connect(url)
    other = [b'{"pid": 1}']

    def wait(_seconds):
        if other:
            filesystem.pipe_file(f"{target}/run.json", other.pop())

    monkeypatch.setattr(time, "sleep", wait)
    taken = [claim(url, run) for _ in range(2)]
    monkeypatch.undo()

    assert 3 == len({url, *taken})
    for each in taken:
        assert each.startswith(f"{url}-")
        assert (run / "run.json").read_bytes() == contents(each)["run.json"]
    assert b'{"pid": 1}' == contents(url)["run.json"]


@pytest.fixture
def many_files():
    """As many open files as a driver of Ray may have: `select` refuses descriptors from 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with contextlib.ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(open(os.devnull))
        yield


@pytest.mark.usefixtures("many_files")
def test_a_driver_uploads_while_it_runs_and_at_its_end(run, s3, capfd):
    """In a process beside it, which ends with it."""
    uploader = remote_output.Uploader(f"{s3}/my-run", run, 0.3)
    url = uploader.url
    remote_output.start(uploader)
    wait_until(lambda: "step_1/worker_0.jsonl" in files_at(url))
    (run / "step_9").mkdir()
    (run / "step_9" / "worker_0.jsonl").write_text("{}\n")
    wait_until(lambda: "step_9/worker_0.jsonl" in files_at(url))
    (run / "step_9" / "worker_1.jsonl").write_text("{}\n")

    remote_output.finish()

    assert local(run, ".cache") == files_at(url)
    assert f"the run was uploaded to {url}" in capfd.readouterr().err


def test_an_upload_that_was_killed_is_a_line_with_the_command_that_brings_the_rest(run, s3, capfd):
    """The command continues from what is there."""
    uploader = remote_output.Uploader(f"{s3}/my-run", run, 0.3)
    remote_output.start(uploader)
    wait_until(lambda: "step_1/worker_0.jsonl" in files_at(uploader.url))
    uploader._process.kill()
    (run / "step_1" / "worker_9.jsonl").write_text("{}\n")
    remote_output.finish()

    (line,) = [line for line in capfd.readouterr().err.splitlines() if "upload" in line]
    assert "the upload process was killed (SIGKILL)" in line
    assert f"Run: verl-profiler collect {run} --to {uploader.url} (not-uploaded)" in line
    assert 0 == main(["collect", str(run), "--to", uploader.url])
    assert local(run, ".cache") == files_at(uploader.url)


def test_an_upload_that_did_not_end_is_named_and_collect_brings_the_rest(
    worker_config, storage, capsys
):
    """As after a power cut: how much is known to be missing, and the command that brings it."""
    active = recorder.start(worker_config, lambda: Identity("trainer", 0))
    run, url = active.directory, f"{storage}/my-run"
    shutil.copy(SMALL / "run.json", run)

    def write(count):
        for number in range(count):
            log_manager.log(None, event="looked", extra={"number": number, "x": "y" * 99}, step=1)
        wait_until(lambda: not active.waiting())
        wait_until(lambda: json.loads(header.read_text())["written_events"] >= count)

    header = run / "processes" / "trainer_0.json"
    earlier = Upload(url, run, 1.0)
    write(500)
    assert [] == earlier.round_with_account()
    # Less than a quarter more: its header comes, its events do not.
    write(50)
    wait_until(lambda: json.loads(header.read_text())["written_events"] >= 550)
    assert [] == earlier.round_with_account()
    count, (problem,) = looked(url)
    assert (500, True) == (count, "still being uploaded" in problem)

    # The driver and its upload are killed, an hour ago.
    filesystem, target = connect(url)
    draft = f"{target}/.{header.name}.12345678.part"
    filesystem.pipe_file(draft, b"half")
    account = json.loads(contents(url)["upload.json"])
    account |= dict.fromkeys(("uploaded", "updated"), "2026-01-01T10:00:00.000000+00:00")
    filesystem.pipe_file(f"{target}/upload.json", json.dumps(account).encode())
    count, (problem,) = looked(url)
    for text in (
        "did not end",
        "10:00:00 UTC",
        "50 events that its processes had written by their last headers",
        f"verl-profiler collect {run} --to {url}",
        "if that directory is lost, so is the rest",
    ):
        assert text in problem
    with load(url, cache=False) as opened:
        # Nothing else is printed of these events, such as that they were left on a host.
        assert [problem] == opened.problems
    with load(f"{url}/step_1") as part:
        assert [each for each in part.problems if "did not end" in each]
    recorder.stop()

    for _ in range(2):
        assert 0 == main(["collect", str(run), "--to", url])
        there = contents(url)
        assert json.loads(there.pop("upload.json"))["ended"]
        assert local(run, ".cache", ".disk") == there
    assert (550, []) == looked(url)


def test_after_a_killed_driver_the_rest_is_uploaded(run, s3):
    """The process ends with the driver, whatever ended it, after a last upload."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from verl_profiler.launch import remote_output\n"
        "run = Path(sys.argv[1])\n"
        "remote_output.start(remote_output.Uploader(sys.argv[2], run, 3600))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    url = f"{s3}/my-run"
    done = subprocess.run([sys.executable, "-c", script, str(run), url], check=False)
    assert -9 == done.returncode

    wait_until(lambda: local(run, ".cache") == files_at(url))


def test_storage_that_fails_costs_a_line_and_the_files_stay(run, s3, capfd, monkeypatch):
    """The bucket is deleted during the run; the line has the command for later."""
    url = f"{s3}/my-run"
    before = local(run, ".cache")

    def claimed(target, directory):
        found = claim(target, directory)
        filesystem, bucket = connect(s3)
        for path in filesystem.find(bucket):
            filesystem.rm_file(path)
        filesystem.rmdir(bucket)
        return found

    monkeypatch.setattr(upload, "claim", claimed)
    monkeypatch.setattr(os, "nice", lambda _more: 0)
    with open(os.devnull) as ended:
        monkeypatch.setattr(sys, "stdin", ended)
        assert 1 == upload.main([str(run), url], wait_s=0.0)

    (line,) = [line for line in capfd.readouterr().err.splitlines() if "not-uploaded" in line]
    assert f"Run: verl-profiler collect {run} --to {url}" in line
    assert "NoSuchBucket" in line or "bucket does not exist" in line
    assert before == local(run, ".cache")


def test_a_url_that_cannot_be_written_ends_the_command_before_training(run, s3):
    """With the reason; a bucket that was misspelled is not made."""
    missing = f"no-such-bucket-{s3[-6:]}"
    with pytest.raises(ConfigError, match="nothing can be written to") as caught:
        remote_output.Uploader(f"s3://{missing}/my-run", run, 60)
    assert "output-url" == caught.value.slug
    filesystem, _ = connect(s3)
    assert not filesystem.exists(missing)
    for url, problem in (
        ("memory://x/my-run", "exists in one process only"),
        ("s3://bucket", "has no folder for the run"),
        ("nope://x/y", "cannot be used"),
    ):
        with pytest.raises(RemoteError, match=problem):
            claim(url, run)
    with pytest.raises(RemoteError) as caught:
        name_of("sftp://me:hunter22@host")
    assert "hunter22" not in str(caught.value)


def test_a_missing_package_is_named_with_its_command(run, monkeypatch, tmp_path):
    """Of the recording half, and of the reading half."""
    (tmp_path / "s3fs.py").write_text("raise ImportError(\"No module named 's3fs'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install s3fs"):
        remote_output.Uploader("s3://bucket/my-run", run, 60)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    registry = importlib.import_module("fsspec.registry")
    # fsspec keeps the classes that it has imported.
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    with pytest.raises(ReadingError, match=r"pip install s3fs[^']*'verl-profiler\[remote\]'"):
        load("s3://bucket/my-run")
