"""What the scripts that drive verl's real classes share: a recorder with all probes, and its lines as JSON."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

from verl_profiler.instrumentation import placing, wrapping
from verl_profiler.probes import all_probes
from verl_profiler.recording import recorder
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig


async def nothing(*_args, **_kwargs):
    return None


class Replica:
    """A replica of engines that does nothing."""

    world_size = 2

    def __init__(self, rank, mode="hybrid"):
        self.replica_rank = rank
        self.rollout_mode = SimpleNamespace(value=mode)

    abort_all_requests = resume_generation = sleep = nothing


def begin(role, **settings):
    """Record as a process of this role, with all probes placed; return the run directory."""
    directory = tempfile.mkdtemp()
    events = EventSettings(**settings)
    config = WorkerConfig(directory, directory, events, take_anchor(), flush_interval_s=0.1)
    recorder.start(config, lambda: Identity(role, 0), dict)
    placing.install(all_probes())
    return directory


def end(directory, report):
    """Print what a script found, with the probes' errors so far and all recorded lines."""
    report.setdefault("errors", dict(wrapping.status.errors))
    recorder.stop()
    report["events"] = [
        json.loads(line)
        for path in sorted(Path(directory).glob("step_*/*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    print("REPORT " + json.dumps(report, default=str), flush=True)
