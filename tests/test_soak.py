"""Half a minute of everything that goes wrong; `benchmarks/soak.py` is the long form."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent.parent / "benchmarks" / "soak.py"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_every_event_is_written_once_or_counted_and_nothing_is_left():
    """Seeded; times and memory are judged by the long form, what is alive and what is counted here."""
    command = [sys.executable, SOAK, "--minutes", "0.5", "--events", "150000", "--requests", "8000"]
    options = ["--latency-ratio", "0", "--memory-share", "0.3", "--kill-loss-s", "20"]

    ended = subprocess.run(
        [*command, *options], check=False, capture_output=True, text=True, timeout=280
    )

    assert 0 == ended.returncode, ended.stdout + ended.stderr
    assert "all held" in ended.stdout
