"""Clocks are compared on a real Ray cluster of two nodes, one of them with clocks of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from verl_profiler.reading.reader import load

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

CLUSTER = Path(__file__).parent / "clock_cluster.py"


def may_make_namespaces():
    """Whether this user may make hosts of namespaces."""
    return (
        sys.platform.startswith("linux")
        and os.getuid() == 0
        and all(map(shutil.which, ("ip", "unshare")))
        and not subprocess.run(
            ["unshare", "-n", "-m", "-u", "-T", "true"], check=False, capture_output=True
        ).returncode
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What the driver said, and the times of spans on both hosts."""
    pytest.importorskip("ray")
    if not may_make_namespaces():
        pytest.skip("hosts of namespaces need root")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VERL_PROFILER")}
    done = subprocess.run(
        [sys.executable, str(CLUSTER), str(tmp_path_factory.mktemp("cluster"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=CLUSTER.parent,
        env={**environment, "PYTHONPATH": str(CLUSTER.parent)},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULTS "))


def test_the_other_hosts_events_are_placed_within_the_stated_bound(recorded):
    """1000 s of monotonic and -37 ms of wall clock are taken out of them, to the bound."""
    directory = Path(recorded["directory"])
    clock = json.loads((directory / "run.json").read_text())["clock"]
    with load(directory, cache=False) as opened:
        rows = opened.rows(
            "SELECT p.host, shift_us, clock_bound_us, e.begin_us, "
            "CAST(extra->>'$.true_ns' AS BIGINT) AS true_ns "
            "FROM events AS e JOIN processes AS p USING (run, name) WHERE event = 'looked'"
        )
        problems = "\n".join(opened.problems)
    hosts = {row["host"]: row for row in rows}
    errors = {host: [] for host in hosts}
    for row in rows:
        true_us = (row["true_ns"] + clock["wall_ns"] - clock["monotonic_ns"]) // 1000
        # The span begins some microseconds after its field was read.
        errors[row["host"]].append(abs(row["begin_us"] - true_us) - 500)
    other = next(host for host in hosts if host.startswith("vpclock"))

    assert 40 == len(rows)
    assert 2 == len(hosts)
    # A process may lose its core between the two; a clock that is off moves all of its events.
    assert all(median(each) <= hosts[host]["clock_bound_us"] for host, each in errors.items())
    assert 37_000 == pytest.approx(hosts[other]["shift_us"], abs=hosts[other]["clock_bound_us"])
    assert 0 < hosts[other]["clock_bound_us"] < 20_000
    assert f"clocks aligned with the driver's: {other} (moved by +3" in problems


def test_comparing_takes_no_cpus_and_ends_with_ray(recorded):
    """The actors ask for no CPUs; after `ray.shutdown` nothing connects again."""
    assert 2 == recorded["free_cpus"]
    assert not recorded["connected_again"]
    assert not recorded["running"]
