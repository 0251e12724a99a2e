"""An S3 server that speaks the real protocol over HTTP on loopback, and its clients' settings."""

import shutil
import uuid

import pytest
from cached_runs import SMALL


@pytest.fixture
def run(tmp_path):
    """A run on this disk."""
    shutil.copytree(SMALL, tmp_path / "my-run", ignore=shutil.ignore_patterns(".cache"))
    return tmp_path / "my-run"


@pytest.fixture(scope="session")
def s3_server():
    """The address of moto's server."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    started = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    yield f"http://{host}:{port}"
    started.stop()


@pytest.fixture(scope="session")
def s3_environment(s3_server):
    """What clients take from the environment."""
    return {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing-secret",
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture
def s3(s3_environment, monkeypatch, tmp_path):
    """The URL of a new bucket; clients take everything else from the environment."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VERL_PROFILER_CACHE_HOME", str(tmp_path / "caches"))
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"runs-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().mkdir(bucket)
    yield f"s3://{bucket}"
    s3fs.S3FileSystem.clear_instance_cache()
