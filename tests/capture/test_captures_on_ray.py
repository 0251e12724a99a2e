"""Captures on real Ray clusters: what runs under nsys, and what arrives from a second node."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
ROLES = ("trainer_0", "agent_loop_0", "agent_loop_1")


def run_driver(name, folder, *before, environment=None):
    """Run a driver in a process of its own; return its last line, read as JSON."""
    pytest.importorskip("ray")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VERL_PROFILER")}
    inherited |= environment or {}
    path = os.pathsep.join(filter(None, (str(HERE), inherited.get("PYTHONPATH"))))
    done = subprocess.run(
        [*before, sys.executable, str(HERE / name), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
        cwd=HERE,
        env={**inherited, "PYTHONPATH": path},
    )
    assert 0 == done.returncode, (done.stdout + done.stderr)[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_only_chosen_processes_run_under_nsys(tmp_path):
    """The controller and the chosen rank; no process by inheritance; all with one Python.

    nsys is a stand-in that logs its arguments.
    """
    seen, _ = run_driver("captures_cluster.py", tmp_path)

    assert {
        "trainer": True,
        "engine 0": False,
        "engine 1": True,
        "nameless": False,
        "worker": False,
        "task": False,
    } == {name: watched for name, (watched, _) in seen["watched"].items()}
    folders = {Path(python).parent for _, python in seen["watched"].values()}
    assert {Path(sys.executable).parent} == folders
    assert {"engine 1": True} == seen["reached"]
    # The check tries the options too; it finds nothing wrong but nvtx, if that is missing.
    assert all("nvtx is not installed" in problem for node in seen["problems"] for problem in node)
    calls = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    (engine,) = [argv for argv in calls if f"{tmp_path}/raw/engine_%h_%p" in argv]
    assert {"--capture-range=nvtx", "--trace=nvtx", "-o", "python"} <= set(engine)


@pytest.mark.nightly
def test_reports_of_another_node_arrive_and_a_node_without_nsys_is_reported(
    nsys, namespaces, tmp_path
):
    """Nodes with their own host names and disks, and a real nsys on two of the three."""
    # Ray's sockets have no room for a long path.
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        found, printed = run_driver("captures_nodes.py", folder, *namespaces, environment=nsys)
        home = Path(folder) / "logs" / "run" / "nsight"
        captures = json.loads((home / "captures.json").read_text())
        files = {path.name for path in home.glob("*.*")}
        assert all((home / capture["file"]).stat().st_size for capture in captures), printed

    expected = {f"{name}.step{step}" for name in ROLES for step in (1, 2)}
    assert {f"{name}.{end}" for name in expected for end in ("nsys-rep", "json")} | {
        "captures.json"
    } == files
    assert [""] * len(expected) == [capture["problem"] for capture in captures]
    of_loops = {(each["rank"], each["host"]) for each in captures if each["role"] == "agent_loop"}
    assert set(enumerate(found["hosts"])) == of_loops
    assert "node-two" == found["hosts"][1] != found["hosts"][0]
    assert "node-three: nsys is not on the PATH" in found["refused"]
    assert "node-two" not in found["refused"]
    # `collect --ray` restored what had been deleted here.
    assert (0, True) == (found["status"], found["back"])
