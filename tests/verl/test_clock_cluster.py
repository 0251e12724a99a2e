"""Clocks are compared over a real Ray cluster of two nodes, one of them with a skewed clock."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiler.alignment import fit

pytestmark = pytest.mark.ray

AHEAD_NS = 1000 * 10**9


def found_on(*addresses):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("clock_cluster.py")), *addresses],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    assert 0 == done.returncode
    return json.loads(lines[0].partition(" ")[2])


def has_namespaces():
    """Whether this user may make network and time namespaces."""
    with open(os.devnull, "w") as nothing:
        try:
            return os.getuid() == 0 and not subprocess.call(
                ["unshare", "-n", "-T", "true"],
                stderr=nothing,
            )
        except FileNotFoundError:
            return False


@pytest.mark.timeout(320)
@pytest.mark.parametrize("skewed", [False, True])
def test_the_truth_is_within_the_bound_on_a_real_cluster(skewed):
    """Of the driver's own clock, and of one that is 1000 s ahead behind a network of its own."""
    if skewed and not has_namespaces():
        pytest.skip("network and time namespaces are not allowed here")
    found = found_on("10.213.7.1", "10.213.7.2") if skewed else found_on("127.0.0.1")

    assert found["cpus_untouched"]
    assert [] == found["running"]
    assert 2 == len(found["peers"])
    truths = []
    for peer in found["peers"]:
        line = fit(peer["samples"])
        truth = AHEAD_NS if skewed and line.offset_ns > AHEAD_NS / 2 else 0
        truths.append(truth)
        for _, ahead_ns, bound_ns in peer["samples"]:
            assert abs(ahead_ns - truth) <= bound_ns
        assert abs(line.offset_ns - truth) <= line.bound_ns
        error, bound = abs(line.offset_ns - truth) / 1e6, line.bound_ns / 1e6
        print(f"truth {truth / 1e9:.0f} s: error {error:.3f} ms, bound {bound:.3f} ms")
    assert [0, AHEAD_NS if skewed else 0] == sorted(truths)
