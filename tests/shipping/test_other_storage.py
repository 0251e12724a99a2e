"""Storage other than S3.

`webhdfs://` by fsspec's client and `oss://` by ossfs are on fakes of servers, `sftp://` by paramiko on
asyncssh's server, and `hdfs://` on the Hadoop that `VERL_PROFILER_TEST_HDFS` names as
`hdfs://host:port/folder`, where there is one and its libhdfs (docs/how-to/multi-node.md).

What each of these runs through is the whole of `profiler.output_dir=URL`: a name is claimed, files grow,
are compressed, and their steps pruned; readers and `collect --to` then have what this disk has.
"""

import asyncio
import gc
import gzip
import json
import os
import shutil
import threading
import uuid
from pathlib import Path

import pytest
from fake_oss import FakeOSS
from fake_webhdfs import FakeWebHDFS
from shipping.copies import contents, local, taken_by_two_at_once

from verl_profiler.cli import main
from verl_profiler.errors import ConfigError, ReadingError
from verl_profiler.events.remote import connect, has_folders
from verl_profiler.launch import remote_output
from verl_profiler.reading.reader import load
from verl_profiler.shipping.upload import Upload

conf = pytest.importorskip("fsspec.config").conf

SMALL = Path(__file__).parents[1] / "data" / "small_run"
QUERY = "SELECT * EXCLUDE (run) FROM event_fields ORDER BY ALL"


@pytest.fixture
def run(tmp_path):
    """A run on this disk."""
    shutil.copytree(SMALL, tmp_path / "my-run", ignore=shutil.ignore_patterns(".cache"))
    return tmp_path / "my-run"


@pytest.fixture
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_PROFILER_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def webhdfs(caches):
    """A fake name node with its data node, and the URL of a folder on it."""
    pytest.importorskip("fsspec")
    pytest.importorskip("requests")
    server = FakeWebHDFS()
    yield server, f"webhdfs://hadoop@127.0.0.1:{server.port}/user/hadoop"
    server.close()


@pytest.fixture
def oss(caches, monkeypatch):
    """A fake of OSS, and the URL of a folder on it; its client has no variables for keys of its own."""
    ossfs = pytest.importorskip("ossfs")
    server = FakeOSS()
    monkeypatch.setenv("OSS_ENDPOINT", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("FSSPEC_OSS_KEY", "testing")
    monkeypatch.setenv("FSSPEC_OSS_SECRET", "testing-secret")
    # fsspec reads them when it is imported.
    monkeypatch.setitem(conf, "oss", {"key": "testing", "secret": "testing-secret"})
    ossfs.OSSFileSystem.clear_instance_cache()
    yield server, "oss://runs/of/me"
    ossfs.OSSFileSystem.clear_instance_cache()
    server.close()


@pytest.fixture
def sftp(caches, tmp_path, monkeypatch):
    """A server that shows a folder of this disk as its root, and the URL of a folder on it."""
    asyncssh = pytest.importorskip("asyncssh")
    pytest.importorskip("paramiko")
    from fsspec.implementations.sftp import SFTPFileSystem

    root = tmp_path / "server"
    root.mkdir()
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(str(tmp_path / "key"))
    key.write_public_key(str(tmp_path / "key.pub"))
    loop = asyncio.new_event_loop()

    async def listen():
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            authorized_client_keys=str(tmp_path / "key.pub"),
            sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=str(root)),
        )

    server = loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    monkeypatch.setenv("FSSPEC_SFTP_KEY_FILENAME", str(tmp_path / "key"))
    # fsspec reads them when it is imported.
    monkeypatch.setitem(conf, "sftp", {"key_filename": str(tmp_path / "key")})
    yield root, f"sftp://me@127.0.0.1:{server.get_port()}/runs"
    for client in list(SFTPFileSystem._cache.values()):
        client.ftp.close()
        client.client.close()
    SFTPFileSystem.clear_instance_cache()

    async def close():
        server.close()
        # An upload's connection may be open for a moment.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(close(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()
    # What is left of connections ends here, not in whatever test comes next.
    gc.collect()


