"""Half a minute of damaged runs; `benchmarks/fuzz.py` is the long form."""

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent.parent / "benchmarks" / "fuzz.py"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_no_damage_is_a_traceback_a_hang_or_a_wrong_number():
    """Seeded; how many runs there is time for depends on the machine."""
    command = [sys.executable, FUZZ, "--minutes", "0.5", "--seed", "1", "--limit-s", "60"]

    ended = subprocess.run(
        [*command, "--no-reduce"], check=False, capture_output=True, text=True, timeout=280
    )

    assert 0 == ended.returncode, ended.stdout + ended.stderr
    assert "no failures" in ended.stdout
