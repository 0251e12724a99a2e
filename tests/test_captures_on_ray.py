"""Who runs under nsys on a real Ray cluster; nsys is a stand-in that writes its words down."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

DRIVER = Path(__file__).parent / "captures_cluster.py"


def test_each_process_has_its_own_answer(tmp_path):
    """The controller and the rank that was chosen; nobody by inheritance; all with one Python."""
    pytest.importorskip("ray")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VERL_PROFILER")}
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
        cwd=DRIVER.parent,
        env={**environment, "PYTHONPATH": str(DRIVER.parent)},
    )
    assert 0 == done.returncode, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])

    assert {
        "trainer": True,
        "engine 0": False,
        "engine 1": True,
        "nameless": False,
        "worker": False,
        "task": False,
    } == {name: watched for name, (watched, _) in seen["watched"].items()}
    assert {sys.executable} == {python for _, python in seen["watched"].values()}
    assert {"engine 1": True} == seen["told"]
    # The check tries the options too; it finds nothing wrong but nvtx, if that is missing.
    assert all("nvtx is not installed" in problem for node in seen["problems"] for problem in node)
    calls = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    (engine,) = [words for words in calls if f"{tmp_path}/raw/engine_%h_%p" in words]
    assert {"--capture-range=nvtx", "--trace=nvtx", "-o", "python"} <= set(engine)
