"""These tests use the real verl, on a CPU, with the rehearsal's import stubs for CUDA wheels."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiler.rehearsal.environment import environment

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.verl)
            item.add_marker(pytest.mark.timeout(700))
            if importlib.util.find_spec("verl") is None:
                item.add_marker(pytest.mark.skip(reason="verl is not installed"))


@pytest.fixture(scope="session", autouse=True)
def _libyaml():
    """Parse by libyaml, as OmegaConf does not: each composition reads verl's 30 files anew."""
    yaml = pytest.importorskip("yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)
        yield


@pytest.fixture(scope="session")
def verl_environment():
    """Return the environment of a child that imports verl here."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    needed = environment("sglang", clean)
    # The rehearsal's platform and adjustments stay out: these tests want verl as it is.
    wanted = {k: v for k, v in needed.items() if not k.startswith("VERL_")}
    folders = [wanted.get("PYTHONPATH", ""), str(HERE), str(HERE.parent)]
    wanted["PYTHONPATH"] = ":".join(filter(None, folders))
    return {**clean, **wanted, "RAY_DEDUP_LOGS": "0", "WANDB_MODE": "offline"}


@pytest.fixture(scope="session")
def forked(verl_environment, tmp_path_factory):
    """Return a function that runs a script of this folder: its status, and what it printed where."""
    folder = tmp_path_factory.mktemp("forked")
    with subprocess.Popen(
        [sys.executable, str(HERE / "forked.py")],
        env=verl_environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:

        def run(script, *arguments, path=(), probed=False, **environment):
            out, err = folder / "out", folder / "err"
            for file in (out, err):
                file.unlink(missing_ok=True)
            order = {
                "words": [str(HERE / script), *map(str, arguments)],
                "path": list(map(str, path)),
                "environment": environment,
                "probed": probed,
                "out": str(out),
                "err": str(err),
            }
            try:
                print(json.dumps(order), file=server.stdin, flush=True)
                status = int(server.stdout.readline())
            except BaseException:
                # The next script would get this one's answer.
                server.kill()
                raise
            return status, out.read_text(), err.read_text()

        yield run
        server.stdin.close()


@pytest.fixture(scope="session")
def reported(forked):
    """Return a function that runs a script of this folder and returns what it reports as JSON."""

    def run(script, *arguments, **options):
        _, out, err = forked(script, *arguments, **options)
        lines = [line for line in out.splitlines() if line.startswith("REPORT ")]
        assert lines, out[-3000:] + err[-3000:]
        return json.loads(lines[0].removeprefix("REPORT "))

    return run
