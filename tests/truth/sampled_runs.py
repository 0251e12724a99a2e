"""A run whose agent-loop workers recorded with sampled details, by playing a full one through recorders."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from bench_details import record_again
from generate_events import Shape, generate

__all__ = ["SHAPE", "full_run", "record_again"]

# Three steps of 400 requests in 4 workers, one of which is slow; and a validation.
SHAPE = Shape(steps=3, workers=4, requests=400, turns=4, validation_requests=40, seed=11)


def full_run(folder, shape=SHAPE):
    """Generate a run; return its directory."""
    generate(folder, shape)
    return folder
