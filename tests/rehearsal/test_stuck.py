"""Hangs planted in a real run are explained while they last, and the run goes on after them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.rehearsal,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("verl", "ray", "transfer_queue")),
        reason="needs verl",
    ),
]


def test_planted_hangs_are_named(tmp_path):
    """Of requests, of ranks, of the weight sync, of a paused engine, of stopped and killed processes.

    docs/stuck.md has all.
    """
    plants = ["tool", "rank", "weight_sync", "paused", "stopped_engine", "stopped_trainer"]
    command = [sys.executable, ROOT / "benchmarks" / "planted_hangs.py", "--output", tmp_path]

    done = subprocess.run(
        [*map(str, command), *plants, "killed_rank"],
        capture_output=True,
        text=True,
        check=False,
    )

    console = (tmp_path / "run" / "console.log").read_text(errors="replace")
    assert 0 == done.returncode, f"{done.stdout}{done.stderr}{console[-3000:]}"
    found = {
        plant: json.loads((tmp_path / f"{plant}.json").read_text())
        for plant in [*plants, "killed_rank"]
    }
    facts = {plant: " / ".join(each["facts"]) for plant, each in found.items()}
    # What the processes themselves found: ranks by their stacks, engines by their own counts.
    assert "1 of 2 ranks is in " in facts["rank"], facts
    assert "actor_1 is in rehearsal_hangs:block_at" in facts["rank"], facts
    assert "engine_0: 0 running, 0 waiting, paused" in facts["paused"], facts
    details = "\n".join(found["tool"]["details"])
    for text in ("tasks in rehearsal_hangs:wait_at", "trainer_0:"):
        assert text in details, details
    # One line for each hang, and one for its end; the trainer announces none while it is stopped itself.
    assert console.count("(phase-stuck)") >= len(plants) - 1, console[-3000:]
    assert console.count(" is over after ") >= len(plants) - 1, console[-3000:]
