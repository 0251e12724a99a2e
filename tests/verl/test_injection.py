"""The settings and the plugin arrive in every process: own cluster, running cluster, `ray job submit`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from reading_back import headers_of, lines_of

HERE = Path(__file__).parent

pytestmark = pytest.mark.ray


def run(script, *words, environment):
    """Run one of the scripts beside this file; return what it printed after its marker word."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FOUND ", "RESULTS "))]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[0].partition(" ")[2]), done.stderr


@pytest.fixture(scope="module")
def cluster(verl_environment, tmp_path_factory):
    """Drivers on a cluster of two raylets that was there before; folder and findings."""
    folder = tmp_path_factory.mktemp("cluster")
    found, _ = run("injection_cluster.py", folder, "attached", environment=verl_environment)
    return folder, found


def arrived(found):
    """Whether each actor records, and the user's own variable is still there."""
    assert isinstance(found, list), f"the driver did not end well: {found}"
    return [
        actor["plugin"]
        and actor["settings"]
        and actor["recording"]
        and actor["tracing"] == "1"
        and actor["users_variable"]
        for actor in found
    ]


@pytest.mark.nightly
def test_on_a_cluster_of_its_own(verl_environment, tmp_path):
    """Also in a process that never imports verl, and after the user's own hook."""
    found, said = run(
        "injection_driver.py", tmp_path / "run", "local", "hook", environment=verl_environment
    )

    assert ["yes"] == arrived(found)
    assert [("yes", False)] == [(actor["users_hook"], actor["verl"]) for actor in found]
    assert ["looked"] == [line["event"] for line in lines_of(tmp_path / "run")]
    assert 1 == sum(name.startswith("driver") for name in headers_of(tmp_path / "run"))
    assert "recording to" in said


@pytest.mark.parametrize("kind", ["attached", "job"])
def test_on_a_running_cluster_the_settings_reach_both_nodes(cluster, kind):
    """Its raylets do not have the driver's environment."""
    folder, found = cluster

    assert ["yes", "yes"] == arrived(found[kind]), found[kind]
    assert 2 == len({actor["node"] for actor in found[kind]})
    assert {"worker_0", "worker_1"} <= set(headers_of(folder / kind))


@pytest.mark.nightly
def test_a_jobs_own_hook_is_respected_and_the_loss_is_said(verl_environment, tmp_path):
    """Ray refuses two hooks; processes that import verl are recorded all the same."""
    found, _ = run("injection_cluster.py", tmp_path, "hook", environment=verl_environment)

    assert ["yes", "yes"] == [actor["users_hook"] for actor in found["job_with_hook"]]
    assert [True, True] == [actor["settings"] for actor in found["job_with_hook"]]
