"""Clocks are compared over a real Ray cluster of two raylets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiler.alignment import fit

pytestmark = pytest.mark.ray


def test_two_nodes_of_one_kernel_are_found_to_agree():
    """The truth is 0; every comparison and the line through them hold it within their bounds."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("clock_cluster.py"))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(lines[0].partition(" ")[2])
    (peer,) = found["exchange"]["clock_exchange"]["peers"]

    assert 0 == done.returncode
    assert 2 == found["actors"]
    assert found["cpus_untouched"]
    assert [] == found["running"]
    assert len(peer["samples"]) >= 8
    for _, ahead_ns, bound_ns in peer["samples"]:
        assert abs(ahead_ns) <= bound_ns
    line = fit(peer["samples"])
    assert abs(line.offset_ns) <= line.bound_ns
    print(f"bound {line.bound_ns / 1e6:.3f} ms, residual {line.residual_ns / 1e6:.3f} ms")
