"""Storage other than S3: `sftp://` by paramiko, on asyncssh's server.

The whole of `profiler.output_dir=URL`: a name is claimed, files grow, are compressed; readers and
`collect --to` then have what this disk has.
"""

import asyncio
import gc
import gzip
import json
import os
import threading

import pytest
from shipping.copies import another_line, contents, local

from verl_profiler.cli import main
from verl_profiler.events.remote import connect
from verl_profiler.reading.reader import load
from verl_profiler.storage.upload import Upload, claim

conf = pytest.importorskip("fsspec.config").conf

QUERY = "SELECT * EXCLUDE (run) FROM event_fields ORDER BY ALL"


@pytest.fixture
def sftp(tmp_path, monkeypatch):
    """A server that shows a folder of this disk as its root, and the URL of a folder on it."""
    asyncssh = pytest.importorskip("asyncssh")
    pytest.importorskip("paramiko")
    from fsspec.implementations.sftp import SFTPFileSystem

    monkeypatch.setenv("VERL_PROFILER_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
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


def test_the_whole_way_of_a_run(run, sftp):
    """From the claim of its name to `collect --to`."""
    wanted = f"{sftp[1]}/deep/my-run"
    url = claim(wanted, run)
    # Its own is there.
    assert wanted == url == claim(wanted, run)
    launch = (run / "run.json").read_text()
    (run / "run.json").write_text(launch.replace('"pid"', '"other"'))
    assert claim(wanted, run).startswith(f"{wanted}-")
    (run / "run.json").write_text(launch)
    filesystem, target = connect(url)
    upload = Upload(url, run)

    assert [] == upload.round()
    with load(url) as opened:
        count = opened.rows("SELECT count(*) AS n FROM event_fields")[0]["n"]
        assert [each for each in opened.problems if "still being uploaded" in each]
    # It grows, one of the same size is replaced, a step is compressed.
    grown = run / "step_2" / "worker_0.jsonl"
    grown.write_text(grown.read_text() + another_line(grown.read_text()))
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
    assert [] == upload.round()
    there = contents(url)
    assert "step_2/worker_0.jsonl.gz" in there
    assert "step_2/worker_0.jsonl" not in there

    filesystem.rm_file(f"{target}/step_2/worker_0.jsonl.gz")
    assert 0 == main(["collect", str(run), "--to", url])

    there = contents(url)
    assert json.loads(there.pop("upload.json"))["ended"]
    assert local(run, ".cache") == there
    with load(str(run), cache=False) as here, load(url, cache=False) as other:
        assert here.rows(QUERY) == other.rows(QUERY)
        assert here.problems == other.problems


def test_a_file_replaced_within_the_same_second_is_read_again(run, sftp):
    """SFTP has whole seconds, and the size is the same too."""
    root, storage = sftp
    url = f"{storage}/my-run"
    Upload(url, run).round()
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
