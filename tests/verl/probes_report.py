"""What the scripts that drive verl's real classes share: a recorder with all probes, and its lines as JSON."""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

from verl_profiler.instrumentation import placing, wrapping
from verl_profiler.probes import all_probes
from verl_profiler.recording import recorder
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.identity import Identity
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig


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


def forked(function, *arguments):
    """Run a function in a fork of this process; return the ends of its standard input and output."""
    (orders, writes), (reads, answers) = os.pipe(), os.pipe()
    sys.stdout.flush()
    if os.fork() == 0:
        os.dup2(orders, 0)
        os.dup2(answers, 1)
        for end in (orders, writes, reads, answers):
            os.close(end)
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        # The threads of a library need not end.
        os._exit(0)
    os.close(orders)
    os.close(answers)
    return SimpleNamespace(stdin=open(writes, "w"), stdout=open(reads))


def report_of(process):
    """Return what a forked function reports at its end."""
    return json.loads(process.stdout.read().splitlines()[-1].removeprefix("REPORT "))
