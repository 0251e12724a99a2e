"""Hangs planted in a real run are explained while they last, and the run goes on after them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("verl", "ray", "transfer_queue")),
        reason="needs verl",
    ),
]


def test_planted_hangs_are_named(tmp_path):
    """Of requests, of ranks, of the weight sync, of a paused engine, of stopped and killed processes.

    docs/stuck.md has all.
    """
    plants = ["tool", "rank", "weight_sync", "paused", "stopped_engine"]
    command = [sys.executable, ROOT / "benchmarks" / "planted_hangs.py", "--output", tmp_path]

    done = subprocess.run(
        [*map(str, command), *plants, "killed_rank"],
        capture_output=True,
        text=True,
        check=False,
    )

    console = (tmp_path / "run" / "console.log").read_text(errors="replace")
    assert 0 == done.returncode, f"{done.stdout}{done.stderr}{console[-3000:]}"
    for plant in [*plants, "killed_rank"]:
        assert (tmp_path / f"{plant}.json").exists()
    # One line for each hang, and one for its end.
    assert console.count("(phase-stuck)") >= len(plants), console[-3000:]
    assert console.count(" is over after ") >= len(plants), console[-3000:]
