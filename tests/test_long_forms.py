"""Half a minute of what `benchmarks/fuzz.py` and `benchmarks/soak.py` do for hours, and small runs of the others."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "options", "conclusion"),
    [
        # Damaged runs: no traceback, no hang, no wrong number.
        ("fuzz.py", "--seed 1 --limit-s 60 --no-reduce", "no failures"),
        # Each event is written once or counted; times and memory are judged by the long form.
        (
            "soak.py",
            "--events 150000 --requests 8000 --latency-ratio 0 --memory-share 0.3 --kill-loss-s 20",
            "all held",
        ),
    ],
)
def test_half_a_minute_of_a_long_form_finds_nothing(script, options, conclusion):
    """Seeded; how much there is time for depends on the machine."""
    command = [sys.executable, BENCHMARKS / script, "--minutes", "0.5", *options.split()]

    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)

    assert 0 == ended.returncode, ended.stdout + ended.stderr
    assert conclusion in ended.stdout


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "command",
    [
        "bench_details.py --steps 1 --requests 40 --workers 2",
        "bench_devices.py --readings 50",
        "bench_diff.py --pairs 2 --steps 5 --rho 0",
        "bench_engine_state.py --engine messages --readings 500",
        "bench_open.py --alternate 1",
        "bench_processes.py --processes 2 --seconds 3 --step-s 1",
        "bench_ranges.py",
        "bench_read.py --events 1e4",
        "bench_record.py",
        "bench_simulated_engines.py --runs 1 --kinds small --steps 3",
    ],
)
def test_a_benchmark_runs_with_what_the_package_has_today(command):
    """They use names that are not public; what they measure depends on the machine."""
    script, *options = command.split()

    ended = subprocess.run(
        [sys.executable, BENCHMARKS / script, *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert 0 == ended.returncode, ended.stdout + ended.stderr
    assert ended.stdout