@pytest.fixture
def hdfs(caches):
    """A new folder on a real HDFS."""
    folder = os.environ.get("VERL_PROFILER_TEST_HDFS")
    if not folder:
        pytest.skip("VERL_PROFILER_TEST_HDFS names no HDFS")
    url = f"{folder.rstrip('/')}/{uuid.uuid4().hex}"
    yield None, url
    filesystem, path = connect(url)
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


@pytest.fixture(params=["webhdfs", "oss", "sftp", "hdfs"])
def storage(request):
    return request.getfixturevalue(request.param)[1]


def as_the_local_run(run, url, capsys):
    there = contents(url)
    assert json.loads(there.pop("upload.json"))["ended"]
    assert local(run, ".cache") == there
    with load(str(run), cache=False) as here, load(url, cache=False) as other:
        assert here.rows(QUERY) == other.rows(QUERY)
        assert here.problems == other.problems
    capsys.readouterr()
    assert 0 == main(["summary", str(run)])
    expected = capsys.readouterr().out
    assert 0 == main(["summary", url])
    assert expected == capsys.readouterr().out


def test_the_whole_way_of_a_run(run, storage, capsys):
    """From the claim of its name to `collect --to`."""
    wanted = f"{storage}/deep/my-run"
    url = remote_output.claim(wanted, run)
    assert wanted == url
    assert f"{wanted}-2" == remote_output.claim(wanted, run)
    filesystem, target = connect(url)
    upload = Upload(filesystem, target, run, folders=has_folders(url))

    assert [] == upload.round()
    with load(url) as opened:
        count = opened.rows("SELECT count(*) AS n FROM event_fields")[0]["n"]
        assert [each for each in opened.problems if "still being uploaded" in each]
    # It grows, one of the same size is replaced, a step is compressed and another one pruned.
    grown = run / "step_2" / "worker_0.jsonl"
    grown.write_bytes(grown.read_bytes() + grown.read_bytes().splitlines(keepends=True)[-1])
    (header,) = (run / "processes").glob("worker_0.json")
    header.write_text(header.read_text().replace('"worker_0"', '"worker_9"'))
    assert [] == upload.round(final=True)
    with load(url) as opened:
        assert count + 1 == opened.rows("SELECT count(*) AS n FROM event_fields")[0]["n"]
        (row,) = opened.rows("SELECT header FROM processes WHERE name = 'worker_0'")
        assert "worker_9" in row["header"]
    for path in sorted((run / "step_2").iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()
    (run / "retention.json").write_text('{"format":1,"until":1,"kept":["step_0"]}')
    shutil.rmtree(run / "step_1")
    assert [] == upload.round()
    there = contents(url)
    assert {"step_2/worker_0.jsonl.gz", "retention.json"} <= there.keys()
    assert not [name for name in there if name.startswith("step_1/")]
    assert "step_2/worker_0.jsonl" not in there

    filesystem.rm_file(f"{target}/step_2/worker_0.jsonl.gz")
    assert 0 == main(["collect", str(run), "--to", url])

    as_the_local_run(run, url, capsys)


@pytest.mark.parametrize("kind", ["webhdfs", "oss", "hdfs"])
def test_two_launches_at_the_same_moment_take_two_names(run, kind, tmp_path, monkeypatch, request):
    """Both find nothing before either has written, as tasks of a job array may."""
    storage = request.getfixturevalue(kind)[1]
    taken_by_two_at_once(run, f"{storage}/my-run", tmp_path, monkeypatch)


def test_a_process_beside_the_driver_uploads(run, storage, capfd):
    """To the last line."""
    url = remote_output.claim(f"{storage}/my-run", run)
    remote_output.start(run, url, 0.5)
    with (run / "step_2" / "worker_0.jsonl").open("a") as file:
        file.write("{}\n")

    remote_output.finish()

    assert f"the run was uploaded to {url}" in capfd.readouterr().err
    there = contents(url)
    assert json.loads(there.pop("upload.json"))["ended"]
    assert local(run, ".cache") == there


def test_an_upload_to_hdfs_that_was_killed_leaves_whole_files(run, webhdfs):
    """A file is written beside its place; what is left of one is no file of the run, and is removed."""
    server, storage = webhdfs
    url = f"{storage}/my-run"
    filesystem, target = connect(url)
    upload = Upload(filesystem, target, run, folders=True)
    assert [] == upload.round()
    before = contents(url)
    server.create(f"{target}/step_2/.worker_0.jsonl.part", b'{"cut', overwrite=False)

    with load(url) as opened:
        assert not [each for each in opened.problems if "part" in each]
    assert 0 == main(["collect", str(run), "--to", url])
    after = contents(url)
    assert before == {name: data for name, data in after.items() if name != "upload.json"}


def test_a_file_replaced_within_the_same_second_is_read_again(run, sftp):
    """SFTP has whole seconds, and the size is the same too."""
    root, storage = sftp
    url = f"{storage}/my-run"
    filesystem, target = connect(url)
    Upload(filesystem, target, run, folders=True).round()
    (there,) = root.rglob("processes/worker_0.json")
    at = there.stat().st_mtime
    with load(url) as opened:
        (row,) = opened.rows("SELECT header FROM processes WHERE name = 'worker_0'")
        assert "node-1" in row["header"]
    there.write_text(there.read_text().replace('"node-1"', '"node-9"'))
    os.utime(there, (at, at))

    with load(url) as opened:
        (row,) = opened.rows("SELECT header FROM processes WHERE name = 'worker_0'")
        assert "node-9" in row["header"]


def test_hdfs_refuses_another_user(run, webhdfs):
    """With the name node's words, before training starts."""
    server, storage = webhdfs
    with pytest.raises(ConfigError, match="Permission denied: user=me, access=WRITE"):
        remote_output.claim(f"{storage.replace('hadoop@', 'me@')}/my-run", run)
    assert {"/"} == {*server.files}


def test_oss_refuses_another_key(run, oss, monkeypatch):
    """A name is not taken for free because nothing of it can be read."""
    server, storage = oss
    monkeypatch.setenv("FSSPEC_OSS_KEY", "other")
    with pytest.raises(ConfigError, match="Access Key Id you provided does not exist"):
        remote_output.claim(f"{storage}/my-run", run)
    assert {} == server.objects


def test_a_server_that_is_gone_is_no_empty_folder(run, webhdfs, capsys):
    """Neither for who writes nor for who reads."""
    server, storage = webhdfs
    url = f"{storage}/my-run"
    filesystem, target = connect(url)
    Upload(filesystem, target, run, folders=True).round()
    server.close()
    # A connection that is open is answered by the thread that has it.
    type(filesystem).clear_instance_cache()

    with pytest.raises(ConfigError, match="nothing can be written to"):
        remote_output.claim(url, run)
    with pytest.raises(ReadingError, match="cannot be read: ConnectionError"):
        load(url)
    assert 2 == main(["collect", str(run), "--to", url])
    assert "cannot be used: ConnectionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "package", "module"),
    [
        ("oss://bucket/my-run", "ossfs", "ossfs"),
        ("webhdfs://127.0.0.1:1/my-run", "requests", "requests"),
        ("hdfs://127.0.0.1:1/runs/my-run", "pyarrow", "pyarrow"),
        ("sftp://127.0.0.1:1/runs/my-run", "paramiko", "paramiko"),
    ],
)
def test_what_to_install_is_named(run, url, package, module, tmp_path, monkeypatch):
    """Of each kind of storage whose client is missing."""
    pytest.importorskip("fsspec")
    (tmp_path / f"{module}.py").write_text(f"raise ImportError(\"No module named '{module}'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        remote_output.claim(url, run)


def test_without_hadoops_library_hdfs_has_another_way(run, monkeypatch):
    """pyarrow brings no libhdfs; WebHDFS needs none."""
    pytest.importorskip("pyarrow")
    for name in ("ARROW_LIBHDFS_DIR", "HADOOP_HOME", "JAVA_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"libhdfs[^']*webhdfs://"):
        remote_output.claim("hdfs://127.0.0.1:1/runs/my-run", run)
