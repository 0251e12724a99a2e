"""What the console shows at the end of a profiled training: the headline and the first finding.

Both come from `verl-profiler summary`, in a process of its own with limited time.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

from verl_profiler.environ import SETTINGS
from verl_profiler.recording.complaints import announce

# A summary of 100,000 events takes about 3 s.
PATIENCE_S = 10.0
_NEEDED = ("duckdb", "numpy", "scipy")


def conclude(directory: Path, *, patience_s: float = PATIENCE_S) -> None:
    """Print the headline and the first finding of a run; nothing where they cannot be had.

    Args:
        directory: The run directory.
        patience_s: End the summary after this time.
    """
    try:
        if any(importlib.util.find_spec(name) is None for name in _NEEDED):
            return
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", "verl_profiler", "summary", str(directory)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            check=False,
            timeout=patience_s,
            # Not recorded itself.
            env={name: value for name, value in os.environ.items() if name != SETTINGS},
            # Ctrl-C reaches the driver only.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        announce(f"the summary takes longer than {patience_s:g} s; see verl-profiler summary")
        return
    except Exception:  # noqa: BLE001  training has succeeded; the files are still there
        return
    if done.returncode == 0:
        lines = done.stdout.splitlines()
        first = itertools.dropwhile(lambda line: not line.startswith("1. "), lines)
        finding = itertools.takewhile(lambda line: line.startswith(("1. ", "   ")), first)
        headline = (line for line in lines if line.startswith(f"{directory.name}: "))
        for line in [*itertools.islice(headline, 1), *finding]:
            announce(line)
